"""Which feature_rows runs: on a GPU the fused one, where Triton is; else plain torch."""

from typing import Any

from torch import Tensor

from headattr.kernels.feature_rows import batched
from headattr.kernels.pair_topk.dispatch import has_triton


def feature_rows(table: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """As `batched.feature_rows`, the fastest way here."""
    if table.device.type == "cuda" and has_triton():
        from headattr.kernels.feature_rows import fused

        return fused.feature_rows(table, *arguments, **options)
    return batched.feature_rows(table, *arguments, **options)
