"""QK: the score of an edge as an exact table of (query component, key component) products.

    s_ij = sum over components c at i, d at j of   scale * Q_i[c] . K_j[d]

Pairs come from the table; totals, marginals, contrasts and ablations come from vector sums, so they
are exact whatever k is. Kamath et al. 2025, "Tracing Attention Computation Through Feature
Interactions".
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.attribution.ablation import ablations
from headattr.attribution.blocks import Rank
from headattr.attribution.contrast import Ends, RowSums, sizes
from headattr.attribution.lists import at_slots, strongest
from headattr.attribution.sides import Projected, Side
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.dispatch import topk_pairs
from headattr.kernels.row_means.dispatch import differences, pair_contrasts
from headattr.model.head import HeadWeights


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
    q_top: Int[Tensor, "edge top"]
    q_marginals: Float[Tensor, "edge top"]
    q_contrasts: Float[Tensor, "edge top"]
    q_ablations: Float[Tensor, "edge top"]
    k_top: Int[Tensor, "edge top"]
    k_marginals: Float[Tensor, "edge top"]
    k_contrasts: Float[Tensor, "edge top"]
    k_ablations: Float[Tensor, "edge top"]
    q_parts: Int[Tensor, "edge part"]
    """The strongest members of kinds, by their place in `Components.parts`."""
    q_part_marginals: Float[Tensor, "edge part"]
    q_part_contrasts: Float[Tensor, "edge part"]
    k_parts: Int[Tensor, "edge part"]
    k_part_marginals: Float[Tensor, "edge part"]
    k_part_contrasts: Float[Tensor, "edge part"]


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
    rows: RowSums

    @cached_property
    def left(self) -> Float[Tensor, "row slot d_head"]:
        """The queries' features times the scale, in the type of the pairs."""
        return self.scale * self.query.features


def qk_edges(
    block: QkBlock, ends: Ends, key: Projected, *, top_marginals: int, rank: Rank
) -> QkEdges:
    """All but the pairs of some edges of one head; `key` holds their keys.

    completeness = |sum(totals) - score| / (scale |Q| |K|); contrast_completeness, the worse of both
    sides, takes sum_j' A_ij' |K_j'| for |K_j| where that is larger, for it compares j with the row.
    `rank`: features are those of the largest |marginal|, or of the largest |contrast|.
    """
    query, scale, rows, q_at = block.query, block.scale, block.rows, ends.q_at
    score = scale * (block.Q[q_at] * block.K[ends.k_pos]).sum(-1)
    q_norms, k_norms = block.q_norms[q_at], block.k_norms[ends.k_pos]
    size = scale * q_norms * k_norms
    row_size = scale * q_norms * k_norms.maximum(rows.size[q_at])
    capped = block.weights.capped(score)
    totals = scale * query.kinds[q_at] @ key.kinds[ends.k_at].transpose(1, 2)
    found = sizes(query, key, rows, scale, capped, ends)
    gaps = [found.q_kinds.sum(1) - found.total, found.k_kinds.sum(1) - found.total]
    by_value = rank == "value"
    q_ranked = found.q_marginals if by_value else found.q_contrasts
    k_ranked = found.k_marginals if by_value else found.k_contrasts
    q_top = strongest(q_ranked, query.counts[q_at], top_marginals)
    k_top = strongest(k_ranked, key.counts[ends.k_at], top_marginals)
    q_marginals = at_slots(found.q_marginals, q_top)
    k_marginals = at_slots(found.k_marginals, k_top)
    q_parts, k_parts = (
        _strongest_parts(marginals, contrasts, top_marginals, rank)
        for marginals, contrasts in (
            (found.q_part_marginals, found.q_part_contrasts),
            (found.k_part_marginals, found.k_part_contrasts),
        )
    )
    q_ablations, k_ablations = ablations(
        query, key, scale, ends, (q_top, q_marginals), (k_top, k_marginals)
    )
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
        q_top,
        q_marginals,
        at_slots(found.q_contrasts, q_top),
        q_ablations,
        k_top,
        k_marginals,
        at_slots(found.k_contrasts, k_top),
        k_ablations,
        *q_parts,
        *k_parts,
    )


def _strongest_parts(
    marginals: Float[Tensor, "edge part"], contrasts: Float[Tensor, "edge part"], n: int, rank: Rank
) -> tuple[Tensor, Tensor, Tensor]:
    """The strongest members of kinds of each edge: which, their marginals and contrasts."""
    n = min(n, marginals.shape[1])
    if not n:
        none = marginals.new_zeros(len(marginals), 0)
        return none.long(), none, none
    counts = torch.full_like(marginals[:, 0], marginals.shape[1], dtype=torch.long)
    top = strongest(marginals if rank == "value" else contrasts, counts, n)
    return top, at_slots(marginals, top), at_slots(contrasts, top)


def value_pairs(block: QkBlock, ends: Ends, key: Projected, topk: int) -> PairTopK:
    """The pairs of the largest |value| of some edges; `key` holds their keys."""
    query = block.query
    return topk_pairs(
        block.left, key.features, query.counts, key.counts, topk,
        left_at=ends.q_at, right_at=ends.k_at,
    )  # fmt: skip


def contrasts_of(
    block: QkBlock, ends: Ends, q_slots: Int[Tensor, "edge k"], k_slots: Int[Tensor, "edge k"]
) -> Float[Tensor, "edge k"]:
    """The contrasts of some pairs of each edge, 0 where there is none; edges by query."""
    left, rows = block.query.exact, block.rows.weights
    keys, q_at = block.key.entries, ends.q_at
    return block.scale * pair_contrasts(left, keys, rows, q_at, ends.k_pos, q_slots, k_slots)


def contrast_pairs(
    block: QkBlock, ends: Ends, topk: int
) -> tuple[PairTopK, Float[Tensor, "edge k"]]:
    """The pairs of the largest |contrast| of some edges, by query, and their contrasts; values are
    the products all the same."""
    keys, k_pos, q_at = block.key.entries, ends.k_pos, ends.q_at
    counts = keys.ptr.diff()[k_pos]
    width = max(1, int(counts.max())) if len(counts) else 1
    slots = torch.arange(width, device=k_pos.device).expand(len(k_pos), -1)
    slots = slots.masked_fill(slots >= counts[:, None], -1)
    right = differences(keys, block.rows.weights, q_at, k_pos, slots).to(block.left)
    found = topk_pairs(block.left, right, block.query.counts, counts, topk, left_at=q_at)
    q_slots, k_slots = found.left.clamp(min=0).long(), found.right.clamp(min=0).long()
    last = max(0, len(keys.vectors) - 1)
    entries = (keys.ptr[k_pos][:, None] + k_slots).clamp(max=last)
    if not len(keys.vectors):
        return found, found.values
    values = (block.left[q_at[:, None], q_slots] * keys.vectors[entries].to(block.left)).sum(-1)
    return found._replace(values=values.masked_fill(found.left < 0, 0)), found.values


def relative(error: Float[Tensor, "*n"], size: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """error / size, 0 where the error is 0."""
    return torch.where(error == 0, torch.zeros_like(error), error / size)


def lengths(vectors: Float[Tensor, "pos d"], eps: float) -> Float[Tensor, "pos"]:
    """Norms of a prompt's vectors; one below the rounding of the longest counts as that."""
    found = vectors.norm(dim=-1)
    return found.clamp(min=eps * float(found.max()))
