"""The definition of feature_rows, in loops."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def feature_rows(
    table: Float[Tensor, "u d"],
    rows_at: Int[Tensor, "entry"],
    coefs: Float[Tensor, "entry"],
    ptr: Int[Tensor, "pos_plus_1"],
    width: int,
    *,
    cos: Float[Tensor, "pos rot"] | None = None,
    sin: Float[Tensor, "pos rot"] | None = None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "pos width d"]:
    """As `batched.feature_rows`, one number after the other."""
    out = torch.zeros(len(ptr) - 1, width, table.shape[1], dtype=dtype or table.dtype)
    for pos in range(len(ptr) - 1):
        for slot, entry in enumerate(range(int(ptr[pos]), int(ptr[pos + 1]))):
            row = [float(coefs[entry]) * float(x) for x in table[rows_at[entry]]]
            turned = list(row)
            half = 0 if cos is None else cos.shape[1] // 2
            for i in range(half):
                assert cos is not None
                assert sin is not None
                first, second = row[i], row[i + half]
                turned[i] = first * float(cos[pos, i]) - second * float(sin[pos, i])
                turned[i + half] = second * float(cos[pos, i + half]) + first * float(
                    sin[pos, i + half]
                )
            out[pos, slot] = torch.tensor(turned, dtype=torch.float64)
    return out
