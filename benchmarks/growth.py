"""Cost against prompt length, active features, dictionary and k; wide bases; many edges."""

import gc
from collections.abc import Sequence
from typing import Any

from clock import ROUNDS, interleaved, median, say, seconds, times_faster
from fits import slope
from inputs import make_task
from ops import OPS, ours
from report import Section, number, table
from rivals import rivals
from sizes import SETTING, SPREADS, Size

SWEEPS: dict[str, Sequence[int]] = {
    "length": (32, 64, 128, 256),
    "active": (16, 32, 64, 128),
    "features": (8_192, 16_384, 32_768, 65_536),
    "topk": (5, 10, 20, 40),
}
MEANINGS = {"length": "T", "active": "n", "features": "d_sae", "topk": "k"}
SHORT = SETTING._replace(length=64)
"""What is held while something other than T grows."""
SWEPT = ("qk pairs", "whole layer", "whole layer, with OV")
WIDE = ((64, 128), (300, 32), (1250, 16))
"""Active features a position and tokens: fewer of these, so that it takes seconds."""
FLAT = 0.2
MANY = {100_000: 447, 1_000_000: 1414, 10_000_000: 4472}
"""About as many edges, and the tokens whose head has them."""


def exponents(
    names: Sequence[str] = SWEPT,
    base: Size = SHORT,
    sweeps: dict[str, Sequence[int]] = SWEEPS,
    rounds: int = ROUNDS,
) -> Section:
    figures: dict[str, Any] = {}
    rows = []
    for field, points in sweeps.items():
        for name in names:
            say(f"growth with {MEANINGS[field]}: {name}")
            sizes = [base._replace(**{field: point}) for point in points]
            works = {}
            for point, size in zip(points, sizes, strict=True):
                op = OPS[name]
                works[str(point)] = ours(op, make_task(size, "heavy", output=op.output))
            times = interleaved(works, rounds)
            layer = [median(found) for found in times.values()]
            edge = [t / size.edges for t, size in zip(layer, sizes, strict=True)]
            fits = slope(points, edge), slope(points, layer)
            figures[f"{name}/{field}"] = {
                "points": list(points), "seconds": layer, "an_edge": edge,
                "slope_edge": fits[0], "slope_layer": fits[1],
            }  # fmt: skip
            shown = ", ".join(
                f"{point}: {number(1e6 * e)}" for point, e in zip(points, edge, strict=True)
            )
            rows.append([MEANINGS[field], name, shown, *(f"{fit:.2f}" for fit in fits)])
    lines = [
        f"One head, heavy-tailed activations; otherwise d_model {base.d_model}, d_head "
        f"{base.d_head}, T {base.length}, n {base.active}, d_sae {base.features:,}, k {base.topk}. "
        "Exponents are slopes in log-log; a layer has T (T + 1) / 2 edges a head.",
        "",
        *table(("grows", "", "microseconds an edge", "exponent, edge", "exponent, layer"), rows),
    ]
    return Section("How the cost grows", lines, figures)


def wide(
    points: Sequence[tuple[int, int]] = WIDE, base: Size = SETTING, rounds: int = ROUNDS
) -> Section:
    figures: dict[str, Any] = {}
    rows = []
    for active, length in points:
        for spread in SPREADS:
            say(f"wide basis: {active} features, {spread}")
            size = base._replace(active=active, length=length)
            task = make_task(size, spread)
            plain = rivals("qk pairs", task)["plain"].work
            times = interleaved({"ours": ours(OPS["qk pairs"], task), "plain": plain}, rounds)
            rates = {key: size.edges / median(found) for key, found in times.items()}
            ratio = times_faster(times["ours"], times["plain"])
            figures[f"{active}/{spread}"] = rates | {"ratio": ratio}
            shown = number(rates["ours"]), number(rates["plain"]), f"{ratio:.2f}"
            rows.append([str(active), str(length), spread, *shown])
            gc.collect()
    head = ("n", "T", "activations", "ours, edges/s", "plain, edges/s", "ours / plain")
    lines = [f"qk pairs, otherwise as `setting`; medians of {rounds}.", "", *table(head, rows)]
    return Section("Wide bases", lines, figures)


def flat(*, long: bool = False, base: Size = SETTING, many: dict[int, int] = MANY) -> Section:
    """One go at each number of edges, between goes at the smallest."""
    small, *others = [count for count in many if long or count < 10_000_000]
    op = OPS["whole layer"]

    def an_edge(count: int) -> float:
        size = base._replace(length=many[count])
        say(f"flatness: {size.edges:,} edges")
        work = ours(op, make_task(size, "heavy"))
        found = seconds(work) / size.edges
        gc.collect()
        return found

    an_edge(small)
    firsts, found = [an_edge(small) for _ in range(2)], {}
    for count in others:
        found[count] = an_edge(count)
        firsts += [an_edge(small) for _ in range(3)]
    first = median(firsts)
    rows = [[f"{small:,}", str(many[small]), str(len(firsts)), number(1e6 * first), "1"]]
    verdict = []
    for count, cost in found.items():
        ratio = cost / first
        rows.append([f"{count:,}", str(many[count]), "1", number(1e6 * cost), f"{ratio:.2f}"])
        word = "within" if abs(ratio - 1) <= FLAT else "NOT within"
        verdict.append(f"- {count:,} edges: {word} {FLAT:.0%} of {small:,}")
    head = ("edges, about", "T", "goes", "microseconds an edge", "to the first")
    about = (
        "A whole layer of one head without OV, its parts dropped; the rest as `setting`, so more "
        "edges are a longer prompt. Goes at the smallest number lie before and after the others."
    )
    figures = {"an_edge": {small: first, **found}, "all_of_the_smallest": firsts}
    return Section("Many edges", [about, "", *table(head, rows), "", *verdict], figures)
