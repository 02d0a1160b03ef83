"""Lists of vectors, or of numbers, of an edge each: products with them, and their strongest."""

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


def strongest(
    values: Float[Tensor, "edge slot"], counts: Int[Tensor, "edge"], n: int
) -> Int[Tensor, "edge n"]:
    """Slots of the n values of largest size, -1 where a row has fewer; ties by lower slot."""
    width = values.shape[1]
    outside = torch.arange(width, device=values.device) >= counts[:, None]
    sizes = values.abs().masked_fill(outside, -1)
    top, order = sizes.topk(min(n + 1, width), dim=-1)
    tied = (top[:, :-1] == top[:, 1:]).any(-1).nonzero().flatten()
    if len(tied):
        again = sizes[tied].sort(dim=-1, descending=True, stable=True).indices
        order[tied] = again[:, : order.shape[1]]
    order = order[:, :n]
    slots = order.masked_fill(outside.gather(1, order), -1)
    return torch.nn.functional.pad(slots, (0, n - order.shape[1]), value=-1)


def at_slots(
    values: Float[Tensor, "edge slot"], slots: Int[Tensor, "edge n"]
) -> Float[Tensor, "edge n"]:
    """The values in those slots, 0 where the slot is -1."""
    return values.gather(1, slots.clamp(min=0)).masked_fill(slots < 0, 0)
