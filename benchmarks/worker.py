"""One version of headattr at work for `against.py`: asked on standard input, a JSON line an answer.

    {"build": [op, size, spread]}   -> {"edges": n}, or {"lacks": why}
    {"go": true}                    -> {"seconds": process time}

Which version is a matter of PYTHONPATH.
"""

import json
import sys
from typing import Any

import torch


def build(name: str, size: str, spread: str) -> tuple[Any, int]:
    """The op, after a go that warms up, and how many edges it does."""
    from ops import OPS, function_of, ours
    from sizes import SIZES, TINY

    op, found = OPS[name], {**SIZES, "tiny": TINY}[size]
    function_of(op)
    from inputs import make_task

    work = ours(op, make_task(found, spread, output=op.output, rank=op.rank))  # type: ignore[arg-type]
    work()
    return work, found.edges


def main() -> None:
    from clock import seconds

    torch.set_num_threads(1)
    work: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "build" in asked:
            try:
                work, edges = build(*asked["build"])
                answer: dict[str, Any] = {"edges": edges}
            except (ImportError, AttributeError, TypeError, ValueError) as error:
                answer = {"lacks": f"{type(error).__name__}: {error}"}
        else:
            answer = {"seconds": seconds(work)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
