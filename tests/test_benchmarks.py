"""The benchmarks measure what they say, and report nothing that is not proven."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def suite() -> Iterator[Any]:
    """The modules of the suite, which import each other by their bare names."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        import run

        yield run
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.fixture
def tiny(suite: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The suite at a size of no account, whose tests pass."""
    from sizes import TINY

    monkeypatch.setitem(suite.SIZES, "setting", TINY)
    monkeypatch.setattr(suite, "SETTING", TINY)
    monkeypatch.setattr(suite.proofs, "prove", lambda tests: f"Tests first: {' '.join(tests)}.")
    return suite


def test_every_op_names_tests_that_are_there(suite: Any) -> None:
    for op in suite.OPS.values():
        assert op.tests
        for test in op.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).is_file()
            assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")


def test_every_op_and_size_that_has_to_be_there_is(suite: Any) -> None:
    wanted = {"qk pairs", "ov pairs", "contrast pairs", "row sums", "projection", "whole layer"}
    assert wanted <= suite.OPS.keys()
    assert suite.SIZES.keys() == {"setting", "gemma-2-2b", "llama-3-8b"}


def test_every_op_and_each_competitor_runs(suite: Any) -> None:
    from ratios import measure
    from sizes import TINY

    for name in suite.OPS:
        found = measure(name, TINY, "heavy", rounds=1)
        assert {"ours", "plain", "loop"} <= found["rates"].keys()
        assert found["ratios"].keys() == found["rates"].keys() - {"ours"}


@pytest.mark.parametrize("name", ["qk pairs", "ov pairs", "contrast pairs"])
def test_plain_torch_finds_the_pairs_that_attribution_keeps(suite: Any, name: str) -> None:
    """A competitor that did less would be too fast: its values are those of the run."""
    import numpy as np
    import rivals
    from inputs import make_task
    from sizes import TINY

    from headattr.attribution.layer import attribute_layer

    op = suite.OPS[name]
    task = make_task(TINY, "heavy", output=op.output, rank=op.rank)
    table, (head,) = attribute_layer(task), rivals.heads_of(task)
    kept = {"qk pairs": table.values, "contrast pairs": table.pair_contrasts}
    wanted = table.ov.values if table.ov is not None else kept[name]
    found = [
        rivals._strongest(row, TINY.topk).numpy()
        for part in rivals._PRODUCTS[name](head)
        for row in part
    ]
    assert np.allclose(np.abs(found), np.abs(wanted), atol=1e-5)
    of_edge = [
        rivals._strongest(rivals._LOOPS[name](head, q, k), TINY.topk).numpy()
        for q, k in rivals.spaced(TINY.length, TINY.edges)
    ]
    assert np.allclose(np.abs(of_edge), np.abs(wanted), atol=1e-5)


def test_nothing_is_reported_where_a_test_fails(
    suite: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing = tmp_path / "test_wrong.py"
    failing.write_text("def test_one_is_two() -> None:\n    assert 1 == 2\n")
    op = suite.OPS["qk pairs"]._replace(tests=(str(failing),))
    monkeypatch.setitem(suite.OPS, "qk pairs", op)
    monkeypatch.setattr(suite.proofs.prove, "__defaults__", (tmp_path,))
    monkeypatch.setattr(suite, "sections", lambda options: pytest.fail("it measured"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    assert suite.main(["--ops", "qk pairs", "--quick"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "test_wrong.py::test_one_is_two" in err


def test_the_quick_report_has_its_tables(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.main(["--quick", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("## ")
    assert "Tests first: tests/test_kernels.py" in out
    assert "tests not run" not in out
    for name in tiny.QUICK_OPS:
        rows = re.findall(rf"^\| {name} \| (.*) \|$", out, re.MULTILINE)
        assert len(rows) == 2  # heavy and even
        for row in rows:
            assert all(float(cell.replace(",", "")) > 0 for cell in row.split(" | ") if cell)
    assert len(re.findall(r"at least 2: (?:holds|DOES NOT HOLD)$", out, re.MULTILINE)) == 2


def test_figures_without_tests_say_so(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ops", "qk pairs", "--quick", "--rounds", "1", "--skip-tests"]
    assert tiny.main(arguments) == 0
    assert capsys.readouterr().out.split("\n")[0].endswith("tests not run")
    assert tiny.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tests_run"] is False
    assert "setting/heavy/qk pairs" in found["figures"]["Ops against plain torch"]


def test_a_slope_of_made_up_numbers_is_exact(suite: Any) -> None:
    from fits import slope

    for power in (-1.0, 0.0, 0.5, 2.0):
        assert slope([1, 2, 5, 40], [3 * x**power for x in (1, 2, 5, 40)]) == pytest.approx(power)


def test_growth_wide_and_flat_at_no_size(suite: Any) -> None:
    import growth
    from sizes import TINY

    sweeps = {"length": (4, 8), "active": (2, 4), "features": (40, 80), "topk": (1, 2)}
    grown = growth.exponents(("qk pairs",), TINY, sweeps, rounds=1)
    assert len(grown.figures) == 4
    assert sum(line.startswith("|") for line in grown.lines) == 6
    found = growth.wide(((4, 6), (5, 3)), TINY, rounds=1).figures
    assert found.keys() == {"4/heavy", "4/even", "5/heavy", "5/even"}
    flat = growth.flat(base=TINY, many={10: 4, 36: 8, 10_000_000: 99})
    assert flat.figures["an_edge"].keys() == {10, 36}
    assert re.search(r"- 36 edges: (?:within|NOT within) 20%", flat.lines[-1])


def test_another_version_is_measured_beside_this_one_and_cleaned_up(suite: Any) -> None:
    """The version here beside a folder without headattr's ops; and git's worktrees as before."""
    import against

    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = ["git", "-C", str(ROOT), "worktree", "list"]
    before = subprocess.run(listed, capture_output=True, check=True).stdout
    with pytest.raises(against.NoSuchRef), against.checked_out("no-such-ref"):
        pass
    found: list[Path] = []
    with pytest.raises(KeyError):
        _leave_with_an_error(against, found)
    assert not found[0].exists()
    assert subprocess.run(listed, capture_output=True, check=True).stdout == before


def _leave_with_an_error(against: Any, found: list[Path]) -> None:
    with against.checked_out("HEAD") as folder:
        assert (folder / "headattr").is_dir()
        found.append(folder)
        raise KeyError


def test_a_version_without_the_op_says_so(suite: Any, tmp_path: Path) -> None:
    import against

    (tmp_path / "headattr").mkdir()
    (tmp_path / "headattr" / "__init__.py").write_text("")
    with against.working(ROOT) as here, against.working(tmp_path) as there:
        case = "qk pairs", "tiny", "heavy"
        found = against.compare(here, there, case, 1)
    assert found["side"] == "ref"
    assert "No module named 'headattr.attribution'" in found["lacks"]


def test_stages_count_what_is_within_another_once(
    suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import endtoend

    clock = iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr(endtoend.time, "process_time", lambda: next(clock))
    stages = endtoend.Stages()
    with stages.at("attribute"), stages.at("write"):
        pass
    assert stages.seconds == {"attribute": 1.0 + 3.0, "write": 2.0}


def test_a_section_goes_on_top_of_the_older_ones(suite: Any, tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\nNewest first.\n\n## old\n\nfigures\n")
    suite.report.append("## new\n\nfigures\n", path)
    wanted = "# Results\n\nNewest first.\n\n## new\n\nfigures\n\n## old\n\nfigures\n"
    assert path.read_text() == wanted
