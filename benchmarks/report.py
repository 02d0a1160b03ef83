"""Figures as markdown, and the file they are kept in."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"


class Section(NamedTuple):
    """One part of a report."""

    title: str
    lines: list[str]
    figures: dict[str, Any]


def number(value: float) -> str:
    """Three figures that count."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        digits = len(str(int(abs(value)))) - 3
        return f"{round(value, -digits):,.0f}"
    return f"{value:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def commit(folder: Path = ROOT) -> str:
    """The commit that is checked out, and whether files differ from it."""
    short = _git("rev-parse", "--short", "HEAD", folder=folder)
    changed = _git("status", "--porcelain", "--", "headattr", "benchmarks", folder=folder)
    code = [line for line in changed.splitlines() if line.endswith(".py")]
    return f"{short}{', with changes' if code else ''}"


def _git(*arguments: str, folder: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown" if done.returncode == 0 else "unknown"


def machine() -> str:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    named = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    cpu = named[0] if named else platform.processor() or "unknown processor"
    wide = "AVX-512" if "avx512f" in text else "AVX2" if "avx2" in text else platform.machine()
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "numba", "transformers"))
    return (
        f"{platform.platform()}; {cpu} ({wide}), {os.cpu_count()} cores; {packages}; Python "
        f"{platform.python_version()}; load average at the end {load}"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def text_of(sections: Sequence[Section], *, command: str, tests: str, proven: bool) -> str:
    """A dated section of RESULTS.md."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    heading = f"## {date} · commit {commit()}" + ("" if proven else " · tests not run")
    lines = [heading, "", f"`{command}`, one thread, process time. {tests}", "", machine()]
    for section in sections:
        lines += ["", f"### {section.title}", "", *section.lines]
    return "\n".join(lines) + "\n"


def json_of(sections: Sequence[Section], *, command: str, tests: str, proven: bool) -> str:
    """The same figures as JSON."""
    found = {
        "commit": commit(),
        "machine": machine(),
        "command": command,
        "tests": tests,
        "tests_run": proven,
        "figures": {section.title: section.figures for section in sections},
    }
    return json.dumps(found, indent=1)


def append(text: str, path: Path = RESULTS) -> None:
    """Put a section on top of the older ones."""
    before, mark, after = path.read_text(encoding="utf-8").partition("\n## ")
    rest = f"\n{mark.strip()} {after}" if mark else ""
    path.write_text(f"{before.rstrip()}\n\n{text}{rest}", encoding="utf-8")
