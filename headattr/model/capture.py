"""One forward pass of the model itself -> what every attribution starts from.

The model runs unchanged, with its own eager attention; a tap in the attention interface keeps its
query, key and value vectors (after biases and rotary), its scale and some rows of its pattern, and
hooks keep the residual stream. Nothing here knows a family.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headattr.errors import HeadattrError, PromptError
from headattr.model.head import Rotary
from headattr.model.load import LoadedModel

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
    block: Float[Tensor, "pos d_model"]
    """What attention adds to the stream."""


class PromptCapture(NamedTuple):
    """One prompt."""

    place: int
    """Its index among the prompts of the run."""
    tokens: Int[Tensor, "pos"]
    layers: dict[int, LayerCapture]
    resid: dict[int, Float[Tensor, "pos d_model"]]
    """The residual stream at the asked sites: key L is resid_pre of layer L, n_layers the last
    output."""


@dataclass
class _Tap:
    layers: frozenset[int]
    query_rows: Tensor
    found: dict[int, dict[str, Any]] = field(default_factory=dict)


_TAP: ContextVar[_Tap] = ContextVar("headattr_tap")


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
    indices: Sequence[int] | None = None,
) -> list[PromptCapture | PromptError]:
    """Run the model on a padded batch; one result a prompt, in order, without padding.

    `indices` are the places of the prompts in the run, by default 0, 1, ... `layers`: whose
    attention is kept. `sites`: whose residual stream is kept (n_layers: the last output). `rows`:
    how many rows of the pattern to keep, the last among them; None keeps all. A prompt with a
    non-finite value comes back as a PromptError. The batch may be padded on either side, not
    inside.
    """
    spans = [_span(row, index) for index, row in enumerate(mask)]
    indices = range(len(spans)) if indices is None else indices
    if len(spans) > 1 and rotary_depends_on_length(model):
        return [
            result
            for place, row, span in zip(indices, ids, spans, strict=True)
            for result in capture(
                model,
                row[None, span],
                torch.ones_like(row[None, span], dtype=torch.bool),
                layers=layers,
                sites=sites,
                rows=rows,
                indices=[place],
            )
        ]
    kept = _rows_of(spans, ids.shape[1], rows)
    tap, resid = _forward(model, ids, mask, frozenset(layers), frozenset(sites), kept)
    results: list[PromptCapture | PromptError] = []
    for index, span in enumerate(spans):
        result = PromptCapture(
            indices[index],
            ids[index, span].to(model.device),
            {layer: _layer_of(tap, layer, resid[layer], index, span, kept) for layer in layers},
            {site: resid[site][index, span] for site in sites},
        )
        results.append(_non_finite(result) or result)
    return results


def rotary_depends_on_length(model: LoadedModel) -> bool:
    """Does the rotary frequency of a position depend on the longest position of the batch?"""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    return any(kind in str(parameters.get("rope_type")) for kind in ("dynamic", "longrope"))


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
) -> tuple[_Tap, dict[int, Tensor]]:
    resid: dict[int, Tensor] = {}
    tap = _Tap(layers, rows.to(model.device))
    modules = model.layers
    _reset_rotary(model)
    mask = mask.to(model.device)
    with ExitStack() as stack:
        stack.enter_context(_tapped(model, tap))
        if model.dtype == torch.float64:
            stack.enter_context(_KeepFloat64())
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
            stack.callback(attention.register_forward_hook(_keep_block(tap, layer)).remove)
        model.family.trunk(model.hf)(
            input_ids=ids.to(model.device),
            attention_mask=mask.long(),
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        )
    return tap, resid


def _keep_input(resid: dict[int, Tensor], site: int) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        resid[site] = args[0] if args else kwargs["hidden_states"]

    return hook


def _keep_output(resid: dict[int, Tensor], site: int) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        resid[site] = output[0] if isinstance(output, tuple) else output

    return hook


def _keep_rotary(tap: _Tap, layer: int) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap.found.setdefault(layer, {})["rotary"] = kwargs.get("position_embeddings")

    return hook


def _keep_block(tap: _Tap, layer: int) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        tap.found.setdefault(layer, {})["block"] = (
            output[0] if isinstance(output, tuple) else output
        )

    return hook


@contextmanager
def _tapped(model: LoadedModel, tap: _Tap) -> Iterator[None]:
    """Run the model's own eager attention through the tap; put its attention back afterwards."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register("headattr", _eager_with_tap)
    AttentionMaskInterface.register("headattr", eager_mask)
    before = model.config._attn_implementation
    token = _TAP.set(tap)
    try:
        model.hf.set_attn_implementation("headattr")
        yield
    finally:
        model.hf.set_attn_implementation(before)
        _TAP.reset(token)


def _eager_with_tap(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    eager = sys.modules[type(module).__module__].eager_attention_forward
    output, pattern = eager(module, query, key, value, attention_mask, **kwargs)
    tap = _TAP.get()
    if module.layer_idx in tap.layers:
        scaling = kwargs.get("scaling")
        batch = torch.arange(len(pattern), device=pattern.device)[:, None]
        tap.found.setdefault(module.layer_idx, {}).update(
            Q=query,
            K=key,
            V=value,
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            pattern=pattern[batch, :, tap.query_rows].transpose(1, 2),
        )
    return output, None


def _layer_of(
    tap: _Tap, layer: int, resid: Tensor, index: int, span: slice, rows: Tensor
) -> LayerCapture:
    found = tap.found[layer]
    rotary = found["rotary"]
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
        found["block"][index, span],
    )


def _non_finite(result: PromptCapture) -> PromptError | None:
    for layer, kept in sorted(result.layers.items()):
        for name, value in (
            ("resid_pre", kept.resid_pre),
            ("Q", kept.Q),
            ("K", kept.K),
            ("V", kept.V),
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
        if hasattr(module, "original_inv_freq"):
            module.register_buffer("inv_freq", module.original_inv_freq.clone(), persistent=False)
            module.max_seq_len_cached = module.original_max_seq_len


class _KeepFloat64(TorchFunctionMode):
    """Hugging Face computes norms, softmax and rotary angles in float32 even in a float64 model;
    not here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if double and func is Tensor.float:
            return args[0]
        if double and func in (
            Tensor.to,
            torch.softmax,
            torch.nn.functional.softmax,
            Tensor.softmax,
        ):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
