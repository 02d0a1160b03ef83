"""What a run would take - edges, bytes, memory, time - before anything heavy.

Reads configurations and tokenizer, no weights. Edges are counted exactly for `all` and `file:`, and
are an upper bound where the pattern decides. Time is that of the same code on random numbers of the
run's sizes, on this machine, now.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from headattr.attribution.blocks import Sizes as BlockSizes
from headattr.attribution.blocks import blocks_of
from headattr.basis.component import Place, SourceInfo
from headattr.basis.dictionary import Dictionary, Release
from headattr.basis.formats.registry import open_release
from headattr.basis.load import Role, Sources, check_release, declared_bos
from headattr.basis.transcoders import layer_of
from headattr.basis.unembed import N_PREDICTED
from headattr.budget import Budget, budget_for
from headattr.config import RunConfig, SourceSpec
from headattr.edges import EdgeRule, listed_edges, parse_edge_rule, token_filter
from headattr.errors import DictionaryError
from headattr.inputs import inputs_of
from headattr.kernels.pair_topk import batched
from headattr.kernels.pair_topk.dispatch import path_of
from headattr.model.load import DTYPES, LoadedModel
from headattr.model.outline import outline_model
from headattr.model.sites import Site
from headattr.model.tokens import Prompt, decide_bos, tokenize
from headattr.plan import (
    GUESSED_SLOTS,
    distinct,
    plan_heads,
    plan_layer,
    plan_outputs,
    shape_of,
)
from headattr.stopwatch import Sizes, forward_seconds, layer_seconds
from headattr.store.columns import OV, Column, edge_columns
from headattr.store.format import slot_type
from headattr.store.writer import LayerPlan
from headattr.tables import TOP_MARGINALS

_KINDS = 3
"""Features, bias, and error or position."""
_HELD = 8192
"""Edges of a layer that wait to be written, at most."""
_PROCESS = 700e6
"""Bytes of Python with torch, transformers and sae_lens."""
_STORED = {"scalar": 0.87, "array": 0.89, "rounded": 0.5, "q": 0.62, "k": 0.62, "o": 0.62}
"""Bytes on disk of a byte of each kind of column, as measured on SmolLM2."""
_WRITTEN = 40e6
"""Bytes a second that are compressed and written."""
_START = 15.0
"""Seconds of imports, loading and the proof of a small model."""


class _Source(NamedTuple):
    """What a plan asks of a dictionary, and how many features it has at once."""

    layer: int
    about: SourceInfo
    l0: int
    width: int
    sites: tuple[Site, ...]
    encoder: bool = True
    """Can it be read by its encoder?"""
    reads_nothing: bool = False


class _View(NamedTuple):
    """A source at one layer, as basis or output."""

    source: _Source
    place: Place

    def check_read(self, read: str) -> None:
        """As the basis itself: no encoder reads without an encoder."""
        if self.source.reads_nothing:
            raise DictionaryError("transcoders of the MLPs below a layer do not read it")
        if read == "encoder" and not self.source.encoder:
            raise DictionaryError(
                f"{self.source.about.name} has no linear encoder to read with; use --read decoder"
            )

    def reads(self) -> None:
        """A basis may be an output."""


def estimate_run(config: RunConfig) -> dict[str, Any]:
    """{"prompts", "tokens", "set_aside", "heads", "edges", "edges_are" ("exact" or "at most"),
    "bytes", "bytes_per_edge", "memory": {"model", "dictionaries", "work", "results", "peak"},
    "seconds": {"start", "forward", "attribution", "writing", "total"}, "assumed"}.

    Bytes and seconds are those of `edges`; raises what the run itself would raise of its inputs.
    """
    inputs = inputs_of(config)
    model = outline_model(config.model, config.dtype)
    assumed: list[str] = []
    sources = _sources(model, inputs.basis, inputs.output, assumed)
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


def _sources(
    model: LoadedModel,
    basis: Sequence[SourceSpec],
    output: Sequence[SourceSpec],
    assumed: list[str],
) -> Sources:
    """As the run's own, from configurations alone."""
    shared: dict[Any, _Source] = {}
    deepest = max((s.layer for s in basis if s.layer < len(model.layers)), default=0)

    def of(spec: SourceSpec, role: Role) -> _View:
        key = (role if role == "output" else "", *spec[:3])
        release = open_release(spec.target) if isinstance(spec.target, Path) else None
        if release is not None and release.kind != "sae" and role == "basis":
            key = ("", str(spec.target))
        if key not in shared:
            shared[key] = _source(model, spec, release, role, deepest, assumed)
        twin = shared.get(("", *spec[:3])) if role == "output" else None
        found = twin if twin is not None and twin.about.kind == "sae" else shared[key]
        site = found.sites[0]
        stage = {"z": 1, "attn_out": 1}.get(site.kind, 0 if site.kind == "resid_pre" else 2)
        if stage == 2 and model.family.parallel(model.config):
            stage = 0
        layer = spec.layer if spec.kind != "unembed" else len(model.layers) + 1
        return _View(found, Place(layer, stage if role == "output" else 0))

    bases = {s.layer: of(s, "basis") for s in basis if s.layer < len(model.layers)}
    outputs = [of(spec, "output") for spec in output]
    return Sources(bases, {view.place: view for view in outputs})


def _source(
    model: LoadedModel,
    spec: SourceSpec,
    release: Release | None,
    role: Role,
    deepest: int,
    assumed: list[str],
) -> _Source:
    """From a configuration alone; what it does not say is assumed aloud."""

    def about(kind: str, layer: int, n: int, name: str, bos: bool | None = None) -> SourceInfo:
        return SourceInfo(kind, layer, name, None, n, "", "", (), bos, None)

    vocabulary, stream = model.vocabulary, (Site("resid_pre", spec.layer),)
    if spec.kind == "tokens":
        return _Source(0, about("tokens", 0, vocabulary, "tokens"), 1, vocabulary, stream)
    if spec.kind == "unembed" or release is None:
        layer = len(model.layers)
        found = about("unembed", layer, vocabulary, "unembed")
        return _Source(layer, found, N_PREDICTED + 1, vocabulary, (Site("resid_pre", layer),))
    check_release(release, spec.layer, role, model.d_model)
    used, kind, sites = release.dictionaries, release.kind, stream
    if kind == "transcoders" and role == "basis":
        used = tuple(d for d in used if layer_of(d) < deepest)
        sites = (*(Site("mlp_in", layer_of(d)) for d in used), Site("resid_pre", deepest))
    elif kind == "transcoders":
        used, sites = tuple(d for d in used if layer_of(d) == spec.layer), ()
        sites = (Site("mlp_in", spec.layer), Site("resid_pre", spec.layer))
    elif kind == "crosscoder":
        sites = tuple(site for d in used for site in d.reads if site is not None)
    elif used[0].reads[0] is not None and used[0].reads[0].kind != "resid_pre":
        sites = (used[0].reads[0], *stream)
    l0 = sum(_l0(d, assumed) for d in used)
    found = about(kind, spec.layer, release.features, release.name, used[0].prepend_bos)
    linear = all(d.activation.kind != "matching_pursuit" for d in used)
    own = kind == "transcoders" and role == "basis"
    return _Source(spec.layer, found, l0, release.features, sites, linear, own)


def _l0(dictionary: Dictionary, assumed: list[str]) -> int:
    """Active features a position."""
    found = dictionary.activation.k
    if found is None:
        found = min(GUESSED_SLOTS, dictionary.features)
        assumed.append(
            f"{dictionary.name}: {found} active features a position (its configuration does not "
            "say)"
        )
    return found


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
    config: RunConfig, plan: LayerPlan, order: Sequence[_Source]
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
            disk += count * size * _STORED[column.kind] * used
            memory += count * (8 if column.kind in ("q", "k", "o") else 4)
        return disk, memory

    columns = edge_columns(capped=plan.softcap is not None, parts=False)
    disk, memory = table(columns, "qk")
    if plan.output is not None:
        more = table(OV, "ov")
        disk, memory = disk + more[0], memory + more[1]
    return disk + 4, memory


def _memory(
    config: RunConfig,
    model: LoadedModel,
    plans: Sequence[LayerPlan],
    order: Sequence[_Source],
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
    config: RunConfig, budget: Budget, plan: LayerPlan, order: Sequence[_Source], length: int
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
    order: Sequence[_Source],
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
