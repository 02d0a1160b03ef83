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

from headattr.attribution.ov import (
    OutputSide,
    OvHead,
    block_completeness,
    output_side,
    ov_edges,
    ov_head,
)
from headattr.attribution.qk import qk_edges, share_sums
from headattr.attribution.sides import Prepared, Projected, prepare, project
from headattr.basis.component import Components, Reads
from headattr.edges import TOP_MARGINALS, LayerTable, OvTable
from headattr.model.capture import LayerCapture
from headattr.model.head import HeadWeights
from headattr.model.proof import layer_errors

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
    values = [project(weights, "value", g, prepared, None) for g in range(len(weights.W_V))]
    flagged = swallow_attention(kept.resid_pre)
    heads: list[dict[str, Any]] = []
    key: tuple[int, Projected] | None = None
    for head in task.heads:
        group = weights.kv_head(head)
        if key is None or key[0] != group:
            key = (group, project(weights, "key", group, prepared, kept.rotary))
        query = project(weights, "query", head, prepared, kept.rotary)
        heads.append(
            _attribute_head(task, head, query, key[1], values[group], pattern[head], output)
        )
        own = (kept.Q[:, head], kept.K[:, group])
        heads[-1]["share_sums"] = share_sums(query, key[1], own, kept.scale, allowed)
        heads[-1]["sink_share"] = pattern[head][
            :, torch.from_numpy(flagged).to(pattern.device)
        ].sum(-1)
    block = None if output is None else _block(task, values, pattern, output)
    return _table(task, heads, flagged, block)


def _own_pattern(weights: HeadWeights, kept: LayerCapture, allowed: Tensor) -> Tensor:
    """The pattern of every head, from the model's own queries and keys."""
    return weights.pattern(weights.scores(kept.Q, kept.K) * (kept.scale / weights.scale), allowed)


def _attribute_head(
    task: LayerTask,
    head: int,
    query: Projected,
    key: Projected,
    value: Projected,
    pattern: Float[Tensor, "q_pos k_pos"],
    output: OutputSide | None,
) -> dict[str, Any]:
    """Edges of one head in chunks, as columns of tensors."""
    weights, kept = task.weights, task.kept
    group = weights.kv_head(head)
    edges = task.select(head, pattern.cpu().double().numpy())
    q_all, k_all = (torch.from_numpy(pos).to(pattern.device) for pos in edges)
    own = (kept.Q[:, head], kept.K[:, group])
    writes = None if output is None else ov_head(weights, head, value, kept.V[:, group], output)
    sizes = {"topk": task.topk, "top_marginals": task.top_marginals}
    at_once = _edges_at_once(task, query, writes)
    qk, ov = [], []
    for q_pos, k_pos in zip(q_all.split(at_once), k_all.split(at_once), strict=True):
        qk.append(qk_edges(query, key, own, kept.scale, q_pos, k_pos, **sizes))
        if writes is not None:
            ov.append(ov_edges(writes, pattern[q_pos, k_pos], q_pos, k_pos, **sizes))
    return {"q_pos": q_all, "k_pos": k_all, "pattern": pattern[q_all, k_all], "qk": qk, "ov": ov}


def _edges_at_once(task: LayerTask, query: Projected, writes: OvHead | None) -> int:
    """Edges a chunk, so that the largest temporary stays within the budget."""
    slots, d_head = query.features.shape[1:]
    wide = 0 if writes is None else writes.rows.shape[-2]
    an_edge = max(slots * max(slots, wide), (slots + wide) * d_head, 1)
    return max(1, task.chunk_numbers // an_edge)


def _block(
    task: LayerTask, values: list[Projected], pattern: Tensor, output: OutputSide
) -> NDArray[np.floating]:
    """Check of the whole row: all heads, all allowed keys, all components, and b_O."""
    weights = task.weights
    rebuilt = weights.b_O.expand_as(task.kept.block).clone()
    for head in range(weights.n_heads):
        rebuilt += pattern[head] @ values[weights.kv_head(head)].whole @ weights.W_O[head]
    return _numpy(block_completeness(rebuilt, task.kept.block, output))


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
        score=qk["score"],
        pattern=_cat(heads, "pattern"),
        completeness=qk["completeness"],
        feature_share=qk["feature_share"],
        kinds=task.components.kinds,
        totals=qk["totals"],
        values=pairs["values"],
        q_slots=pairs["left"],
        k_slots=pairs["right"],
        q_top=qk["q_top"],
        q_marginals=qk["q_marginals"],
        k_top=qk["k_top"],
        k_marginals=qk["k_marginals"],
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
