"""Which topk_pairs runs: on CPU the compiled one, where numba is there; on a GPU the fused one,
where Triton is; else plain torch."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from headattr.kernels.pair_topk import batched, blocked
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.selection import compiled_loops


def topk_pairs(
    left: Tensor, right: Tensor, n_left: Tensor, n_right: Tensor, k: int, **options: Any
) -> PairTopK:
    """As `batched.topk_pairs`, the fastest way here."""
    path = path_of(left.device, left.dtype, k)
    return path.topk_pairs(left, right, n_left, n_right, k, **options)


def path_of(device: torch.device, dtype: torch.dtype, k: int) -> Any:
    """The module of the fastest way for such lists. Fused: all but float64 and k above 256."""
    if device.type == "cuda" and dtype != torch.float64 and k <= 256 and has_triton():
        from headattr.kernels.pair_topk import fused

        return fused
    usual = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    return blocked if usual and compiled_loops() is not None else batched


@cache
def has_triton() -> bool:
    """A Triton with `topk` (3.4) can be imported; nothing else here needs it."""
    try:
        import triton.language as tl
    except ImportError:
        return False
    return hasattr(tl, "topk")
