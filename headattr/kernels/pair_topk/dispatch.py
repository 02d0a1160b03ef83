"""Which topk_pairs runs: on CPU the compiled one, where numba is there; else plain torch."""

from typing import Any

import torch
from torch import Tensor

from headattr.kernels.pair_topk import batched, blocked
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.selection import compiled_loops


def topk_pairs(left: Tensor, right: Tensor, *arguments: Any, **options: Any) -> PairTopK:
    """As `batched.topk_pairs`, the fastest way here."""
    usual = left.device.type == "cpu" and left.dtype in (torch.float32, torch.float64)
    path = blocked if usual and compiled_loops() is not None else batched
    return path.topk_pairs(left, right, *arguments, **options)
