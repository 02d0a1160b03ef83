"""The definition of topk_pairs, in loops."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.kernels.pair_topk.batched import PairTopK


def topk_pairs(
    left: Float[Tensor, "l n d"],
    right: Float[Tensor, "r m d"],
    n_left: Int[Tensor, "l"],
    n_right: Int[Tensor, "r"],
    k: int,
    *,
    left_at: Int[Tensor, "edge"] | None = None,
    right_at: Int[Tensor, "edge"] | None = None,
    scale: Float[Tensor, "edge"] | None = None,
) -> PairTopK:
    """As `batched.topk_pairs`, one pair after the other."""
    edges = len(left if left_at is None else left_at)
    values = left.new_zeros(edges, k)
    slots = torch.full((2, edges, k), -1, dtype=torch.int32, device=left.device)
    nonfinite = torch.zeros(edges, dtype=torch.int64, device=left.device)
    for edge in range(edges):
        pairs = []
        q = edge if left_at is None else int(left_at[edge])
        j = edge if right_at is None else int(right_at[edge])
        size = 1.0 if scale is None else float(scale[edge])
        for a in range(int(n_left[q])):
            for b in range(int(n_right[j])):
                product = size * float(left[q, a] @ right[j, b])
                if math.isfinite(product):
                    pairs.append((-abs(product), a, b, product))
                else:
                    nonfinite[edge] += 1
        for rank, (_, a, b, product) in enumerate(sorted(pairs)[:k]):
            values[edge, rank] = product
            slots[0, edge, rank], slots[1, edge, rank] = a, b
    return PairTopK(values, slots[0], slots[1], nonfinite)
