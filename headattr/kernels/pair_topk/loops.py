"""The compiled loops of topk_pairs: products in tiles, and only those that can matter.

The rows of a list are visited in order of their norm, largest first. A tile of products is
multiplied in registers and compared with the bound, a value that k products of the edge are known
to reach; what reaches it joins the candidates, and the candidates raise the bound. No product is
larger than the norms of its two rows, so where that lies under the bound, the rest of the row of
tiles is left. Needs numba; see `selection`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from headattr.kernels.pair_topk.tile import (
    TILE_ROWS,
    fetch_rows,
    lowest_bit,
    multiply_tile,
    tile_columns,
)

__all__ = ["TILE_ROWS", "strongest", "tile_columns"]
_BUCKETS = 256
_CACHE = 1 << 17
"""Bytes of columns that all rows pass before the next columns: half of a core's own cache."""


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """The function as machine code; unwrapped, because the tests check types on every call."""
    function = inspect.unwrap(function)
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep what was compiled
        return njit(nogil=True, **options)(function)


def _squares(numbers: Any, start: Any, depth: Any) -> Any:
    """Sum of squares of numbers[start : start + depth]."""
    row, total = numbers[start : start + depth], numbers.dtype.type(0)
    for i in range(len(row)):
        total += row[i] * row[i]
    return total


_sum_of_squares = compiled(_squares, fastmath={"reassoc", "contract", "nsz"})


@compiled
def _order(numbers: Any, start: Any, depth: Any, slots: Any, norms: Any, own: Any) -> Any:
    """Fill slots with the rows of the list at `start`, in falling order of norm, and norms; return
    the sum of all norms.

    The order is that of 256 steps of 3 %; below these all rows are alike. norms[i] is no less than
    the norm of any row from i on, rounding included: a relative margin for sums and products of
    `depth` terms, and an absolute one for squares too small to be a number. Rows that hold NaN or
    overflow come first: their norm is infinite. `own` is room for a norm of each row.
    """
    count, number = len(slots), norms.dtype.type
    limits = np.finfo(norms.dtype)
    margin, infinite = number(1 + (depth + 4) * limits.eps), number(np.inf)
    least = np.sqrt(number(depth) * limits.tiny)
    coarse = np.empty(count, np.float32)
    bits = coarse.view(np.int32)
    ends = np.zeros(_BUCKETS + 1, np.int32)
    top, total = np.int32(0), number(0)
    for row in range(count):
        own[row] = _sum_of_squares(numbers, start + row * depth, depth)
    for row in range(count):
        norm = np.sqrt(own[row]) * margin + least
        norm = norm if norm < infinite else infinite
        own[row] = coarse[row] = norm
        total += norm
    for row in range(count):
        top = max(top, bits[row])
    for row in range(count):
        bits[row] = min((top - bits[row]) >> 18, _BUCKETS - 1)
        ends[np.uint32(bits[row] + 1)] += 1
    for bucket in range(_BUCKETS):
        ends[bucket + 1] += ends[bucket]
    for row in range(count):
        bucket = np.uint32(bits[row])
        place = np.uint32(ends[bucket])
        ends[bucket] += 1
        slots[place], norms[place] = row, own[row]
    for place in range(count - 2, -1, -1):
        norms[place] = max(norms[place], norms[place + 1])
    return total


@compiled
def _pack(
    numbers: Any, start: Any, depth: Any, slots: Any, first: Any, width: Any, packed: Any
) -> None:
    """packed[first * depth:] = [depth, width]: the rows first to first + width in order, turned."""
    to = packed[first * depth : (first + width) * depth]
    for c in range(width):
        if first + c < len(slots):
            own = start + slots[first + c] * depth
            row = numbers[own : own + depth]
            for i in range(depth):
                to[np.uint64(i * width + c)] = row[i]
        else:
            for i in range(depth):
                to[np.uint64(i * width + c)] = 0


@compiled
def _tighten(found: Any, kept: Any, k: Any, mask: Any) -> Any:
    """Of the candidates leave the k strongest and a few more; return how many, and the smallest
    size among them, which k products reach.

    Halves the range of sizes until the number above is near k. The bits of |x| order like |x|;
    where `mask` is 0 all sizes are equal.
    """
    products, bits, keys = found
    number = bits.dtype.type
    low, high, enough, wanted = number(0), number(0), kept, k + 4 + k // 16
    for i in range(kept):
        high = max(high, bits[i] & mask)
    high = number(high + 1)
    while enough > wanted and high - low > 1:
        middle = number(low + (high - low) // 2)
        count = np.int32(0)
        for i in range(kept):
            count += np.int32((bits[i] & mask) >= middle)
        if count >= k:
            low, enough = middle, np.int64(count)
        else:
            high = middle
    last = np.int64(-1)  # the key above which a candidate of size `low` is left out
    if enough > wanted:  # fewer than k are larger; of the equal ones, the lowest keys
        same, equal = np.empty(enough, np.int64), 0
        for i in range(kept):
            if (bits[i] & mask) == low:
                same[equal] = keys[i]
                equal += 1
        last = np.sort(same[:equal])[k - (enough - equal) - 1]
    left, smallest = 0, products.dtype.type(np.inf)
    for i in range(kept):
        size = bits[i] & mask
        if size > low or (size == low and (last < 0 or keys[i] <= last)):
            products[left], keys[left] = products[i], keys[i]
            smallest = min(smallest, abs(products[left]))
            left += 1
    return left, smallest if mask != 0 else products.dtype.type(0)


@compiled
def _write(
    found: Any, kept: Any, mask: Any, scale: Any, turned: Any, values: Any, rows: Any, columns: Any
) -> None:
    """The k strongest candidates in order: larger size first, then lower key."""
    products, bits, keys = found
    for this in range(kept):
        size, key = bits[this] & mask, keys[this]
        above, same = np.int32(0), np.int32(0)
        for other in range(kept):
            above += np.int32((bits[other] & mask) > size)
            same += np.int32((bits[other] & mask) == size)
        rank = np.int64(above)
        if rank < len(values) and same > 1:
            for other in range(kept):
                rank += ((bits[other] & mask) == size) & (keys[other] < key)
        if rank < len(values):
            first, second = key >> 32, key & 0xFFFFFFFF
            values[rank] = scale * products[this]
            rows[rank], columns[rank] = (second, first) if turned else (first, second)


@compiled
def _inside(rows: Any, columns: Any, shift: Any) -> Any:
    """The bits of a tile's half that has this many rows and columns left."""
    word = np.uint64(0)
    for r in range(min(rows, TILE_ROWS // 2)):
        across = (np.uint64(1) << np.uint64(min(columns, 1 << shift))) - np.uint64(1)
        word |= across << np.uint64(r << shift)
    return word


@compiled
def _add(
    word: Any, half: Any, row: Any, column: Any, tile: Any, slots: Any, f_slots: Any, shift: Any,
    turned: Any, found: Any, kept: Any, most: Any, plain: Any,
) -> Any:  # fmt: skip
    """Add the products of a tile's half whose bits are set in `word` to the candidates; return how
    many there are now, and how many were not finite."""
    products, bits, keys = found
    bad, width = 0, 1 << shift
    start, row = (half * TILE_ROWS // 2) << shift, row + half * TILE_ROWS // 2
    while word != 0:
        bit = lowest_bit(word)
        word &= word - np.uint64(1)
        products[kept] = tile[start + bit]
        if (bits[kept] & plain) > most:
            bad += 1
            continue
        a, b = np.int64(slots[row + (bit >> shift)]), np.int64(f_slots[column + (bit & width - 1)])
        keys[kept] = b << 32 | a if turned else a << 32 | b
        kept += 1
    return kept, bad


@compiled
def _starts(base: Any, slots: Any, row: Any, depth: Any) -> Any:
    """Where six rows of a list start; beyond its end, the last."""
    last = len(slots) - 1
    return (
        base + slots[row] * depth,
        base + slots[min(row + 1, last)] * depth,
        base + slots[min(row + 2, last)] * depth,
        base + slots[min(row + 3, last)] * depth,
        base + slots[min(row + 4, last)] * depth,
        base + slots[min(row + 5, last)] * depth,
    )


@compiled
def _candidates(
    m_list: Any, f_list: Any, after: Any, packed: Any, ready: Any, depth: Any, shift: Any,
    turned: Any, tile: Any, found: Any, k: Any, mask: Any, plain: Any, most: Any, bound: Any,
) -> Any:  # fmt: skip
    """The products of one edge that reach `bound`, as far as they can be among the k strongest.

    Returns how many, how many are not finite, and how many columns are packed now.
    """
    numbers, base, slots, norms = m_list
    f_numbers, f_base, f_slots, f_norms = f_list
    next_base, next_slots = after
    n, m, width = len(slots), len(f_slots), 1 << shift
    full = len(found[0]) - TILE_ROWS * width
    step = max(1, _CACHE // (width * depth * tile.itemsize)) * width
    kept, bad = 0, 0
    for block in range(0, m, step):
        if norms[0] * f_norms[block] < bound:
            break
        for row in range(0, n, TILE_ROWS):
            longest = norms[row]
            if longest * f_norms[block] < bound:
                break
            starts = _starts(base, slots, row, depth)
            if block == 0 and row < len(next_slots):
                fetch_rows(numbers, _starts(next_base, next_slots, row, depth), depth)
            for column in range(block, min(block + step, m), width):
                if longest * f_norms[column] < bound:
                    break
                while ready <= column:
                    _pack(f_numbers, f_base, depth, f_slots, ready, width, packed)
                    ready += width
                one, two = multiply_tile(
                    numbers, starts, packed, column * depth, depth, bound, tile
                )
                if row + TILE_ROWS > n or column + width > m:
                    one &= _inside(n - row, m - column, shift)
                    two &= _inside(n - row - TILE_ROWS // 2, m - column, shift)
                if one:
                    kept, more = _add(
                        one, 0, row, column, tile, slots, f_slots, shift, turned, found, kept,
                        most, plain,
                    )  # fmt: skip
                    bad += more
                if two:
                    kept, more = _add(
                        two, 1, row, column, tile, slots, f_slots, shift, turned, found, kept,
                        most, plain,
                    )  # fmt: skip
                    bad += more
                if kept > full:
                    kept, reached = _tighten(found, kept, k, mask)
                    bound = max(bound, reached)
    return kept, bad, ready


@compiled
def strongest(
    moving: Any, fixed: Any, n_m: Any, n_f: Any, m_at: Any, f_at: Any, scale: Any, turned: Any,
    shift: Any, packed: Any, tile: Any, found: Any, values: Any, rows: Any, columns: Any,
    nonfinite: Any,
) -> None:  # fmt: skip
    """Fill values, rows, columns [edge, k] and nonfinite [edge].

    Edge e multiplies the rows of moving[m_at[e]] by those of fixed[f_at[e]]; the first n_m, n_f of
    a list count. Values are times `scale`; where that is 0 all products are equal. Ties go to the
    lower row, then column, or with `turned` to the lower column, then row. `packed`, `tile` and
    `found` are room to work in; a tile has 1 << shift columns.

    Each edge begins with a guessed bound: the k-th size of the edge before, relative to the mean
    norms, and a little less. Where fewer than k products reach it, the edge is done again without.
    """
    k, depth, lists, m_rows, f_rows = (
        values.shape[1], moving.shape[2], len(moving), moving.shape[1], fixed.shape[1],
    )  # fmt: skip
    numbers, f_numbers, number = moving.reshape(-1), fixed.reshape(-1), tile.dtype.type
    products, bits, _ = found
    biggest = np.finfo(tile.dtype).max
    products[0] = biggest
    largest = bits[0]
    plain = largest | (largest >> 1)  # all bits but the sign
    slots, norms = np.empty((lists, m_rows), np.int32), np.empty((lists, m_rows), tile.dtype)
    sums, known = np.empty(lists, tile.dtype), np.zeros(lists, np.bool_)
    f_slots, f_norms = np.empty(f_rows, np.int32), np.empty(f_rows, tile.dtype)
    own = np.empty(max(m_rows, f_rows), tile.dtype)
    before, ready, f_sum, share, part, kept, bad = -1, 0, number(0), 0.0, 0.9, 0, 0
    for edge in range(len(m_at)):
        i, j, following = m_at[edge], f_at[edge], m_at[min(edge + 1, len(m_at) - 1)]
        for this in (i, following):
            if not known[this]:
                known[this], n = True, n_m[this]
                start = this * m_rows * depth
                sums[this] = _order(numbers, start, depth, slots[this, :n], norms[this, :n], own)
        n, m, size = n_m[i], n_f[j], abs(scale[edge])
        if n == 0 or m == 0:
            continue
        if j != before:
            before, ready, start = j, 0, j * f_rows * depth
            f_sum = _order(f_numbers, start, depth, f_slots[:m], f_norms[:m], own)
        m_list = (numbers, i * m_rows * depth, slots[i, :n], norms[i, :n])
        f_list = (f_numbers, j * f_rows * depth, f_slots[:m], f_norms[:m])
        after = (following * m_rows * depth, slots[following, : n_m[following]])
        mask, most = (bits.dtype.type(0) if size == 0 else plain), largest
        if size > 1:  # what overflows once it is scaled is not finite
            products[0] = biggest / size
            most = bits[0]
        if not size < np.inf:
            most = bits.dtype.type(-1)
        typical = np.float64(sums[i]) / n * np.float64(f_sum) / m
        guess = share * part * typical
        if not (guess < biggest and 0 < size < np.inf):
            guess = 0.0
        for _ in range(2):
            kept, bad, ready = _candidates(
                m_list, f_list, after, packed, ready, depth, shift, turned, tile, found, k, mask,
                plain, most, number(guess),
            )  # fmt: skip
            if kept >= k or guess == 0:
                break
            part, guess = max(0.5, part * 0.9), 0.0
        part = min(0.97, part * 1.003)
        nonfinite[edge] = bad
        if kept > k:
            kept, reached = _tighten(found, kept, k, mask)
            share = reached / typical
        _write(found, kept, mask, scale[edge], turned, values[edge], rows[edge], columns[edge])
