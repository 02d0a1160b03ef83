"""Which topk_pairs runs: on CPU the blocked one, where numba is there; else plain torch."""

from typing import Any

from torch import Tensor

from headattr.kernels.pair_topk import batched, blocked
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.selection import compiled_select


def topk_pairs(left: Tensor, right: Tensor, *arguments: Any, **options: Any) -> PairTopK:
    """As `batched.topk_pairs`, the fastest way here."""
    fast = left.device.type == "cpu" and compiled_select() is not None
    path = blocked if fast else batched
    return path.topk_pairs(left, right, *arguments, **options)
