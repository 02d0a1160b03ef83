"""One forward pass of the model itself -> what every attribution starts from.

The model runs unchanged, with its own eager attention; a tap in the attention interface keeps its
query, key and value vectors (after biases and rotary), its scale and some rows of its pattern, and
hooks keep the residual stream. Nothing here knows a family.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headattr.errors import HeadattrError, PromptError, ProofError
from headattr.model.head import Rotary
from headattr.model.load import LoadedModel
from headattr.model.tap import Tap, evaluating, keep_float64, tapped

CHECKED_ROWS = 8


class LayerCapture(NamedTuple):
    """What the model itself computed in one layer, for one prompt without padding."""

    resid_pre: Float[Tensor, "pos d_model"]
    Q: Float[Tensor, "pos head d_head"]
    K: Float[Tensor, "pos kv_head d_head"]
    V: Float[Tensor, "pos kv_head d_head"]
    scale: float
    rotary: Rotary | None
    rows: Int[Tensor, "row"]
    """The query positions of `pattern`."""
    pattern: Float[Tensor, "head row pos"]
    attn_out: Float[Tensor, "pos d_model"]
    """What the attention module gives: the sum over heads, and b_O."""
    block: Float[Tensor, "pos d_model"]
    """What attention adds to the stream: the same, behind the norm after attention if there is
    one."""


class PromptCapture(NamedTuple):
    """One prompt."""

    id: int
    """The prompt's id in the run."""
    tokens: Int[Tensor, "pos"]
    layers: dict[int, LayerCapture]
    resid: dict[int, Float[Tensor, "pos d_model"]]
    """The residual stream at the asked sites: key L is resid_pre of layer L, n_layers the last
    output."""


def pad(
    prompts: Sequence[Sequence[int]], side: str = "right"
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Token ids and mask of prompts of unequal length; padding repeats each prompt's first
    token."""
    length = max(map(len, prompts))
    ids = torch.empty(len(prompts), length, dtype=torch.long)
    mask = torch.zeros(len(prompts), length, dtype=torch.bool)
    for row, kept, prompt in zip(ids, mask, prompts, strict=True):
        start = 0 if side == "right" else length - len(prompt)
        row.fill_(prompt[0])
        row[start : start + len(prompt)] = torch.tensor(prompt)
        kept[start : start + len(prompt)] = True
    return ids, mask


@torch.no_grad()
def capture(
    model: LoadedModel,
    ids: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"],
    *,
    layers: Sequence[int],
    sites: Sequence[int] = (),
    rows: int | None = CHECKED_ROWS,
    ids_in_run: Sequence[int] | None = None,
) -> list[PromptCapture | PromptError]:
    """Run the model on a padded batch; one result a prompt, in order, without padding.

    `ids_in_run` are the prompts' ids, by default 0, 1, ... `layers`: whose
    attention is kept. `sites`: whose residual stream is kept (n_layers: the last output). `rows`:
    how many rows of the pattern to keep, the last among them; None keeps all. A prompt with a
    non-finite value comes back as a PromptError. The batch may be padded on either side, not
    inside.
    """
    spans = [_span(row, index) for index, row in enumerate(mask)]
    ids_in_run = range(len(spans)) if ids_in_run is None else ids_in_run
    if len(spans) > 1 and rotary_depends_on_length(model):
        return [
            result
            for prompt_id, row, span in zip(ids_in_run, ids, spans, strict=True)
            for result in capture(
                model,
                row[None, span],
                torch.ones_like(row[None, span], dtype=torch.bool),
                layers=layers,
                sites=sites,
                rows=rows,
                ids_in_run=[prompt_id],
            )
        ]
    kept = _rows_of(spans, ids.shape[1], rows)
    tap, resid = _forward(model, ids, mask, frozenset(layers), frozenset(sites), kept)
    results: list[PromptCapture | PromptError] = []
    for index, span in enumerate(spans):
        result = PromptCapture(
            ids_in_run[index],
            ids[index, span].to(model.device),
            {layer: _layer_of(tap, layer, resid[layer], index, span, kept) for layer in layers},
            {site: resid[site][index, span] for site in sites},
        )
        results.append(_non_finite(result) or result)
    return results


def rotary_depends_on_length(model: LoadedModel) -> bool:
    """Does the rotary frequency of a position depend on the longest position of the batch?"""
    kinds = [str(rotary.get("rope_type")) for rotary in model.rotary_parameters]
    return any(kind in found for found in kinds for kind in ("dynamic", "longrope"))


def _span(row: Bool[Tensor, "pos"], index: int) -> slice:
    kept = row.nonzero().flatten()
    if len(kept) == 0 or int(kept[-1] - kept[0]) + 1 != len(kept):
        raise HeadattrError(
            f"attention mask of prompt {index} has holes or no token; expected padding on one "
            "side only"
        )
    return slice(int(kept[0]), int(kept[-1]) + 1)


def _rows_of(spans: list[slice], length: int, rows: int | None) -> Int[Tensor, "batch row"]:
    """Rows of the padded pattern to keep, the same number a prompt (short prompts repeat some)."""
    count = length if rows is None else min(rows, length)
    return torch.stack(
        [
            torch.linspace(s.start, s.stop - 1, count, dtype=torch.float64).round().long()
            for s in spans
        ]
    )


def _forward(
    model: LoadedModel,
    ids: Tensor,
    mask: Tensor,
    layers: frozenset[int],
    sites: frozenset[int],
    rows: Tensor,
) -> tuple[Tap, dict[int, Tensor]]:
    resid: dict[int, Tensor] = {}
    tap = Tap(layers, rows.to(model.device))
    modules = model.layers
    _reset_rotary(model)
    mask = mask.to(model.device)
    with ExitStack() as stack:
        stack.callback(_reset_rotary, model)
        stack.enter_context(tapped(model.hf, tap))
        stack.enter_context(evaluating(model.hf))
        stack.enter_context(torch.autocast(model.device.type, enabled=False))
        if model.dtype == torch.float64:
            stack.enter_context(keep_float64())
        for layer in layers | {site for site in sites if site < len(modules)}:
            hook = modules[layer].register_forward_pre_hook(
                _keep_input(resid, layer), with_kwargs=True
            )
            stack.callback(hook.remove)
        if len(modules) in sites:
            hook = modules[-1].register_forward_hook(_keep_output(resid, len(modules)))
            stack.callback(hook.remove)
        for layer in layers:
            attention = model.family.attention(modules[layer])
            stack.callback(
                attention.register_forward_pre_hook(
                    _keep_rotary(tap, layer), with_kwargs=True
                ).remove
            )
            added = model.family.added(modules[layer])
            for module, name in ((attention, "attn_out"), (added, "block")):
                stack.callback(module.register_forward_hook(_keep_found(tap, layer, name)).remove)
        model.family.trunk(model.hf)(
            input_ids=ids.to(model.device),
            attention_mask=mask.long(),
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        )
    return tap, resid


def _keep_input(resid: dict[int, Tensor], site: int) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        resid[site] = (args[0] if args else kwargs["hidden_states"]).detach()

    return hook


def _keep_output(resid: dict[int, Tensor], site: int) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        resid[site] = output[0] if isinstance(output, tuple) else output

    return hook


def _keep_rotary(tap: Tap, layer: int) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap.found.setdefault(layer, {})["rotary"] = kwargs.get("position_embeddings")

    return hook


def _keep_found(tap: Tap, layer: int, name: str) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        tap.found.setdefault(layer, {})[name] = output[0] if isinstance(output, tuple) else output

    return hook


def _layer_of(
    tap: Tap, layer: int, resid: Tensor, index: int, span: slice, rows: Tensor
) -> LayerCapture:
    found = tap.found.get(layer, {})
    if not {"Q", "block"} <= found.keys():
        raise ProofError(
            f"the attention of layer {layer} does not run through transformers' attention "
            "interface; expected the family's own forward, this model is changed and is refused"
        )
    rotary = found.get("rotary")
    if rotary is not None:
        cos, sin = (part[index if len(part) > 1 else 0, span] for part in rotary)
        rotary = Rotary(cos, sin)
    kept = (rows[index] - span.start).unique()
    first = torch.searchsorted(rows[index] - span.start, kept)
    Q, K, V = (found[name][index, :, span].transpose(0, 1) for name in "QKV")
    return LayerCapture(
        resid[index, span],
        Q,
        K,
        V,
        found["scale"],
        rotary,
        kept.to(resid.device),
        found["pattern"][index][:, first.to(resid.device), span],
        found["attn_out"][index, span],
        found["block"][index, span],
    )


def _non_finite(result: PromptCapture) -> PromptError | None:
    for layer, kept in sorted(result.layers.items()):
        for name, value in (
            ("resid_pre", kept.resid_pre),
            ("the squared norm of resid_pre", kept.resid_pre.square().sum(-1, keepdim=True)),
            ("Q", kept.Q),
            ("K", kept.K),
            ("V", kept.V),
            ("the attention output", kept.block),
        ):
            if not value.isfinite().all():
                pos = int((~value.isfinite()).flatten(1).any(1).nonzero()[0])
                return PromptError(
                    f"non-finite activations: {name} of layer {layer} at position {pos}"
                )
    for site, value in sorted(result.resid.items()):
        if not value.isfinite().all():
            return PromptError(f"non-finite activations: residual stream before layer {site}")
    return None


def _reset_rotary(model: LoadedModel) -> None:
    if not rotary_depends_on_length(model):
        return
    for module in model.hf.modules():
        for name, frequencies in list(module.named_buffers(recurse=False)):
            if name.endswith("original_inv_freq"):
                kind = name.removesuffix("original_inv_freq")
                module.register_buffer(f"{kind}inv_freq", frequencies.clone(), persistent=False)
                setattr(module, f"{kind}max_seq_len_cached", module.original_max_seq_len)
