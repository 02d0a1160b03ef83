"""The definition of an edge's tables, one component after the other, for tests.

Slow and readable: nothing is folded or projected ahead, each component goes through the norm, the
weights and the rotation alone, in float64.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.component import Components, Reads
from headattr.edges import Edge
from headattr.model.capture import LayerCapture
from headattr.model.head import HeadWeights, Rotary, Side


class Component(NamedTuple):
    """One summand of the residual stream at one position."""

    kind: str
    id: int
    vector: Float[Tensor, "d_model"]


class EdgeTables(NamedTuple):
    """Full tables of one edge, rows and columns in the order of the component lists."""

    q_components: list[Component]
    k_components: list[Component]
    qk: Float[Tensor, "q_component k_component"]
    """scale * Q_i[c] . K_j[d]; sums to the score."""
    writes: Float[Tensor, "k_component d_model"]
    """w_ij,g of every value component; sums to what the edge writes."""


def components_at(
    components: Components, directions: Float[Tensor, "features d_model"], pos: int
) -> list[Component]:
    """The summands at one position: features by id, then the named ones."""
    start, stop = components.active.ptr[pos : pos + 2].tolist()
    sparse = [
        Component(components.kind, int(f), c.double() * directions[f].double())
        for f, c in zip(
            components.active.ids[start:stop], components.coefs[start:stop], strict=True
        )
    ]
    return sparse + [Component(kind, -1, rows[pos]) for kind, rows in components.named.items()]


def edge_tables(
    weights: HeadWeights,
    kept: LayerCapture,
    components: Components,
    directions: Float[Tensor, "features d_model"],
    edge: Edge,
) -> EdgeTables:
    """Both tables of one edge of one prompt."""
    group = weights.kv_head(edge.head)
    query = components_at(components, directions, edge.q_pos)
    key = components_at(components, directions, edge.k_pos)
    Q = [_through(weights, "query", edge.head, kept, edge.q_pos, part) for part in query]
    K = [_through(weights, "key", group, kept, edge.k_pos, part) for part in key]
    V = [_through(weights, "value", group, kept, edge.k_pos, part) for part in key]
    scores = weights.scores(kept.Q, kept.K)[edge.head, edge.q_pos]
    weight = scores[: edge.q_pos + 1].softmax(-1)[edge.k_pos]
    table = torch.stack([torch.stack([weights.scale * (q @ k) for k in K]) for q in Q])
    writes = torch.stack([weight * (v @ weights.W_O[edge.head].double()) for v in V])
    return EdgeTables(query, key, table, writes)


def output_reads(reads: Reads, pos: int) -> dict[int, Float[Tensor, "d_model"]]:
    """r_t of every output feature that is active at a position, by id."""
    start, stop = reads.active.ptr[pos : pos + 2].tolist()
    entries = zip(reads.active.ids[start:stop], reads.scale[start:stop], strict=True)
    return {int(feature): scale * reads.rows[feature] for feature, scale in entries}


def _through(
    weights: HeadWeights, side: Side, head: int, kept: LayerCapture, pos: int, part: Component
) -> Float[Tensor, "d_head"]:
    """One component through the frozen norm, the projection, its constants (with the bias) and
    rotary."""
    norm = weights.norm
    W = {"query": weights.W_Q, "key": weights.W_K, "value": weights.W_V}[side][head].double()
    b = {"query": weights.b_Q, "key": weights.b_K, "value": weights.b_V}[side][head]
    centred = part.vector - part.vector.mean() if norm.kind == "layer" else part.vector
    vector = (norm.gain * centred / norm.sigma(kept.resid_pre[pos].double())) @ W
    if part.kind == "bias":
        vector = vector + b + (0 if norm.bias is None else norm.bias.double() @ W)
    if kept.rotary is None or side == "value":
        return vector
    at = Rotary(kept.rotary.cos[pos : pos + 1], kept.rotary.sin[pos : pos + 1])
    return at.rotate(vector[None])[0]
