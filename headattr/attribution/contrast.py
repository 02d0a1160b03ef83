"""Why here and not elsewhere: each component's share of how this key differs from the row's mean.

    Kbar_i = sum over allowed j' of A_ij' r_ij' K_j'              r = s' / s, 1 without a cap
    query component c   scale * Q_i[c] . (r_ij K_j - Kbar_i)
    key component d     scale * Q_i . (r_ij K_j[d] - sum_j' A_ij' r_ij' K_j'[d])
    pair (f, g)         scale * Q_i[f] . (r_ij K_j[g] - sum_j' A_ij' r_ij' K_j'[g])

Softmax ignores what all keys of a query share, and so do these: adding one vector to every rotated
key changes none (without a cap). Each side sums to s'_ij - E_A[s'_i.], the key side with
`elsewhere`, the features that are active at other keys of the row and not at j.
"""

from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from headattr.attribution.lists import read_lists
from headattr.attribution.sides import Projected, Side
from headattr.kernels.row_means.batched import Rows
from headattr.kernels.row_means.dispatch import by_feature
from headattr.model.head import HeadWeights


class RowSums(NamedTuple):
    """What the keys of some queries, one after the other, have in common, for one head."""

    start: int
    """The first query's position."""
    weight: Float[Tensor, "row k_pos"]
    """A r, float64, as all of this."""
    ratio: Float[Tensor, "row k_pos"]
    """r = s' / s."""
    kinds: Float[Tensor, "row kind d_head"]
    """Weighted sums of the keys' kinds."""
    parts: Float[Tensor, "row part d_head"]
    """And of their members."""
    mean: Float[Tensor, "row"]
    """E_A[s'], from the model's own scores."""
    size: Float[Tensor, "row"]
    """E_A[|K|]."""
    features: Float[Tensor, "row column"]
    """sum_j' A_ij' r_ij' scale * Q_i . K_j'[g] of every key feature, by column."""

    @property
    def weights(self) -> Rows:
        """What weighs the keys of these queries."""
        return Rows(self.start, self.weight, self.ratio)


class Ends(NamedTuple):
    """Edges of one head within a block of its table."""

    q_pos: Int[Tensor, "edge"]
    k_pos: Int[Tensor, "edge"]
    q_at: Int[Tensor, "edge"]
    """Row of the query in what is at hand of the query side."""
    k_at: Int[Tensor, "edge"]
    """Row of the key in what is at hand of the key side."""


class Sizes(NamedTuple):
    """Marginals and contrasts of all components of some edges of one head, by slot."""

    q_marginals: Float[Tensor, "edge q_slot"]
    k_marginals: Float[Tensor, "edge k_slot"]
    q_contrasts: Float[Tensor, "edge q_slot"]
    k_contrasts: Float[Tensor, "edge k_slot"]
    q_kinds: Float[Tensor, "edge kind"]
    """Contrasts by kind of component."""
    k_kinds: Float[Tensor, "edge kind_plus_1"]
    """The last is `elsewhere`."""
    q_part_marginals: Float[Tensor, "edge part"]
    k_part_marginals: Float[Tensor, "edge part"]
    q_part_contrasts: Float[Tensor, "edge part"]
    k_part_contrasts: Float[Tensor, "edge part"]
    """Of the members of kinds."""
    total: Float[Tensor, "edge"]
    """s'_ij - E_A[s'_i.], from the model's own scores: what each side's contrasts sum to."""


def cap_ratio(weights: HeadWeights, scores: Float[Tensor, "*edge"]) -> Float[Tensor, "*edge"]:
    """r = s' / s, and 1 at s = 0 and without a cap."""
    if weights.softcap is None:
        return torch.ones_like(scores)
    return torch.where(scores == 0, torch.ones_like(scores), weights.capped(scores) / scores)


def rows_of(
    weights: HeadWeights,
    query: Projected,
    key: Side,
    start: int,
    scale: float,
    scores: Float[Tensor, "row k_pos"],
    pattern: Float[Tensor, "row k_pos"],
) -> RowSums:
    """Sum the keys of the rows of `query`, which begin at `start`; `scores` and `pattern` are the
    model's own, float64, over the keys from 0 on."""
    keys = scores.shape[1]
    ratio = cap_ratio(weights, scores)
    weight = pattern * ratio
    return RowSums(
        start,
        weight,
        ratio,
        einsum(weight, key.kinds[:keys], "row k_pos, k_pos kind d -> row kind d"),
        einsum(weight, key.parts[:keys], "row k_pos, k_pos part d -> row part d"),
        (pattern * weights.capped(scores)).sum(1),
        pattern @ key.whole[:keys].norm(dim=-1),
        by_feature(key.entries, weight, scale * query.whole, len(key.table)),
    )


def sizes(
    query: Projected,
    key: Projected,
    rows: RowSums,
    scale: float,
    capped: Float[Tensor, "edge"],
    ends: Ends,
) -> Sizes:
    """Marginals (scale * Q_i[c] . K_j and scale * Q_i . K_j[d]) and contrasts of both sides;
    `capped`: s'_ij of the edges."""
    q_at, k_at = ends.q_at, ends.k_at
    K, Q = key.whole[k_at], scale * query.whole
    ratio = rows.ratio[q_at, ends.k_pos][:, None]
    mean = rows.kinds.sum(1)
    of_query = scale * read_lists(query.exact, q_at, K)
    of_mean = scale * einsum(query.exact, mean, "row slot d, row d -> row slot")
    of_key = read_lists(key.exact, k_at, Q[q_at])
    shared = rows.features[q_at[:, None], key.columns[k_at]] if len(rows.features.T) else 0
    contrast = (ratio * of_key - shared).masked_fill(~key.inside[k_at], 0)
    by_kind = ratio[..., None] * key.kinds[k_at] - rows.kinds[q_at]
    k_kinds = einsum(by_kind, Q[q_at], "edge kind d, edge d -> edge kind")
    q_kinds = einsum(query.kinds[q_at], ratio * K - mean[q_at], "edge kind d, edge d -> edge kind")
    here = contrast.sum(1)
    q_parts = scale * read_lists(query.parts, q_at, K)
    mean_of_parts = scale * einsum(query.parts, mean, "row part d, row d -> row part")
    k_parts = read_lists(key.parts, k_at, Q[q_at])
    shared_parts = einsum(rows.parts, Q, "row part d, row d -> row part")
    return Sizes(
        of_query,
        of_key,
        ratio * of_query - of_mean[q_at],
        contrast,
        scale * q_kinds,
        torch.cat([here[:, None], k_kinds[:, 1:], (k_kinds[:, 0] - here)[:, None]], 1),
        q_parts,
        k_parts,
        ratio * q_parts - mean_of_parts[q_at],
        ratio * k_parts - shared_parts[q_at],
        capped - rows.mean[q_at],
    )
