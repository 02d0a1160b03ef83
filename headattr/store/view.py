"""A layer of an open shard as arrays: rows of its columns, decoded; which edge a row is.

Bulk readers (index, queries, export, check) and the reader of one edge all go through this.
"""

import json
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.edges import token_filter
from headattr.store.coding import decode_slots, falling_values
from headattr.store.columns import Column, Role, edge_columns, ov_columns, roles
from headattr.store.format import split_keys

_CONTIGUOUS = 1 << 12
"""Rows that are read together of a dataset without chunks."""

Rows = slice | NDArray[np.integer] | int
"""Some edges of a layer; an array is ascending, without repetitions."""


class Where(NamedTuple):
    """Which edges some rows are."""

    prompt: NDArray[np.int64]
    """Place of the prompt in the shard."""
    head: NDArray[np.int64]
    """Place of the head in the layer's heads."""
    q_pos: NDArray[np.int64]
    k_pos: NDArray[np.int64]
    begin: NDArray[np.int64]
    """Where the prompt's positions begin in the shard."""


class SourceView:
    """The active lists of one source of an open shard."""

    def __init__(self, file: Any, source: int) -> None:
        """`file`: an open shard."""
        self.file, self.group = file, file[f"source/{source}"]

    @cached_property
    def ptr(self) -> NDArray[np.int64]:
        """Where the list of each position begins."""
        return self.group["ptr"][:]

    @cached_property
    def feature(self) -> Any:
        """The ids of all lists, on disk."""
        return self.group["feature"]

    @cached_property
    def act(self) -> Any:
        """The activations of all lists, on disk."""
        return self.group["act"]

    @cached_property
    def features(self) -> NDArray[np.int64]:
        """The ids of all lists, in memory."""
        return self.feature[:].astype(np.int64)

    def positions(self, feature: int) -> NDArray[np.int64]:
        """The positions of the shard where a feature is active, ascending."""
        inverse = self.group["inverse"]
        features = inverse["feature"][:]
        at = int(np.searchsorted(features, np.uint32(feature)))
        if at == len(features) or features[at] != feature:
            return np.empty(0, np.int64)
        start, stop = inverse["ptr"][at : at + 2]
        return inverse["position"][start:stop].astype(np.int64)

    def ids(self, slots: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
        """Features of slots [row, n] in the lists of positions [row]; -1 stays."""
        if not len(self.features):
            return np.full(slots.shape, -1, np.int64)
        places = np.minimum(self.ptr[at][:, None] + np.maximum(slots, 0), len(self.features) - 1)
        return np.where(slots < 0, -1, self.features[places])


class LayerView:
    """The edges of one layer of an open shard."""

    def __init__(self, file: Any, layer: int) -> None:
        """`file`: an open shard that has this layer."""
        self.file, self.layer = file, layer
        self.group: Any = file[f"layer/{layer}"]
        self._datasets: dict[str, Any] = {}
        self._sources: dict[int, SourceView] = {}
        self._matched = "", np.empty(0, bool)

    @cached_property
    def attrs(self) -> dict[str, Any]:
        """The attributes of the layer's group."""
        return dict(self.group.attrs)

    @cached_property
    def heads(self) -> list[int]:
        """The heads that were attributed."""
        return self.attrs["heads"].tolist()

    @cached_property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """(kind, name) of the members of kinds that have several."""
        return tuple((kind, name) for kind, name in json.loads(self.attrs["parts"]))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the basis' components."""
        return tuple(json.loads(self.attrs["kinds"]))

    @property
    def basis(self) -> int:
        """The source of query, key and value features."""
        return int(self.attrs["basis"])

    @property
    def output(self) -> int | None:
        """The source of output features."""
        return None if self.attrs["output"] < 0 else int(self.attrs["output"])

    @cached_property
    def edge_columns(self) -> dict[str, Column]:
        """Columns of the score, by field."""
        capped, rank = "softcap" in self.attrs, self.attrs["rank"]
        return edge_columns(capped=capped, parts=bool(self.parts), rank=rank)

    @cached_property
    def ov_columns(self) -> dict[str, Column]:
        """Columns of what is moved, by field; none without an output."""
        return {} if self.output is None else ov_columns(parts=bool(self.parts))

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """The roles that features have here."""
        return roles(self.attrs["rank"], moved=self.output is not None)

    @cached_property
    def group_ptr(self) -> NDArray[np.int64]:
        """Where the edges of each (prompt, head) begin."""
        return self.group["group_ptr"][:]

    @cached_property
    def prompt_ptr(self) -> NDArray[np.int64]:
        """Where the positions of each prompt begin."""
        return self.file["prompt/ptr"][:]

    def __len__(self) -> int:
        """Edges."""
        return len(self.dataset("key"))

    def dataset(self, name: str) -> Any:
        """A dataset of the layer, kept open."""
        if name not in self._datasets:
            self._datasets[name] = self.group[name]
        return self._datasets[name]

    def source(self, index: int) -> SourceView:
        """The active lists of a source, kept."""
        if index not in self._sources:
            self._sources[index] = SourceView(self.file, index)
        return self._sources[index]

    def matching(self, text: str) -> NDArray[np.bool_]:
        """Which positions of the shard have a token that a token filter means; the last is kept."""
        if self._matched[0] != text:
            shown = [token.decode() for token in self.file["prompt/token_text"][:]]
            self._matched = text, token_filter(text, shown)
        return self._matched[1]

    def where(self, rows: slice | NDArray[np.integer]) -> Where:
        """Which edges these are."""
        q_pos, k_pos = split_keys(self.take("key", rows))
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        group = np.searchsorted(self.group_ptr, numbers, "right") - 1
        prompt, head = np.divmod(group, len(self.heads))
        return Where(prompt, head, q_pos, k_pos, self.prompt_ptr[prompt])

    def take(self, name: str, rows: Rows) -> Any:
        """Some rows of a dataset as stored. Scattered rows are picked out of whole chunks, which
        are decompressed anyway."""
        dataset = self.dataset(name)
        if not isinstance(rows, np.ndarray):
            return dataset[rows]
        if not len(rows):
            return dataset[:0]
        size = dataset.chunks[0] if dataset.chunks else _CONTIGUOUS
        chunks, begin = np.unique(rows // size, return_index=True)
        parts = [
            dataset[chunk * size : (chunk + 1) * size][some - chunk * size]
            for chunk, some in zip(chunks.tolist(), np.split(rows, begin[1:]), strict=True)
        ]
        return np.concatenate(parts)

    def read(self, column: Column, rows: Rows) -> Any:
        """Some rows of a column: floats, or slots with -1 for none."""
        found = self.take(column.dataset, rows)
        if column.kind == "falling":
            return falling_values(np.asarray(self.take(column.first.dataset, rows)), found)
        return decode_slots(found) if column.kind in ("q", "k", "o", "part") else found

    def ids(self, column: Column, rows: slice | NDArray[np.integer], where: Where) -> Any:
        """Some rows of a column of slots as feature ids, -1 for none."""
        slots = self.read(column, rows)
        if column.kind == "o":
            if self.attrs["every_output"]:
                return slots
            return self.source(int(self.attrs["output"])).ids(slots, where.begin + where.q_pos)
        at = where.begin + (where.q_pos if column.kind == "q" else where.k_pos)
        return self.source(self.basis).ids(slots, at)

    def reads(self, rows: Rows) -> NDArray[np.float32]:
        """What each of the strongest output features reads: the sum of its totals."""
        totals = self.read(self.ov_columns["o_totals"], rows)
        return totals.astype(np.float64).sum(-1).astype(np.float32)

    def strongest(
        self, role: Role, rows: slice | NDArray[np.integer], where: Where
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids [row, 8] of the features of a role, -1 for none, and how strong each is."""
        columns = self.edge_columns if role.table == "qk" else self.ov_columns
        ids = self.ids(columns[role.top], rows, where)
        if role.strength == "o_reads":
            return ids, self.reads(rows)
        return ids, self.read(columns[role.strength], rows)
