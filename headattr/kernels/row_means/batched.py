"""row_means on any device in plain torch: the sums that are asked for, each once."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

_CHUNK = 1 << 21  # numbers of a temporary over entries and d_head


class Keys(NamedTuple):
    """The features of all keys of a prompt in one head, an entry an active feature of a position.

    Entries are in CSR order by position; `order` puts them by column, then position.
    """

    vectors: Float[Tensor, "entry d"]
    ptr: Int[Tensor, "pos_plus_1"]
    columns: Int[Tensor, "entry"]
    """Which feature, as a column of the prompt's tables."""
    order: Int[Tensor, "entry"]
    place: Int[Tensor, "entry"]
    """column * positions + position of the entries in that order: ascending."""


class Rows(NamedTuple):
    """Some queries one after the other, and what weighs their keys."""

    start: int
    """The first query's position."""
    weight: Float[Tensor, "row k_pos"]
    """0 where a query does not see a key."""
    ratio: Float[Tensor, "row k_pos"]


def by_feature(
    keys: Keys, weight: Float[Tensor, "row k_pos"], Q: Float[Tensor, "row d"], features: int
) -> Float[Tensor, "row column"]:
    """sum over keys j' of weight_ij' Q_i . K_j'[g], of every feature g, by column."""
    sums = weight.new_zeros(features, len(weight))
    counts, stop = keys.ptr.diff(), int(keys.ptr[weight.shape[1]])
    where = torch.arange(weight.shape[1], device=weight.device)
    where = where.repeat_interleave(counts[: weight.shape[1]])
    for entries in torch.arange(stop, device=weight.device).split(_CHUNK // len(weight) + 1):
        products = (keys.vectors[entries] @ Q.T).mul_(weight.T[where[entries]])
        sums.index_add_(0, keys.columns[entries], products)
    return sums.T


def differences(
    keys: Keys,
    rows: Rows,
    q_at: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    slots: Int[Tensor, "edge n"],
) -> Float[Tensor, "edge n d"]:
    """ratio_ij K_j[g] - sum over keys j' of weight_ij' K_j'[g], of some features g of each edge.

    `q_at` is a row, `slots` index the list of k_pos; what stands at slot -1 is 0.
    """
    valid = slots >= 0
    entries = (keys.ptr[k_pos][:, None] + slots)[valid]
    places = keys.columns[entries] * len(rows.weight) + q_at[:, None].expand_as(slots)[valid]
    wanted, which = places.unique(return_inverse=True)
    sums = _sums(keys, rows, wanted % len(rows.weight), wanted // len(rows.weight))
    ratio = rows.ratio[q_at, k_pos][:, None].expand(slots.shape)[valid]
    out = keys.vectors.new_zeros(*slots.shape, keys.vectors.shape[1])
    out[valid] = ratio[:, None] * keys.vectors[entries] - sums[which]
    return out


def _sums(
    keys: Keys, rows: Rows, row: Int[Tensor, "n"], columns: Int[Tensor, "n"]
) -> Float[Tensor, "n d"]:
    """sum_j' weight_ij' K_j'[g] of some (i, g), over the entries of g up to the query."""
    length, d = len(keys.ptr) - 1, keys.vectors.shape[1]
    begin = torch.searchsorted(keys.place, columns * length)
    last = columns * length + rows.start + row
    counts = torch.searchsorted(keys.place, last, right=True) - begin
    out = keys.vectors.new_zeros(len(row), d)
    chunk = (counts.cumsum(0) - counts) // max(1, _CHUNK // max(1, d))
    for part in (
        torch.arange(len(row), device=row.device)[chunk == c] for c in chunk.unique().tolist()
    ):
        n = counts[part]
        owner = torch.arange(len(part), device=row.device).repeat_interleave(n)
        first = n.cumsum(0) - n
        entry = begin[part][owner] + torch.arange(len(owner), device=row.device) - first[owner]
        weight = rows.weight[row[part][owner], keys.place[entry] % length]
        vectors = weight[:, None] * keys.vectors[keys.order[entry]]
        out[part] = out.new_zeros(len(part), d).index_add_(0, owner, vectors)
    return out


def pair_contrasts(
    left: Float[Tensor, "row slot d"],
    keys: Keys,
    rows: Rows,
    q_at: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    q_slots: Int[Tensor, "edge k"],
    k_slots: Int[Tensor, "edge k"],
) -> Float[Tensor, "edge k"]:
    """left_i[f] . `differences` of some pairs (f, g) of each edge; 0 where a slot is -1."""
    difference = differences(keys, rows, q_at, k_pos, k_slots)
    return (left[q_at[:, None], q_slots.clamp(min=0)] * difference).sum(-1)
