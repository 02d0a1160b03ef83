"""The tests that prove what is measured: no figures without them."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from clock import say
from ops import OPS
from report import ROOT


class NotProven(Exception):
    """A test that an op rests on fails."""


def tests_of(names: Sequence[str]) -> list[str]:
    """The tests of some ops, each once."""
    return sorted({test for name in names for test in OPS[name].tests})


def prove(tests: Sequence[str], root: Path = ROOT) -> str:
    """Run the tests and say in a sentence what passed. Raises NotProven, naming what failed."""
    say(f"tests: {' '.join(tests)}")
    spread = ["-n", "auto"] if len(tests) > 1 and find_spec("xdist") else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", *spread, *tests],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    if done.returncode != 0:
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        raise NotProven(
            f"no figures: {', '.join(failed) or ' '.join(tests)} failed\n\n{said[-2000:]}"
        )
    passed = re.findall(r"(\d+ passed.*?) in ", said)
    return f"Tests first: {passed[-1] if passed else 'passed'} of {', '.join(tests)}."
