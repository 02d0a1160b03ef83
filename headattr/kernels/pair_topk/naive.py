"""The definition of topk_pairs, in loops."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.kernels.pair_topk.batched import PairTopK


def topk_pairs(
    left: Float[Tensor, "edge n d"],
    right: Float[Tensor, "edge m d"],
    n_left: Int[Tensor, "edge"],
    n_right: Int[Tensor, "edge"],
    k: int,
) -> PairTopK:
    """As `batched.topk_pairs`, one pair after the other."""
    edges = len(left)
    values = left.new_zeros(edges, k)
    slots = torch.full((2, edges, k), -1, dtype=torch.int32, device=left.device)
    nonfinite = torch.zeros(edges, dtype=torch.int64, device=left.device)
    for edge in range(edges):
        pairs = []
        for a in range(int(n_left[edge])):
            for b in range(int(n_right[edge])):
                product = float(left[edge, a] @ right[edge, b])
                if math.isfinite(product):
                    pairs.append((-abs(product), a, b, product))
                else:
                    nonfinite[edge] += 1
        for rank, (_, a, b, product) in enumerate(sorted(pairs)[:k]):
            values[edge, rank] = product
            slots[0, edge, rank], slots[1, edge, rank] = a, b
    return PairTopK(values, slots[0], slots[1], nonfinite)
