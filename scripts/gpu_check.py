"""Are the Triton kernels right on this GPU, and how fast are they? Meant to take under
three minutes.

    python scripts/gpu_check.py              checks, measures, writes benchmarks/RESULTS-gpu.md
    python scripts/gpu_check.py --no-bench   checks only
    PYTHONPATH=. python scripts/gpu_check.py without installing the package

Checks: the fused kernels against plain torch (whole numbers, equal to the last tie) and against
float64 (real numbers); lists beyond 2^31 numbers where memory allows. Measured: all edges of one
layer of 512 tokens at the sizes of Gemma 2 2B, projections given, as ratios within one run.

Exit 0: all right. 1: something is wrong. 2: no CUDA GPU, or no Triton.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headattr.kernels.feature_rows import batched as plain_rows
from headattr.kernels.pair_topk import batched
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.dispatch import has_triton

REPORT = Path(__file__).resolve().parents[1] / "benchmarks" / "RESULTS-gpu.md"
LIMIT = 5e-6  # of |left| |right|: far above float32's rounding of 256 products, far below TF32's
REPEATS, SECONDS = 5, 8  # of one measurement


class Sizes(NamedTuple):
    """A layer, its prompt and what is kept."""

    tokens: int
    heads: int
    kv_heads: int
    d_head: int
    active: int
    topk: int


class Outcome(NamedTuple):
    """One check."""

    name: str
    right: bool
    note: str


class Time(NamedTuple):
    """One measurement."""

    name: str
    edges: int
    seconds: float


GEMMA_2_2B = Sizes(512, 8, 4, 256, 64, 20)
SHAPES = [  # edges, n, m, d, k
    (300, 64, 64, 256, 20),
    (60, 64, 64, 256, 256),
    (300, 64, 64, 64, 32),
    (60, 70, 33, 128, 256),
    (200, 7, 5, 9, 50),
    (100, 17, 33, 80, 1),
    (40, 16, 900, 64, 20),
    (8, 300, 300, 96, 100),
]
VARIANTS = {  # of the kernel's shape, to see whether the choice made without a GPU holds
    "as chosen": {},
    "copies ahead of time": {"num_stages": 2, "maxnreg": 255},
    "copies ahead of time, 8 warps": {"num_stages": 2, "num_warps": 8, "maxnreg": 200},
    "8 warps": {"num_warps": 8, "maxnreg": 128},
    "32 dimensions at a time, 8 warps": {"DEPTH": 32, "num_warps": 8, "maxnreg": 200},
}


def random_lists(lists: int, slots: int, d: int, device: str, *, whole: bool) -> Tensor:
    """Rows of heavy-tailed size, or small whole numbers, whose products tie and are exact."""
    if whole:
        return torch.randint(-2, 3, (lists, slots, d), device=device).float()
    sizes = torch.rand(lists, slots, 1, device=device).clamp(min=0.01).pow(-0.5)
    return torch.randn(lists, slots, d, device=device) * sizes


def ragged(lists: Tensor) -> tuple[Tensor, Tensor]:
    """Counts of all lengths, and NaN behind them."""
    n = lists.shape[1]
    counts = torch.randint(0, n + 1, (len(lists),), device=lists.device)
    counts[0] = n
    outside = torch.arange(n, device=lists.device) >= counts[:, None]
    return lists.masked_fill(outside[..., None], float("nan")), counts


def check_ties(edges: int, n: int, m: int, d: int, k: int, device: str) -> Outcome:
    """On whole numbers, ragged lists that edges share, scales of every sign: equal in every bit."""
    from headattr.kernels.pair_topk import fused

    sides = [ragged(random_lists(9, size, d, device, whole=True)) for size in (n, m)]
    (left, n_left), (right, n_right) = sides
    at = {f"{side}_at": torch.randint(0, 9, (edges,), device=device) for side in ("left", "right")}
    scale = torch.randint(-2, 3, (edges,), device=device).float()
    asked = left, right, n_left, n_right, k
    found, wanted = (path.topk_pairs(*asked, **at, scale=scale) for path in (fused, batched))
    different = [
        name
        for name, value in wanted._asdict().items()
        if not torch.equal(getattr(found, name), value)
    ]
    name = f"whole numbers, n {n}, m {m}, d {d}, k {k}"
    return Outcome(name, not different, f"different: {different}" if different else "equal")


def check_reals(edges: int, n: int, m: int, d: int, k: int, device: str) -> Outcome:
    """Against float64: values, and that no stronger pair is missing."""
    from headattr.kernels.pair_topk import fused

    left, right = (random_lists(edges, size, d, device, whole=False) for size in (n, m))
    counts = [torch.full((edges,), size, device=device) for size in (n, m)]
    worst = worst_error(fused.topk_pairs(left, right, *counts, k), left, right, k)
    name = f"real numbers, n {n}, m {m}, d {d}, k {k}"
    return Outcome(name, worst <= LIMIT, f"worst error {worst:.1e} of size")


def worst_error(found: PairTopK, left: Tensor, right: Tensor, k: int) -> float:
    """Of values and of the sizes by rank, over |left| |right| of an edge's longest; infinite where
    a pair is missing, twice there or out of order."""
    edges, n, m = len(left), left.shape[1], right.shape[1]
    kept = min(k, n * m)
    products = (left.double() @ right.double().transpose(1, 2)).flatten(1)
    slots = found.left[:, :kept].long() * m + found.right[:, :kept]
    falling = found.values.abs().diff(dim=1).max() <= 0 if k > 1 else True
    ordered = slots.sort(dim=1).values
    distinct = (ordered.diff(dim=1) > 0).all() and int(slots.min()) >= 0
    if not (falling and distinct and int(slots.max()) < n * m and (found.n_nonfinite == 0).all()):
        return float("inf")
    longest = left.double().norm(dim=-1).amax(1) * right.double().norm(dim=-1).amax(1)
    mine, best = products.gather(1, slots), products.abs().topk(kept, dim=1).values
    errors = [(found.values[:, :kept] - mine).abs(), (mine.abs() - best).abs()]
    return float((torch.stack(errors) / longest.view(1, edges, 1)).max())


def check_rows(d: int, rot: int, dtype: torch.dtype, device: str) -> Outcome:
    """feature_rows against plain torch."""
    from headattr.kernels.feature_rows import fused

    counts = torch.randint(0, 12, (37,), device=device)
    ptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    table = torch.randn(50, d, device=device, dtype=dtype)
    rows_at = torch.randint(0, 50, (int(ptr[-1]),), device=device)
    coefs = torch.randn(len(rows_at), device=device, dtype=torch.float64)
    angles = torch.randn(2, 37, rot, device=device)
    turned = {"cos": angles[0], "sin": angles[1]} if rot else {}
    asked = table, rows_at, coefs, ptr, 12
    found, wanted = (
        path.feature_rows(*asked, **turned, dtype=torch.float32).double()
        for path in (fused, plain_rows)
    )
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    name = f"rows, d {d}, rotated {rot}, {str(dtype).removeprefix('torch.')}"
    return Outcome(name, worst <= 1e-6, f"worst error {worst:.1e} of the largest")


def check_far_offsets(
    device: str, *, lists: int = 131_200, slots: int = 64, d: int = 256
) -> Outcome:
    """The last of so many lists that offsets pass 2^31."""
    from headattr.kernels.pair_topk import fused

    numbers = lists * slots * d
    name = f"{lists} lists, {numbers / 2**31:.2f} times 2^31 numbers"
    needed = 4 * 2.2 * numbers
    if device == "cuda" and torch.cuda.mem_get_info()[0] < needed:
        return Outcome(name, True, f"skipped: needs {needed / 1e9:.0f} GB")
    left = torch.zeros(lists, slots, d, device=device)
    right = random_lists(3, slots, d, device, whole=True)
    left[-2:] = random_lists(2, slots, d, device, whole=True)
    n_left, n_right = (torch.full((len(part),), slots, device=device) for part in (left, right))
    at = torch.arange(lists, device=device) % 3
    found = fused.topk_pairs(left, right, n_left, n_right, 20, right_at=at)
    wanted = batched.topk_pairs(left[-2:], right, n_left[-2:], n_right, 20, right_at=at[-2:])
    same = all(torch.equal(a[-2:], b) for a, b in zip(found, wanted, strict=True))
    return Outcome(name, same, "equal" if same else "different")


def check_all(device: str, shapes: list[tuple[int, int, int, int, int]]) -> Iterator[Outcome]:
    """Every check but that of far offsets."""
    for shape in shapes:
        yield check_ties(*shape, device)
        yield check_reals(*shape, device)
    for d, rot, dtype in [
        (256, 256, torch.float32),
        (80, 32, torch.float64),
        (64, 0, torch.float16),
    ]:
        yield check_rows(d, rot, dtype, device)


class Layer(NamedTuple):
    """The lists of each kv head - the queries of its group below each other - and all its edges."""

    left: list[Tensor]
    right: list[Tensor]
    left_at: Tensor
    right_at: Tensor
    n_left: Tensor
    n_right: Tensor


def make_layer(sizes: Sizes, device: str) -> Layer:
    """Random projections of a whole prompt."""
    group = sizes.heads // sizes.kv_heads
    q_pos, k_pos = torch.tril_indices(sizes.tokens, sizes.tokens, device=device)
    rows = torch.cat([q_pos + head * sizes.tokens for head in range(group)])

    def lists(count: int) -> list[Tensor]:
        shape = count * sizes.tokens, sizes.active, sizes.d_head
        return [random_lists(*shape, device, whole=False) for _ in range(sizes.kv_heads)]

    counts = [torch.full((n * sizes.tokens,), sizes.active, device=device) for n in (group, 1)]
    return Layer(lists(group), lists(1), rows, k_pos.repeat(group), *counts)


def seconds_of(work: Callable[[], object], device: str) -> float:
    """The median of several runs after one that compiles and warms up."""

    def once() -> float:
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < SECONDS:
        times.append(once())
    return statistics.median(times)


def measure(sizes: Sizes, device: str, *, chunk: int) -> list[Time]:
    """All edges of the layer by each way; `chunk`: edges whose products are stored at a time."""
    from triton.runtime.errors import OutOfResources

    from headattr.kernels.pair_topk import fused

    layer = make_layer(sizes, device)
    edges = len(layer.left_at)

    def pairs(path: Any, step: int, heads: int) -> None:
        for left, right in zip(layer.left[:heads], layer.right[:heads], strict=True):
            for first in range(0, edges, step):
                part = slice(first, first + step)
                path.topk_pairs(
                    left,
                    right,
                    layer.n_left,
                    layer.n_right,
                    sizes.topk,
                    left_at=layer.left_at[part],
                    right_at=layer.right_at[part],
                )

    def gathered(select: Callable[[Tensor], object], heads: int) -> None:
        """Both lists of every edge gathered and multiplied, a chunk at a time."""
        for left, right in zip(layer.left[:heads], layer.right[:heads], strict=True):
            for first in range(0, edges, chunk):
                part = slice(first, first + chunk)
                turned = right[layer.right_at[part]].transpose(1, 2)
                select((left[layer.left_at[part]] @ turned).flatten(1))

    def rows(select: Callable[[Tensor], object], heads: int) -> None:
        """A query's features with those of all its keys, as one matrix product a query."""
        for left, right in zip(layer.left[:heads], layer.right[:heads], strict=True):
            for at, own in enumerate(left):
                keys = right[: at % sizes.tokens + 1]
                products = keys.flatten(0, 1) @ own.T
                select(products.view(len(keys), -1))

    def best(products: Tensor) -> object:
        return products.abs().topk(min(sizes.topk, products.shape[1]), dim=1)

    ways: dict[str, tuple[Callable[[int], object], int]] = {
        "fused": (lambda heads: pairs(fused, edges, heads), sizes.kv_heads),
        "plain torch and topk, a product a query": (lambda heads: rows(best, heads), 1),
        "plain torch and topk, gathered": (lambda heads: gathered(best, heads), 1),
        "batched (exact ties)": (lambda heads: pairs(batched, chunk, heads), 1),
        "bare products, a product a query": (lambda heads: rows(lambda _: None, heads), 1),
        "bare products, gathered": (lambda heads: gathered(lambda _: None, heads), 1),
    }
    times = [
        Time(name, edges * heads, seconds_of(lambda w=work, h=heads: w(h), device))
        for name, (work, heads) in ways.items()
    ]
    for name, changes in VARIANTS.items():
        try:
            with reshaped(fused, changes):
                seconds = seconds_of(lambda: pairs(fused, edges, 1), device)
        except OutOfResources as error:  # a smaller GPU than it was meant for
            print(f"{name}: {error}", file=sys.stderr)
            continue
        times.append(Time(f"fused, one kv head, {name}", edges, seconds))
    return times


@contextmanager
def reshaped(fused: Any, changes: dict[str, int]) -> Iterator[None]:
    """The kernel with other constants than it would choose."""
    chosen = fused.shape_for
    fused.shape_for = lambda *sizes: chosen(*sizes)._replace(**changes)
    try:
        yield
    finally:
        fused.shape_for = chosen


def report(outcomes: list[Outcome], times: list[Time], sizes: Sizes, machine: str) -> str:
    """A section of RESULTS-gpu.md."""
    lines = [f"## {machine}", "", "| check | | |", "|---|---|---|"]
    lines += [f"| {o.name} | {'right' if o.right else 'WRONG'} | {o.note} |" for o in outcomes]
    if times:
        pair = 2 * sizes.active**2 * sizes.d_head  # operations an edge
        base = next(t.edges / t.seconds for t in times if t.name.startswith("plain torch"))
        lines += ["", f"All edges of a layer, projections given, float32: {sizes}.", ""]
        lines += ["| | edges/s | ratio to plain torch | products, TFLOP/s |", "|---|---|---|---|"]
        for t in times:
            rate = t.edges / t.seconds
            lines.append(
                f"| {t.name} | {rate:,.0f} | {rate / base:.2f} | {rate * pair / 1e12:.2f} |"
            )
    return "\n".join(lines) + "\n"


def machine_line() -> str:
    """Date, commit, GPU and versions."""
    import triton

    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    today = datetime.now(UTC).date()
    return (
        f"{today} · commit {commit}{changed} · {gpu} · "
        f"torch {torch.__version__}, triton {triton.__version__}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-bench", action="store_true", help="checks only")
    parser.add_argument("--out", type=Path, default=REPORT, help="default: %(default)s")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA GPU here; nothing was checked", file=sys.stderr)
        return 2
    if not has_triton():
        print('gpu_check: needs Triton 3.4: pip install "headattr[gpu]"', file=sys.stderr)
        return 2
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")  # plain torch multiplies IEEE float32 too
    outcomes = []
    for outcome in (*check_all("cuda", SHAPES), check_far_offsets("cuda")):
        print(f"{'right' if outcome.right else 'WRONG'}  {outcome.name}: {outcome.note}")
        outcomes.append(outcome)
    torch.cuda.empty_cache()
    times = [] if options.no_bench else measure(GEMMA_2_2B, "cuda", chunk=1 << 14)
    section = report(outcomes, times, GEMMA_2_2B, machine_line())
    before = options.out.read_text() if options.out.exists() else "# Results on GPUs\n"
    title, _, rest = before.partition("\n")
    options.out.write_text(f"{title}\n\n{section}{rest}")
    print(section)
    return 0 if all(outcome.right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
