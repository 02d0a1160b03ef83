"""Process time of several pieces of work, taken by turns so that drift of the machine hits all."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

ROUNDS = 5
Work = Callable[[], object]


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def seconds(work: Work) -> float:
    """Process time of one go."""
    started = time.process_time()
    work()
    return time.process_time() - started


def interleaved(works: Mapping[str, Work], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each, round by round, after a go of each that warms up."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(seconds(work))
    return times


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def times_faster(ours: Sequence[float], other: Sequence[float]) -> float:
    """The median of other / ours, each pair from one round."""
    return median([b / max(a, 1e-9) for a, b in zip(ours, other, strict=True)])
