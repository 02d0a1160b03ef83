"""Measure headattr: ops against competitors, growth, other versions, a run of a real model."""

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import against
import endtoend
import growth
import proofs
import ratios
import report
import torch
from ops import OPS
from report import ROOT, Section
from sizes import SETTING, SIZES, Size

import headattr

PARTS = ("ratios", "growth", "wide", "flat", "run")
QUICK_OPS = ("qk pairs", "ov pairs", "row sums")
EXAMPLE = """
example: python benchmarks/run.py --ops "qk pairs" "whole layer" --sizes setting --against HEAD~5
    runs the tests of both ops, measures them at one size, then beside the version of five commits
    ago; tables on standard output, progress on standard error
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ops", nargs="+", choices=list(OPS), metavar="OP", help="; ".join(OPS))
    made.add_argument(
        "--sizes", nargs="+", choices=list(SIZES), metavar="SIZE", help="; ".join(SIZES)
    )
    made.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help="; ".join(PARTS))
    made.add_argument("--against", metavar="REF", help="the same ops at a git ref, by turns")
    made.add_argument("--rounds", type=int, default=5, help="goes of everything (default: 5)")
    made.add_argument("--quick", action="store_true", help="a few ops at one size; under a minute")
    made.add_argument("--long", action="store_true", help="also ten million edges")
    made.add_argument("--append", action="store_true", help="keep the tables in RESULTS.md")
    made.add_argument("--json", action="store_true", help="print the figures as JSON")
    made.add_argument(
        "--skip-tests", action="store_true", help="for development; the report then says so"
    )
    return made


def sections(options: argparse.Namespace) -> Iterator[Section]:
    """What was asked for, part by part."""
    names, sizes, parts = chosen(options)
    if "ratios" in parts:
        yield ratios.section(names, sizes, options.rounds)
    if options.against:
        known = [label for label in sizes if label in SIZES]
        yield against.section(options.against, names, known, options.rounds)
    if "growth" in parts:
        yield growth.exponents(rounds=options.rounds)
    if "wide" in parts:
        yield growth.wide(rounds=options.rounds)
    if "flat" in parts:
        yield growth.flat(long=options.long)
    if "run" in parts:
        yield endtoend.section(options.rounds)


def chosen(options: argparse.Namespace) -> tuple[list[str], dict[str, Size], list[str]]:
    """Ops, sizes and parts: what was named; quick, or with ops named, the ratios alone."""
    few = options.quick or options.ops or options.sizes or options.against
    names = options.ops or list(QUICK_OPS if options.quick else OPS)
    sizes = {label: SIZES[label] for label in options.sizes or list(SIZES)}
    if options.quick and not options.sizes:
        sizes = {"setting": SETTING}
    return names, sizes, options.parts or (["ratios"] if few else list(PARTS))


def tested(options: argparse.Namespace) -> list[str]:
    """The ops whose tests have to pass."""
    names, _, parts = chosen(options)
    used = set(names) if "ratios" in parts or options.against else set()
    if "growth" in parts:
        used |= set(growth.SWEPT)
    if "wide" in parts:
        used.add("qk pairs")
    if "flat" in parts or "run" in parts:
        used.add("whole layer, with OV")
    return sorted(used)


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if Path(headattr.__file__).resolve().parents[1] != ROOT:
        print(f"this measures {ROOT}, but imports {headattr.__file__}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    said = "No test was run."
    if not options.skip_tests:
        try:
            said = proofs.prove(proofs.tests_of(tested(options)))
        except proofs.NotProven as error:
            print(error, file=sys.stderr)
            return 1
    try:
        found = list(sections(options))
    except against.NoSuchRef as error:
        print(error, file=sys.stderr)
        return 2
    given = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python benchmarks/run.py", *(f'"{a}"' if " " in a else a for a in given)])
    about: dict[str, Any] = {
        "command": command, "tests": said, "proven": not options.skip_tests
    }  # fmt: skip
    text = report.text_of(found, **about)
    print(report.json_of(found, **about) if options.json else text)
    if options.append:
        report.append(text)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
