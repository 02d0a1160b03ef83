"""topk_pairs: the fast paths give what the loops give, whatever the shapes, ties and broken
values."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headattr.kernels.pair_topk import batched, blocked, dispatch, naive
from headattr.kernels.pair_topk.batched import PairTopK

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PATHS = {
    "naive": naive.topk_pairs,
    "batched": batched.topk_pairs,
    "blocked": blocked.topk_pairs,
}
PROFILE = settings(max_examples=120, deadline=None, derandomize=True)


class Case(NamedTuple):
    """Arguments of topk_pairs."""

    left: Tensor
    right: Tensor
    n_left: Tensor
    n_right: Tensor
    k: int


@st.composite
def cases(draw: Callable[[Any], Any], *, whole: bool) -> Case:
    """Edges of odd shapes; `whole` numbers tie often and multiply exactly. Padding is NaN or
    inf."""
    edges, n, m = (draw(st.integers(0, top)) for top in (4, 7, 6))
    d, dtype = draw(st.integers(1, 9)), draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    sides, counts = [], []
    for slots in (n, m):
        if whole:
            rows = torch.randint(-2, 3, (edges, slots, d), generator=generator).to(dtype)
        else:
            rows = torch.randn(edges, slots, d, generator=generator, dtype=dtype)
        count = torch.tensor([draw(st.integers(0, slots)) for _ in range(edges)], dtype=torch.long)
        poison = draw(st.sampled_from([float("nan"), float("inf"), 1e30]))
        rows[torch.arange(slots) >= count[:, None]] = poison
        sides.append(rows)
        counts.append(count)
    return Case(*sides, *counts, draw(st.integers(1, 50)))


def _products(case: Case, edge: int) -> Tensor:
    n, m = int(case.n_left[edge]), int(case.n_right[edge])
    return case.left[edge, :n].double() @ case.right[edge, :m].double().T


def _assert_whole(found: PairTopK, case: Case) -> None:
    """Shapes, types, and -1 slots with value 0 exactly behind the last pair."""
    assert found.values.shape == found.left.shape == found.right.shape == (len(case.left), case.k)
    assert found.values.dtype == case.left.dtype
    for edge in range(len(case.left)):
        kept = min(case.k, int(case.n_left[edge]) * int(case.n_right[edge]))
        assert (found.left[edge] >= 0).sum() == (found.right[edge] >= 0).sum() == kept
        assert (found.left[edge, kept:] == -1).all()
        assert (found.right[edge, kept:] == -1).all()
        assert (found.values[edge, kept:] == 0).all()
        assert (found.left[edge, :kept] < case.n_left[edge]).all()
        assert (found.right[edge, :kept] < case.n_right[edge]).all()


@PROFILE
@given(cases(whole=True))
def test_on_whole_numbers_fast_and_naive_are_equal_to_the_last_tie(case: Case) -> None:
    wanted = naive.topk_pairs(*case)
    for path in (batched, blocked):
        found = path.topk_pairs(*case)
        _assert_whole(found, case)
        for name, value in wanted._asdict().items():
            assert torch.equal(getattr(found, name), value), name
        assert (found.n_nonfinite == 0).all()


@st.composite
def shared(draw: Callable[[Any], Any]) -> tuple[Case, dict[str, Tensor]]:
    """Edges that share their lists, in order or not; whole numbers, a scale that may be 0."""
    integers = st.integers
    lists, edges, d = [draw(integers(1, 5)) for _ in range(2)], draw(integers(0, 30)), 4
    generator = torch.Generator().manual_seed(draw(integers(0, 10**6)))
    sides, counts, at = [], [], []
    for length in lists:
        slots = draw(integers(0, 21))
        dtype = torch.float32
        sides.append(torch.randint(-2, 3, (length, slots, d), generator=generator).to(dtype))
        counts.append(torch.randint(0, slots + 1, (length,), generator=generator))
        found = torch.randint(0, length, (edges,), generator=generator)
        at.append(found.sort().values if draw(st.booleans()) else found)
    options = {"left_at": at[0], "right_at": at[1]}
    if draw(st.booleans()):
        options["scale"] = torch.randint(-1, 3, (edges,), generator=generator).float()
    return Case(*sides, *counts, draw(integers(1, 50))), options


@PROFILE
@given(shared())
def test_edges_that_share_lists_are_the_same_on_every_path(
    asked: tuple[Case, dict[str, Tensor]],
) -> None:
    case, options = asked
    wanted = naive.topk_pairs(*case, **options)
    for path in (batched, blocked, dispatch):
        found = path.topk_pairs(*case, **options)
        for name, value in wanted._asdict().items():
            assert torch.equal(getattr(found, name), value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "m", "k"), [(64, 64, 20), (70, 33, 256), (3, 700, 20), (40, 40, 1)])
def test_wide_lists_with_heavy_tails_have_every_one_of_their_strongest_pairs(
    dtype: torch.dtype, n: int, m: int, k: int
) -> None:
    """Blocks of several rows, causal runs of all lengths; recall is exactly 1 beyond rounding."""
    generator = torch.Generator().manual_seed(n)

    def heavy(length: int, slots: int) -> Tensor:
        sizes = (
            torch.rand(length, slots, 1, generator=generator, dtype=dtype).pow(-1.5).clamp(max=1e4)
        )
        return torch.randn(length, slots, 32, generator=generator, dtype=dtype) * sizes

    left, right = heavy(12, n), heavy(12, m)
    q_pos, k_pos = torch.tril_indices(12, 12)
    counts = [torch.full((12,), size) for size in (n, m)]
    found = blocked.topk_pairs(left, right, *counts, k, left_at=q_pos, right_at=k_pos)

    def ends(edge: int) -> list[tuple[Tensor, Tensor]]:
        return [(left, q_pos[edge]), (right, k_pos[edge])]

    for edge in range(len(q_pos)):
        products = left[q_pos[edge]].double() @ right[k_pos[edge]].double().T
        sizes = products.abs().flatten().sort(descending=True).values
        kept = min(k, len(sizes))
        longest = (float(part[at].norm(dim=-1).max()) for part, at in ends(edge))
        tolerance = (1e-6 if dtype == torch.float32 else 1e-14) * math.prod(longest)
        mine = products[found.left[edge, :kept].long(), found.right[edge, :kept].long()].abs()
        assert len(set(_pairs(found, edge))) == kept
        assert (mine - sizes[:kept]).abs().max() <= tolerance
        assert (found.values[edge, :kept].abs() - mine).abs().max() <= tolerance


def test_thousands_of_equal_products_are_in_order_of_their_slots() -> None:
    ones, counts = torch.ones(2, 60, 1), torch.tensor([60, 60])
    for path in (batched, blocked):
        found = path.topk_pairs(ones, -ones, counts, counts, 130)
        assert found.left[0].tolist() == [0] * 60 + [1] * 60 + [2] * 10
        assert found.right[1].tolist() == [*range(60), *range(60), *range(10)]
        assert (found.values == -1).all()


@PROFILE
@given(cases(whole=False))
def test_on_real_numbers_fast_and_naive_differ_by_rounding_only(case: Case) -> None:
    found, wanted = (path.topk_pairs(*case) for path in (batched, naive))
    blocks = blocked.topk_pairs(*case)
    for path in (found, wanted, blocks):
        _assert_whole(path, case)
    for edge in range(len(case.left)):
        products = _products(case, edge)
        kept = min(case.k, products.numel())
        if kept == 0:
            continue
        size = float(products.abs().max()) or 1.0
        tolerance = (1e-6 if case.left.dtype == torch.float32 else 1e-14) * max(size, 1.0)
        for path in (found, wanted, blocks):
            q, k = path.left[edge, :kept].long(), path.right[edge, :kept].long()
            assert (path.values[edge, :kept] - products[q, k]).abs().max() <= tolerance
            assert len({*zip(q.tolist(), k.tolist(), strict=True)}) == kept
        sizes = products.abs().flatten().sort(descending=True).values[:kept]
        assert (found.values[edge, :kept].abs() - sizes).abs().max() <= tolerance
        different = _pairs(found, edge) ^ _pairs(wanted, edge)
        assert all(abs(products[pair].abs() - sizes[-1]) <= tolerance for pair in different)


def _pairs(found: PairTopK, edge: int) -> set[tuple[int, int]]:
    both = zip(found.left[edge].tolist(), found.right[edge].tolist(), strict=True)
    return {pair for pair in both if pair[0] >= 0}


def _one(products: list[float], *, side: str, dtype: torch.dtype, device: str) -> Case:
    """One edge whose products are the given numbers, as `side` vectors against a single 1."""
    many = torch.tensor(products, dtype=dtype, device=device)[None, :, None]
    single = torch.ones(1, 1, 1, dtype=dtype, device=device)
    left, right = (many, single) if side == "left" else (single, many)
    counts = [torch.tensor([part.shape[1]], device=device) for part in (left, right)]
    return Case(left, right, *counts, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("k", "slots"),
    [(1, [0]), (2, [0, 2]), (3, [0, 2, 1]), (5, [0, 2, 1, 3, 4]), (8, [0, 2, 1, 3, 4, 5])],
)
def test_ties_go_to_the_lower_slot(
    device: str, path: str, side: str, dtype: torch.dtype, k: int, slots: list[int]
) -> None:
    """V14: [3, 2, 3, 2, 1, 1] gives 0, 2 and 0, 2, 1, on every device and in chunks of two
    edges."""
    if device == "cuda" and path == "blocked":
        pytest.skip("compiled for the CPU")
    case = _one([3, 2, 3, 2, 1, 1], side=side, dtype=dtype, device=device)._replace(k=k)
    padded = slots + [-1] * (k - len(slots))
    assert getattr(PATHS[path](*case), side)[0].tolist() == padded
    five = Case(*(part.expand(5, *part.shape[1:]) for part in case[:4]), k)
    for start in range(0, 5, 2):
        chunk = PATHS[path](*(part[start : start + 2] for part in five[:4]), k)
        assert getattr(chunk, side).tolist() == [padded] * len(chunk.left)


def test_a_tie_of_both_signs_goes_to_the_lower_left_then_the_lower_right_slot() -> None:
    left = torch.tensor([[[-1.0], [1.0], [1.0]]])
    right = torch.tensor([[[2.0], [-2.0]]])
    counts = torch.tensor([3]), torch.tensor([2])
    for path in PATHS.values():
        found = path(left, right, *counts, 4)
        assert found.left[0].tolist() == [0, 0, 1, 1]
        assert found.right[0].tolist() == [0, 1, 0, 1]
        assert found.values[0].tolist() == [-2.0, 2.0, 2.0, -2.0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("products", "k", "values", "slots", "bad"),
    [
        ([1.0, float("nan"), 3.0], 2, [3.0, 1.0], [2, 0], 1),
        ([1.0, float("inf"), -3.0], 2, [-3.0, 1.0], [2, 0], 1),
        ([float("-inf"), 2.0, float("nan")], 2, [2.0, 0.0], [1, -1], 2),
        ([float("nan"), float("nan"), 0.0], 3, [0.0, 0.0, 0.0], [2, -1, -1], 2),
        ([float("nan")] * 3, 2, [0.0, 0.0], [-1, -1], 3),
        ([float("nan"), 2.0, 1.0, 2.0], 2, [2.0, 2.0], [1, 3], 1),
    ],
)
def test_non_finite_products_are_left_out_and_counted(
    path: str,
    side: str,
    products: list[float],
    k: int,
    values: list[float],
    slots: list[int],
    bad: int,
) -> None:
    """V12: NaN never ranks."""
    case = _one(products, side=side, dtype=torch.float32, device="cpu")._replace(k=k)
    found = PATHS[path](*case)
    assert found.values[0].tolist() == values
    assert getattr(found, side)[0].tolist() == slots
    assert found.n_nonfinite.tolist() == [bad]


@pytest.mark.parametrize("path", PATHS)
def test_one_broken_edge_does_not_touch_its_neighbours_and_padding_is_not_counted(
    path: str,
) -> None:
    """V12, padded batch of lengths 5 and 2: the NaN beyond a length is no product at all."""
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randint(-3, 4, (3, 5, 4), generator=generator).float() for _ in "lr")
    lengths = torch.tensor([5, 2, 4])
    clean = PATHS[path](left, right, lengths, lengths, 6)
    for part, row in ((left, 1), (right, 1)):
        part[row, 2:] = float("nan")
    left[2, 1] = float("nan")
    found = PATHS[path](left, right, lengths, lengths, 6)
    assert found.n_nonfinite.tolist() == [0, 0, 4]
    for name, value in clean._asdict().items():
        assert torch.equal(getattr(found, name)[:2], value[:2]), name
    assert found.values.isfinite().all()
    assert (found.left[2] != 1).all()


def test_products_that_overflow_are_counted_like_any_non_finite_one() -> None:
    left, right = torch.tensor([[[1e30], [1.0]]]), torch.tensor([[[1e30], [2.0]]])
    counts = torch.tensor([2]), torch.tensor([2])
    for path in PATHS.values():
        found = path(left, right, *counts, 3)
        assert found.n_nonfinite.tolist() == [1]
        assert found.values[0].tolist() == pytest.approx([2e30, 1e30, 2.0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("edges", "n", "m"), [(0, 3, 2), (0, 0, 0), (2, 0, 3), (2, 3, 0), (2, 0, 0), (1, 1, 1)]
)
def test_no_edges_and_no_slots_give_empty_tables_of_the_asked_width(
    path: str, edges: int, n: int, m: int
) -> None:
    left, right = torch.ones(edges, n, 4), torch.ones(edges, m, 4)
    counts = (torch.full((edges,), size) for size in (n, m))
    found = PATHS[path](left, right, *counts, 7)
    assert found.values.shape == (edges, 7)
    kept = min(n * m, 7)
    assert (found.left[:, kept:] == -1).all()
    assert (found.values[:, kept:] == 0).all()
    assert found.n_nonfinite.tolist() == [0] * edges


@pytest.mark.parametrize("path", [batched, blocked])
@PROFILE
@given(case=cases(whole=True), step=st.integers(1, 3))
def test_chunks_of_edges_and_wider_padding_do_not_change_a_bit(
    path: Any, case: Case, step: int
) -> None:
    whole = path.topk_pairs(*case)
    widen = torch.nn.functional.pad
    wider = [widen(part, (0, 0, 0, 3), value=float("nan")) for part in case[:2]]
    parts = [
        path.topk_pairs(*(part[i : i + step] for part in (*wider, *case[2:4])), case.k)
        for i in range(0, len(case.left), step)
    ]
    for name in PairTopK._fields if parts else ():
        joined = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(joined, getattr(whole, name)), name


def _heavy(generator: torch.Generator, *shape: int, dtype: torch.dtype, whole: bool) -> Tensor:
    """Rows of very unequal length; `whole`: products are exact and often equal."""
    if not whole:
        sizes = torch.rand(*shape[:2], 1, generator=generator, dtype=dtype).pow(-0.7)
        return torch.randn(*shape, generator=generator, dtype=dtype) * sizes
    sizes = torch.randn(*shape[:2], 1, generator=generator).mul(1.5).round().clamp(-6, 6)
    return (torch.randint(-2, 3, shape, generator=generator) * 2.0**sizes).to(dtype)


def test_recall_is_exactly_one_on_ten_thousand_heavy_tailed_edges() -> None:
    """Pairs within 1e-6 of the k-th value, relative to it, count either way."""
    generator, k, n = torch.Generator().manual_seed(5), 20, 48
    left, right = (
        _heavy(generator, 141, n, 64, dtype=torch.float32, whole=False) for _ in range(2)
    )
    counts = [torch.randint(8, n + 1, (141,), generator=generator) for _ in range(2)]
    q_pos, k_pos = torch.tril_indices(141, 141)[:, :10_000]
    found = dispatch.topk_pairs(left, right, *counts, k, left_at=q_pos, right_at=k_pos)
    slot, missed, wrong = torch.arange(n), 0, 0
    for part in torch.arange(10_000).split(500):
        q, j = q_pos[part], k_pos[part]
        sizes = (left[q].double() @ right[j].double().transpose(1, 2)).abs()
        sizes.masked_fill_(slot[:, None] >= counts[0][q][:, None, None], -1)
        sizes.masked_fill_(slot >= counts[1][j][:, None, None], -1)
        mine = (found.left[part] * n + found.right[part]).long()
        sizes = sizes.flatten(1)
        kth = sizes.topk(k, -1).values[:, -1:]
        taken = torch.zeros_like(sizes, dtype=torch.bool).scatter_(1, mine, True)
        assert (taken.sum(1) == k).all()
        missed += int(((sizes > kth * (1 + 1e-6)) & ~taken).sum())
        wrong += int(((sizes < kth * (1 - 1e-6)) & taken).sum())
    assert (missed, wrong) == (0, 0)


def _assert_same(case: Case, path: Any = blocked, **options: Tensor) -> None:
    wanted, found = (p.topk_pairs(*case, **options) for p in (batched, path))
    for name, value in wanted._asdict().items():
        assert torch.equal(getattr(found, name), value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [1, 2, 7, 8, 31, 64, 100, 129, 130])
@pytest.mark.parametrize(("n", "m", "k"), [(61, 1, 20), (1, 77, 99), (45, 83, 256), (6, 16, 97)])
def test_odd_shapes_in_every_width_are_the_same_to_the_last_tie(
    dtype: torch.dtype, d: int, n: int, m: int, k: int
) -> None:
    generator = torch.Generator().manual_seed(d)
    sides = [_heavy(generator, 5, rows, d, dtype=dtype, whole=True) for rows in (n, m)]
    counts = [torch.randint(0, rows + 1, (5,), generator=generator) for rows in (n, m)]
    q_pos, k_pos = torch.tril_indices(5, 5)
    scale = torch.tensor([1, -2, 0.5, 0, -1])[k_pos]
    case = Case(*sides, *counts, k)
    _assert_same(case, left_at=q_pos, right_at=k_pos)
    shuffled = torch.randperm(len(q_pos), generator=generator)
    both = {"left_at": q_pos[shuffled], "right_at": k_pos[shuffled]}
    _assert_same(case, dispatch, **both, scale=scale[shuffled])


def test_wide_lists_and_one_list_for_all_edges_are_the_same_to_the_last_tie() -> None:
    generator = torch.Generator().manual_seed(2)
    for n, m, lists in ((32, 5000, 1), (700, 300, 3)):
        left = _heavy(generator, 3, n, 64, dtype=torch.float32, whole=True)
        right = _heavy(generator, lists, m, 64, dtype=torch.float32, whole=True)
        counts = torch.tensor([n, n - 1, n // 2]), torch.full((lists,), m)
        at = {"left_at": torch.tensor([0, 1, 2, 1]), "right_at": torch.tensor([0, 0, 2, 2]) % lists}
        _assert_same(Case(left, right, *counts, 20), **at, scale=torch.tensor([1.0, -1, 4, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 7, 20, 300])
def test_leaving_out_what_cannot_matter_changes_nothing(dtype: torch.dtype, k: int) -> None:
    """Rows that are multiples of one another, whose products are as large as their norms allow;
    thousands of equal products; rows of zeros; one huge row; numbers whose squares vanish or
    overflow; NaN and infinity in rows that count, and in rows that do not."""
    generator = torch.Generator().manual_seed(k)
    step = torch.randint(-3, 4, (8, 40, 1), generator=generator).double()
    lists = (2.0**step * torch.tensor([1.0, -2, 2, 4, 0])).to(dtype)  # norm 5: bounds exactly met
    lists[1] = lists[1, :1]
    lists[2, ::2] = 0
    lists[3] = 0
    lists[4, 17] *= 2.0**40
    tiny = 2.0 ** (-70 if dtype == torch.float32 else -530)
    lists[5] *= tiny
    lists[5, 3] /= tiny**1.5
    lists[6, 11, 2], lists[6, 20, 0], lists[6, 21] = math.nan, math.inf, -math.inf
    lists[7, 30:] = math.nan
    counts = torch.tensor([40] * 7 + [30])
    at = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    scale = torch.tensor([1.0, -3, 0, 0.25])[torch.arange(64) % 4]
    mixed = torch.randperm(64, generator=generator)
    for order in (torch.arange(64), mixed):
        options = {"left_at": at[order, 0], "right_at": at[order, 1]}
        case = Case(lists, lists.flip(1) if k == 7 else lists, counts, counts, k)
        if k == 7:
            case.right[7, :10] = 1
        _assert_same(case, **options)
        _assert_same(case, **options, scale=scale[order])


@pytest.mark.parametrize("before", [0, 1, 4, 5, 6, 13, 14, 15, 16, 29])
def test_ties_go_to_the_lower_slot_wherever_the_tiles_end(before: int) -> None:
    """V14, with zeros before it so that the six lie across the ends of tiles."""
    numbers = [0.0] * before + [3, 2, 3, 2, 1, 1]
    for side in ("left", "right"):
        case = _one(numbers, side=side, dtype=torch.float32, device="cpu")
        for k, slots in ((2, [0, 2]), (3, [0, 2, 1])):
            found = blocked.topk_pairs(*case._replace(k=k))
            assert getattr(found, side)[0].tolist() == [before + slot for slot in slots]


def test_threads_and_the_order_of_edges_do_not_change_a_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(9)
    left, right = (_heavy(generator, 9, 50, 33, dtype=torch.float32, whole=False) for _ in "lr")
    q_pos, k_pos = torch.tril_indices(9, 9)
    case = Case(left, right, *torch.full((2, 9), 50), 20)
    whole = blocked.topk_pairs(*case, left_at=q_pos, right_at=k_pos)
    monkeypatch.setattr(blocked, "_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    shuffled = torch.randperm(len(q_pos), generator=generator)
    for order in (torch.arange(len(q_pos)), shuffled):
        found = blocked.topk_pairs(*case, left_at=q_pos[order], right_at=k_pos[order])
        for name, value in whole._asdict().items():
            assert torch.equal(getattr(found, name), value[order]), name
