"""All edges of one layer of one prompt -> a LayerTable; the only loop over heads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from headattr.attribution.contrast import rows_of
from headattr.attribution.ov import (
    OutputSide,
    OvHead,
    block_completeness,
    output_side,
    ov_edges,
    ov_head,
)
from headattr.attribution.qk import QkHead, Rank, qk_edges, share_sums
from headattr.attribution.sides import Prepared, Projected, prepare, project
from headattr.basis.component import Components, Reads
from headattr.model.capture import LayerCapture
from headattr.model.head import HeadWeights
from headattr.model.proof import layer_errors
from headattr.tables import TOP_MARGINALS, LayerTable, OvTable

SINK_RATIO = 10.0
"""A position whose residual norm is over this many medians swallows attention."""

_WORTH_THREADS = 1 << 29
"""Multiplications of one projection from which more than one thread pays."""

Selector = Callable[[int, NDArray[np.floating]], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""(head, pattern [q_pos, k_pos]) -> query and key positions of its kept edges."""


@dataclass(frozen=True)
class LayerTask:
    """What to attribute in one layer of one prompt."""

    weights: HeadWeights
    kept: LayerCapture
    components: Components
    directions: Float[Tensor, "features d_model"]
    output: Reads | None
    every_output: bool
    heads: tuple[int, ...]
    select: Selector
    topk: int
    rank: Rank = "value"
    """What pairs and kept features are the strongest by."""
    top_marginals: int = TOP_MARGINALS
    chunk_numbers: int = 1 << 21
    """Products held at once; bounds the memory, never the result."""


def swallow_attention(resid_pre: Float[Tensor, "pos d_model"]) -> NDArray[np.bool_]:
    """The first position, and any whose residual norm is over 10 times the prompt's median."""
    norms = resid_pre.norm(dim=-1)
    flagged = norms > SINK_RATIO * norms.median()
    flagged[0] = True
    return flagged.cpu().numpy()


def attribute_layer(task: LayerTask) -> LayerTable:
    """Fill the table of one layer of one prompt."""
    prepared = prepare(task.weights, task.components, task.directions, task.kept.resid_pre)
    with _threads(prepared.directions.numel() * task.weights.W_Q.shape[-1]):
        return _attribute(task, prepared)


@contextmanager
def _threads(multiplications: int) -> Iterator[None]:
    """One CPU thread while matrices are small: on a shared machine more would wait for each other,
    and be ten times slower."""
    before = torch.get_num_threads()
    if multiplications < _WORTH_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _attribute(task: LayerTask, prepared: Prepared) -> LayerTable:
    weights, kept = task.weights, task.kept
    length = len(kept.resid_pre)
    allowed = weights.allowed(torch.arange(length, device=kept.resid_pre.device), length)
    pattern = _own_pattern(weights, kept, allowed)
    output = None if task.output is None else output_side(task.output, every=task.every_output)
    out_scale = weights.output_scale(kept.attn_out)
    values = [project(weights, "value", g, prepared, None) for g in range(len(weights.W_V))]
    flagged = swallow_attention(kept.resid_pre)
    on_flagged = torch.from_numpy(flagged).to(pattern.device)
    heads: list[dict[str, Any]] = []
    key: tuple[int, Projected] | None = None
    for head in task.heads:
        group = weights.kv_head(head)
        if key is None or key[0] != group:
            key = (group, project(weights, "key", group, prepared, kept.rotary))
        query = project(weights, "query", head, prepared, kept.rotary)
        qk = _qk_head(task, head, query, key[1], allowed)
        ov = None
        if output is not None:
            ov = ov_head(weights, head, values[group], kept.V[:, group], output, out_scale)
        heads.append(_attribute_head(task, head, qk, ov, pattern[head]))
        heads[-1]["share_sums"] = share_sums(qk, allowed)
        heads[-1]["sink_share"] = pattern[head][:, on_flagged].sum(-1)
    block = None if output is None else _block(task, values, pattern, output, out_scale)
    return _table(task, heads, flagged, block)


def _own_pattern(weights: HeadWeights, kept: LayerCapture, allowed: Tensor) -> Tensor:
    """The pattern of every head, from the model's own queries and keys."""
    return weights.pattern(weights.scores(kept.Q, kept.K) * (kept.scale / weights.scale), allowed)


def _qk_head(
    task: LayerTask, head: int, query: Projected, key: Projected, allowed: Tensor
) -> QkHead:
    """What the edges of one head share; its own scores and pattern in float64."""
    weights, kept, active = task.weights, task.kept, task.components.active
    Q = kept.Q[:, head].to(query.exact)
    K = kept.K[:, weights.kv_head(head)].to(query.exact)
    scores = kept.scale * Q @ K.T
    pattern = weights.pattern(scores[None], allowed)[0]
    rows = rows_of(weights, key, active.ids, scores, pattern)
    return QkHead(weights, query, key, Q, K, kept.scale, active.padded(active.ids), rows)


def _attribute_head(
    task: LayerTask,
    head: int,
    qk_head: QkHead,
    writes: OvHead | None,
    pattern: Float[Tensor, "q_pos k_pos"],
) -> dict[str, Any]:
    """Edges of one head in chunks, as columns of tensors."""
    edges = task.select(head, pattern.cpu().double().numpy())
    q_all, k_all = (torch.from_numpy(pos).to(pattern.device) for pos in edges)
    sizes = {"topk": task.topk, "top_marginals": task.top_marginals}
    at_once = _edges_at_once(task, qk_head.query, writes)
    qk, ov = [], []
    for q_pos, k_pos in zip(q_all.split(at_once), k_all.split(at_once), strict=True):
        qk.append(qk_edges(qk_head, q_pos, k_pos, rank=task.rank, **sizes))
        if writes is not None:
            ov.append(ov_edges(writes, pattern[q_pos, k_pos], q_pos, k_pos, **sizes))
    return {"q_pos": q_all, "k_pos": k_all, "pattern": pattern[q_all, k_all], "qk": qk, "ov": ov}


def _edges_at_once(task: LayerTask, query: Projected, writes: OvHead | None) -> int:
    """Edges a chunk, so that the largest temporary stays within the budget."""
    slots, d_head = query.exact.shape[1:]
    wide = 0 if writes is None else writes.rows.shape[-2]
    an_edge = max(slots * max(slots, wide), (slots + wide) * d_head, 1)
    return max(1, task.chunk_numbers // an_edge)


def _block(
    task: LayerTask,
    values: list[Projected],
    pattern: Tensor,
    output: OutputSide,
    scale: Float[Tensor, "pos"],
) -> NDArray[np.floating]:
    """Check of the whole row: all heads, all allowed keys, all components, and M_i(b_O)."""
    weights, block = task.weights, task.kept.block
    rebuilt = torch.zeros_like(block)
    for head in range(weights.n_heads):
        whole = values[weights.kv_head(head)].whole.to(block)
        rebuilt += pattern[head] @ whole @ weights.written[head]
    rebuilt = rebuilt * scale[:, None] + weights.block_constant(scale)
    return _numpy(block_completeness(rebuilt, block, output))


def _table(
    task: LayerTask,
    heads: list[dict[str, Any]],
    flagged: NDArray[np.bool_],
    block: NDArray[np.floating] | None,
) -> LayerTable:
    counts = [len(found["q_pos"]) for found in heads]
    qk = _columns([chunk for found in heads for chunk in found["qk"]])
    ov_chunks = [chunk for found in heads for chunk in found["ov"]]
    pairs = qk["pairs"]
    return LayerTable(
        layer=task.weights.layer,
        heads=np.array(task.heads, np.int32),
        head_ptr=np.cumsum([0, *counts], dtype=np.int64),
        q_pos=_cat(heads, "q_pos"),
        k_pos=_cat(heads, "k_pos"),
        pattern=_cat(heads, "pattern"),
        kinds=task.components.kinds,
        values=pairs["values"],
        q_slots=pairs["left"],
        k_slots=pairs["right"],
        **{name: column for name, column in qk.items() if name != "pairs"},
        n_nonfinite=int(pairs["n_nonfinite"].sum()),
        flagged=flagged,
        sink_share=_numpy(torch.stack([found["sink_share"] for found in heads])),
        share_sums=_numpy(torch.stack([found["share_sums"] for found in heads])),
        pattern_error=layer_errors(task.weights, task.kept).pattern,
        ov=None if block is None else _ov_table(_columns(ov_chunks), block),
    )


def _ov_table(ov: dict[str, Any], block: NDArray[np.floating]) -> OvTable:
    pairs = ov["pairs"]
    return OvTable(
        pairs["values"],
        pairs["left"],
        pairs["right"],
        ov["completeness"],
        ov["v_top"],
        ov["v_norms"],
        ov["o_top"],
        ov["o_reads"],
        ov["o_totals"],
        block,
    )


def _columns(chunks: list[Any]) -> dict[str, Any]:
    """NamedTuples of tensors, concatenated field by field, as numpy."""
    return {
        name: _columns([getattr(chunk, name) for chunk in chunks])
        if hasattr(getattr(chunks[0], name), "_fields")
        else _numpy(torch.cat([getattr(chunk, name) for chunk in chunks]))
        for name in chunks[0]._fields
    }


def _cat(heads: list[dict[str, Any]], name: str) -> NDArray[Any]:
    return _numpy(torch.cat([found[name] for found in heads]))


def _numpy(tensor: Tensor) -> NDArray[Any]:
    return tensor.cpu().numpy()
