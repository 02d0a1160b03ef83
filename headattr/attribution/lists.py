"""Products of each edge's own vector with a list of vectors that several edges share."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def read_lists(
    lists: Float[Tensor, "list slot d"],
    at: Int[Tensor, "edge"],
    vectors: Float[Tensor, "edge d"],
) -> Float[Tensor, "edge slot"]:
    """lists[at[e]] @ vectors[e] of every edge.

    The edges of a list are one matrix product; lists with about as many edges are one batch of
    them, so that little is padded and no list is copied once an edge.
    """
    out = vectors.new_empty(len(at), lists.shape[1])
    order = at.argsort(stable=True)
    used, counts = at[order].unique_consecutive(return_counts=True)
    size = (counts - 1).clamp(min=1).log2().floor().long()  # 1 and 2, 3 and 4, 5 to 8, ...
    starts = counts.cumsum(0) - counts
    for bucket in size.unique().tolist():
        chosen = (size == bucket).nonzero().flatten()
        most = int(counts[chosen].max())
        place = torch.arange(most, device=at.device)
        inside = place < counts[chosen, None]
        edges = order[(starts[chosen, None] + place).where(inside, starts[chosen, None])]
        found = vectors[edges] @ _some(lists, used[chosen]).transpose(1, 2)
        out[edges[inside]] = found[inside]
    return out


def _some(lists: Tensor, at: Tensor) -> Tensor:
    """lists[at], without a copy where they follow each other; `at` ascends."""
    first, last = int(at[0]), int(at[-1])
    return lists[first : last + 1] if last - first + 1 == len(at) else lists[at]
