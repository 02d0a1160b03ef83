"""The Triton kernels without a GPU: numerics in the interpreter, and compiled for two kinds of GPU
with nothing spilled. `scripts/gpu_check.py` is the same on a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headattr.kernels.feature_rows import batched as plain_rows
from headattr.kernels.feature_rows import dispatch as rows_dispatch
from headattr.kernels.pair_topk import batched, dispatch

triton = pytest.importorskip("triton", "3.4", reason="needs Triton 3.4: headattr[gpu]")
TESTS = Path(__file__).resolve().parent
compiled_only = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET is set: nothing compiles"
)


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), **environment},
        capture_output=True,
        text=True,
    )


def test_the_kernels_are_right_in_the_interpreter() -> None:
    """In a process of its own: the switch is read when a kernel is defined."""
    file = str(TESTS / "interpreted.py")
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", file, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def compiled(kernel: Any, shape: Any, arch: int, pointers: dict[str, str], ints: set[str]) -> bytes:
    """A kernel compiled for a GPU that is not here.

    As the launch would: pointers aligned to 16 bytes, and widths multiples of 16.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = shape.constants()
    kinds = dict.fromkeys(ints, "i32") | dict.fromkeys(constants, "constexpr")
    kinds = {name: kinds.get(name, pointers.get(name, "*fp32")) for name in kernel.arg_names}
    aligned = [name for name, kind in kinds.items() if kind[0] == "*" or name.endswith("_width")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, kinds, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=shape.options())
    return built.asm["cubin"]


def dumped(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers a thread, and bytes it spills."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = subprocess.run(
        [tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True
    )
    return {name: int(size) for name, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", found.stdout)}


@compiled_only
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("k", [32, 256])
@pytest.mark.parametrize("d_head", [64, 128, 256])
def test_the_pairs_compile_and_spill_nothing(
    d_head: int, k: int, arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headattr.kernels.pair_topk import fused

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    integers = dict.fromkeys(["n_left", "n_right", "left_at", "right_at", "visits"], "*i64")
    pointers = integers | {"nonfinite": "*i64", "left_slots": "*i32", "right_slots": "*i32"}
    cubin = compiled(
        fused.strongest_pairs,
        fused.shape_for(64, 64, d_head, k),
        arch,
        pointers,
        {"left_width", "right_width", "m", "k"},
    )
    found = dumped(cubin, tmp_path)
    print(f"d_head {d_head}, k {k}, sm_{arch}: {found}")
    assert found["STACK"] == found["LOCAL"] == 0
    assert found["REG"] <= 200


@compiled_only
@pytest.mark.parametrize("arch", [80, 90])
def test_the_rows_compile_and_spill_nothing(
    arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headattr.kernels.feature_rows import fused

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    pointers = {"rows_at": "*i64", "ptr": "*i64"}
    pointers |= dict.fromkeys(["table", "coefs", "cos", "sin"], "*fp64")
    shape, ints = fused.shape_for(64, 256, 128), {"u", "width", "blocks"}
    found = dumped(compiled(fused.rotated_rows, shape, arch, pointers, ints), tmp_path)
    print(f"rows, sm_{arch}: {found}")
    assert found["STACK"] == found["LOCAL"] == 0


def test_a_gpu_gets_the_fused_kernel_where_it_can_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from headattr.kernels.pair_topk import fused

    assert dispatch.has_triton()
    cuda = torch.device("cuda")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert dispatch.path_of(cuda, dtype, 256) is fused
    assert dispatch.path_of(cuda, torch.float64, 20) is batched
    assert dispatch.path_of(cuda, torch.float32, 257) is batched
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert dispatch.path_of(cuda, torch.float32, 20) is batched


def test_rows_on_cpu_are_plain_torch() -> None:
    table, ptr = torch.randn(3, 4), torch.tensor([0, 2])
    asked = table, torch.tensor([2, 0]), torch.ones(2), ptr, 2
    assert torch.equal(rows_dispatch.feature_rows(*asked), plain_rows.feature_rows(*asked))


def test_the_gpu_script_checks_a_gpu_or_says_that_there_is_none(tmp_path: Path) -> None:
    script, report = TESTS.parent / "scripts" / "gpu_check.py", tmp_path / "results.md"
    done = run(str(script), "--no-bench", "--out", str(report))
    if torch.cuda.is_available():
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WRONG" not in report.read_text()
    else:
        assert done.returncode == 2
        assert "no CUDA GPU" in done.stderr
        assert not report.exists()
