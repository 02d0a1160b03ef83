"""Which row_means runs: on CPU the compiled one, where numba is there; else plain torch."""

from typing import Any

from torch import Tensor

from headattr.kernels.row_means import batched, compiled
from headattr.kernels.row_means.batched import Keys


def _path(keys: Keys) -> Any:
    fast = keys.vectors.device.type == "cpu" and compiled.compiled() is not None
    return compiled if fast else batched


def by_feature(keys: Keys, *arguments: Any) -> Tensor:
    """As `batched.by_feature`, the fastest way here."""
    return _path(keys).by_feature(keys, *arguments)


def differences(keys: Keys, *arguments: Any) -> Tensor:
    """As `batched.differences`, the fastest way here."""
    return _path(keys).differences(keys, *arguments)


def pair_contrasts(left: Tensor, keys: Keys, *arguments: Any) -> Tensor:
    """As `batched.pair_contrasts`, the fastest way here."""
    return _path(keys).pair_contrasts(left, keys, *arguments)
