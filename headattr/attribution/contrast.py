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

from headattr.attribution.sides import Projected
from headattr.model.head import HeadWeights

_CHUNK = 1 << 21  # numbers of a temporary over rows and active entries


class Rows(NamedTuple):
    """What the keys of each query have in common, for one head."""

    weight: Float[Tensor, "q_pos k_pos"]
    """A r, float64."""
    ratio: Float[Tensor, "q_pos k_pos"]
    """r = s' / s."""
    kinds: Float[Tensor, "q_pos kind d_head"]
    """Weighted sums of the keys' kinds."""
    mean: Float[Tensor, "q_pos"]
    """E_A[s'], from the model's own scores."""
    size: Float[Tensor, "q_pos"]
    """E_A[|K|]."""
    entries: Float[Tensor, "active d_head"]
    """The keys' features, one row an active entry, by feature, then position."""
    ids: Int[Tensor, "active"]
    """Their features, ascending."""
    positions: Int[Tensor, "active"]
    """Ascending within a feature."""


class Sizes(NamedTuple):
    """Marginals and contrasts of all components of some edges of one head, by slot."""

    q_marginals: Float[Tensor, "edge slot"]
    k_marginals: Float[Tensor, "edge slot"]
    q_contrasts: Float[Tensor, "edge slot"]
    k_contrasts: Float[Tensor, "edge slot"]
    q_kinds: Float[Tensor, "edge kind"]
    """Contrasts by kind of component."""
    k_kinds: Float[Tensor, "edge kind_plus_1"]
    """The last is `elsewhere`."""
    total: Float[Tensor, "edge"]
    """s'_ij - E_A[s'_i.], from the model's own scores: what each side's contrasts sum to."""


def cap_ratio(weights: HeadWeights, scores: Float[Tensor, "*edge"]) -> Float[Tensor, "*edge"]:
    """r = s' / s, and 1 at s = 0 and without a cap."""
    if weights.softcap is None:
        return torch.ones_like(scores)
    return torch.where(scores == 0, torch.ones_like(scores), weights.capped(scores) / scores)


def rows_of(
    weights: HeadWeights,
    key: Projected,
    active_ids: Int[Tensor, "active"],
    scores: Float[Tensor, "q_pos k_pos"],
    pattern: Float[Tensor, "q_pos k_pos"],
) -> Rows:
    """Sum the keys of every row; `scores` and `pattern` are the model's own, float64."""
    ratio = cap_ratio(weights, scores)
    weight = pattern * ratio
    slots = torch.arange(key.exact.shape[1], device=scores.device)
    positions, slot = (slots < key.counts[:, None]).nonzero(as_tuple=True)
    order = active_ids.argsort(stable=True)
    return Rows(
        weight,
        ratio,
        einsum(weight, key.kinds, "q_pos k_pos, k_pos kind d -> q_pos kind d"),
        (pattern * weights.capped(scores)).sum(1),
        pattern @ key.whole.norm(dim=-1),
        key.exact[positions[order], slot[order]],
        active_ids[order],
        positions[order],
    )


def sizes(
    query: Projected,
    key: Projected,
    rows: Rows,
    scale: float,
    capped: Float[Tensor, "edge"],
    q_pos: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    k_ids: Int[Tensor, "edge slot"],
) -> Sizes:
    """Marginals (scale * Q_i[c] . K_j and scale * Q_i . K_j[d]) and contrasts of both sides.

    `capped`: s'_ij of the edges; `k_ids`: the key features by slot, anything beyond the last.
    """
    K, Q = key.whole[k_pos], scale * query.whole[q_pos]
    ratio = rows.ratio[q_pos, k_pos][:, None]
    difference = ratio * K - rows.kinds.sum(1)[q_pos]
    of_query = scale * query.exact[q_pos] @ torch.stack([K, difference], -1)
    of_key = einsum(key.exact[k_pos], Q, "edge slot d, edge d -> edge slot")
    inside = torch.arange(of_key.shape[1], device=q_pos.device) < key.counts[k_pos, None]
    contrast = (ratio * of_key - _shared(query, rows, scale, q_pos, k_ids)).masked_fill(~inside, 0)
    by_kind = ratio[..., None] * key.kinds[k_pos] - rows.kinds[q_pos]
    k_kinds = einsum(by_kind, Q, "edge kind d, edge d -> edge kind")
    here = contrast.sum(1)
    elsewhere = k_kinds[:, 0] - here
    return Sizes(
        of_query[..., 0],
        of_key,
        of_query[..., 1],
        contrast,
        scale * einsum(query.kinds[q_pos], difference, "edge kind d, edge d -> edge kind"),
        torch.cat([here[:, None], k_kinds[:, 1:], elsewhere[:, None]], 1),
        capped - rows.mean[q_pos],
    )


def _shared(
    query: Projected,
    rows: Rows,
    scale: float,
    q_pos: Int[Tensor, "edge"],
    k_ids: Int[Tensor, "edge slot"],
) -> Float[Tensor, "edge slot"]:
    """sum_j' A_ij' r_ij' scale * Q_i . K_j'[g] of each key feature g of each edge.

    Row by row over all entries, summed by feature: what the edges of a row share is computed once.
    """
    if not len(rows.ids):
        return query.whole.new_zeros(k_ids.shape)
    features, inverse = rows.ids.unique_consecutive(return_inverse=True)
    column = torch.searchsorted(features, k_ids).clamp(max=len(features) - 1)
    used, row = q_pos.unique(return_inverse=True)
    step = max(1, _CHUNK // len(rows.ids))
    parts = []
    for some in used.split(step):
        products = rows.entries @ (scale * query.whole[some]).T
        products *= rows.weight[some][:, rows.positions].T
        sums = products.new_zeros(len(features), len(some))
        parts.append(sums.index_add_(0, inverse, products).T)
    return torch.cat(parts)[row[:, None], column]


def differences(
    key: Projected,
    rows: Rows,
    q_pos: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    slots: Int[Tensor, "edge n"],
    ids: Int[Tensor, "edge n"],
) -> Float[Tensor, "edge n d_head"]:
    """r_ij K_j[g] - sum_j' A_ij' r_ij' K_j'[g] of some key features of each edge, float64.

    `slots` of key features and their `ids`; rows of slot -1 are zero. Products of these with
    scale * Q_i[f] are the contrasts of pairs.
    """
    valid, length = slots >= 0, rows.weight.shape[1]
    ends = (ids * length + q_pos[:, None])[valid]
    wanted, which = ends.unique(return_inverse=True)
    sums = _weighted_sums(rows, wanted % length, wanted // length)
    here = key.exact[k_pos[:, None].expand_as(slots)[valid], slots[valid]]
    ratio = rows.ratio[q_pos, k_pos][:, None].expand(ids.shape)[valid]
    out = key.exact.new_zeros(*ids.shape, key.exact.shape[-1])
    out[valid] = ratio[:, None] * here - sums[which]
    return out


def _weighted_sums(
    rows: Rows, q_pos: Int[Tensor, "n"], ids: Int[Tensor, "n"]
) -> Float[Tensor, "n d_head"]:
    """sum_j' A_ij' r_ij' K_j'[g] of some (i, g), over the entries of g at or before i."""
    length = rows.weight.shape[1]
    place = rows.ids * length + rows.positions
    begin = torch.searchsorted(place, ids * length)
    counts = torch.searchsorted(place, ids * length + q_pos, right=True) - begin
    out = rows.entries.new_zeros(len(ids), rows.entries.shape[1])
    budget = max(1, _CHUNK // max(1, rows.entries.shape[1]))
    chunk = (counts.cumsum(0) - counts) // budget
    for part in (
        torch.arange(len(ids), device=ids.device)[chunk == c] for c in chunk.unique().tolist()
    ):
        n = counts[part]
        owner = torch.arange(len(part), device=ids.device).repeat_interleave(n)
        first = n.cumsum(0) - n
        entry = begin[part][owner] + torch.arange(len(owner), device=ids.device) - first[owner]
        weight = rows.weight[q_pos[part][owner], rows.positions[entry]]
        summed = out.new_zeros(len(part), out.shape[1])
        out[part] = summed.index_add_(0, owner, weight[:, None] * rows.entries[entry])
    return out


def pair_contrasts(
    query: Projected,
    key: Projected,
    rows: Rows,
    scale: float,
    q_pos: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    q_slots: Int[Tensor, "edge k"],
    k_slots: Int[Tensor, "edge k"],
    k_ids: Int[Tensor, "edge slot"],
) -> Float[Tensor, "edge k"]:
    """The contrast of each kept pair; 0 where there is none."""
    ids = k_ids.gather(1, k_slots.clamp(min=0))
    difference = differences(key, rows, q_pos, k_pos, k_slots, ids)
    left = query.exact[q_pos[:, None], q_slots.clamp(min=0)]
    return scale * einsum(left, difference, "edge k d, edge k d -> edge k")
