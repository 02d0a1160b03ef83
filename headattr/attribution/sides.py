"""The components of one side of a head - query, key or value - projected into head space.

    features[i, slot] = coef_if R_i W_Q N(d_f) / sigma_i
    kinds[i] = (sum over features, bias, error, ...)

Everything a table needs follows from these two by dot products. The bias kind holds the constants
as well (norm bias, b_Q / b_K / b_V), so the kinds sum to the whole query, key or value vector; they
are float64.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.basis.component import Components
from headattr.model.head import HeadWeights, Rotary, Side


class Prepared(NamedTuple):
    """What all heads of a layer share: the directions that are active somewhere in the prompt."""

    components: Components
    directions: Float[Tensor, "unique d_model"]
    inverse: Int[Tensor, "active"]
    """Row of `directions` for every active entry."""
    coefs: Float[Tensor, "active"]
    """coef / sigma of the entry's position."""
    kinds: Float[Tensor, "pos kind d_model"]
    """Sum of the features, then the named components, each over sigma; float64."""


class Projected(NamedTuple):
    """One side of one head."""

    features: Float[Tensor, "pos slot d_head"]
    """Zero rows behind each position's last feature."""
    counts: Int[Tensor, "pos"]
    kinds: Float[Tensor, "pos kind d_head"]
    """float64."""

    @property
    def whole(self) -> Float[Tensor, "pos d_head"]:
        """The sum over all components: the query, key or value vector itself, in the features'
        type."""
        return self.kinds.sum(1).to(self.features.dtype)


def prepare(
    weights: HeadWeights,
    components: Components,
    directions: Float[Tensor, "features d_model"],
    resid_pre: Float[Tensor, "pos d_model"],
) -> Prepared:
    """Gather the active directions once for a prompt and layer."""
    unique, inverse = components.active.ids.unique(return_inverse=True)
    sigma = weights.norm.sigma(resid_pre.to(components.sparse_sum.dtype))
    coefs = (components.coefs / sigma[components.active.positions]).to(directions.dtype)
    kinds = (
        torch.stack([components.sparse_sum, *components.named.values()], 1) / sigma[:, None, None]
    )
    return Prepared(components, directions[unique], inverse, coefs, kinds)


def project(
    weights: HeadWeights, side: Side, head: int, prepared: Prepared, rotary: Rotary | None
) -> Projected:
    """One side of one head (`head` is the kv head for keys and values), rotated where it has to
    be."""
    W = weights.folded[side][head]
    active = prepared.components.active
    rows = (prepared.directions @ W.to(prepared.directions))[prepared.inverse] * prepared.coefs[
        :, None
    ]
    features = active.padded(rows)
    kinds = prepared.kinds @ W
    kinds[:, prepared.components.kinds.index("bias")] += weights.constants[side][head]
    if rotary is not None and side != "value":
        features, kinds = rotary.rotate(features), rotary.rotate(kinds)
    return Projected(features, active.counts, kinds)


def strongest(
    values: Float[Tensor, "edge slot"], counts: Int[Tensor, "edge"], n: int
) -> tuple[Float[Tensor, "edge n"], Int[Tensor, "edge n"]]:
    """The n values of largest size and their slots (-1 and 0 where a row has fewer); ties by lower
    slot."""
    slot = torch.arange(values.shape[1], device=values.device)
    outside = slot >= counts[:, None]
    order = (
        values.abs()
        .masked_fill(outside, -1)
        .sort(dim=-1, descending=True, stable=True)
        .indices[:, :n]
    )
    missing = outside.gather(1, order)
    widen = (0, n - order.shape[1])
    kept = values.gather(1, order).masked_fill(missing, 0)
    pad = torch.nn.functional.pad
    return pad(kept, widen), pad(order.masked_fill(missing, -1).int(), widen, value=-1)
