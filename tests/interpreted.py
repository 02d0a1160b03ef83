"""The Triton kernels in Triton's interpreter, on CPU tensors: `test_fused.py` runs this file in a
process of its own, since TRITON_INTERPRET has to be set before a kernel is defined.

Shapes are tiny, for a sort of 256 keys takes the interpreter a second. It multiplies with numpy:
what it cannot show is a GPU's rounding, races and speed.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from headattr.kernels.feature_rows import batched as plain_rows
from headattr.kernels.feature_rows import fused as fused_rows
from headattr.kernels.feature_rows import naive as naive_rows
from headattr.kernels.pair_topk import fused, naive
from headattr.kernels.pair_topk.batched import PairTopK

assert os.environ.get("TRITON_INTERPRET") == "1", "run by tests/test_fused.py"


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Small whole numbers: products are exact and tie often."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def assert_equal(found: PairTopK, wanted: PairTopK) -> None:
    for name, value in wanted._asdict().items():
        assert torch.equal(getattr(found, name), value.to(getattr(found, name).dtype)), name


@pytest.mark.parametrize(
    ("n", "m", "d", "k", "dtype"),
    [
        (7, 5, 9, 20, torch.float32),  # tiles larger than the lists
        (1, 1, 1, 1, torch.float32),  # arguments of 1 are compiled in
        (17, 33, 5, 32, torch.float16),
        (70, 33, 40, 14, torch.float32),  # two tiles of rows, three blocks of dimensions
        (5, 130, 16, 7, torch.bfloat16),  # three tiles of columns: slots of later tiles are lower
        (3, 4, 2, 50, torch.float16),  # fewer pairs than asked for
    ],
)
def test_whole_numbers_are_equal_to_naive_to_the_last_tie(
    n: int, m: int, d: int, k: int, dtype: torch.dtype
) -> None:
    """Ragged lists; their padding holds NaN and infinity and is neither ranked nor counted."""
    left, right = whole(2, n, d, seed=n).to(dtype), whole(2, m, d, seed=m).to(dtype)
    counts = torch.tensor([n, max(0, n - 2)]), torch.tensor([max(0, m - 1), m])
    left[1, max(0, n - 2) :] = float("nan")
    right[0, max(0, m - 1) :] = float("inf")
    found = fused.topk_pairs(left, right, *counts, k)
    assert found.values.dtype == torch.float32
    assert_equal(found, naive.topk_pairs(left.float(), right.float(), *counts, k))


def test_256_pairs() -> None:
    left, right = whole(1, 17, 3), whole(1, 16, 3, seed=1)
    asked = left, right, torch.tensor([17]), torch.tensor([16]), 256
    assert_equal(fused.topk_pairs(*asked), naive.topk_pairs(*asked))


def test_edges_that_share_lists_have_each_its_own_scale() -> None:
    """Negative ones, and 0, where all products are equal; edges in no order; int32 indices."""
    left, right = whole(3, 6, 4), whole(2, 9, 4, seed=1)
    counts = torch.tensor([6, 0, 4]), torch.tensor([9, 8])
    at = {
        "left_at": torch.tensor([2, 0, 0, 1, 2], dtype=torch.int32),
        "right_at": torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32),
    }
    scale = torch.tensor([-2.0, 0.0, 0.5, 1.0, 3.0])
    asked = left, right, *counts, 12
    assert_equal(
        fused.topk_pairs(*asked, **at, scale=scale), naive.topk_pairs(*asked, **at, scale=scale)
    )
    few = {name: index[:1] for name, index in at.items()}  # fewer edges than lists
    assert_equal(
        fused.topk_pairs(*asked, **few, scale=scale[:1].double()),
        naive.topk_pairs(*asked, **few, scale=scale[:1]),
    )


def test_chunks_of_edges_and_wider_padding_change_nothing() -> None:
    left, right = (torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    counts = torch.tensor([6, 3, 5]), torch.tensor([2, 6, 6])
    widened = [torch.nn.functional.pad(part, (0, 0, 0, 12)) for part in (left, right)]
    together = fused.topk_pairs(left, right, *counts, 8)
    for edge in range(2):
        one = slice(edge, edge + 1)
        alone = fused.topk_pairs(*(part[one] for part in (*widened, *counts)), 8)
        assert_equal(alone, PairTopK(*(part[one] for part in together)))


@pytest.mark.parametrize(("n", "m", "d", "k"), [(17, 33, 33, 20), (64, 64, 64, 1)])
def test_real_numbers_differ_from_float64_by_rounding(n: int, m: int, d: int, k: int) -> None:
    """V18: 17 by 33 within 1e-5."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(1, size, d, generator=generator) for size in (n, m))
    found = fused.topk_pairs(left, right, torch.tensor([n]), torch.tensor([m]), k)
    products = left[0].double() @ right[0].double().T
    best = products.abs().flatten().sort(descending=True).values[:k]
    assert (found.values[0].abs() - best).abs().max() < 1e-5
    mine = products[found.left[0].long(), found.right[0].long()]
    assert (found.values[0] - mine).abs().max() < 1e-5
    assert len({*zip(found.left[0].tolist(), found.right[0].tolist(), strict=True)}) == k


def test_bfloat16_ones_multiply_to_16_exactly() -> None:
    """V18: never as bit patterns."""
    ones, counts = torch.ones(1, 16, 16, dtype=torch.bfloat16), torch.tensor([16])
    found = fused.topk_pairs(ones, ones, counts, counts, 20)
    assert found.values.tolist() == [[16.0] * 20]
    assert found.left[0].tolist() == [0] * 16 + [1] * 4
    assert found.right[0].tolist() == [*range(16), *range(4)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("k", "slots"), [(2, [0, 2]), (3, [0, 2, 1])])
def test_ties_go_to_the_lower_slot(side: str, k: int, slots: list[int]) -> None:
    """V14."""
    many, single = torch.tensor([3.0, -2, -3, 2, 1, 1])[None, :, None], torch.ones(1, 1, 1)
    sides = (many, single) if side == "left" else (single, many)
    found = fused.topk_pairs(*sides, *(torch.tensor([part.shape[1]]) for part in sides), k)
    assert getattr(found, side)[0].tolist() == slots + [-1] * (k - len(slots))


def test_equal_products_over_several_tiles_are_in_order_of_their_slots() -> None:
    ones = torch.ones(1, 2, 1), -torch.ones(1, 70, 1)
    found = fused.topk_pairs(*ones, torch.tensor([2]), torch.tensor([70]), 128)
    assert found.left[0].tolist() == [0] * 70 + [1] * 58
    assert found.right[0].tolist() == [*range(70), *range(58)]
    assert (found.values == -1).all()


@pytest.mark.parametrize(
    ("products", "k", "values", "slots", "bad"),
    [
        ([1.0, float("nan"), 3.0], 2, [3.0, 1.0], [2, 0], 1),
        ([float("-inf"), 2.0, float("nan")], 2, [2.0, 0.0], [1, -1], 2),
        ([float("nan"), float("inf"), 0.0], 3, [0.0, 0.0, 0.0], [2, -1, -1], 2),
        ([float("nan"), 2.0, 1.0, -2.0], 2, [2.0, -2.0], [1, 3], 1),
        ([3e38, 1e-45, -1.0], 3, [3e38, -1.0, 1e-45], [0, 2, 1], 0),
    ],
)
def test_non_finite_products_are_left_out_and_counted(
    products: list[float], k: int, values: list[float], slots: list[int], bad: int
) -> None:
    left, counts = torch.tensor(products)[None, :, None], torch.tensor([len(products)])
    found = fused.topk_pairs(left, torch.ones(1, 1, 1), counts, torch.tensor([1]), k)
    assert torch.equal(found.values[0], torch.tensor(values))
    assert found.left[0].tolist() == slots
    assert found.n_nonfinite.tolist() == [bad]


def test_what_overflows_is_counted_in_its_own_edge_and_under_its_scale() -> None:
    left, right = torch.tensor([[[1e30], [1.0]], [[2.0], [1.0]]]), torch.tensor([[[1e30], [2.0]]])
    found = fused.topk_pairs(
        left,
        right,
        torch.tensor([2, 2]),
        torch.tensor([2]),
        3,
        left_at=torch.tensor([0, 1, 1]),
        right_at=torch.tensor([0, 0, 0]),
        scale=torch.tensor([1.0, 1.0, 2e8]),
    )
    assert found.n_nonfinite.tolist() == [1, 0, 1]
    assert found.left.tolist() == [[0, 1, 1], [0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    ("edges", "n", "m", "d"), [(0, 3, 2, 4), (2, 0, 3, 4), (2, 3, 0, 4), (1, 2, 2, 0)]
)
def test_nothing_gives_tables_of_nothing(edges: int, n: int, m: int, d: int) -> None:
    left, right = torch.ones(edges, n, d), torch.ones(edges, m, d)
    counts = [torch.full((edges,), size) for size in (n, m)]
    assert_equal(
        fused.topk_pairs(left, right, *counts, 7), naive.topk_pairs(left, right, *counts, 7)
    )


def test_what_the_kernel_cannot_do_is_said() -> None:
    ones, one = torch.ones(1, 1, 1), torch.tensor([1])
    with pytest.raises(ValueError, match="at most 256"):
        fused.topk_pairs(ones, ones, one, one, 257)
    with pytest.raises(ValueError, match="float64"):
        fused.topk_pairs(ones.double(), ones.double(), one, one, 2)
    wide = ones.expand(1, 65_537, 1)
    with pytest.raises(ValueError, match=r"2\^32"):
        fused.topk_pairs(wide, wide, one, one, 2)


@triton.jit
def last_keys(codes, values, slots, order) -> None:
    """Keys of the last 16 by 16 of 65536 by 65536 slots, sorted, and what is read of them."""
    at = tl.arange(0, 16)
    code = tl.load(codes + at[:, None] * 16 + at[None, :])
    code = tl.reshape(code, [16, 1, 16, 1])
    keys, _, _ = fused._heads(code, 65520, 65520, 65536, 16, 16, 1, 1)
    _, value, slot = fused._read(tl.topk(tl.ravel(keys), 256))
    tl.store(values + tl.arange(0, 256), value)
    tl.store(slots + tl.arange(0, 256), slot)


def test_the_last_of_2_to_the_32_slots_ranks_like_the_first() -> None:
    products = whole(16, 16) * torch.tensor([1.0, 3e38 / 2])[whole(16, 16, seed=1).int() % 2]
    bits = products.view(torch.int32)
    codes = (((bits & 0x7FFFFFFF) + (1 - (1 << 30))) << 1) | (bits < 0).int()
    values, slots = torch.zeros(256), torch.zeros(256, dtype=torch.int64)
    last_keys[(1,)](codes, values, slots, None)
    order = products.abs().flatten().sort(descending=True, stable=True).indices
    assert torch.equal(values, products.flatten()[order])
    wanted = (65520 + order // 16) * 65536 + 65520 + order % 16
    assert torch.equal(slots, wanted)
    assert int(slots.max()) == (1 << 32) - 1


def test_offsets_beyond_2_to_the_31_reach_the_last_list() -> None:
    """The lists are pages that were never touched, but for the last."""
    lists, shape = (1 << 31) // 256 + 2, fused.shape_for(3, 2, 16, 4)
    try:
        left = torch.from_numpy(np.zeros((lists, 16, 16), np.float32))
    except MemoryError:
        pytest.skip("no address space for 8.6 GB of untouched pages")
    left[-1, 0, :3] = torch.tensor([1.0, -3.0, 2.0])
    right = torch.zeros(1, 16, 16)
    right[0, 0, :2] = torch.tensor([1.0, 10.0])
    values, slots = torch.zeros(1, 4), torch.zeros(2, 1, 4, dtype=torch.int32)
    at, zero, one = torch.tensor([lists - 1]), torch.tensor([0]), torch.ones(1)
    counts = torch.full((1,), 3).expand(lists), torch.tensor([2])
    fused.strongest_pairs[(1,)](
        left, right, counts[0].contiguous(), counts[1], at, zero, one, zero,
        values, slots[0], slots[1], zero.clone(), 16, 16, 2, 4, **shape.constants(),
    )  # fmt: skip
    assert values.tolist() == [[-30.0, 20.0, 10.0, -3.0]]
    assert slots[0].tolist() == [[1, 2, 0, 1]]


ROWS = [  # d, rotated, table, result
    (10, 0, torch.float32, None),
    (10, 6, torch.float32, None),
    (130, 130, torch.float64, torch.float32),
    (16, 16, torch.float64, None),
    (16, 8, torch.float16, torch.float32),
    (16, 16, torch.bfloat16, torch.float32),
]


def rows_asked(d: int, rot: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Four positions of 0, 3, 11 and 1 entries."""
    generator = torch.Generator().manual_seed(d)
    ptr = torch.tensor([0, 0, 3, 14, 15])
    table = torch.randn(20, d, generator=generator).to(dtype)
    rows_at = torch.randint(0, 20, (15,), generator=generator)
    coefs = torch.randn(15, generator=generator, dtype=torch.float64)
    angles = torch.randn(2, 4, rot, generator=generator)
    turned = {"cos": angles[0], "sin": angles[1]} if rot else {}
    return (table, rows_at, coefs, ptr, 13), turned


@pytest.mark.parametrize(("d", "rot", "dtype", "result"), ROWS)
def test_rows_are_gathered_and_rotated_like_naive(
    d: int, rot: int, dtype: torch.dtype, result: torch.dtype | None
) -> None:
    asked, turned = rows_asked(d, rot, dtype)
    wanted = naive_rows.feature_rows(*asked, **turned, dtype=torch.float64)
    for path in (fused_rows, plain_rows):
        found = path.feature_rows(*asked, **turned, dtype=result)
        assert found.dtype == (result or dtype)
        assert found.shape == wanted.shape
        exact = found.dtype == dtype == torch.float64
        assert (found - wanted).abs().max() < (1e-14 if exact else 3e-6)
        assert (found[wanted == 0] == 0).all()


def test_rows_that_cannot_be_laid_out_are_refused_and_unknown_ones_are_nan() -> None:
    (table, rows_at, coefs, ptr, width), turned = rows_asked(10, 6, torch.float32)
    for path in (fused_rows, plain_rows):
        with pytest.raises(ValueError, match="more than the width of 10"):
            path.feature_rows(table, rows_at, coefs, ptr, 10)
        odd = {name: part[:, :5] for name, part in turned.items()}
        with pytest.raises(ValueError, match="even"):
            path.feature_rows(table, rows_at, coefs, ptr, width, **odd)
        assert path.feature_rows(table, rows_at[:0], coefs[:0], ptr[:1], 3).shape == (0, 3, 10)
    found = fused_rows.feature_rows(table, rows_at + 10_000, coefs, ptr, width)
    assert found[2, :11].isnan().all()
    assert (found[2, 11:] == 0).all()


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gpu_checks_pass_here_and_find_what_is_wrong(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    outcomes = list(gpu_check.check_all("cpu", [(2, 4, 4, 9, 6)]))
    outcomes.append(gpu_check.check_far_offsets("cpu", lists=2, slots=5, d=9))
    assert all(outcome.right for outcome in outcomes), outcomes
    chosen = fused.topk_pairs
    monkeypatch.setattr(fused, "topk_pairs", lambda *a, **o: _nudged(chosen(*a, **o)))
    assert not gpu_check.check_reals(1, 4, 4, 9, 6, "cpu").right
    assert not gpu_check.check_ties(2, 4, 4, 9, 6, "cpu").right


def _nudged(found: PairTopK) -> PairTopK:
    return found._replace(values=found.values * (1 + 3e-4))  # as TF32 would


def test_the_gpu_benchmark_runs_and_reports(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "REPEATS", 1)
    monkeypatch.setattr(gpu_check, "VARIANTS", {"as chosen": {}})
    sizes = gpu_check.Sizes(2, 2, 1, 8, 4, 3)
    times = gpu_check.measure(sizes, "cpu", chunk=2)
    assert {time.edges for time in times} == {6}
    outcome = gpu_check.Outcome("a check", False, "a note")
    text = gpu_check.report([outcome], times, sizes, gpu_check.machine_line())
    assert "| a check | WRONG | a note |" in text
    assert text.count("| 1.00 |") == 1
