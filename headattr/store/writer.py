"""Results of some prompts -> one shard and its sidecar, each published whole or not at all.

Prompts, then edges layer by layer, are appended as they come; memory does not grow with the edges.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from headattr.store.coding import falling_codes, slot_type
from headattr.store.columns import Column, Rank, edge_columns, ov_columns
from headattr.store.format import (
    PAIR_CHUNK,
    SCALAR_CHUNK,
    SHARD_FORMAT,
    VERSION,
    file_hash,
    key_type,
    make_keys,
    shard_name,
    sync,
    temporary_beside,
)
from headattr.store.growing import Filter, Growing
from headattr.store.index import write_index
from headattr.store.receipt import compare, created, publish_shard, receipt, refused
from headattr.store.sources import ActiveLists, SourceWriter
from headattr.store.tallies import write_tallies
from headattr.store.view import LayerView
from headattr.tables import EdgePart, LayerFacts


class PromptRecord(NamedTuple):
    """What a shard keeps of one prompt beside its edges."""

    id: int
    tokens: Sequence[int]
    token_texts: Sequence[str]
    text: str | None
    extra: dict[str, Any]
    truncated: bool
    sources: dict[int, ActiveLists]


class LayerPlan(NamedTuple):
    """What the manifest says of one layer."""

    layer: int
    heads: list[int]
    basis: int
    """Index of the source that decomposes it."""
    output: int | None
    read: str | None
    every_output: bool
    ov_reason: str | None
    """Why there is no output."""
    window: int | None = None
    """How many keys a query sees, itself included; None is all before it."""
    softcap: float | None = None
    """c of c tanh(s / c), between score and softmax."""


@contextmanager
def new_shard(
    folder: Path,
    index: int,
    plans: Sequence[LayerPlan],
    *,
    manifest_hash: str,
    longest: int,
    rank: Rank = "value",
    filters: Filter = "zstd",
    compact: bool = False,
) -> Iterator["ShardWriter"]:
    """Publish `NNNNN.h5`, then `NNNNN.json` with its rows and hash, when the block ends well.

    `longest`: tokens of the longest prompt; `rank`: what pairs are the strongest by. Raises
    StoreError, naming the path and the cause, if the disk refuses; nothing half-written keeps a
    name.
    """
    path = folder / f"{shard_name(index)}.h5"
    with refused(path), temporary_beside(path) as temporary:
        with created(temporary) as file:
            file.attrs.update(
                format=SHARD_FORMAT, version=VERSION, manifest_hash=manifest_hash, shard=index
            )
            writer = ShardWriter(file, plans, key_type(longest), rank, filters, compact)
            yield writer
            edges, written = writer.finish(), receipt(file)
        sync(temporary)
        compare(temporary, written)
        sidecar = {
            "format": SHARD_FORMAT,
            "version": VERSION,
            "shard": index,
            "manifest_hash": manifest_hash,
            "sha256": file_hash(temporary),
            "bytes": temporary.stat().st_size,
            "edges": edges,
            "prompts": [prompt.id for prompt in writer.prompts],
            "set_aside": writer.set_aside,
        }
        publish_shard(temporary, path, sidecar)


class ShardWriter:
    """A shard that is being written: prompts in order, then for each layer its edges, prompt by
    prompt."""

    def __init__(
        self,
        file: h5py.File,
        plans: Sequence[LayerPlan],
        keys: np.dtype[Any],
        rank: Rank,
        filters: Filter,
        compact: bool,
    ) -> None:
        """An empty shard; `keys`: the type of edge keys."""
        self.file, self.prompts = file, list[PromptRecord]()
        self.filters: Filter = filters
        self.set_aside: list[dict[str, Any]] = []
        """Prompts that failed, for the sidecar."""
        self.sources: dict[int, SourceWriter] = {}
        self.layers = {
            plan.layer: _Layer(file, plan, keys, rank, filters, compact) for plan in plans
        }

    def add_prompt(self, prompt: PromptRecord) -> None:
        """The next prompt; its layers follow."""
        self.prompts.append(prompt._replace(sources={}))
        for index, active in prompt.sources.items():
            if index not in self.sources:
                self.sources[index] = SourceWriter(
                    self.file.create_group(f"source/{index}"), self.filters
                )
            self.sources[index].add(active)
        self._fit_slots()

    def _fit_slots(self) -> None:
        """Slots as wide as the lists that are there need."""
        longest = {index: source.longest for index, source in self.sources.items()}
        for layer in self.layers.values():
            layer.widen(longest)

    def add_edges(self, layer: int, part: EdgePart) -> None:
        """More edges of the prompt that this layer is at."""
        self.layers[layer].add_edges(part)

    def add_layer(self, facts: LayerFacts) -> None:
        """A layer has all edges of the prompt it is at; the next is the next prompt's."""
        self.layers[facts.layer].add_facts(facts)

    def cut(self, prompts: int) -> None:
        """Forget everything behind the first `prompts` prompts, whatever is there of it."""
        del self.prompts[prompts:]
        for part in (*self.sources.values(), *self.layers.values()):
            part.cut(prompts)
        if prompts:  # a list that is gone may have been the longest
            self._fit_slots()

    def finish(self) -> int:
        """Write what is held; returns the number of edges."""
        _write_prompts(self.file, self.prompts)
        if not self.prompts:  # as if none had ever come: those that did were cut
            for name in {"source", "layer"} & self.file.keys():
                del self.file[name]
            return 0
        for source in self.sources.values():
            source.finish()
        edges = sum(layer.finish() for layer in self.layers.values())
        for layer in self.layers:
            view = LayerView(self.file, layer)
            write_index(view, self.filters)
            write_tallies(view, view.group.require_group("tally"), self.filters)
        return edges


def _write_prompts(file: h5py.File, prompts: Sequence[PromptRecord]) -> None:
    group = file.create_group("prompt")
    text = h5py.string_dtype()
    group["id"] = np.array([prompt.id for prompt in prompts], np.int64)
    group["ptr"] = np.cumsum([0, *(len(prompt.tokens) for prompt in prompts)], dtype=np.int64)
    group["token"] = np.array([t for prompt in prompts for t in prompt.tokens], np.int32)
    group.create_dataset(
        "token_text", data=[t for prompt in prompts for t in prompt.token_texts], dtype=text
    )
    group.create_dataset("text", data=[prompt.text or "" for prompt in prompts], dtype=text)
    group.create_dataset("extra", data=[json.dumps(prompt.extra) for prompt in prompts], dtype=text)
    group["truncated"] = np.array([prompt.truncated for prompt in prompts], bool)


@dataclass
class _Layer:
    """The edges of one layer."""

    file: h5py.File
    plan: LayerPlan
    keys: np.dtype[Any]
    rank: Rank
    filters: Filter
    compact: bool
    facts: list[LayerFacts] = field(default_factory=list)
    counts: list[NDArray[np.int64]] = field(default_factory=list)
    """Edges of each prompt by head; the last is the prompt at work."""
    columns: dict[str, Growing] = field(default_factory=dict)
    slots: dict[str, np.dtype[Any]] = field(default_factory=dict)

    def _column(self, name: str, column: Column) -> Growing:
        if name not in self.columns:
            group = self.file.require_group(f"layer/{self.plan.layer}")
            chunk = SCALAR_CHUNK if column.kind == "scalar" else PAIR_CHUNK
            bits = column.compact if self.compact and column.compact else column.bits
            kept = Growing(group, column.dataset, chunk, self.filters, bits=bits)
            kept.slots = self.slots.get(column.kind)
            self.columns[name] = kept
        return self.columns[name]

    def _append(self, name: str, column: Column, rows: NDArray[Any]) -> None:
        if column.kind == "falling":
            first, rows = falling_codes(rows)
            self._column(f"{name}_first", column.first).append(first)
        else:
            rows = rows.astype(np.int32 if column.kind in self.slots else np.float32)
        self._column(name, column).append(rows)

    def widen(self, longest: dict[int, int]) -> None:
        """Slots reach lists of this length, by source."""
        plan, basis = self.plan, slot_type(longest[self.plan.basis])
        self.slots = {"q": basis, "k": basis, "part": np.dtype(np.uint16)}
        if plan.output is not None:
            self.slots["o"] = slot_type(1 << 31 if plan.every_output else longest[plan.output])
        every = edge_columns(capped=True, parts=True, rank=self.rank)
        for columns, prefix in ((every, ""), (ov_columns(parts=True), "ov.")):
            for name, column in columns.items():
                if column.kind in self.slots and prefix + name in self.columns:
                    self.columns[prefix + name].widen(self.slots[column.kind])

    def add_edges(self, part: EdgePart) -> None:
        """More edges of the prompt at work."""
        if len(self.counts) == len(self.facts):
            self.counts.append(np.zeros(len(self.plan.heads), np.int64))
        self.counts[-1][self.plan.heads.index(part.head)] += len(part.columns["q_pos"])
        keys = make_keys(part.columns["q_pos"], part.columns["k_pos"], self.keys)
        self._column("key", Column("key", "scalar")).append(keys)
        parts = part.columns["q_parts"].shape[1] > 0
        capped = self.plan.softcap is not None
        columns = edge_columns(capped=capped, parts=parts, rank=self.rank)
        kept = [("", columns, part.columns)]
        if part.ov is not None:
            kept.append(("ov.", ov_columns(parts=parts), part.ov))
        for prefix, columns, found in kept:
            for name, column in columns.items():
                self._append(prefix + name, column, found[name])

    def add_facts(self, facts: LayerFacts) -> None:
        """The prompt at work is done."""
        if len(self.counts) == len(self.facts):
            self.counts.append(np.zeros(len(self.plan.heads), np.int64))
        self.facts.append(facts)

    def cut(self, prompts: int) -> None:
        """Forget all but the first prompts."""
        del self.facts[prompts:], self.counts[prompts:]
        edges = int(sum(counts.sum() for counts in self.counts))
        for column in self.columns.values():
            column.cut(edges)

    def finish(self) -> int:
        """Write what is held and what the prompts have once; returns the number of edges."""
        plan, facts = self.plan, self.facts
        for column in self.columns.values():
            column.finish()
        group: Any = self.file[f"layer/{plan.layer}"]
        group.attrs.update(
            heads=np.array(plan.heads, np.int32),
            kinds=json.dumps(facts[0].kinds),
            parts=json.dumps(facts[0].parts),
            basis=plan.basis,
            output=-1 if plan.output is None else plan.output,
            read=plan.read or "",
            every_output=plan.every_output,
            rank=self.rank,
        )
        for name in ("window", "softcap"):
            if getattr(plan, name) is not None:
                group.attrs[name] = getattr(plan, name)
        group["group_ptr"] = np.cumsum(np.concatenate([[0], *self.counts]), dtype=np.int64)
        group["flagged"] = np.concatenate([found.flagged for found in facts])
        shares = [found.sink_share.T for found in facts]
        group["sink_share"] = np.concatenate(shares).astype(np.float32)
        group["share_sums"] = np.stack([found.share_sums for found in facts])
        group["pattern_error"] = np.array([found.pattern_error for found in facts], np.float32)
        group["qk"].attrs["n_nonfinite"] = sum(found.n_nonfinite for found in facts)
        if plan.output is not None:
            whole = [f.block_completeness for f in facts if f.block_completeness is not None]
            group["ov/block_completeness"] = np.concatenate(whole).astype(np.float32)
        return len(group["key"])
