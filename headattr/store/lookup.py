"""Where in a store: the edges of a feature or a pair, strongest first, as arrays.

A shard's index has the strongest edges of a feature with their strength. A page is exact: a shard
whose kept ones could leave some of the page out is read in full.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.edges import HeadId
from headattr.store.columns import RoleName
from headattr.store.filters import EdgeFilter
from headattr.store.hits import Hits, Page, edge_facts, no_hits
from headattr.store.index import BLOCK, Postings, RoleIndex, role_index
from headattr.store.reader import Store
from headattr.store.shard import Shard
from headattr.store.view import LayerView


@dataclass
class _Found:
    """What one layer of one shard has, as far as it was read."""

    shard: Shard
    layer: int
    rows: NDArray[np.int64]
    strengths: NDArray[np.floating]
    bound: float
    """No edge that was not read is stronger; -1 where all were."""
    count: int
    """Edges before any filter."""
    all: Callable[[], Postings]

    @property
    def view(self) -> LayerView:
        """The layer; not kept, so that shards may be closed meanwhile."""
        return self.shard.layer(self.layer)

    def keep(self, chosen: EdgeFilter, heads: set[HeadId]) -> None:
        """Only what a filter leaves."""
        kept = chosen.signed(self.strengths)
        rows, strengths = self.rows[kept], self.strengths[kept]
        order = np.argsort(rows, kind="stable")
        rows, strengths = rows[order], strengths[order]
        if len(rows):
            kept = chosen.keep(self.view, rows, self.view.where(rows), heads)
            rows, strengths = rows[kept], strengths[kept]
        self.rows, self.strengths = rows, strengths

    def read_all(self, chosen: EdgeFilter, heads: set[HeadId]) -> None:
        """Everything, from the shard."""
        found = self.all()
        self.rows, self.strengths, self.bound = found.rows, found.strengths, -1.0
        self.keep(chosen, heads)


def layers_of(store: Store, source: int, role: RoleName) -> list[int]:
    """Layers where features of a source can have a role."""
    key = "output" if role == "o" else "basis"
    return [
        plan["layer"]
        for plan in store.manifest["layers"]
        if plan[key] == source and (role in "qk" or plan["output"] is not None)
    ]


def feature_page(
    store: Store,
    source: int,
    feature: int,
    role: RoleName,
    chosen: EdgeFilter,
    start: int = 0,
    count: int = 20,
) -> Page:
    """Edges where a feature (its id in the store) is among the strongest of its role, strongest
    first: by |marginal| (with `rank` contrast by |contrast|), norm written, or |read|."""
    if chosen == EdgeFilter() and (
        page := _merged_page(store, source, feature, role, start, count)
    ):
        return page
    heads = chosen.heads_of(store.heads)
    layers = [
        layer
        for layer in layers_of(store, source, role)
        if any(HeadId(layer, head) in heads for head in store.heads_in(layer))
    ]
    found: list[_Found] = []
    for shard in store.shards:
        with store.tolerating(shard):
            for layer in layers:
                if shard.has(layer):
                    found.append(_of_feature(shard, layer, feature, role))
                    found[-1].keep(chosen, heads)
    return _page(found, chosen, heads, start, count)


def _merged_page(
    store: Store, source: int, feature: int, role: RoleName, start: int, count: int
) -> Page | None:
    """The page from the index of all shards; None without one, or beyond what it keeps."""
    if store.merged is None:
        return None
    columns: dict[str, list[Any]] = {name: [] for name in Hits._fields}
    total = 0
    for layer in layers_of(store, source, role):
        if (found := store.merged.page(layer, role, feature)) is None:
            continue
        facts, edges = found
        if len(facts["score"]) < min(edges, start + count):
            return None
        total += edges
        for name in columns.keys() - {"layer"}:
            columns[name].append(facts[name])
        columns["layer"].append(np.full(len(facts["score"]), layer))
    if not total:
        return Page(no_hits(), 0)
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    order = np.argsort(-np.abs(whole["strength"]), kind="stable")[start : start + count]
    for name in ("q_token", "k_token"):
        whole[name] = store.merged.texts(whole[name][order])
    return Page(
        Hits(**{n: rows if n.endswith("token") else rows[order] for n, rows in whole.items()}),
        total,
    )


def _of_feature(shard: Shard, layer: int, feature: int, name: RoleName) -> _Found:
    def index() -> RoleIndex:
        return role_index(shard.layer(layer), name)

    best, count = index().best(feature), index().count(feature)
    bound = float(np.abs(best.strengths[-1])) if count > len(best.rows) else -1.0
    rest = best.rows, best.strengths, bound, count, lambda: index().all(feature)
    return _Found(shard, layer, *rest)


class HeadSums(NamedTuple):
    """What a pair comes to in one head."""

    head: HeadId
    edges: int
    """Edges that keep it."""
    total: float
    """Sum of its values there."""


def pair_page(
    store: Store,
    source: int,
    left: int,
    right: int,
    table: Literal["qk", "ov"],
    chosen: EdgeFilter,
    start: int = 0,
    count: int = 20,
) -> tuple[Page, list[HeadSums]]:
    """Edges that keep a pair (query by key feature, or value by output feature; ids in the store),
    strongest first by |value|, and what it comes to by head. `source`: the basis."""
    heads = chosen.heads_of(store.heads)
    found: list[_Found] = []
    for shard in store.shards:
        with store.tolerating(shard):
            for layer in layers_of(store, source, "q" if table == "qk" else "v"):
                if shard.has(layer):
                    rows, values = pair_rows(shard.layer(layer), left, right, table)
                    none = Postings(rows, rows, values)
                    one = _Found(shard, layer, rows, values, -1.0, len(rows), lambda p=none: p)
                    one.keep(chosen, heads)
                    found.append(one)
    return _page(found, chosen, heads, start, count), _by_head(found)


def _by_head(found: list[_Found]) -> list[HeadSums]:
    """Heads by the size of the sum, largest first."""
    sums: dict[HeadId, tuple[int, float]] = {}
    for one in found:
        view = one.view
        places = view.where(one.rows).head
        totals = np.bincount(places, one.strengths, len(view.heads))
        for place, edges in enumerate(np.bincount(places, minlength=len(totals)).tolist()):
            head = HeadId(one.layer, view.heads[place])
            before = sums.get(head, (0, 0.0))
            if edges:
                sums[head] = before[0] + edges, before[1] + float(totals[place])
    listed = [HeadSums(head, *found) for head, found in sums.items()]
    return sorted(listed, key=lambda one: (-abs(one.total), one.head))


def pair_rows(
    view: LayerView, left: int, right: int, table: Literal["qk", "ov"]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Rows of a layer that keep a pair, ascending, and its value in each.

    Only edges whose positions have both features active are looked at.
    """
    columns = view.edge_columns if table == "qk" else view.ov_columns
    names = ("q_slots", "k_slots") if table == "qk" else ("v_slots", "o_slots")
    found_rows, found_values = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for rows in _candidates(view, left, right, table):
        where = view.where(rows)
        ids = [view.ids(columns[name], rows, where) for name in names]
        at, place = np.nonzero((ids[0] == left) & (ids[1] == right))
        found_rows.append(rows[at])
        found_values.append(view.read(columns["values"], rows)[at, place])
    return np.concatenate(found_rows), np.concatenate(found_values)


def _candidates(
    view: LayerView, left: int, right: int, table: Literal["qk", "ov"]
) -> Iterator[NDArray[np.int64]]:
    """Rows whose ends have both features active, in parts."""
    active = [_active(view, view.basis, left), None]
    if table == "qk":
        active[1] = _active(view, view.basis, right)
    elif not view.attrs["every_output"]:
        active[1] = _active(view, int(view.attrs["output"]), right)
    for start in range(0, len(view), BLOCK):
        rows = slice(start, min(start + BLOCK, len(view)))
        where = view.where(rows)
        ends = [where.begin + where.q_pos, where.begin + where.k_pos]
        if table == "ov":
            ends.reverse()
        kept = np.ones(rows.stop - rows.start, bool)
        for on, at in zip(active, ends, strict=True):
            kept &= True if on is None else on[at]
        if kept.any():
            yield np.flatnonzero(kept) + start


def _active(view: LayerView, source: int, feature: int) -> NDArray[np.bool_]:
    """[position of the shard] where a feature is active."""
    found = view.source(source)
    on = np.zeros(len(found.ptr) - 1, bool)
    on[found.positions(feature)] = True
    return on


def _page(
    found: list[_Found], chosen: EdgeFilter, heads: set[HeadId], start: int, count: int
) -> Page:
    """The edges from place `start`, exactly."""
    wanted = start + count
    while True:
        sizes = np.concatenate([np.empty(0), *(np.abs(one.strengths) for one in found)])
        last = np.partition(sizes, -wanted)[-wanted] if 0 < wanted <= len(sizes) else 0.0
        unread = [one for one in found if one.bound >= last and one.bound >= 0]
        if not unread:
            break
        for one in unread:
            with one.shard.reading():
                one.read_all(chosen, heads)
    complete = all(one.bound < 0 for one in found)
    whole = chosen.edges_alone and chosen.sign == "both" and chosen.heads == "all"
    total = len(sizes) if complete else sum(one.count for one in found) if whole else None
    which = np.repeat(np.arange(len(found)), [len(one.rows) for one in found])
    rows = np.concatenate([np.empty(0, np.int64), *(one.rows for one in found)])
    order = np.lexsort((rows, which, -sizes))[start:wanted]
    return Page(_hits(found, which[order], rows[order]), total)


def _hits(found: list[_Found], which: NDArray[np.int64], rows: NDArray[np.int64]) -> Hits:
    """Facts of some rows, in the order given."""
    columns: dict[str, NDArray[Any]] = {}
    for number in np.unique(which).tolist():
        one, places = found[number], np.flatnonzero(which == number)
        order = np.argsort(rows[places], kind="stable")
        places = places[order]
        some = rows[places]
        at = np.searchsorted(one.rows, some)
        with one.shard.reading():
            facts = {**edge_facts(one.shard, one.view, some), "strength": one.strengths[at]}
        for name, column in facts.items():
            if name not in columns:
                columns[name] = np.empty(len(rows), column.dtype)
            columns[name][places] = column
    if not columns:
        return no_hits()
    return Hits(**columns)
