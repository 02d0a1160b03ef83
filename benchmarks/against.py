"""The same ops in another version: a git ref in a worktree of its own, by turns with this one."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clock import ROUNDS, median, say, times_faster
from report import ROOT, Section, commit, number, table

_WORKER = Path(__file__).with_name("worker.py")


class NoSuchRef(Exception):
    """Git knows no such version."""


@contextmanager
def checked_out(ref: str, root: Path = ROOT) -> Iterator[Path]:
    """A temporary worktree at `ref`, gone afterwards whatever happens."""
    with tempfile.TemporaryDirectory(prefix="headattr-bench-") as folder:
        path = Path(folder) / "ref"
        git = ["git", "-C", str(root), "worktree"]
        try:
            done = subprocess.run(
                [*git, "add", "--detach", str(path), ref],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise NoSuchRef(f"--against {ref}: {done.stderr.strip()}")
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], capture_output=True, check=False)
            subprocess.run([*git, "prune"], capture_output=True, check=False)


class Worker:
    """A process that measures with the headattr of a folder."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, **question: Any) -> dict[str, Any]:
        """One question, one answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else {"lacks": "its process ended"}

    def end(self) -> None:
        """Let the process go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def working(folder: Path) -> Iterator[Worker]:
    worker = Worker(folder)
    try:
        yield worker
    finally:
        worker.end()


def compare(
    here: Worker, there: Worker, case: Sequence[str], rounds: int = ROUNDS
) -> dict[str, Any]:
    """Seconds of both, round by round; `lacks` where one has no such op."""
    for side, worker in (("ref", there), ("here", here)):
        answer = worker.ask(build=list(case))
        if "lacks" in answer:
            return {"side": side, "lacks": answer["lacks"]}
        edges = answer["edges"]
    times: dict[str, list[float]] = {"here": [], "ref": []}
    for _ in range(rounds):
        times["here"].append(here.ask(go=True)["seconds"])
        times["ref"].append(there.ask(go=True)["seconds"])
    return {
        "here": edges / median(times["here"]),
        "ref": edges / median(times["ref"]),
        "ratio": times_faster(times["here"], times["ref"]),
    }


def section(ref: str, names: Sequence[str], sizes: Sequence[str], rounds: int = ROUNDS) -> Section:
    rows, figures = [], {}
    with checked_out(ref) as folder, working(ROOT) as here, working(folder) as there:
        at = commit(folder)
        for size in sizes:
            for name in names:
                say(f"against {ref}: {size}, {name}")
                found = figures[f"{size}/{name}"] = compare(
                    here, there, (name, size, "heavy"), rounds
                )
                if "lacks" in found:
                    who = f"{ref} lacks it" if found["side"] == "ref" else "not here"
                    rows.append([size, name, "", who, found["lacks"].replace("|", "/")[:100]])
                else:
                    rates = number(found["here"]), number(found["ref"])
                    rows.append([size, name, *rates, f"{found['ratio']:.2f}"])
    head = ("size", "", "here, edges/s", f"{ref}, edges/s", f"here / {ref}")
    about = (
        f"The same inputs and calls in two processes by turns, medians of {rounds}; {ref} is {at}. "
        "The tests that ran are of the version here."
    )
    return Section(f"Against {ref}", [about, "", *table(head, rows)], figures)
