"""topk_pairs on CPU: products in blocks that stay in cache, and a compiled selection.

Edges that share a left (or a right) list, one after the other, are one matrix product: the lists of
the other side stand below each other. Needs numba; see `dispatch`.
"""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.selection import bit_masks, compiled_select

_BLOCK = 1 << 17
"""Products at once: half a megabyte of float32, what a core's own cache holds."""


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
        np.arange(edges) if at is None else at.numpy().astype(np.int64)
        for at in (left_at, right_at)
    ]
    values = torch.zeros(edges, k, dtype=left.dtype)
    slots = [np.full((edges, k), -1, np.int32) for _ in range(2)]
    nonfinite = np.zeros(edges, np.int64)
    sizes = np.ones(edges, np.float64) if scale is None else scale.double().numpy()
    fixed_left = _runs(here[0]) <= _runs(here[1])
    # `fixed` is shared by the edges of a run; the lists of `moving` are the rows of the products
    fixed, moving = (left, right) if fixed_left else (right, left)
    f_at, m_at = here if fixed_left else here[::-1]
    n_f, n_m = (n_left, n_right) if fixed_left else (n_right, n_left)
    f_slots, m_slots = slots if fixed_left else slots[::-1]
    counts = n_m.numpy()[m_at], n_f.numpy()[f_at]
    select = compiled_select()
    assert select is not None
    wide = moving.shape[1] * fixed.shape[1]
    sign, infinite = bit_masks(left.dtype)
    for start, stop, products in _products(fixed, moving, f_at, m_at) if wide else ():
        part = slice(start, stop)
        select(
            products, products.view(type(sign)), sign, infinite, counts[0][part], counts[1][part],
            sizes[part], not fixed_left, values.numpy()[part], m_slots[part], f_slots[part],
            nonfinite[part],
        )  # fmt: skip
    of_left, of_right = map(torch.from_numpy, slots)
    return PairTopK(values, of_left, of_right, torch.from_numpy(nonfinite))


def _runs(at: NDArray[np.int64]) -> int:
    """How often the list changes from one edge to the next."""
    return int((np.diff(at) != 0).sum())


def _blocks(at: NDArray[np.int64], most: int) -> list[tuple[int, int, int]]:
    """(start, stop, length): edges start to stop, in runs of `length` edges that share a list; at
    most `most` edges, one run at least."""
    ends = np.append(np.nonzero(np.diff(at))[0] + 1, len(at))
    blocks: list[tuple[int, int, int]] = []
    start = 0
    for end in ends.tolist():
        while start < end:
            length = min(most, end - start)
            first, stop, before = blocks[-1] if blocks else (0, 0, 0)
            if before == length and stop == start and stop - first + length <= most:
                blocks[-1] = (first, start + length, length)
            else:
                blocks.append((start, start + length, length))
            start += length
    return blocks


def _products(
    fixed: Tensor, moving: Tensor, f_at: NDArray[np.int64], m_at: NDArray[np.int64]
) -> Iterator[tuple[int, int, NDArray[np.floating]]]:
    """(start, stop, [edge, moving slot, fixed slot]) block by block, all in one buffer."""
    (rows, d), columns = moving.shape[1:], fixed.shape[1]
    most = max(1, _BLOCK // (rows * columns))
    buffer = moving.new_empty(most * rows, columns)
    blocks = buffer.view(most, rows, columns).numpy()
    below = moving.reshape(-1, d)
    turned = fixed.transpose(1, 2)
    gaps = np.append(0, np.cumsum(np.diff(m_at) != 1))  # equal at both ends: one after the other
    for start, stop, length in _blocks(f_at, most):
        out = buffer[: (stop - start) * rows]
        if gaps[start] == gaps[stop - 1]:
            first = int(m_at[start]) * rows
            lists = below[first : first + len(out)]
        else:
            lists = moving[torch.from_numpy(m_at[start:stop])]
        if length == stop - start:
            torch.mm(lists.reshape(-1, d), turned[int(f_at[start])], out=out)
        else:
            shared = torch.from_numpy(f_at[start:stop:length])
            several = lists.reshape(len(shared), -1, d)
            torch.bmm(several, turned[shared], out=out.view(len(shared), -1, columns))
        yield start, stop, blocks[: stop - start]
