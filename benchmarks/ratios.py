"""Ops beside their competitors, in one run."""

import gc
from collections.abc import Sequence
from typing import Any

from clock import ROUNDS, interleaved, median, say, times_faster
from inputs import make_task
from ops import OPS, ours
from report import Section, number, table
from rivals import rivals
from sizes import SPREADS, Size, Spread

NEEDED = 2.0
"""What ours / plain has to reach at `setting`."""
_COLUMNS = ("plain", "products", "loop")


def measure(name: str, size: Size, spread: Spread, rounds: int = ROUNDS) -> dict[str, Any]:
    """Edges a second of an op and its competitors, and how many times faster ours is."""
    op = OPS[name]
    task = make_task(size, spread, output=op.output, rank=op.rank)
    others = rivals(name, task)
    works = {"ours": ours(op, task)} | {key: rival.work for key, rival in others.items()}
    times = interleaved(works, rounds)
    edges = {"ours": size.edges} | {key: rival.edges for key, rival in others.items()}
    an_edge = {key: [t / edges[key] for t in found] for key, found in times.items()}
    gc.collect()
    return {
        "rates": {key: 1 / median(found) for key, found in an_edge.items()},
        "ratios": {
            key: times_faster(an_edge["ours"], an_edge[key]) for key in works if key != "ours"
        },
    }


def section(names: Sequence[str], sizes: dict[str, Size], rounds: int = ROUNDS) -> Section:
    figures: dict[str, Any] = {}
    lines = [
        f"Edges a second; medians of {rounds}, competitors by turns, ratios within a round. Plain: "
        "a query by 32 keys as one product, `.abs().topk(k, -1)`; products: the same without the "
        "selection; loop: edge by edge. Of a whole layer they are the pairs alone. Projection and "
        "row sums are spread over all edges; their competitors are plain torch without sharing, "
        "the bare products, and a loop over positions or queries.",
    ]
    for label, size in sizes.items():
        for spread, meaning in SPREADS.items():
            rows = []
            for name in names:
                say(f"{label}, {spread}: {name}")
                found = measure(name, size, spread, rounds)
                figures[f"{label}/{spread}/{name}"] = found
                rows.append(_row(name, found))
            lines += ["", f"`{label}`: {size}; {meaning}", ""]
            head = ("", "ours", *_COLUMNS, *(f"ours / {key}" for key in _COLUMNS))
            lines += table(head, rows)
    lines += ["", *verdicts(figures)]
    return Section("Ops against plain torch", lines, figures)


def verdicts(figures: dict[str, Any]) -> list[str]:
    """The line that matters most, for each kind of activations."""
    lines = []
    for spread in SPREADS:
        found = figures.get(f"setting/{spread}/qk pairs")
        if found is not None:
            ratio = found["ratios"]["plain"]
            holds = "holds" if ratio >= NEEDED else "DOES NOT HOLD"
            lines.append(
                f"- qk pairs, ours / plain at `setting`, {spread} activations: {ratio:.2f}; at "
                f"least {NEEDED:g}: {holds}"
            )
    return lines


def _row(name: str, found: dict[str, Any]) -> list[str]:
    rates, ratio = found["rates"], found["ratios"]
    return [
        name,
        *(number(rates[key]) if key in rates else "" for key in ("ours", *_COLUMNS)),
        *(f"{ratio[key]:.2f}" if key in ratio else "" for key in _COLUMNS),
    ]
