"""row_means on CPU, compiled by numba where it is there.

Edges come by query; what the keys of a query have in common of a feature is summed when the first
of its edges asks for it, and kept until the next query. Needs no temporary but one row a feature.
"""

import inspect
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.kernels.row_means.batched import Keys, Rows

_CHUNK = 1 << 17
"""Products at once: a megabyte."""


class Compiled(NamedTuple):
    """What numba made of `_pass` and `_add_weighted`."""

    run: Any
    add_weighted: Any


@cache
def compiled() -> Compiled | None:
    """The compiled loops, or None where numba is not installed."""
    try:
        from numba import njit
    except ImportError:
        return None
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz"}}
    loops = [inspect.unwrap(loop) for loop in (_pass, _add_weighted)]
    try:
        return Compiled(*(njit(cache=True, **options)(loop) for loop in loops))
    except RuntimeError:  # nowhere to keep what was compiled
        return Compiled(*(njit(**options)(loop) for loop in loops))


def by_feature(
    keys: Keys, weight: Float[Tensor, "row k_pos"], Q: Float[Tensor, "row d"], features: int
) -> Float[Tensor, "row column"]:
    """As `batched.by_feature`."""
    loops = compiled()
    assert loops is not None
    sums = weight.new_zeros(features, len(weight))
    turned, stop = weight.T.contiguous().numpy(), int(keys.ptr[weight.shape[1]])
    ptr, columns = keys.ptr.numpy(), keys.columns.numpy()
    step = _CHUNK // len(weight) + 1
    products = weight.new_empty(min(step, stop), len(weight))
    position = 0
    for start in range(0, stop, step):
        some = keys.vectors[start : min(start + step, stop)]
        torch.mm(some, Q.T, out=products[: len(some)])
        found = products[: len(some)].numpy()
        position = loops.add_weighted(found, start, position, ptr, columns, turned, sums.numpy())
    return sums.T


def differences(
    keys: Keys,
    rows: Rows,
    q_at: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    slots: Int[Tensor, "edge n"],
) -> Float[Tensor, "edge n d"]:
    """As `batched.differences`."""
    out = keys.vectors.new_zeros(*slots.shape, keys.vectors.shape[1])
    nothing = keys.vectors.new_zeros(0, 0, 0), slots[:0], out[:0, :, 0]
    _run(keys, rows, q_at, k_pos, slots, *nothing, out)
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
    """As `batched.pair_contrasts`."""
    out = left.new_zeros(k_slots.shape)
    _run(keys, rows, q_at, k_pos, k_slots, left, q_slots, out, left[:0])
    return out


def _run(keys: Keys, rows: Rows, *parts: Tensor) -> None:
    loops, features = compiled(), int(keys.columns.max()) + 1 if len(keys.columns) else 0
    assert loops is not None
    length = len(keys.ptr) - 1
    starts = torch.arange(features + 1, device=keys.place.device) * length
    begin = torch.searchsorted(keys.place, starts)
    q_at, k_pos, slots, left, q_slots, products, out = (part.numpy() for part in parts)
    loops.run(
        *(part.contiguous().numpy() for part in keys), begin.numpy(),
        rows.start, rows.weight.contiguous().numpy(), rows.ratio.contiguous().numpy(),
        q_at, k_pos, slots.astype(np.int64), left, q_slots.astype(np.int64), products, out,
    )  # fmt: skip


def _add_weighted(
    products: Any, start: Any, position: Any, ptr: Any, columns: Any, weight: Any, sums: Any
) -> Any:
    """Add the weighted products [entry, row] of entries from `start` on to the sums [column, row];
    `position` is at or before that of the first, and that of the last comes back."""
    for at in range(len(products)):
        while ptr[position + 1] <= start + at:
            position += 1
        total, factor, product = sums[columns[start + at]], weight[position], products[at]
        for row in range(len(product)):
            total[row] += factor[row] * product[row]
    return position


def _pass(
    vectors: Any,
    ptr: Any,
    columns: Any,
    order: Any,
    place: Any,
    begin: Any,
    start: Any,
    weight: Any,
    ratio: Any,
    q_at: Any,
    k_pos: Any,
    slots: Any,
    left: Any,
    q_slots: Any,
    products: Any,
    out: Any,
) -> None:
    """Fill `products` [edge, n] where there is a `left`, else `out` [edge, n, d]."""
    length, d, features = len(ptr) - 1, vectors.shape[1], len(begin) - 1
    means = np.empty((features, d), vectors.dtype)
    of_row = np.full(features, -1, np.int64)
    for edge in range(len(q_at)):
        row, key = q_at[edge], k_pos[edge]
        r = ratio[row, key]
        for n in range(slots.shape[1]):
            if slots[edge, n] < 0:
                continue
            here = ptr[key] + slots[edge, n]
            g = columns[here]
            mean, vector = means[g], vectors[here]
            if of_row[g] != row:
                of_row[g] = row
                mean[:] = 0
                for at in range(begin[g], begin[g + 1]):
                    position = place[at] - g * length
                    if position > start + row:
                        break
                    w, other = weight[row, position], vectors[order[at]]
                    for x in range(d):
                        mean[x] += w * other[x]
            if len(left):
                one, total = left[row, q_slots[edge, n]], r - r
                for x in range(d):
                    total += one[x] * (r * vector[x] - mean[x])
                products[edge, n] = total
            else:
                for x in range(d):
                    out[edge, n, x] = r * vector[x] - mean[x]
