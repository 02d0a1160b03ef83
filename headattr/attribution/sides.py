"""The components of one side of a head - query, key or value - projected into head space.

    features[i, slot] = coef_if R_i W_Q N(d_f) / sigma_i            (with QK-norm: g / rms(q_i) too)
    kinds[i] = (sum over features, bias, error, ...)

Everything a table needs follows from these two by dot products. The bias kind holds the constants
as well (norm bias, b_Q / b_K / b_V), so the kinds sum to the whole query, key or value vector.
Everything is computed in float64; the pairs alone are products of float32 copies.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.basis.component import Components
from headattr.model.head import HeadWeights, Norm, Rotary, Side

_CHUNK = 1 << 22  # numbers of a temporary over active entries and d_model


class Prepared(NamedTuple):
    """What all heads of a layer share: the directions that are active somewhere in the prompt."""

    components: Components
    directions: Float[Tensor, "unique d_model"]
    """float64."""
    inverse: Int[Tensor, "active"]
    """Row of `directions` for every active entry."""
    coefs: Float[Tensor, "active"]
    """coef / sigma of the entry's position, float64."""
    kinds: Float[Tensor, "pos kind d_model"]
    """Sum of the features, then the named components, each over sigma; float64."""
    regrow: Float[Tensor, "pos slot"]
    """sigma_i / sigma_i without that feature: what the rest grows by when it is removed."""
    dtype: torch.dtype
    """Of the pairs."""


@dataclass(frozen=True)
class Projected:
    """One side of one head."""

    exact: Float[Tensor, "pos slot d_head"]
    """The features, float64; zero rows behind each position's last."""
    counts: Int[Tensor, "pos"]
    kinds: Float[Tensor, "pos kind d_head"]
    """float64."""
    constant: Float[Tensor, "pos d_head"]
    """The part of the bias that no change of the stream scales: norm bias and b_Q (b_K, b_V)."""
    regrow: Float[Tensor, "pos slot"]
    head_regrow: Float[Tensor, "pos slot"] | None
    """With QK-norm rms(q_i) / rms of the query without that feature, else None."""
    dtype: torch.dtype

    @cached_property
    def features(self) -> Float[Tensor, "pos slot d_head"]:
        """The features in the type of the pairs."""
        return self.exact.to(self.dtype)

    @cached_property
    def whole(self) -> Float[Tensor, "pos d_head"]:
        """The sum over all components: the query, key or value vector itself, float64."""
        return self.kinds.sum(1)

    def without(
        self, pos: Int[Tensor, "edge"], slots: Int[Tensor, "edge top"]
    ) -> Float[Tensor, "edge top d_head"]:
        """The whole vector after one feature was subtracted from the stream, norms responding.

        q' = (sigma / sigma') (q_lin - q_f) + q_const, with QK-norm times rms(q) / rms(q').
        """
        at = pos[:, None], slots
        whole, constant = self.whole[pos], self.constant[pos]
        vector = _without(whole, constant, self.exact[at], self.regrow[at])
        return vector if self.head_regrow is None else self.head_regrow[at][..., None] * vector


def prepare(
    weights: HeadWeights,
    components: Components,
    directions: Float[Tensor, "features d_model"],
    resid_pre: Float[Tensor, "pos d_model"],
) -> Prepared:
    """Gather the active directions once for a prompt and layer."""
    exact = components.sparse_sum.dtype
    unique, inverse = components.active.ids.unique(return_inverse=True)
    used = directions[unique].to(exact)
    sigma = weights.norm.sigma(resid_pre.to(exact))
    coefs = components.coefs.to(exact)
    kinds = (
        torch.stack([components.sparse_sum, *components.named.values()], 1) / sigma[:, None, None]
    )
    regrow = _regrow(weights.norm, components, used, inverse, resid_pre.to(exact))
    scaled = coefs / sigma[components.active.positions]
    return Prepared(components, used, inverse, scaled, kinds, regrow, resid_pre.dtype)


def _regrow(
    norm: Norm,
    components: Components,
    directions: Float[Tensor, "unique d_model"],
    inverse: Int[Tensor, "active"],
    x: Float[Tensor, "pos d_model"],
) -> Float[Tensor, "pos slot"]:
    """sigma / sigma' of every active entry, by position and slot: x less the feature, through the
    norm's own sigma."""
    active = components.active
    coefs = components.coefs.to(x)
    if not len(coefs):
        return active.padded(coefs)
    step = max(1, _CHUNK // x.shape[1])
    rests = (
        x[pos] - coef[:, None] * directions[row]
        for pos, coef, row in zip(
            active.positions.split(step), coefs.split(step), inverse.split(step), strict=True
        )
    )
    # where a feature is all there is, nothing is left: not its rounding times a large ratio
    parts = [(1 / norm.sigma(rest)).where(norm.linear(rest).any(-1), 0) for rest in rests]
    return active.padded(norm.sigma(x)[active.positions] * torch.cat(parts))


def project(
    weights: HeadWeights, side: Side, head: int, prepared: Prepared, rotary: Rotary | None
) -> Projected:
    """One side of one head (`head` is the kv head for keys and values), rotated where it has to
    be."""
    W = weights.folded[side][head]
    active = prepared.components.active
    rows = (prepared.directions @ W)[prepared.inverse] * prepared.coefs[:, None]
    features = active.padded(rows)
    kinds = prepared.kinds @ W
    constant = weights.constants[side][head].to(kinds).expand(len(kinds), -1)
    kinds[:, prepared.components.kinds.index("bias")] += constant
    found = Projected(
        features, active.counts, kinds, constant, prepared.regrow, None, prepared.dtype
    )
    if norm := weights.head_norm(side):
        found = _head_normed(found, norm)
    return found if rotary is None or side == "value" else _rotated(found, rotary)


def _head_normed(found: Projected, norm: Norm) -> Projected:
    """Behind QK-norm, its scale frozen."""
    sigma = norm.sigma(found.whole)
    after = norm.sigma(_without(found.whole, found.constant, found.exact, found.regrow))
    return Projected(
        norm.linear(found.exact) / sigma[:, None, None],
        found.counts,
        norm.linear(found.kinds) / sigma[:, None, None],
        norm.linear(found.constant) / sigma[:, None],
        found.regrow,
        (sigma[:, None] / after).where(after > 0, 0),
        found.dtype,
    )


def _without(
    whole: Float[Tensor, "n d_head"],
    constant: Float[Tensor, "n d_head"],
    features: Float[Tensor, "n slot d_head"],
    regrow: Float[Tensor, "n slot"],
) -> Float[Tensor, "n slot d_head"]:
    """(sigma / sigma') (q_lin - q_f) + q_const for each feature f."""
    linear = (whole - constant)[:, None] - features
    return regrow[..., None] * linear + constant[:, None]


def _rotated(found: Projected, rotary: Rotary) -> Projected:
    turned = Rotary(rotary.cos.to(found.exact), rotary.sin.to(found.exact)).rotate
    return Projected(
        turned(found.exact),
        found.counts,
        turned(found.kinds),
        turned(found.constant),
        found.regrow,
        found.head_regrow,
        found.dtype,
    )


def strongest(
    values: Float[Tensor, "edge slot"], counts: Int[Tensor, "edge"], n: int
) -> Int[Tensor, "edge n"]:
    """Slots of the n values of largest size, -1 where a row has fewer; ties by lower slot."""
    slot = torch.arange(values.shape[1], device=values.device)
    outside = slot >= counts[:, None]
    order = (
        values.abs()
        .masked_fill(outside, -1)
        .sort(dim=-1, descending=True, stable=True)
        .indices[:, :n]
    )
    missing = outside.gather(1, order)
    slots = order.masked_fill(missing, -1)
    return torch.nn.functional.pad(slots, (0, n - order.shape[1]), value=-1)


def at_slots(
    values: Float[Tensor, "edge slot"], slots: Int[Tensor, "edge n"]
) -> Float[Tensor, "edge n"]:
    """The values in those slots, 0 where the slot is -1."""
    return values.gather(1, slots.clamp(min=0)).masked_fill(slots < 0, 0)
