"""Chunks of edges -> the numpy columns of a part."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor


def columns_of(
    chunks: Sequence[Any],
    back: Int[Tensor, "edge"] | None,
    left: str = "left",
    right: str = "right",
) -> dict[str, Any]:
    """Fields of the chunks as numpy, edge `back[e]` becoming edge e; `left` and `right` are what
    the slots of pairs are called."""
    names = {"left": left, "right": right}
    found = {}
    for name, first in chunks[0]._asdict().items():
        if first is not None:
            whole = torch.cat([getattr(chunk, name) for chunk in chunks])
            found[names.get(name, name)] = as_numpy(whole if back is None else whole[back])
    return found


def as_numpy(tensor: Tensor) -> NDArray[Any]:
    """A tensor of any device."""
    return tensor.cpu().numpy()
