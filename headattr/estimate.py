"""What a run would take - edges, bytes, memory, time - before anything heavy.

Reads configurations and tokenizer, no weights. Edges are counted exactly for `all` and `file:`, and
are an upper bound where the pattern decides. Time is that of the same code on random numbers of the
run's sizes, on this machine, now.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headattr.attribution.blocks import Sizes as BlockSizes
from headattr.attribution.blocks import blocks_of
from headattr.basis.load import declared_bos
from headattr.budget import Budget, budget_for
from headattr.config import RunConfig
from headattr.edges import EdgeRule, listed_edges, parse_edge_rule, token_filter
from headattr.inputs import inputs_of
from headattr.kernels.pair_topk import batched
from headattr.kernels.pair_topk.dispatch import path_of
from headattr.model.load import DTYPES, LoadedModel
from headattr.model.outline import outline_model
from headattr.model.tokens import Prompt, decide_bos, tokenize
from headattr.outlined import OutlinedSource, outlined_sources
from headattr.plan import (
    distinct,
    plan_heads,
    plan_layer,
    plan_outputs,
    shape_of,
)
from headattr.stopwatch import Sizes, forward_seconds, layer_seconds
from headattr.store.coding import slot_type
from headattr.store.columns import OV, Column, edge_columns
from headattr.store.writer import LayerPlan
from headattr.tables import TOP_MARGINALS

_KINDS = 3
"""Features, bias, and error or position."""
_HELD = 8192
"""Edges of a layer that wait to be written, at most."""
_PROCESS = 700e6
"""Bytes of Python with torch, transformers and sae_lens."""
_SLOT, _FALLING, _FLOAT = 0.62, 1.05, 3.45
_ROUNDED = {16: 2.6, 10: 1.65, 7: 1.35, 6: 1.25}
"""Bytes on disk, as measured on SmolLM2: of a byte of a slot, of a number of each precision."""
_INDEXED = 12
"""Bytes an edge of the index of one role."""
_WRITTEN = 40e6
"""Bytes a second that are compressed and written."""
_START = 15.0
"""Seconds of imports, loading and the proof of a small model."""


def estimate_run(config: RunConfig) -> dict[str, Any]:
    """{"prompts", "tokens", "set_aside", "heads", "edges", "edges_are" ("exact" or "at most"),
    "bytes", "bytes_per_edge", "memory": {"model", "dictionaries", "work", "results", "peak"},
    "seconds": {"start", "forward", "attribution", "writing", "total"}, "assumed"}.

    Bytes and seconds are those of `edges`; raises what the run itself would raise of its inputs.
    """
    inputs = inputs_of(config)
    model = outline_model(config.model, config.dtype)
    assumed: list[str] = []
    sources = outlined_sources(model, inputs.basis, inputs.output, assumed)
    heads, _ = plan_heads(config, model, sources)
    layers = sorted({head.layer for head in heads})
    outputs, reasons = plan_outputs(config, layers, sources)
    sources = sources._replace(outputs={view.place: view for view in outputs.values()})
    plans = [plan_layer(config, model, layer, heads, sources, outputs, reasons) for layer in layers]
    bos = decide_bos(model.tokenizer, config.bos, declared_bos(distinct(sources)))
    prompts, aside = tokenize(model, inputs.texts.prompts, bos, truncate=config.truncate)
    rule = parse_edge_rule(config.edges)
    edges = _count_edges(config, rule, plans, prompts, heads)
    order = distinct(sources)
    per_edge = [_edge_bytes(config, plan, order) for plan in plans]
    total = sum(edges)
    stored = sum(e * b for e, (b, _) in zip(edges, per_edge, strict=True))
    tokens = sum(len(prompt.tokens) for prompt in prompts)
    stored += tokens * sum(8 * 0.6 * s.l0 + 12 for s in order)
    stored += tokens * sum(4 * len(plan.heads) + 6 for plan in plans)
    seconds = _seconds(config, model, plans, order, prompts, edges, stored)
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "set_aside": len(aside) + len(inputs.texts.set_aside),
        "heads": sum(len(plan.heads) for plan in plans),
        "edges": total,
        "edges_are": "exact" if rule.kind in ("all", "file") else "at most",
        "bytes": round(stored),
        "bytes_per_edge": round(stored / total) if total else 0,
        "memory": _memory(config, model, plans, order, prompts),
        "seconds": seconds,
        "assumed": list(dict.fromkeys(assumed)),
    }


def _count_edges(
    config: RunConfig,
    rule: EdgeRule,
    plans: Sequence[LayerPlan],
    prompts: Sequence[Prompt],
    heads: Sequence[Any],
) -> list[int]:
    """Edges of each layer, at most where the pattern decides."""
    if rule.kind == "file":
        lengths = {prompt.id: len(prompt.tokens) for prompt in prompts}
        windows = {plan.layer: plan.window for plan in plans}
        listed = listed_edges(Path(rule.path), lengths, heads, windows)
        return [
            sum(len(edges) for (_, head), edges in listed.items() if head.layer == plan.layer)
            for plan in plans
        ]
    by_window = {
        window: sum(_edges_of(config, rule, prompt, window) for prompt in prompts)
        for window in {plan.window for plan in plans}
    }
    return [len(plan.heads) * by_window[plan.window] for plan in plans]


def _edges_of(config: RunConfig, rule: EdgeRule, prompt: Prompt, window: int | None) -> int:
    """Edges of one head of one prompt."""
    length = len(prompt.tokens)
    q_allowed = token_filter(config.q_token, prompt.token_texts)
    k_allowed = token_filter(config.k_token, prompt.token_texts)
    last = np.arange(length)
    first = np.zeros(length, int) if window is None else np.maximum(0, last - window + 1)
    if rule.kind == "top" and not config.keep_sinks and length > 1:
        k_allowed = k_allowed & (last > 0)
    until: NDArray[np.int64] = np.concatenate([[0], np.cumsum(k_allowed)])
    seen = until[last + 1] - until[first]
    if rule.kind == "top":
        seen = np.minimum(seen, rule.m)
    elif rule.kind == "threshold" and rule.threshold > 0:
        seen = np.minimum(seen, int(1 / rule.threshold))
    return int(seen[q_allowed].sum())


def _edge_bytes(
    config: RunConfig, plan: LayerPlan, order: Sequence[OutlinedSource]
) -> tuple[float, float]:
    """Bytes of an edge of a layer on disk, and in memory before it is written."""
    kinds = _KINDS
    numbers = {
        "totals": kinds * kinds,
        "q_contrast_totals": kinds,
        "k_contrast_totals": kinds + 1,
        "o_totals": TOP_MARGINALS * kinds,
    }
    pairs = {"values", "pair_contrasts", "q_slots", "k_slots", "v_slots", "o_slots"}
    basis = order[plan.basis]
    filled = {
        "qk": min(1.0, basis.l0**2 / config.topk),
        "ov": 0.0 if plan.output is None else min(1.0, basis.l0 * order[plan.output].l0 / 32),
    }

    def table(columns: dict[str, Column], part: str) -> tuple[float, float]:
        disk = memory = 0.0
        for name, column in columns.items():
            scalar = column.kind == "scalar"
            count = numbers.get(
                name, config.topk if name in pairs else 1 if scalar else TOP_MARGINALS
            )
            source = plan.output if column.kind == "o" and plan.output is not None else plan.basis
            size = slot_type(order[source].l0).itemsize if column.kind in ("q", "k", "o") else 4
            used = 1.0 if name in numbers or scalar else filled[part]
            disk += count * _stored(column, size, config.compact) * used
            memory += count * (8 if column.kind in ("q", "k", "o") else 4)
        return disk, memory

    columns = edge_columns(capped=plan.softcap is not None, parts=False, rank=config.rank)
    disk, memory = table(columns, "qk")
    if plan.output is not None:
        more = table(OV, "ov")
        disk, memory = disk + more[0], memory + more[1]
    return disk + 4 + _INDEXED * (4 if plan.output is not None else 2), memory


def _stored(column: Column, size: int, compact: bool) -> float:
    """Bytes of one number of a column on disk; `size`: of a slot."""
    if column.kind in ("q", "k", "o"):
        return size * _SLOT
    if column.kind == "falling":
        return _FALLING
    bits = column.compact if compact and column.compact else column.bits
    return _FLOAT if bits is None else _ROUNDED[bits]


def _memory(
    config: RunConfig,
    model: LoadedModel,
    plans: Sequence[LayerPlan],
    order: Sequence[OutlinedSource],
    prompts: Sequence[Prompt],
) -> dict[str, int]:
    """Bytes: weights, dictionaries, what is at work, and results that are not written yet."""
    size = DTYPES[config.dtype].itemsize
    weights = size * sum(p.numel() for p in model.hf.parameters())
    dictionaries = (
        size
        * model.d_model
        * sum(
            s.width * (1 if s.about.kind == "unembed" else 2 * (s.about.kind != "tokens"))
            for s in order
        )
    )
    shape = shape_of(model, plans, order, [source.l0 for source in order])
    budget = budget_for(shape, config.memory)
    total, lengths = budget.total, [len(prompt.tokens) for prompt in prompts]
    budget.check({prompt.id: len(prompt.tokens) for prompt in prompts})
    work = 0
    for batch in budget.batches(lengths, config.batch_size):
        longest = max(lengths[i] for i in batch)
        tokens = len(batch) * longest
        captured = tokens * shape.captured(budget.layers_at_once(tokens), shape.sites)
        attention = min(4 * size * len(batch) * model.n_heads * longest**2, total // 8)
        running = tokens * shape.passing() + 4 * len(batch) * longest**2 + attention
        blocks = max(_block_bytes(config, budget, plan, order, longest) for plan in plans)
        work = max(work, captured + max(running, shape.attributed(longest) + blocks))
    held = sum(_edge_bytes(config, plan, order)[1] for plan in plans) * _HELD
    parts = {"model": weights, "dictionaries": dictionaries, "work": work, "results": held}
    whole = {name: round(value) for name, value in parts.items()}
    return {**whole, "peak": round(_PROCESS) + sum(whole.values())}


def _block_bytes(
    config: RunConfig, budget: Budget, plan: LayerPlan, order: Sequence[OutlinedSource], length: int
) -> int:
    """Of the queries and edges of a layer that are attributed at once."""
    basis, output = order[plan.basis], None if plan.output is None else order[plan.output]
    reads = 0 if output is None else output.width if plan.every_output else output.l0
    sizes = BlockSizes(
        length=length,
        used=min(length * basis.l0, basis.width),
        slots=basis.l0,
        reads=reads,
        every=plan.every_output,
        d_head=budget.shape.d_head,
        kinds=_KINDS,
        parts=0,
        topk=config.topk,
        top_marginals=TOP_MARGINALS,
        rank=config.rank,
        products=path_of(torch.device("cpu"), torch.float32, config.topk) is batched,
    )
    return blocks_of(sizes, budget.block_bytes(length)).bytes


def _seconds(
    config: RunConfig,
    model: LoadedModel,
    plans: Sequence[LayerPlan],
    order: Sequence[OutlinedSource],
    prompts: Sequence[Prompt],
    edges: Sequence[int],
    stored: float,
) -> dict[str, float]:
    """Wall time on this machine as it is now."""
    lengths = sorted(len(prompt.tokens) for prompt in prompts) or [1]
    dtype = DTYPES[config.dtype]
    last = max(max(plan.layer + 1, *(s.layer for s in order)) for plan in plans)
    blocks = sum(p.numel() for layer in model.layers[:last] for p in layer.parameters())
    attribution = 0.0
    for plan, count in zip(plans, edges, strict=True):
        outline = model.family.head_weights(model.hf, plan.layer)
        basis, output = order[plan.basis], None if plan.output is None else order[plan.output]
        sizes = Sizes(
            model.d_model,
            outline.W_Q.shape[-1],
            lengths[len(lengths) // 2],
            (basis.l0, basis.width),
            None if output is None else (output.l0, output.width),
        )
        cost = layer_seconds(sizes, config.topk, config.rank, dtype)
        attribution += len(prompts) * (cost.prompt + len(plan.heads) * cost.head)
        attribution += count * cost.edge
    parts = {
        "start": _START,
        "forward": forward_seconds(blocks, sum(lengths), dtype),
        "attribution": attribution,
        "writing": stored / _WRITTEN,
    }
    parts["total"] = sum(parts.values())
    return {name: round(value, 1) for name, value in parts.items()}
