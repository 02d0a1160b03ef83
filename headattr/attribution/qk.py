"""QK: the score of an edge as an exact table of (query component, key component) products.

    s_ij = sum over components c at i, d at j of   scale * Q_i[c] . K_j[d]

Pairs come from the table; totals and marginals come from vector sums, so they are exact whatever k
is. Kamath et al. 2025, "Tracing Attention Computation Through Feature Interactions".
"""

from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from headattr.attribution.sides import Projected, strongest
from headattr.kernels.pair_topk.batched import PairTopK, topk_pairs


class QkEdges(NamedTuple):
    """The QK side of some edges of one head, one row an edge."""

    score: Float[Tensor, "edge"]
    completeness: Float[Tensor, "edge"]
    feature_share: Float[Tensor, "edge"]
    totals: Float[Tensor, "edge q_kind k_kind"]
    pairs: PairTopK
    q_marginals: Float[Tensor, "edge top"]
    q_top: Int[Tensor, "edge top"]
    k_marginals: Float[Tensor, "edge top"]
    k_top: Int[Tensor, "edge top"]


def qk_edges(
    query: Projected,
    key: Projected,
    own: tuple[Float[Tensor, "pos d_head"], Float[Tensor, "pos d_head"]],
    scale: float,
    q_pos: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    *,
    topk: int,
    top_marginals: int,
) -> QkEdges:
    """Attribute the edges (q_pos, k_pos) of one head.

    `own` holds the model's own rotated queries and keys: the score is their product, never the
    components'. completeness = |sum(totals) - score| / (scale |Q| |K|).
    """
    exact = query.kinds.dtype
    Q, K = own[0][q_pos].to(exact), own[1][k_pos].to(exact)
    score = scale * (Q * K).sum(-1)
    size = scale * Q.norm(dim=-1) * K.norm(dim=-1)
    totals = scale * einsum(
        query.kinds[q_pos], key.kinds[k_pos], "edge q_kind d, edge k_kind d -> edge q_kind k_kind"
    )
    n_q, n_k = query.counts[q_pos], key.counts[k_pos]
    pairs = topk_pairs(scale * query.features[q_pos], key.features[k_pos], n_q, n_k, topk)
    q_all = scale * einsum(
        query.features[q_pos], key.whole[k_pos], "edge slot d, edge d -> edge slot"
    )
    k_all = scale * einsum(
        key.features[k_pos], query.whole[q_pos], "edge slot d, edge d -> edge slot"
    )
    q_marginals, q_top = strongest(q_all, n_q, top_marginals)
    k_marginals, k_top = strongest(k_all, n_k, top_marginals)
    return QkEdges(
        score,
        relative((totals.sum((1, 2)) - score).abs(), size),
        relative(totals[:, 0, 0], size),
        totals,
        pairs,
        q_marginals,
        q_top,
        k_marginals,
        k_top,
    )


def share_sums(
    query: Projected,
    key: Projected,
    own: tuple[Float[Tensor, "pos d_head"], Float[Tensor, "pos d_head"]],
    scale: float,
    allowed: Tensor,
) -> Float[Tensor, "4"]:
    """sum s^2, sum (s - T_ff)^2 over all allowed edges, then both with each row's mean removed, in
    float64.

    A head's feature share is 1 - second / first, and 1 - fourth / third (the part that softmax
    sees).
    """
    exact = query.kinds.dtype
    score = scale * own[0].to(exact) @ own[1].to(exact).T
    rest = score - scale * query.kinds[:, 0] @ key.kinds[:, 0].T
    count = allowed.sum(1, keepdim=True)
    sums = []
    for centred in (False, True):
        for table in (score, rest):
            kept = table.masked_fill(~allowed, 0)
            if centred:
                kept = (table - kept.sum(1, keepdim=True) / count).masked_fill(~allowed, 0)
            sums.append(kept.square().sum())
    return torch.stack(sums)


def relative(error: Float[Tensor, "*n"], size: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """error / size, 0 where the error is 0."""
    return torch.where(error == 0, torch.zeros_like(error), error / size)
