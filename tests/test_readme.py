"""What the README shows is what one gets."""

import re
from pathlib import Path
from typing import Any

import pytest

from headattr.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "headattr-demo"
    assert main(["demo", "--out", str(out)]) == 0
    return out


def test_the_worked_edge_is_what_its_command_prints(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line by line: the same words, and numbers within the last digit (errors: within their
    size)."""
    asked, shown = re.findall(
        r"`headattr (query edge headattr-demo [^`]*)` says:\n\n```\n(.*?)\n```", README, re.DOTALL
    )[0]
    assert main(asked.replace("headattr-demo", str(demo)).split()) == 0
    found = capsys.readouterr().out.rstrip("\n").split("\n")
    for wanted, line in zip(shown.split("\n"), found, strict=True):
        assert NUMBER.sub("#", line).split() == NUMBER.sub("#", wanted).split()
        for one, other in zip(NUMBER.findall(wanted), NUMBER.findall(line), strict=True):
            assert float(other) == pytest.approx(float(one), rel=2e-3, abs=1e-6)


def test_the_figures_of_the_explanation_stand_in_the_worked_edge() -> None:
    """Every number with a decimal point in the prose is one of the command's."""
    section = README.split("## What the numbers mean")[1].split("The mathematics follows")[0]
    block, prose = section.split("```")[1], section.split("```")[2]
    printed = NUMBER.findall(block)
    figures = [text for text in NUMBER.findall(prose) if "." in text or "e-" in text]
    assert len(figures) > 10
    other_copy = {"0.380"}
    assert {figure.lstrip("+-") for figure in figures} - other_copy <= {
        text.lstrip("+-") for text in printed
    }


def test_the_pattern_of_the_other_copy_is_as_the_explanation_says(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "2", "--head", "L3H0", "--q", "29", "--k", "18"]
    assert main(["query", "edge", str(demo), *options]) == 0
    assert "pattern 0.380" in capsys.readouterr().out
    assert "the second (0.380)" in " ".join(README.split())


def test_the_python_of_the_readme_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks that need nothing of the reader's own, one after the other."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    runnable = [block for block in blocks if "path/to" not in block]
    assert len(runnable) == 2
    for block in runnable:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "table 10.403 score 10.403" in printed
    assert re.search(r"predicted (-3\.80\d) happened \1", printed)
