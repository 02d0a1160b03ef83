"""feature_rows on any device in plain torch."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def feature_rows(
    table: Float[Tensor, "u d"],
    rows_at: Int[Tensor, "entry"],
    coefs: Float[Tensor, "entry"],
    ptr: Int[Tensor, "pos_plus_1"],
    width: int,
    *,
    cos: Float[Tensor, "pos rot"] | None = None,
    sin: Float[Tensor, "pos rot"] | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "pos width d"]:
    """R_i (coef * table[row]) of every entry, by position i and slot; zeros behind a position's
    last.

    Entries ptr[i] to ptr[i + 1] are those of position i, `width` at most. cos and sin rotate the
    first `rot` dimensions, dimension c paired with c + rot / 2; the rest passes, and all of it
    without them. Computed in float64 where the table is, else in float32; `dtype` (the table's by
    default) is that of the result.
    """
    check(table, ptr, width, cos, sin)
    exact = torch.float64 if table.dtype == torch.float64 else torch.float32
    counts = ptr.diff()
    positions = torch.arange(len(counts), device=ptr.device).repeat_interleave(counts)
    slots = torch.arange(len(rows_at), device=ptr.device) - ptr[positions]
    rows = table[rows_at].to(exact) * coefs.to(exact)[:, None]
    if cos is not None and sin is not None:
        cos, sin = (part.to(exact)[positions] for part in (cos, sin))
        turned, rest = rows[:, : cos.shape[1]], rows[:, cos.shape[1] :]
        first, second = turned.chunk(2, -1)
        turned = turned * cos + torch.cat([-second, first], -1) * sin
        rows = torch.cat([turned, rest], -1)
    out = rows.new_zeros(len(counts), width, rows.shape[1], dtype=dtype or table.dtype)
    out[positions, slots] = rows.to(out.dtype)
    return out


def check(table: Tensor, ptr: Tensor, width: int, cos: Tensor | None, sin: Tensor | None) -> None:
    """What no path can lay out or rotate."""
    most = int(ptr.diff().max()) if len(ptr) > 1 else 0
    if most > width:
        raise ValueError(f"a position has {most} entries, more than the width of {width}")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin come together or not at all")
    rot = 0 if cos is None else cos.shape[1]
    if rot % 2 or rot > table.shape[1]:
        raise ValueError(f"{rot} rotated dimensions of {table.shape[1]}: even, and no more, is due")
