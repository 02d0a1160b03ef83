"""What is measured: calls that attribution makes, recorded in a run of it and made again.

So an op has the shapes, chunks and order that attribution gives it, here and in any other version
that has a function of that name. Each op names the tests that prove it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from clock import Work

KERNELS = "tests/test_kernels.py"
ROW_MEANS = "tests/test_row_means.py"
CONTRASTS = "tests/test_contrasts.py"
DEFINITION = "tests/test_identities.py::test_batched_tables_equal_the_definition"

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Op(NamedTuple):
    """One thing that is timed."""

    tests: tuple[str, ...]
    """Files, or tests within them, as pytest names them."""
    module: str
    function: str
    output: bool = False
    """Needs a layer whose outputs are read."""
    rank: str = "value"


_LAYER = "headattr.attribution.layer"
_WHOLE = _LAYER, "stream_layer"
OPS = {
    "qk pairs": Op((KERNELS,), "headattr.attribution.qk", "topk_pairs"),
    "ov pairs": Op((KERNELS,), "headattr.attribution.ov", "topk_pairs", output=True),
    "contrast pairs": Op(
        (KERNELS, ROW_MEANS, CONTRASTS), _LAYER, "contrast_pairs", rank="contrast"
    ),
    "row sums": Op((ROW_MEANS,), "headattr.attribution.contrast", "by_feature"),
    "pair contrasts": Op((ROW_MEANS,), "headattr.attribution.qk", "pair_contrasts"),
    "projection": Op((DEFINITION,), _LAYER, "project", output=True),
    "whole layer": Op((DEFINITION, CONTRASTS), *_WHOLE),
    "whole layer, with OV": Op((DEFINITION, CONTRASTS), *_WHOLE, output=True),
    "whole layer by contrast": Op((DEFINITION, CONTRASTS), *_WHOLE, rank="contrast"),
    "whole layer by contrast, with OV": Op(
        (DEFINITION, CONTRASTS), *_WHOLE, output=True, rank="contrast"
    ),
}


def drop(_: object) -> None:
    """A consumer that keeps nothing."""


@contextmanager
def recording(module: Any, function: str) -> Iterator[list[Call]]:
    """The arguments of every call of a module's function."""
    original, calls = getattr(module, function), list[Call]()

    def listen(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        return original(*arguments, **options)

    setattr(module, function, listen)
    try:
        yield calls
    finally:
        setattr(module, function, original)


def calls_of(op: Op, task: Any) -> list[Call]:
    """What attribution of a layer calls the op with."""
    layer = import_module(_LAYER)
    with recording(import_module(op.module), op.function) as calls:
        layer.stream_layer(task, drop, drop)
    return calls


def again(function: Callable[..., Any], calls: list[Call]) -> Work:
    """All of the calls, one after the other."""

    def work() -> None:
        for arguments, options in calls:
            function(*arguments, **options)

    return work


def function_of(op: Op) -> Callable[..., Any]:
    """What the op is in this version of headattr. Raises AttributeError or ImportError where there
    is none, or no attribution in blocks, which calls it."""
    _ = import_module(_LAYER).stream_layer
    return getattr(import_module(op.module), op.function)


def ours(op: Op, task: Any) -> Work:
    """The op as this version of headattr does it."""
    function = function_of(op)
    if op.function == "stream_layer":
        return lambda: function(task, drop, drop)
    calls = calls_of(op, task)
    if not calls:
        raise AttributeError(f"attribution does not call {op.module}.{op.function}")
    return again(_projected if op.function == "project" else function, calls)


def _projected(*arguments: Any, **options: Any) -> None:
    """A side with its kinds and the features of every position, which are made when asked for."""
    side = import_module(_LAYER).project(*arguments, **options)
    _ = side.kinds, side.entries
