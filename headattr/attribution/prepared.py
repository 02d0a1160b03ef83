"""What all heads of a layer share for one prompt: active features, coefficients, frozen scales."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.basis.component import Components
from headattr.basis.rows import Matrix
from headattr.model.head import HeadWeights, Norm

_CHUNK = 1 << 17  # numbers of a temporary over active entries and d_model: a megabyte


class Entries(NamedTuple):
    """Active entries of a prompt in the order of their features, then positions."""

    order: Int[Tensor, "active"]
    """Indexes into the prompt's own order."""
    place: Int[Tensor, "active"]
    """column * length + position, ascending."""


@dataclass(frozen=True)
class Prepared:
    """What all heads of a layer share for one prompt."""

    components: Components
    directions: Matrix
    """Of the whole dictionary."""
    used: Int[Tensor, "unique"]
    """The features that are active somewhere, ascending: the columns of a prompt's tables."""
    columns: Int[Tensor, "active"]
    """Of every active entry."""
    sigma: Float[Tensor, "pos"]
    """float64, as all that follows."""
    coefs: Float[Tensor, "active"]
    """coef / sigma of the entry's position."""
    regrow: Float[Tensor, "active"]
    """sigma_i / sigma_i without that feature: what the rest grows by when it is removed."""
    dtype: torch.dtype
    """Of the pairs."""
    chunk: int = _CHUNK
    """Numbers of a temporary over active entries, at most."""

    @cached_property
    def by_feature(self) -> Entries:
        """The active entries by column, then position."""
        active = self.components.active
        order = self.columns.argsort(stable=True)
        place = self.columns[order] * len(active.counts) + active.positions[order]
        return Entries(order, place)

    def pushed(self, W: Float[Tensor, "d_model d_head"]) -> Float[Tensor, "unique d_head"]:
        """The directions that are active somewhere, through one head's weights."""
        step = max(1, self.chunk // W.shape[0])
        parts = [self.directions[ids].to(W) @ W for ids in self.used.split(step)]
        return torch.cat(parts) if parts else W.new_zeros(0, W.shape[1])


def prepare(
    weights: HeadWeights,
    components: Components,
    directions: Matrix,
    resid_pre: Float[Tensor, "pos d_model"],
    memory: int = 1 << 28,
) -> Prepared:
    """What all heads of a layer share for one prompt; `memory`: bytes for temporaries."""
    chunk = max(1, min(_CHUNK, memory // 64))
    exact = components.sparse_sum.dtype
    used, columns = components.active.ids.unique(return_inverse=True)
    sigma = weights.norm.sigma(resid_pre.to(exact))
    coefs = components.coefs.to(exact) / sigma[components.active.positions]
    regrow = _regrow(weights.norm, components, directions, resid_pre.to(exact), chunk)
    facts = used, columns, sigma, coefs, regrow, resid_pre.dtype, chunk
    return Prepared(components, directions, *facts)


def _regrow(
    norm: Norm,
    components: Components,
    directions: Matrix,
    x: Float[Tensor, "pos d_model"],
    chunk: int,
) -> Float[Tensor, "active"]:
    """sigma / sigma' of every active entry: x less the feature, through the norm's own sigma."""
    active = components.active
    coefs = components.coefs.to(x)
    if not len(coefs):
        return coefs
    step = max(1, chunk // x.shape[1])
    rests = (
        x[pos] - coef[:, None] * directions[ids].to(x)
        for pos, coef, ids in zip(
            active.positions.split(step), coefs.split(step), active.ids.split(step), strict=True
        )
    )
    return norm.sigma(x)[active.positions] * torch.cat([_inverse_sigma(norm, r) for r in rests])


def _inverse_sigma(norm: Norm, rest: Float[Tensor, "entry d_model"]) -> Float[Tensor, "entry"]:
    """1 / sigma; where a feature is all there is, nothing is left, not its rounding times a large
    ratio: 0."""
    sigma = norm.sigma(rest)
    empty = (sigma <= 2 * norm.eps**0.5).nonzero().flatten()
    inverse = 1 / sigma
    inverse[empty[~norm.linear(rest[empty]).any(-1)]] = 0
    return inverse
