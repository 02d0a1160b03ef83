"""QK: the score of an edge as an exact table of (query component, key component) products.

    s_ij = sum over components c at i, d at j of   scale * Q_i[c] . K_j[d]

Pairs come from the table; totals, marginals, contrasts and ablations come from vector sums, so they
are exact whatever k is. Kamath et al. 2025, "Tracing Attention Computation Through Feature
Interactions".
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headattr.attribution.ablation import ablations
from headattr.attribution.contrast import Ends, Rows, differences, pair_contrasts, sizes
from headattr.attribution.sides import Projected, Side, at_slots, strongest
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.dispatch import topk_pairs
from headattr.model.head import HeadWeights

Rank = Literal["value", "contrast"]


class QkEdges(NamedTuple):
    """The QK side of some edges of one head, one row an edge."""

    score: Float[Tensor, "edge"]
    score_capped: Float[Tensor, "edge"]
    score_contrast: Float[Tensor, "edge"]
    completeness: Float[Tensor, "edge"]
    feature_share: Float[Tensor, "edge"]
    totals: Float[Tensor, "edge q_kind k_kind"]
    contrast_completeness: Float[Tensor, "edge"]
    q_contrast_totals: Float[Tensor, "edge kind"]
    k_contrast_totals: Float[Tensor, "edge kind_plus_1"]
    pairs: PairTopK
    pair_contrasts: Float[Tensor, "edge k"]
    q_top: Int[Tensor, "edge top"]
    q_marginals: Float[Tensor, "edge top"]
    q_contrasts: Float[Tensor, "edge top"]
    q_ablations: Float[Tensor, "edge top"]
    k_top: Int[Tensor, "edge top"]
    k_marginals: Float[Tensor, "edge top"]
    k_contrasts: Float[Tensor, "edge top"]
    k_ablations: Float[Tensor, "edge top"]


@dataclass(frozen=True)
class QkBlock:
    """What the edges of some queries of one head share; the queries follow each other."""

    weights: HeadWeights
    query: Projected
    """Of these queries."""
    key: Side
    """Of the whole prompt."""
    Q: Float[Tensor, "row d_head"]
    """The model's own rotated queries and keys, float64: the score is their product, never the
    components'."""
    K: Float[Tensor, "pos d_head"]
    q_norms: Float[Tensor, "row"]
    """`lengths` of them."""
    k_norms: Float[Tensor, "pos"]
    scale: float
    rows: Rows


def qk_edges(
    block: QkBlock,
    q_pos: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    *,
    topk: int,
    top_marginals: int,
    rank: Rank,
) -> QkEdges:
    """Attribute the edges (q_pos, k_pos) of one head, whose queries are in the block.

    completeness = |sum(totals) - score| / (scale |Q| |K|); contrast_completeness, the worse of both
    sides, takes sum_j' A_ij' |K_j'| for |K_j| where that is larger, for it compares j with the row.
    `rank`: pairs and features are those of the largest |value| and |marginal|, or of the largest
    |contrast|.
    """
    query, scale, rows = block.query, block.scale, block.rows
    keys, k_at = k_pos.unique(return_inverse=True)
    ends, key = Ends(q_pos, k_pos, q_pos - rows.start, k_at), block.key.at(keys)
    q_at = ends.q_at
    score = scale * (block.Q[q_at] * block.K[k_pos]).sum(-1)
    q_norms, k_norms = block.q_norms[q_at], block.k_norms[k_pos]
    size = scale * q_norms * k_norms
    row_size = scale * q_norms * k_norms.maximum(rows.size[q_at])
    capped = block.weights.capped(score)
    totals = scale * einsum(
        query.kinds[q_at], key.kinds[k_at], "edge q_kind d, edge k_kind d -> edge q_kind k_kind"
    )
    found = sizes(query, key, rows, scale, capped, ends)
    gaps = [found.q_kinds.sum(1) - found.total, found.k_kinds.sum(1) - found.total]
    pairs, pair_contrast = _pairs(block, key, ends, topk, rank)
    by_value = rank == "value"
    q_ranked = found.q_marginals if by_value else found.q_contrasts
    k_ranked = found.k_marginals if by_value else found.k_contrasts
    q_top = strongest(q_ranked, query.counts[q_at], top_marginals)
    k_top = strongest(k_ranked, key.counts[k_at], top_marginals)
    q_ablations, k_ablations = ablations(query, key, scale, ends, q_slots=q_top, k_slots=k_top)
    return QkEdges(
        score,
        capped,
        found.total,
        relative((totals.sum((1, 2)) - score).abs(), size),
        relative(totals[:, 0, 0], size),
        totals,
        relative(torch.stack(gaps).abs().amax(0), row_size),
        found.q_kinds,
        found.k_kinds,
        pairs,
        pair_contrast,
        q_top,
        at_slots(found.q_marginals, q_top),
        at_slots(found.q_contrasts, q_top),
        q_ablations,
        k_top,
        at_slots(found.k_marginals, k_top),
        at_slots(found.k_contrasts, k_top),
        k_ablations,
    )


def _pairs(
    block: QkBlock, key: Projected, ends: Ends, topk: int, rank: Rank
) -> tuple[PairTopK, Float[Tensor, "edge k"]]:
    """The strongest pairs and their contrasts; values are the products whatever the rank."""
    query, rows, scale = block.query, block.rows, block.scale
    left, n_k = scale * query.features, key.counts
    if rank == "value":
        pairs = topk_pairs(
            left, key.features, query.counts, n_k, topk, left_at=ends.q_at, right_at=ends.k_at
        )
        return pairs, pair_contrasts(
            query, block.key, key, rows, scale, ends, pairs.left, pairs.right
        )
    n_k = n_k[ends.k_at]
    slots = torch.arange(key.exact.shape[1], device=n_k.device).expand(len(n_k), -1)
    slots = slots.masked_fill(slots >= n_k[:, None], -1)
    right = differences(block.key, key, rows, ends, slots).to(left)
    found = topk_pairs(left, right, query.counts, n_k, topk, left_at=ends.q_at)
    q_slots, k_slots = found.left.clamp(min=0).long(), found.right.clamp(min=0).long()
    products = left[ends.q_at[:, None], q_slots] * key.features[ends.k_at[:, None], k_slots]
    values = products.sum(-1).masked_fill(found.left < 0, 0)
    return found._replace(values=values), found.values


def share_sums(
    score: Float[Tensor, "row k_pos"],
    of_features: Float[Tensor, "row k_pos"],
    allowed: Bool[Tensor, "row k_pos"],
) -> Float[Tensor, "4"]:
    """sum s^2, sum (s - T_ff)^2 over the allowed edges of some rows, then both with each row's mean
    removed, in float64; `of_features` is T_ff.

    A head's feature share is 1 - second / first, and 1 - fourth / third (the part that softmax
    sees), from the sums over all rows.
    """
    count = allowed.sum(1, keepdim=True)
    sums = []
    for centred in (False, True):
        for table in (score, score - of_features):
            kept = table.masked_fill(~allowed, 0)
            if centred:
                kept = (table - kept.sum(1, keepdim=True) / count).masked_fill(~allowed, 0)
            sums.append(kept.square().sum())
    return torch.stack(sums)


def relative(error: Float[Tensor, "*n"], size: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """error / size, 0 where the error is 0."""
    return torch.where(error == 0, torch.zeros_like(error), error / size)


def lengths(vectors: Float[Tensor, "pos d"], eps: float) -> Float[Tensor, "pos"]:
    """Norms of a prompt's vectors; one below the rounding of the longest counts as that."""
    found = vectors.norm(dim=-1)
    return found.clamp(min=eps * float(found.max()))
