"""How long the run's own code takes here and now, on random numbers of the run's sizes."""

import time
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from headattr.attribution.blocks import Rank
from headattr.attribution.layer import attribute_layer
from headattr.attribution.task import LayerTask
from headattr.basis.active import ActiveFeatures
from headattr.basis.component import Components, Reads, decompose
from headattr.edges import same_edges
from headattr.model.capture import LayerCapture
from headattr.model.head import HeadWeights, Norm

_TIMED_LENGTH, _TIMED_EDGES = 1024, 8192
"""Tokens of a prompt and edges of a head at most, so that the timing stays a matter of seconds."""
_ATTENTION = 1.5
"""A forward pass over its matrix products alone."""


class Sizes(NamedTuple):
    """What the time of a layer depends on."""

    d_model: int
    d_head: int
    length: int
    """Tokens of a typical prompt."""
    basis: tuple[int, int]
    """Active features a position, and features in all."""
    output: tuple[int, int] | None


class Cost(NamedTuple):
    """Seconds of attribution: of each prompt, of each head of it, and of each edge."""

    prompt: float
    head: float
    edge: float


def forward_seconds(parameters: int, tokens: int, dtype: torch.dtype) -> float:
    """Seconds of a forward pass through `parameters` weights, from the speed of one product."""
    left, right = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - started)
    speed = left.numel() * right.shape[1] / sorted(times)[1]
    return _ATTENTION * parameters * tokens / speed


@cache
def layer_seconds(sizes: Sizes, topk: int, rank: Rank, dtype: torch.dtype) -> Cost:
    """The cost of a layer, from three short runs of the attribution itself: with one edge a query,
    in one head and in two, and with several.

    Of long prompts the first tokens are timed: what is known of every row of a head grows with the
    square of the length, what a prompt has once with the length.
    """
    longer = max(1.0, sizes.length / _TIMED_LENGTH)
    sizes = sizes._replace(length=min(sizes.length, _TIMED_LENGTH))
    few = min(sizes.length, _TIMED_EDGES)
    many = min(_TIMED_EDGES, sizes.length * (sizes.length + 1) // 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _time(sizes, 1, few, topk, rank, dtype)  # warms up, and compiles
        one, two, long = (
            _time(sizes, heads, edges, topk, rank, dtype)
            for heads, edges in ((1, few), (2, few), (1, many))
        )
    edge = max(0.0, long - one) / max(1, many - few)
    head = max(0.0, two - one - few * edge)
    prompt = max(0.0, one - head - few * edge)
    return Cost(longer * prompt, longer**2 * head, edge)


def _time(sizes: Sizes, heads: int, edges: int, topk: int, rank: Rank, dtype: torch.dtype) -> float:
    """Seconds of one prompt with `edges` edges in each of `heads` heads."""
    d_model, length = sizes.d_model, sizes.length
    x, weights = torch.randn(length, d_model, dtype=dtype), _weights(sizes, heads, dtype)
    components, directions = _components(x, *sizes.basis)
    reads = None
    if sizes.output is not None:
        read, rows = _components(x, *sizes.output)
        reads = Reads(read.active, rows, read.active.acts, None, "encoder")
    Q, K, V = (weights.vectors(side, x, None) for side in ("query", "key", "value"))
    pattern = torch.full((heads, 1, length), 1 / length, dtype=dtype)
    last = torch.tensor([length - 1])
    kept = LayerCapture(x, Q, K, V, weights.scale, None, last, pattern, x, x)
    every = np.tril_indices(length)
    # spread over all queries, the first key of each first
    order = np.argsort(every[1], kind="stable")[:edges]
    chosen = [positions[np.sort(order)] for positions in every]
    task = LayerTask(
        weights=weights,
        kept=kept,
        components=components,
        directions=directions,
        output=reads,
        every_output=False,
        heads=tuple(range(heads)),
        select=same_edges(*chosen),
        topk=topk,
        rank=rank,
    )
    started = time.perf_counter()
    attribute_layer(task)
    return time.perf_counter() - started


def _weights(sizes: Sizes, heads: int, dtype: torch.dtype) -> HeadWeights:
    d_model, d_head = sizes.d_model, sizes.d_head
    W_Q, W_K, W_V = torch.randn(3, heads, d_model, d_head, dtype=dtype) / d_model**0.5
    W_O, zero = torch.randn(heads, d_head, d_model, dtype=dtype), torch.zeros(heads, d_head)
    norm, b_O = Norm("rms", torch.ones(d_model, dtype=dtype), None, 1e-6), torch.zeros(d_model)
    zero, b_O = zero.to(dtype), b_O.to(dtype)
    return HeadWeights(0, norm, W_Q, W_K, W_V, W_O, zero, zero, zero, b_O, d_head**-0.5)


def _components(x: torch.Tensor, l0: int, width: int) -> tuple[Components, torch.Tensor]:
    """Random features, as many of them and as many at once as the dictionary has."""
    length, width = len(x), min(width, len(x) * l0)
    ids = torch.stack([torch.randperm(width)[:l0].sort().values for _ in range(length)])
    acts = torch.rand(ids.numel(), dtype=x.dtype) + 0.1
    ptr = torch.arange(length + 1) * ids.shape[1]
    directions = torch.randn(width, x.shape[1], dtype=x.dtype)
    active = ActiveFeatures(ptr, ids.flatten(), acts)
    ones, zeros = torch.ones_like(x[:, 0]), torch.zeros_like(x)
    return decompose(x, active, ones, directions, zeros), directions
