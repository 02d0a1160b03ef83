"""One layer of one prompt from random numbers, as `headattr.stopwatch` makes it, at a size."""

from functools import lru_cache

import numpy as np
import torch
from sizes import Size, Spread

from headattr.attribution.task import LayerTask
from headattr.basis.active import ActiveFeatures
from headattr.basis.component import Components, Reads, decompose
from headattr.edges import same_edges
from headattr.model.capture import LayerCapture
from headattr.model.head import HeadWeights, Norm, Rotary

_LARGEST_TABLE = 1 << 28
"""Bytes of a dictionary; of a larger one only the rows that are active somewhere are there."""


@lru_cache(maxsize=2)
def make_task(
    size: Size, spread: Spread, *, output: bool = False, rank: str = "value"
) -> LayerTask:
    """All edges of the measured heads; the same numbers for the same arguments."""
    torch.manual_seed(0)
    x, weights = torch.randn(size.length, size.d_model), make_weights(size)
    components, directions = make_components(x, size, spread)
    rotary = make_rotary(size)
    Q, K, V = (weights.vectors(side, x, rotary) for side in ("query", "key", "value"))
    last = torch.tensor([size.length - 1])
    pattern = torch.full((size.heads, 1, size.length), 1 / size.length)
    reads = None
    if output:
        read, rows = make_components(x, size, spread)
        reads = Reads(read.active, rows, read.active.acts, None, "encoder")
    return LayerTask(
        weights=weights,
        kept=LayerCapture(x, Q, K, V, weights.scale, rotary, last, pattern, x, x),
        components=components,
        directions=directions,
        output=reads,
        every_output=False,
        heads=tuple(range(size.heads)),
        select=same_edges(*np.tril_indices(size.length)),
        topk=size.topk,
        rank=rank,
    )


def make_weights(size: Size) -> HeadWeights:
    d_model, d_head, heads = size.d_model, size.d_head, size.heads
    norm = Norm(
        size.norm,
        torch.rand(d_model) + 0.5,
        torch.randn(d_model) if size.norm == "layer" else None,
        1e-5,
    )
    W_Q, W_K, W_V = (torch.randn(n, d_model, d_head) / d_model**0.5 for n in (heads, 1, 1))
    W_O = torch.randn(heads, d_head, d_model) / d_head**0.5
    zeros = [torch.zeros(n, d_head) for n in (heads, 1, 1)]
    b_O, scale = torch.zeros(d_model), d_head**-0.5
    return HeadWeights(0, norm, W_Q, W_K, W_V, W_O, *zeros, b_O, scale, softcap=size.softcap)


def make_rotary(size: Size) -> Rotary | None:
    if not size.rotary:
        return None
    rates = 10_000.0 ** (-torch.arange(size.d_head // 2) * 2 / size.d_head)
    angles = (torch.arange(size.length)[:, None] * rates).repeat(1, 2)
    return Rotary(angles.cos(), angles.sin())


def make_components(x: torch.Tensor, size: Size, spread: Spread) -> tuple[Components, torch.Tensor]:
    """`size.active` random features a position, and their directions."""
    n = min(size.active, size.features)
    ids = torch.stack(
        [torch.randperm(size.features)[:n].sort().values for _ in range(size.length)]
    ).flatten()
    rows = size.features
    if rows * size.d_model * x.itemsize > _LARGEST_TABLE:
        used, ids = ids.unique(return_inverse=True)
        rows = len(used)
    acts = (
        torch.rand(len(ids)).clamp(min=1e-4) ** -0.7 if spread == "heavy" else torch.ones(len(ids))
    )
    directions = torch.randn(rows, size.d_model) / size.d_model**0.5
    active = ActiveFeatures(torch.arange(size.length + 1) * n, ids, acts)
    ones, zeros = torch.ones(size.length), torch.zeros_like(x)
    return decompose(x, active, ones, directions, zeros), directions
