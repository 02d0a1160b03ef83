"""One forward pass of the model itself -> what every attribution starts from.

The model runs unchanged, as far as the last layer that is asked for; a tap in its attention keeps
its query, key and value vectors (after biases, norms and rotary), its scale and some rows of its
pattern, and hooks keep the residual stream. Nothing here knows a family.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headattr.errors import DictionaryError, HeadattrError, PromptError, ProofError
from headattr.model.forward import (
    rotary_depends_on_length,
)
from headattr.model.head import Rotary
from headattr.model.load import LoadedModel
from headattr.model.sites import Site
from headattr.model.tap import Tap, forward_through

CHECKED_ROWS = 8
ATTENTION_NUMBERS = 1 << 28
"""A gigabyte of float32."""


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
    inside: dict[Site, Float[Tensor, "pos d"]] = {}  # noqa: RUF012 - a NamedTuple's, never changed
    """The other sites that were asked for."""

    def at(self, site: Site) -> Float[Tensor, "pos d"]:
        """What was captured at a site."""
        return self.resid[site.layer] if site.kind == "resid_pre" else self.inside[site]


def check_sites(model: LoadedModel, sites: Iterable[Site]) -> None:
    """Raises DictionaryError for a site that the model does not have, or whose module headattr does
    not know."""
    n_layers = len(model.layers)
    for site in sorted(sites):
        most = n_layers if site.kind == "resid_pre" else n_layers - 1
        if not 0 <= site.layer <= most:
            raise DictionaryError(
                f"there is no site {site}: the model has {n_layers} layers, so that it lies "
                f"between 0 and {most}"
            )
        if site.kind not in ("resid_pre", "attn_own", "attn_out", "z") and model.family.mlp is None:
            raise DictionaryError(
                f"{site}: headattr does not know the MLP of {model.family.name}; expected a family "
                "that names it"
            )
        if site.kind == "resid_mid" and model.family.parallel(model.config):
            raise DictionaryError(
                f"{site}: in {model.name} attention and MLP read the same stream side by side; "
                "there is no stream between them"
            )


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
    sites: Sequence[int | Site] = (),
    rows: int | None = CHECKED_ROWS,
    ids_in_run: Sequence[int] | None = None,
    numbers: int = ATTENTION_NUMBERS,
) -> list[PromptCapture | PromptError]:
    """Run the model on a padded batch; one result a prompt, in order, without padding.

    `ids_in_run` are the prompts' ids, by default 0, 1, ... `layers`: whose
    attention is kept. `sites`: what else is kept; a number is a residual site (n_layers: the last
    output). Raises DictionaryError for a site that the model does not have. `rows`:
    how many rows of the pattern to keep, the last among them; None keeps all. `numbers`: of an
    attention matrix that are there at once; a longer one is computed some queries at a time. A
    prompt with a non-finite value comes back as a PromptError. The batch may be padded on either
    side, not inside.
    """
    wanted = {Site("resid_pre", site) if isinstance(site, int) else site for site in sites}
    check_sites(model, wanted)
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
                numbers=numbers,
            )
        ]
    kept = _rows_of(spans, ids.shape[1], rows)
    tap = Tap(frozenset(layers), kept.to(model.device), numbers)
    forward_through(model, ids, mask, tap, frozenset(wanted))
    resid = tap.resid
    results: list[PromptCapture | PromptError] = []
    for index, span in enumerate(spans):
        result = PromptCapture(
            ids_in_run[index],
            ids[index, span].to(model.device),
            {layer: _layer_of(tap, layer, resid[layer], index, span, kept) for layer in layers},
            {s.layer: resid[s.layer][index, span] for s in wanted if s.kind == "resid_pre"},
            {s: tap.inside[s][index, span] for s in wanted if s.kind != "resid_pre"},
        )
        results.append(_non_finite(result) or result)
    return results


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
    for site, value in sorted(result.inside.items()):
        if not value.isfinite().all():
            return PromptError(f"non-finite activations: {site}")
    return None
