"""Selection of the strongest pairs from a block of products, compiled by numba where it is there.

The block [edge, row, column] is read once, down its columns, for the maximum of every eight rows.
Bisection then finds a bound that at least k of these maxima reach, and hardly more; so at least k
products reach it, and all that do are in the few eights whose maxima do. Sizes are compared as
integers: the bits of |x| order like |x|, and what is not finite comes last.
"""

import inspect
from functools import cache
from typing import Any

import numpy as np
import torch


@cache
def compiled_select() -> Any | None:
    """The compiled `_select`, or None where numba is not installed."""
    try:
        from numba import njit
    except ImportError:
        return None
    try:
        return njit(nogil=True, cache=True)(inspect.unwrap(_select))
    except RuntimeError:  # nowhere to keep what was compiled
        return njit(nogil=True)(inspect.unwrap(_select))


@cache
def bit_masks(dtype: torch.dtype) -> tuple[Any, Any]:
    """Of a number seen as an integer: all bits but the sign, and the bits of infinity."""
    kind = np.dtype(f"i{dtype.itemsize}").type
    infinite = torch.tensor(torch.inf, dtype=dtype).numpy().view(kind)[()]
    return kind(np.iinfo(kind).max), infinite


def _select(
    products: Any,
    bits: Any,
    sign: Any,
    infinite: Any,
    n_rows: Any,
    n_columns: Any,
    scale: Any,
    row_major: Any,
    values: Any,
    rows: Any,
    columns: Any,
    nonfinite: Any,
) -> None:
    """Fill values, rows, columns [edge, k] with the k products of largest size of each edge.

    Of `products` [edge, row, column] the first n_rows, n_columns of an edge count; values are
    times `scale` [edge], and where that is 0 all products are equal. Ties go to the lower row, then
    column (`row_major`), or the lower column, then row. `nonfinite` counts what is left out.
    """
    edges, all_rows, all_columns = products.shape
    k = values.shape[1]
    zero = sign - sign
    maxima = np.empty((all_rows + 7) // 8 * all_columns, bits.dtype)
    sizes = np.empty(all_rows * all_columns, bits.dtype)
    keys = np.empty(all_rows * all_columns, np.int64)
    for edge in range(edges):
        m, n = n_rows[edge], n_columns[edge]
        blocks = (m + 7) // 8 * n
        mask = zero if scale[edge] == 0 else sign

        # the maximum of every eight rows of a column
        for first in range(0, m, 8):
            part = maxima[first // 8 * n : first // 8 * n + n]
            if first + 8 <= m:
                for c in range(n):
                    one = max(bits[edge, first, c] & mask, bits[edge, first + 1, c] & mask)
                    two = max(bits[edge, first + 2, c] & mask, bits[edge, first + 3, c] & mask)
                    three = max(bits[edge, first + 4, c] & mask, bits[edge, first + 5, c] & mask)
                    four = max(bits[edge, first + 6, c] & mask, bits[edge, first + 7, c] & mask)
                    part[c] = max(max(one, two), max(three, four))
            else:
                for c in range(n):
                    part[c] = zero
                for row in range(first, m):
                    for c in range(n):
                        part[c] = max(part[c], bits[edge, row, c] & mask)

        # a bound that k maxima reach, and hardly more
        high, bound, enough = zero, zero, np.int32(blocks)
        for block in range(blocks):
            high = max(high, maxima[block])
        if high < infinite:
            while enough > k + 4 and high - bound > 1:
                middle = bound + (high - bound) // 2
                count = np.int32(0)
                for block in range(blocks):
                    count += np.int32(maxima[block] >= middle)
                if count >= k:
                    bound, enough = middle, count
                else:
                    high = middle

        # all that reach it
        kept = 0
        for block in range(blocks):
            if maxima[block] < bound:
                continue
            first, c = block // n * 8, block % n
            for row in range(first, min(first + 8, m)):
                size = bits[edge, row, c] & mask
                if size >= bound and size < infinite:
                    sizes[kept] = size
                    keys[kept] = row * all_columns + c if row_major else c * all_rows + row
                    kept += 1
                elif size >= infinite:
                    nonfinite[edge] += 1

        # in order
        if kept > 512:  # many equal ones: sorted by size, then key, not compared with each other
            order = np.argsort(keys[:kept])
            by_key = sizes[:kept][order]
            again = np.argsort(-by_key, kind="mergesort")[:k]
            for rank in range(len(again)):
                key = keys[order[again[rank]]]
                row = key // all_columns if row_major else key % all_rows
                c = key % all_columns if row_major else key // all_rows
                rows[edge, rank], columns[edge, rank] = row, c
                values[edge, rank] = scale[edge] * products[edge, row, c]
            continue
        for this in range(kept):
            size, key = sizes[this], keys[this]
            above, same = np.int32(0), np.int32(0)
            for other in range(kept):
                above += np.int32(sizes[other] > size)
                same += np.int32(sizes[other] == size)
            rank = np.int64(above)
            if rank < k and same > 1:
                for other in range(kept):
                    rank += (sizes[other] == size) & (keys[other] < key)
            if rank < k:
                row = key // all_columns if row_major else key % all_rows
                c = key % all_columns if row_major else key // all_rows
                rows[edge, rank], columns[edge, rank] = row, c
                values[edge, rank] = scale[edge] * products[edge, row, c]
