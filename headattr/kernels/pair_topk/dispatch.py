"""Which topk_pairs runs: on CPU the blocked one, where numba is there; else plain torch."""

from typing import Any

import torch
from torch import Tensor

from headattr.kernels.pair_topk import batched, blocked
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.selection import compiled_select


def topk_pairs(left: Tensor, right: Tensor, *arguments: Any, **options: Any) -> PairTopK:
    """As `batched.topk_pairs`, the fastest way here."""
    path = batched if holds_products(left.device) else blocked
    return path.topk_pairs(left, right, *arguments, **options)


def holds_products(device: torch.device) -> bool:
    """Are all products of the edges of a call in memory at once?"""
    return device.type != "cpu" or compiled_select() is None
