"""What a head's pairs come to: written with a shard, added up over shards when asked.

Of every head the pairs with the largest sum of sizes and those that are kept by the most edges;
beside them, the most that a pair which is left out can have.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from headattr.store.format import SCALAR_CHUNK
from headattr.store.growing import Filter, Growing
from headattr.store.index import BLOCK
from headattr.store.view import LayerView, Where

KEPT = 256
"""Pairs of a head that are kept by either order."""
_AT_WORK = 1 << 20
"""Pairs of a head that are counted at once; beyond it the weakest are let go."""

Table = Literal["qk", "ov"]


class Tally(NamedTuple):
    """Sums over the edges of a head; columns by pair, in the order of their ids."""

    left: NDArray[np.int64]
    """Query (value) feature."""
    right: NDArray[np.int64]
    """Key (output) feature."""
    edges: NDArray[np.int64]
    """Edges that keep the pair."""
    total: NDArray[np.float64]
    """Sum of its values there."""
    size: NDArray[np.float64]
    """Sum of the sizes of its values."""
    missed_count: int
    """A pair that is not here is kept by at most so many edges."""
    missed_size: float
    """And has at most this sum of sizes."""


def tally(columns: Sequence[NDArray[Any]], missed_count: int, missed_size: float) -> Tally:
    """A tally of five columns."""
    left, right, edges, total, size = columns
    return Tally(left, right, edges, total, size, missed_count, missed_size)


EMPTY = tally([np.empty(0, np.int64)] * 3 + [np.empty(0, np.float64)] * 2, 0, 0.0)


SUMS = 8
"""Numbers of `head_sums`."""


def head_sums(view: LayerView) -> NDArray[np.float64]:
    """[head, 8] sums over a layer's edges: how many, |score|, the four `share_sums`; and over its
    positions: pattern mass on those that swallow attention, how many."""
    sums = np.empty((len(view.heads), SUMS))
    counts, sinks = np.diff(view.group_ptr), view.dataset("sink_share")[:].astype(np.float64)
    for place in range(len(view.heads)):
        sums[place, 0] = counts[place :: len(view.heads)].sum()
    sums[:, 1] = view.dataset("tally/score_size")[:]
    sums[:, 2:6] = view.dataset("share_sums")[:].sum(0)
    sums[:, 6], sums[:, 7] = sinks.sum(0), len(sinks)
    return sums


def write_tallies(view: LayerView, into: h5py.Group, filters: Filter) -> None:
    """The tallies of a layer whose columns are written, into an empty group."""
    sizes = np.zeros(len(view.heads))
    for rows in _blocks(view):
        score = np.abs(view.take("score", rows).astype(np.float64))
        sizes += np.bincount(view.where(rows).head, score, len(sizes))
    into["score_size"] = sizes
    for table in ("qk", "ov") if view.output is not None else ("qk",):
        group = into.create_group(table)
        found = _of_heads(view, table)
        ptr = np.cumsum([0, *(len(one.left) for one in found)], dtype=np.int64)
        types = {"left": np.uint32, "right": np.uint32, "edges": np.uint32}
        for name in ("left", "right", "edges", "total", "size"):
            column = Growing(group, name, SCALAR_CHUNK, filters)
            rows = np.concatenate([np.empty(0), *(getattr(one, name) for one in found)])
            column.append(rows.astype(types.get(name, np.float64)))
            column.finish()
        group["ptr"] = ptr
        group["missed_count"] = np.array([one.missed_count for one in found], np.int64)
        group["missed_size"] = np.array([one.missed_size for one in found], np.float64)


def read_tally(view: LayerView, head: int, table: Table) -> Tally:
    """The tally of the head at this place of the layer's heads."""
    group: Any = view.group[f"tally/{table}"]
    start, stop = group["ptr"][head : head + 2].tolist()
    columns = [group[name][start:stop] for name in ("left", "right", "edges", "total", "size")]
    types = (np.int64,) * 3 + (np.float64,) * 2
    return tally(
        [column.astype(dtype) for column, dtype in zip(columns, types, strict=True)],
        int(group["missed_count"][head]),
        float(group["missed_size"][head]),
    )


def add(tallies: list[Tally]) -> tuple[Tally, NDArray[np.int64], NDArray[np.float64]]:
    """Tallies as one, and how much more each of its pairs may have: of edges, of size.

    `edges`, `total` and `size` are what is known of a pair; a tally that lacks it may have up to
    `missed_count` edges and `missed_size` of it more. What the sum lacks altogether has at most
    its own `missed_count` and `missed_size`.
    """
    missed = np.array([one.missed_count for one in tallies], np.int64)
    missed_size = np.array([one.missed_size for one in tallies], np.float64)
    whole, known = _joined(tallies, which=True)
    n = len(whole.left)
    seen, size_seen = np.zeros(n, np.int64), np.zeros(n, np.float64)
    for number, places in enumerate(known):
        seen[places] += missed[number]
        size_seen[places] += missed_size[number]
    return (
        whole._replace(missed_count=int(missed.sum()), missed_size=float(missed_size.sum())),
        missed.sum() - seen,
        missed_size.sum() - size_seen,
    )


def _of_heads(view: LayerView, table: Table) -> list[Tally]:
    """The tally of every head, in one pass over the edges."""
    found, let_go = [EMPTY] * len(view.heads), set[int]()
    for rows in _blocks(view):
        for head, part in _by_head(view, rows, table):
            found[head] = _joined([found[head], part])[0]
            if len(found[head].left) > _AT_WORK // len(found):
                found[head] = cut(found[head], _AT_WORK // len(found) // 4)
                let_go.add(head)
    found = [cut(one, KEPT) for one in found]
    return _counted_again(view, table, found, let_go) if let_go else found


def _counted_again(
    view: LayerView, table: Table, found: list[Tally], let_go: set[int]
) -> list[Tally]:
    """The same pairs over all edges, for heads some of whose pairs were let go of on the way, and
    may have come again."""
    codes = [one.left << 32 | one.right for one in found]
    sums = [[np.zeros_like(column) for column in one[2:5]] for one in found]
    for rows in _blocks(view):
        for head, part in _by_head(view, rows, table):
            _, at, places = np.intersect1d(
                codes[head], part.left << 32 | part.right, assume_unique=True, return_indices=True
            )
            for column, more in zip(sums[head], part[2:5], strict=True):
                column[at] += more[places]
    return [
        tally([one.left, one.right, *sums[head]], one.missed_count, one.missed_size)
        if head in let_go
        else one
        for head, one in enumerate(found)
    ]


def _blocks(view: LayerView) -> Iterator[slice]:
    return (slice(i, min(i + BLOCK, len(view))) for i in range(0, len(view), BLOCK))


def _by_head(view: LayerView, rows: slice, table: Table) -> Iterator[tuple[int, Tally]]:
    """The tallies of some edges, of each head that has any."""
    where = view.where(rows)
    left, right, values = _pairs_of(view, rows, where, table)
    for head in np.unique(where.head).tolist():
        own = where.head == head
        yield head, _whole(left[own], right[own], values[own])


def tally_of(view: LayerView, rows: NDArray[np.int64], table: Table) -> Tally:
    """The tally of some ascending rows, complete."""
    return _whole(*_pairs_of(view, rows, view.where(rows), table))


def _pairs_of(
    view: LayerView, rows: slice | NDArray[np.int64], where: Where, table: Table
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Both features and the value of every kept pair, [row, pair]; -1 for none."""
    columns = view.edge_columns if table == "qk" else view.ov_columns
    names = ("q_slots", "k_slots") if table == "qk" else ("v_slots", "o_slots")
    left, right = (view.ids(columns[name], rows, where) for name in names)
    return left, right, view.read(columns["values"], rows)


def _whole(left: NDArray[np.int64], right: NDArray[np.int64], values: NDArray[Any]) -> Tally:
    some = left >= 0
    values = values[some].astype(np.float64)
    ones = np.ones(len(values), np.int64)
    return _summed([left[some], right[some], ones, values, np.abs(values)], 0, 0.0)


def _joined(tallies: list[Tally], *, which: bool = False) -> tuple[Tally, list[Any]]:
    """Several as one; with `which` the places of each one's pairs in it."""
    columns = [np.concatenate(parts) for parts in zip(*(t[:5] for t in tallies), strict=True)]
    missed = sum(t.missed_count for t in tallies), sum(t.missed_size for t in tallies)
    whole = _summed(columns, *missed)
    if not which:
        return whole, []
    code = whole.left << 32 | whole.right
    return whole, [np.searchsorted(code, t.left << 32 | t.right) for t in tallies]


def _summed(columns: Sequence[NDArray[Any]], missed_count: int, missed_size: float) -> Tally:
    """Rows of one pair added up."""
    left, right, *sums = columns
    code = left << 32 | right
    order = np.argsort(code, kind="stable")
    code = code[order]
    begin = np.flatnonzero(np.diff(code, prepend=-1) != 0)
    if not len(begin):
        return EMPTY._replace(missed_count=missed_count, missed_size=missed_size)
    sums = [np.add.reduceat(column[order], begin) for column in sums]
    code = code[begin]
    return tally([code >> 32, code & 0xFFFFFFFF, *sums], missed_count, missed_size)


def cut(whole: Tally, most: int) -> Tally:
    """Only the pairs that are among the first `most` by size or by count."""
    if len(whole.left) <= most:
        return whole
    kept = np.zeros(len(whole.left), bool)
    for column in (whole.size, whole.edges):
        kept[np.argsort(-column, kind="stable")[:most]] = True
    if kept.all():
        return whole
    rest_count, rest_size = int(whole.edges[~kept].max()), float(whole.size[~kept].max())
    return tally(
        [column[kept] for column in whole[:5]],
        whole.missed_count + rest_count,
        whole.missed_size + rest_size,
    )
