"""Which topk_pairs runs: on CPU the blocked one, where numba is there; on a GPU the fused one,
where Triton is; else plain torch."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from headattr.kernels.pair_topk import batched, blocked
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.selection import compiled_select


def topk_pairs(
    left: Tensor, right: Tensor, n_left: Tensor, n_right: Tensor, k: int, **options: Any
) -> PairTopK:
    """As `batched.topk_pairs`, the fastest way here."""
    fast = left.device.type == "cpu" and compiled_select() is not None
    path = gpu_path(left.dtype, k) if left.device.type == "cuda" else blocked if fast else batched
    return path.topk_pairs(left, right, n_left, n_right, k, **options)


def gpu_path(dtype: torch.dtype, k: int) -> Any:
    """The fused kernel for all but float64 and more than 256 pairs; those are plain torch."""
    if dtype == torch.float64 or k > 256 or not has_triton():
        return batched
    from headattr.kernels.pair_topk import fused

    return fused


@cache
def has_triton() -> bool:
    """A Triton with `topk` (3.4) can be imported; nothing else here needs it."""
    try:
        import triton.language as tl
    except ImportError:
        return False
    return hasattr(tl, "topk")
