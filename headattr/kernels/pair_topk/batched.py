"""topk_pairs on any device in plain torch.

One batched product, one topk; ties and non-finite values are mended.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class PairTopK(NamedTuple):
    """The strongest pairs of each edge, |value| falling."""

    values: Float[Tensor, "edge k"]
    """0 where a slot is -1."""
    left: Int[Tensor, "edge k"]
    """Slot of the left vector; -1 where the edge has fewer than k pairs."""
    right: Int[Tensor, "edge k"]
    n_nonfinite: Int[Tensor, "edge"]
    """Products that were NaN or infinite and so were left out."""


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
    """The k pairs (a, b) of each edge with the largest |scale left_a . right_b|, a < n_left, b <
    n_right.

    Edge e has the left list `left_at[e]` and the right list `right_at[e]`, by default e itself;
    `scale` is 1 by default. Ties go to the lower left slot, then the lower right slot. Rows beyond
    n_left and n_right are padding and may hold anything. Memory: one product an edge and pair, so
    the caller chunks the edges.
    """
    left, n_left = (left, n_left) if left_at is None else (left[left_at], n_left[left_at])
    right, n_right = (right, n_right) if right_at is None else (right[right_at], n_right[right_at])
    left = left if scale is None else scale[:, None, None] * left
    edges, n, m = len(left), left.shape[1], right.shape[1]
    products = (left @ right.transpose(1, 2)).view(edges, n * m)
    magnitude = products.abs()
    slot = torch.arange(n * m, device=left.device)
    if edges and (int(n_left.min()) < n or int(n_right.min()) < m):
        inside = (slot // max(m, 1) < n_left[:, None]) & (slot % max(m, 1) < n_right[:, None])
        magnitude = magnitude.masked_fill(~inside, -1)
    kept = min(k, n * m)
    top, index = magnitude.topk(min(kept + 1, n * m), dim=-1)
    nonfinite = torch.zeros(edges, dtype=torch.int64, device=left.device)
    if edges and kept:
        tied = (
            (top[:, kept - 1] == top[:, kept])
            if top.shape[1] > kept
            else top.new_zeros(edges).bool()
        )
        again = (tied | ~top[:, 0].isfinite()).nonzero().flatten()
        if len(again):
            bad = ~magnitude[again].isfinite()
            nonfinite[again] = bad.sum(-1)
            redone = (
                magnitude[again].masked_fill(bad, -1).sort(dim=-1, descending=True, stable=True)
            )
            top[again], index[again] = (
                redone.values[:, : top.shape[1]],
                redone.indices[:, : top.shape[1]],
            )
    top, index = _by_slot_where_equal(top[:, :kept], index[:, :kept])
    missing = top < 0
    values = products.gather(1, index).masked_fill(missing, 0)
    left_slot = (index // max(m, 1)).masked_fill(missing, -1)
    right_slot = (index % max(m, 1)).masked_fill(missing, -1)
    widen = (0, k - kept)
    return PairTopK(
        torch.nn.functional.pad(values, widen),
        torch.nn.functional.pad(left_slot.int(), widen, value=-1),
        torch.nn.functional.pad(right_slot.int(), widen, value=-1),
        nonfinite,
    )


def _by_slot_where_equal(top: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The same entries with equal values in order of their index."""
    index, order = index.sort(-1)
    top, again = top.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return top, index.gather(1, again)
