"""topk_pairs on a GPU in Triton: the products of an edge never leave the chip.

One program an edge. It walks over the edge's products in tiles, keeps the strongest so far sorted
in registers, and knows the k-th of them, the bound.

    tile    left rows times right rows, IEEE float32 multiply-adds (no TF32), a code an entry
    heads   the strongest entry of every group (4 by 4, held by one thread), as 64-bit keys
    while   the strongest head is above the bound: the heads are sorted and merged into the kept,
            taken out of their groups, and each group names its next

A tile no head of which is above the bound costs two passes over registers and no sort. The loop
ends after 16 rounds at most, for a group has 16 entries, and after about as many as the fullest
group has of the k strongest: two or three where strong pairs are spread.

Order is that of one integer, so no tie is left to chance:

    key = (bits of |x|, plus 1, less 2^30) 33 bits up | (2^32 - 1 - slot) 1 bit up | sign of x

The bits of |x| order like |x|; `slot` is left slot times the width of the right list plus right
slot, so the lower left slot, then the lower right slot comes first; the sign never decides, since
no two pairs share a slot. All 64 bits are used: an edge has at most 2^32 pairs. Products rank
before they are multiplied by the edge's scale, which changes no order, or makes all of them 0.

Programs are numbered such that those that run at the same time share lists (`_visits`).
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from headattr.kernels.pair_topk.batched import PairTopK

MOST_K = 256
MOST_PAIRS = 1 << 32
"""What a slot's 32 bits tell apart."""
_TOGETHER = 16
"""Programs go over the edges of this many left lists and this many right lists, then the next."""

_NOTHING: tl.constexpr = tl.constexpr(-(1 << 31))
_NO_STRENGTH: tl.constexpr = tl.constexpr(-(1 << 30))
_NO_KEY: tl.constexpr = tl.constexpr(-(1 << 63))
_LAST_KEY: tl.constexpr = tl.constexpr((1 << 63) - 1)
_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)


class Shape(NamedTuple):
    """How the kernel is compiled for some sizes: its constants, and the warps of a program."""

    D: int
    """d_head, to the next multiple of DEPTH."""
    K: int
    """k, to the next power of two."""
    ROWS: int
    COLUMNS: int
    """Of a tile."""
    DEPTH: int
    """Dimensions of both lists in shared memory at a time."""
    GROUP_ROWS: int
    GROUP_COLUMNS: int
    num_warps: int
    num_stages: int
    maxnreg: int
    """Registers a thread may take: left to itself ptxas spills to fit one more program on a
    multiprocessor."""

    def constants(self) -> dict[str, int]:
        """What the kernel's text is compiled with."""
        return {name: size for name, size in self._asdict().items() if name.isupper()}

    def options(self) -> dict[str, int]:
        """What the compiler is told beside."""
        return {name: size for name, size in self._asdict().items() if name.islower()}


def shape_for(n: int, m: int, d: int, k: int) -> Shape:
    """Tiles of at most 64 by 64, no larger than the lists; groups small enough for k heads.

    No more than 16 dimensions at a time, and no copies ahead of time: the compiler holds all
    operands of a dot in registers, and programs on a multiprocessor hide each other's waits. 200
    registers are what every tile was found to fit in.
    """
    kept = max(16, _power_of_two(k))
    rows, columns = (min(64, max(16, _power_of_two(size))) for size in (n, m))
    group_rows = group_columns = 4
    while rows * columns // (group_rows * group_columns) < kept:
        if group_rows >= group_columns:
            group_rows //= 2
        else:
            group_columns //= 2
    entries, depth = rows * columns, 16
    warps = 4 if entries >= 2048 else 2 if entries >= 1024 else 1
    return Shape(
        D=-(-d // depth) * depth,
        K=kept,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        GROUP_ROWS=group_rows,
        GROUP_COLUMNS=group_columns,
        num_warps=warps,
        num_stages=1,
        maxnreg=200,
    )


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


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
    """As `batched.topk_pairs`, for float32, float16 and bfloat16; values are float32 always.

    Memory: a float32 copy of both sides' lists, one an edge at most; the host never waits for the
    device. The more edges a call has, the less the copies weigh.
    """
    n, m, d = left.shape[1], right.shape[1], left.shape[2]
    _check(left, right, n * m, k)
    device = left.device
    edges = len(left if left_at is None else left_at)
    values = torch.empty(edges, k, device=device)
    slots = torch.empty(2, edges, k, dtype=torch.int32, device=device)
    nonfinite = torch.empty(edges, dtype=torch.int64, device=device)
    if scale is None:
        scale = torch.ones(edges, device=device)
    if not edges or not k:
        return PairTopK(values, slots[0], slots[1], nonfinite.zero_())
    shape = shape_for(n, m, d, k)
    left, n_left, left_at = _turned(left, n_left, left_at, shape.ROWS, shape.D)
    right, n_right, right_at = _turned(right, n_right, right_at, shape.COLUMNS, shape.D)
    with torch.cuda.device_of(left):
        strongest_pairs[(edges,)](
            left,
            right,
            n_left,
            n_right,
            left_at,
            right_at,
            scale.float().contiguous(),
            _visits(left_at, right_at),
            values,
            slots[0],
            slots[1],
            nonfinite,
            left.shape[2],
            right.shape[2],
            max(1, m),
            k,
            **shape.constants(),
            **shape.options(),
        )
    return PairTopK(values, slots[0], slots[1], nonfinite)


def _check(left: Tensor, right: Tensor, pairs: int, k: int) -> None:
    for part in (left, right):
        if part.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"the fused kernel multiplies float32, float16 or bfloat16, not {part.dtype}: "
                "use batched.topk_pairs"
            )
    if k > MOST_K:
        raise ValueError(
            f"the fused kernel keeps at most {MOST_K} pairs an edge, {k} asked for: "
            "use batched.topk_pairs"
        )
    if pairs > MOST_PAIRS:
        raise ValueError(f"the fused kernel ranks at most 2^32 pairs an edge, not {pairs}")


def _turned(
    lists: Float[Tensor, "l n d"],
    counts: Int[Tensor, "l"],
    at: Int[Tensor, "edge"] | None,
    rows: int,
    dims: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The lists as float32, a dimension after the other, the rows of each side by side in whole
    tiles; their counts, and the list of each edge. Where edges are fewer than lists, a list an
    edge.

    What a thread multiplies then lies together in shared memory (four rows, one dimension), and
    loads need no mask: 16 bytes at a time, no bank read twice.
    """
    if at is not None and len(at) < len(lists):
        lists, counts, at = lists[at], counts[at], None
    n, d = lists.shape[1:]
    turned = lists.new_zeros(len(lists), dims, -(-n // rows) * rows, dtype=torch.float32)
    turned[:, :d, :n] = lists.transpose(1, 2)
    at = torch.arange(len(lists), device=lists.device) if at is None else at.contiguous()
    return turned, counts.contiguous(), at


def _visits(left_at: Int[Tensor, "edge"], right_at: Int[Tensor, "edge"]) -> Int[Tensor, "edge"]:
    """The edges in squares of lists: a few hundred programs run at a time, and those of a square
    read 16 left and 16 right lists between them, whatever the order they were asked for in."""
    square = left_at.long() // _TOGETHER << 32 | right_at.long() // _TOGETHER
    return square.argsort(stable=True)


@triton.jit
@no_type_check
def strongest_pairs(
    left, right, n_left, n_right, left_at, right_at, scale, visits,
    values, left_slots, right_slots, nonfinite,
    left_width, right_width, m, k,
    D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The K strongest pairs of one edge, of which k are written. left [list, D, left_width]."""
    edge = tl.load(visits + tl.program_id(0).to(tl.int64)).to(tl.int64)
    left_index = tl.load(left_at + edge).to(tl.int64)
    right_index = tl.load(right_at + edge).to(tl.int64)
    n_rows = tl.load(n_left + left_index).to(tl.int32)
    n_columns = tl.load(n_right + right_index).to(tl.int32)
    size = tl.load(scale + edge)
    left += left_index * D * left_width
    right += right_index * D * right_width

    rank = K - 1 - tl.arange(0, K)
    kept = tl.full([K], _NO_KEY, tl.int64)  # weakest first
    bound = tl.min(kept)
    bad = tl.zeros([], tl.int64)
    for first_row in range(0, n_rows, ROWS):
        rows = first_row + tl.arange(0, ROWS)
        for first_column in range(0, n_columns, COLUMNS):
            columns = first_column + tl.arange(0, COLUMNS)
            products = _products(
                left + first_row, right + first_column, left_width, right_width,
                D, ROWS, COLUMNS, DEPTH,
            )  # fmt: skip
            inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
            code, broken = _coded(products, inside, size)
            bad += broken
            code = tl.reshape(
                code, [ROWS // GROUP_ROWS, GROUP_ROWS, COLUMNS // GROUP_COLUMNS, GROUP_COLUMNS]
            )
            heads, strength, place = _heads(
                code, first_row, first_column, m, ROWS, COLUMNS, GROUP_ROWS, GROUP_COLUMNS
            )
            while tl.max(tl.ravel(heads)) > bound:
                # of a list that rises and one that falls, the larger of each two: the K largest
                strong = tl.topk(tl.ravel(heads), K)
                kept = tl.bitonic_merge(tl.maximum(kept, strong))
                bound = tl.min(tl.where(rank < k, kept, _LAST_KEY))
                code = _without_heads(code, strength, place, GROUP_ROWS, GROUP_COLUMNS)
                heads, strength, place = _heads(
                    code, first_row, first_column, m, ROWS, COLUMNS, GROUP_ROWS, GROUP_COLUMNS
                )

    found, value, slot = _read(kept)
    at = edge * k + rank
    tl.store(values + at, tl.where(found, value * size, 0.0), mask=rank < k)
    tl.store(left_slots + at, tl.where(found, slot // m, -1).to(tl.int32), mask=rank < k)
    tl.store(right_slots + at, tl.where(found, slot % m, -1).to(tl.int32), mask=rank < k)
    tl.store(nonfinite + edge, bad)


@triton.jit
@no_type_check
def _products(
    left, right, left_width, right_width,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of products. Padding is multiplied like all else: it stays in its row or column."""
    dims = tl.arange(0, DEPTH).to(tl.int64)
    left += dims[None, :] * left_width + tl.arange(0, ROWS)[:, None]
    right += dims[:, None] * right_width + tl.arange(0, COLUMNS)[None, :]
    products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(0, D, DEPTH):
        products = tl.dot(tl.load(left), tl.load(right), products, input_precision="ieee")
        left += DEPTH * left_width
        right += DEPTH * right_width
    return products


@triton.jit
@no_type_check
def _coded(products, inside, size):
    """Each product as an integer, its strength and below it its sign; how many are not finite."""
    scaled = (products * size).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = scaled < _INFINITY
    bits = tl.where(size == 0, 0.0, products).to(tl.int32, bitcast=True)
    strength = (bits & 0x7FFFFFFF) + (1 - (1 << 30))
    code = (strength << 1) | ((bits >> 31) & 1)
    broken = tl.sum(tl.ravel((inside & (finite == 0)).to(tl.int32)))
    return tl.where(inside & finite, code, _NOTHING), broken.to(tl.int64)


@triton.jit
@no_type_check
def _heads(
    code, first_row, first_column, m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The strongest entry of every group: its key, its strength, and its place in the group with
    its sign below; of equal ones the one in the lower row, then the lower column."""
    strength = tl.max(tl.max(code >> 1, 3, keep_dims=True), 1, keep_dims=True)
    places = (_places(GROUP_ROWS, GROUP_COLUMNS) << 1) | (code & 1)
    place = tl.where(code >> 1 == strength, places, 2 * GROUP_ROWS * GROUP_COLUMNS)
    place = tl.min(tl.min(place, 3, keep_dims=True), 1, keep_dims=True)
    row = first_row + GROUP_ROWS * tl.arange(0, ROWS // GROUP_ROWS)
    column = first_column + GROUP_COLUMNS * tl.arange(0, COLUMNS // GROUP_COLUMNS)
    row = row[:, None, None, None] + (place >> 1) // GROUP_COLUMNS
    column = column[None, None, :, None] + (place >> 1) % GROUP_COLUMNS
    slot = row.to(tl.int64) * m + column
    key = (strength.to(tl.int64) << 33) | ((0xFFFFFFFF - slot) << 1) | (place & 1)
    return tl.where(strength == _NO_STRENGTH, _NO_KEY, key), strength, place


@triton.jit
@no_type_check
def _read(key):
    """Of keys: whether there is a pair, its product and its slot."""
    magnitude = ((key >> 33) + ((1 << 30) - 1)).to(tl.int32).to(tl.float32, bitcast=True)
    value = tl.where((key & 1) != 0, -magnitude, magnitude)
    return key != _NO_KEY, value, 0xFFFFFFFF - ((key >> 1) & 0xFFFFFFFF)


@triton.jit
@no_type_check
def _without_heads(code, strength, place, GROUP_ROWS: tl.constexpr, GROUP_COLUMNS: tl.constexpr):
    """The tile without the entries that have been heads."""
    head = (code >> 1 == strength) & (_places(GROUP_ROWS, GROUP_COLUMNS) == place >> 1)
    return tl.where(head, _NOTHING, code)


@triton.jit
@no_type_check
def _places(GROUP_ROWS: tl.constexpr, GROUP_COLUMNS: tl.constexpr):
    """Numbers the entries of a group, row by row."""
    row = tl.arange(0, GROUP_ROWS)[None, :, None, None]
    return row * GROUP_COLUMNS + tl.arange(0, GROUP_COLUMNS)[None, None, None, :]
