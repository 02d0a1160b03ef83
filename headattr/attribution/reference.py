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
    contrast: Float[Tensor, "q_component k_component"]
    """scale * Q_i[c] . (r_ij K_j[d] - sum_j' A_ij' r_ij' K_j'[d]); the feature (or kind) d may be
    anywhere."""
    elsewhere: Float[Tensor, "q_component"]
    """The same, summed over the features of other keys that are not at j: contrast and this sum to
    s'_ij - E_A[s'_i.]."""
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
    """All tables of one edge of one prompt."""
    group, length = weights.kv_head(edge.head), len(kept.resid_pre)
    columns = [components_at(components, directions, pos) for pos in range(length)]
    query, key = columns[edge.q_pos], columns[edge.k_pos]
    Q = [_through(weights, "query", edge.head, kept, edge.q_pos, part) for part in query]
    keys = [
        [_through(weights, "key", group, kept, pos, part) for part in column]
        for pos, column in enumerate(columns)
    ]
    V = [_through(weights, "value", group, kept, edge.k_pos, part) for part in key]
    row = (kept.scale * kept.Q[edge.q_pos, edge.head] @ kept.K[:, group].T).double()
    allowed = weights.allowed(torch.tensor([edge.q_pos]), length)[0]
    capped = row if weights.softcap is None else weights.softcap * torch.tanh(row / weights.softcap)
    A = capped.masked_fill(~allowed, -torch.inf).softmax(-1)
    ratio = torch.where(row == 0, 1.0, capped / row)

    shared: dict[tuple[str, int], Tensor] = {}
    for pos, column in enumerate(columns):
        for part, vector in zip(column, keys[pos], strict=True):
            name = (part.kind, part.id)
            shared[name] = shared.get(name, 0) + A[pos] * ratio[pos] * vector
    here = {
        (part.kind, part.id): ratio[edge.k_pos] * k
        for part, k in zip(key, keys[edge.k_pos], strict=True)
    }
    table = torch.stack(
        [torch.stack([weights.scale * (q @ k) for k in keys[edge.k_pos]]) for q in Q]
    )
    contrast = torch.stack(
        [torch.stack([weights.scale * (q @ (here[n] - shared[n])) for n in here]) for q in Q]
    )
    rest = sum((-shared[n] for n in shared if n not in here), torch.zeros_like(Q[0]))
    elsewhere = torch.stack([weights.scale * (q @ rest) for q in Q])
    writes = torch.stack(
        [
            _written(weights, kept, edge, A[edge.k_pos] * (v @ weights.W_O[edge.head].double()))
            for v in V
        ]
    )
    return EdgeTables(query, key, table, contrast, elsewhere, writes)


def ablated_score(
    weights: HeadWeights,
    kept: LayerCapture,
    edge: Edge,
    pos: int,
    removed: Float[Tensor, "d_model"],
) -> Float[Tensor, ""]:
    """The raw score of an edge after a vector was subtracted from resid_pre at one position, all
    norms computed again, in float64."""
    x = kept.resid_pre.double().clone()
    x[pos] -= removed.double()
    rotary = kept.rotary and Rotary(kept.rotary.cos.double(), kept.rotary.sin.double())
    Q = weights.vectors("query", x, rotary)[edge.q_pos, edge.head]
    K = weights.vectors("key", x, rotary)[edge.k_pos, weights.kv_head(edge.head)]
    return weights.scale * (Q @ K)


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
    head_norm = weights.head_norm(side)
    if head_norm is not None:
        vector = (
            head_norm.gain
            * vector
            / head_norm.sigma(_before_head_norm(weights, side, head, kept, pos))
        )
    if kept.rotary is None or side == "value":
        return vector
    at = Rotary(kept.rotary.cos[pos : pos + 1], kept.rotary.sin[pos : pos + 1])
    return at.rotate(vector[None])[0]


def _before_head_norm(
    weights: HeadWeights, side: Side, head: int, kept: LayerCapture, pos: int
) -> Float[Tensor, "d_head"]:
    """The model's query or key of one position before QK-norm and rotary, from resid_pre."""
    W, b = (weights.W_Q, weights.b_Q) if side == "query" else (weights.W_K, weights.b_K)
    return weights.norm(kept.resid_pre[pos].double()) @ W[head].double() + b[head]


def _written(
    weights: HeadWeights, kept: LayerCapture, edge: Edge, vector: Float[Tensor, "d_model"]
) -> Float[Tensor, "d_model"]:
    """Through the norm after attention, frozen at the query's position."""
    norm = weights.post_norm
    if norm is None:
        return vector
    return norm.gain * vector / norm.sigma(kept.attn_out[edge.q_pos].double())
