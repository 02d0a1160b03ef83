"""The compiled loops, where numba is installed."""

from functools import cache
from types import ModuleType


@cache
def compiled_loops() -> ModuleType | None:
    """The module `loops`, or None where numba is not installed."""
    try:
        from headattr.kernels.pair_topk import loops
    except ImportError:
        return None
    return loops
