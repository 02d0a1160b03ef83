"""topk_pairs on CPU: compiled loops over tiles of products, without those that cannot matter.

Of the two lists of an edge the one that changes less often from edge to edge is laid out in columns
once a run; the rows of the other are read where they are. Memory beyond the outputs: the columns of
one list, and an order and a norm for each row of the others. Needs numba; see `dispatch`.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.selection import compiled_loops

_THREAD = 1 << 26
"""Multiplications for which a thread of its own pays: milliseconds."""
_Side = tuple[Tensor, Tensor, NDArray[np.int64], NDArray[np.int32]]
"""Lists, their counts, the list of each edge, and where its slots are written."""


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
    """As `batched.topk_pairs`."""
    edges = len(left if left_at is None else left_at)
    here = [
        np.arange(edges) if at is None else np.ascontiguousarray(at.numpy(), np.int64)
        for at in (left_at, right_at)
    ]
    values = torch.zeros(edges, k, dtype=left.dtype)
    slots = [np.full((edges, k), -1, np.int32) for _ in range(2)]
    nonfinite = np.zeros(edges, np.int64)
    sizes = (
        np.ones(edges, np.float64)
        if scale is None
        else np.ascontiguousarray(scale.double().numpy())
    )
    turned = _runs(here[0]) <= _runs(here[1])  # the rows are those of the right lists
    if edges and left.shape[1] and right.shape[1]:
        sides = (left, n_left, here[0], slots[0]), (right, n_right, here[1], slots[1])
        rows, columns = sides[::-1] if turned else sides
        _fill(rows, columns, sizes, turned, values.numpy(), nonfinite)
    of_left, of_right = map(torch.from_numpy, slots)
    return PairTopK(values, of_left, of_right, torch.from_numpy(nonfinite))


def _runs(at: NDArray[np.int64]) -> int:
    """How often the list changes from one edge to the next."""
    return int((np.diff(at) != 0).sum())


def _fill(
    of_rows: _Side,
    of_columns: _Side,
    scale: NDArray[np.float64],
    turned: bool,
    values: NDArray[Any],
    nonfinite: NDArray[np.int64],
) -> None:
    """Fill the slots of both sides, values and nonfinite, in as many threads as torch has."""
    loops = compiled_loops()
    assert loops is not None
    (m_lists, m_counts, m_at, rows), (f_lists, f_counts, f_at, columns) = of_rows, of_columns
    moving, fixed = _numbers(m_lists), _numbers(f_lists)
    n_m, n_f = (np.ascontiguousarray(count.numpy(), np.int64) for count in (m_counts, f_counts))
    width = loops.tile_columns(moving.dtype)
    packed = -(-fixed.shape[1] // width) * width * moving.shape[2]
    room = values.shape[1] * 9 // 8 + 64 + loops.TILE_ROWS * width

    def fill(part: slice) -> None:
        found = np.zeros(room, moving.dtype)
        loops.strongest(
            moving, fixed, n_m, n_f, m_at[part], f_at[part], scale[part], turned,
            width.bit_length() - 1, _aligned(packed, moving.dtype),
            _aligned(loops.TILE_ROWS * width, moving.dtype),
            (found, found.view(f"i{moving.itemsize}"), np.zeros(room, np.int64)),
            values[part], rows[part], columns[part], nonfinite[part],
        )  # fmt: skip

    edges = len(scale)
    work = edges * moving.shape[1] * packed
    threads = max(1, min(torch.get_num_threads(), edges, work // _THREAD))
    if threads == 1:
        fill(slice(edges))
        return
    ends = [edges * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, map(slice, ends, ends[1:])))


def _numbers(lists: Tensor) -> NDArray[Any]:
    """[list, row, d], without gaps; d is 1 where it was 0."""
    return (lists if lists.shape[2] else lists.new_zeros(*lists.shape[:2], 1)).contiguous().numpy()


def _aligned(length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Room that starts where a line of the cache does, so that no vector lies across two."""
    room = np.zeros(length + 64 // dtype.itemsize, dtype)
    first = -room.ctypes.data % 64 // dtype.itemsize
    return room[first : first + length]
