"""The tables of a store as numpy columns, a shard at a time, in frames of bounded size.

`pandas.DataFrame(frame)` and `pyarrow.table(frame)` take a frame as it is; what a row may lack is
masked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headattr.edges import HeadId
from headattr.store.choice import Choice, Stored, choose, shards_of
from headattr.store.edge_frames import ROWS, Block, Frame, Naming, decoded
from headattr.store.fields import Field, fields
from headattr.store.shard import Shard
from headattr.store.view import LayerView

AT_ONCE = 1 << 17
"""Rows of a frame, unless one edge alone has more."""
_GAP = 2048
"""Rows that are read and left out rather than read around."""


@contextmanager
def _opened(shard: Shard) -> Iterator[Shard]:
    """A handle of its own: whoever else reads the shard may close theirs, and memory does not grow
    with the shards that were read."""
    own = Shard(shard.path, shard.sidecar)
    try:
        with own.reading():
            yield own
    finally:
        own.close()


def naming(store: Stored, choice: Choice, shards: Sequence[Shard]) -> Naming:
    """The kinds of all chosen layers, from the first of these shards, and the names of the
    sources."""
    kinds: dict[str, None] = {}
    for shard in shards[:1]:
        with _opened(shard) as own:
            for layer in sorted({head.layer for head in choice.heads}):
                kinds |= dict.fromkeys(own.layer(layer).kinds)
    sources = store.manifest["sources"]
    names, first = (tuple(source[key] for source in sources) for key in ("name", "first"))
    return Naming(tuple(kinds), names, first)


def frames(table: str, choice: Choice, names: Naming, shards: Iterable[Shard]) -> Iterator[Frame]:
    """A table of some shards, in order, in frames of at most `AT_ONCE` rows (one edge's at least).

    Raises StoreError, naming the file, where a shard is damaged.
    """
    wanted = fields(table, names.kinds)
    for shard in shards:
        with _opened(shard) as own:
            for found in _joined(_of_shard(own, table, choice, names)):
                yield {field.name: _typed(found[field.name], field) for field in wanted}


def frame(
    store: Stored, table: str, *, heads: str = "all", prompts: str | Iterable[int] = "all"
) -> Frame:
    """One table whole; see `Store.frame`."""
    choice = choose(store, heads, prompts)
    shards = shards_of(store, choice)
    names = naming(store, choice, shards)
    wanted = fields(table, names.kinds)
    found = list(frames(table, choice, names, shards))
    return _concatenated(found) if found else empty(wanted)


def empty(wanted: Sequence[Field]) -> Frame:
    """No rows of these columns."""
    return {field.name: _typed(np.empty(0), field) for field in wanted}


_TYPES = {"text": object, "bool": np.bool_}


def _typed(column: NDArray[Any], field: Field) -> NDArray[Any]:
    found = column.astype(_TYPES.get(field.type, field.type), copy=False)
    return np.ma.masked_array(found, np.isnan(found)) if field.optional else found


def _of_shard(shard: Shard, table: str, choice: Choice, names: Naming) -> Iterator[Frame]:
    chosen = choice.of(shard.ids)
    if table == "prompts":
        yield from _prompt_rows(shard, chosen)
    elif table == "tokens":
        yield from _token_rows(shard, chosen)
    else:
        for layer in sorted({head.layer for head in choice.heads}):
            view = shard.layer(layer)
            heads = [HeadId(layer, head) in choice.heads for head in view.heads]
            groups = np.logical_and.outer(chosen, heads).ravel()
            for rows in spans(view.group_ptr, groups, max(1, AT_ONCE // _an_edge(view, table))):
                found = ROWS[table](Block(view, rows, groups, names))
                if found is not None:
                    yield found


def _an_edge(view: LayerView, table: str) -> int:
    """Rows that an edge may have."""
    if table == "pairs":
        return max(1, view.dataset("qk/value").shape[1])
    if table == "moved" and view.output is not None:
        return max(1, view.dataset("ov/value").shape[1])
    return {"features": 32, "parts": 24}.get(table, 1)


def spans(ptr: NDArray[np.int64], wanted: NDArray[np.bool_], at_once: int) -> Iterator[slice]:
    """Rows of the wanted groups, `at_once` at most, with small gaps between them; group i is rows
    ptr[i] to ptr[i + 1]."""
    groups = np.flatnonzero(wanted & (np.diff(ptr) > 0))
    if not len(groups):
        return
    starts, stops = ptr[groups], ptr[groups + 1]
    apart = starts[1:] - stops[:-1] > _GAP
    begins, ends = starts[np.append(True, apart)], stops[np.append(apart, True)]
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        for start in range(begin, end, at_once):
            yield slice(start, min(start + at_once, end))


def _prompt_rows(shard: Shard, chosen: NDArray[np.bool_]) -> Iterator[Frame]:
    group, first = shard.file["prompt"], 0
    while first < len(
        chosen
    ):  # as many as have AT_ONCE positions together: their texts are as long
        last = int(np.searchsorted(shard.ptr, shard.ptr[first] + AT_ONCE, "right")) - 1
        rows = slice(first, max(first + 1, last))
        read = {name: group[name][rows] for name in ("id", "text", "extra", "truncated")}
        read["prompt"], read["n_tokens"] = read.pop("id"), np.diff(shard.ptr[first : rows.stop + 1])
        for name in ("text", "extra"):
            read[name] = decoded(read[name])
        yield {name: column[chosen[rows]] for name, column in read.items()}
        first = rows.stop


def _token_rows(shard: Shard, chosen: NDArray[np.bool_]) -> Iterator[Frame]:
    group, ids = shard.file["prompt"], np.array(shard.ids, np.int64)
    for rows in spans(shard.ptr, chosen, AT_ONCE):
        at = np.arange(rows.start, rows.stop)
        prompt = np.searchsorted(shard.ptr, at, "right") - 1
        found = {"prompt": ids[prompt], "position": at - shard.ptr[prompt]}
        found |= {"token": group["token"][rows], "text": decoded(group["token_text"][rows])}
        yield {name: column[chosen[prompt]] for name, column in found.items()}


def _joined(found: Iterable[Frame]) -> Iterator[Frame]:
    """Small frames together, as many as have AT_ONCE rows at most."""
    held: list[Frame] = []
    count = 0
    for one in found:
        rows = count_rows(one)
        if held and count + rows > AT_ONCE:
            yield _concatenated(held)
            held, count = [], 0
        if rows:
            held.append(one)
            count += rows
    if held:
        yield _concatenated(held)


def count_rows(frame: Mapping[str, Any]) -> int:
    """Rows of a frame."""
    return len(next(iter(frame.values())))


def _concatenated(found: Sequence[Frame]) -> Frame:
    join = {name: np.ma if np.ma.isMaskedArray(c) else np for name, c in found[0].items()}
    return {name: how.concatenate([part[name] for part in found]) for name, how in join.items()}
