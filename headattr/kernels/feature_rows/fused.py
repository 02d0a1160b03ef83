"""feature_rows on a GPU in Triton: one pass from the table to the rotated, padded rows.

One program for some slots of a position and some dimensions. It reads each of its entries' rows
twice, once with every dimension in its partner's place, so that nothing is exchanged between
threads; the second read comes from cache. Plain torch writes and reads the gathered rows five
times: gathered, scaled, turned, joined, laid out.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from headattr.kernels.feature_rows.batched import check


class Shape(NamedTuple):
    """How the kernel is compiled for some sizes."""

    D: int
    ROT: int
    """0: nothing is rotated."""
    SLOTS: int
    DIMS: int
    num_warps: int

    def constants(self) -> dict[str, int]:
        """What the kernel's text is compiled with."""
        return {name: size for name, size in self._asdict().items() if name.isupper()}

    def options(self) -> dict[str, int]:
        """What the compiler is told beside."""
        return {"num_warps": self.num_warps}


def shape_for(width: int, d: int, rot: int) -> Shape:
    """Blocks of at most 8 slots by 128 dimensions."""
    slots = min(8, _power_of_two(width))
    dims = min(128, _power_of_two(d))
    return Shape(d, rot, slots, dims, 4 if slots * dims >= 512 else 1)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


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
    """As `batched.feature_rows`. A row that the table does not have is NaN."""
    check(table, ptr, width, cos, sin)
    exact = torch.float64 if table.dtype == torch.float64 else torch.float32
    table, positions, d = table.contiguous(), len(ptr) - 1, table.shape[1]
    out = torch.empty(positions, width, d, dtype=dtype or table.dtype, device=table.device)
    if not out.numel():
        return out
    shape = shape_for(width, d, 0 if cos is None else cos.shape[1])
    cos, sin = (coefs if part is None else part for part in (cos, sin))
    blocks = -(-width // shape.SLOTS)
    with torch.cuda.device_of(table):
        rotated_rows[(positions * blocks, -(-d // shape.DIMS))](
            table,
            rows_at.contiguous(),
            coefs.to(exact).contiguous(),
            ptr.contiguous(),
            cos.to(exact).contiguous(),
            sin.to(exact).contiguous(),
            out,
            len(table),
            width,
            blocks,
            **shape.constants(),
            **shape.options(),
        )
    return out


@triton.jit
@no_type_check
def rotated_rows(
    table, rows_at, coefs, ptr, cos, sin, out, u, width, blocks,
    D: tl.constexpr, ROT: tl.constexpr, SLOTS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """SLOTS slots of one position, DIMS dimensions of each."""
    program = tl.program_id(0).to(tl.int64)
    pos = program // blocks
    slots = (program % blocks) * SLOTS + tl.arange(0, SLOTS)
    dims = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    first = tl.load(ptr + pos).to(tl.int64)
    filled = slots < tl.load(ptr + pos + 1).to(tl.int64) - first
    rows = tl.load(rows_at + first + slots, mask=filled, other=0).to(tl.int64)
    coef = tl.load(coefs + first + slots, mask=filled, other=0.0)
    known = (rows >= 0) & (rows < u)
    inside = (filled & known)[:, None] & (dims < D)[None, :]
    row = table + rows[:, None] * D
    x = tl.load(row + dims[None, :], mask=inside, other=0.0).to(coef.dtype) * coef[:, None]
    if ROT > 0:
        turned = dims < ROT
        lower = dims < ROT // 2
        partner = tl.where(lower, dims + ROT // 2, dims - ROT // 2)
        y = tl.load(row + partner[None, :], mask=inside & turned[None, :], other=0.0)
        y = tl.where(lower[None, :], -y.to(coef.dtype), y.to(coef.dtype)) * coef[:, None]
        c = tl.load(cos + pos * ROT + dims, mask=turned, other=1.0)
        s = tl.load(sin + pos * ROT + dims, mask=turned, other=0.0)
        x = x * c[None, :] + y * s[None, :]
    x = tl.where((filled & (known == 0))[:, None], float("nan"), x)
    at = out + (pos * width + slots)[:, None] * D + dims[None, :]
    tl.store(at, x.to(out.dtype.element_ty), mask=(slots < width)[:, None] & (dims < D)[None, :])
