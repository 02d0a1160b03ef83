"""Where a feature is among the strongest of an edge: written with a shard, read without the rest.

For every role (query, key, value, output feature) the rows of each feature, ascending, and apart
from them its strongest rows with how strong it is there.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from headattr.store.columns import Role, RoleName
from headattr.store.format import SCALAR_CHUNK
from headattr.store.growing import Filter, Growing
from headattr.store.view import LayerView
from headattr.tables import TOP_MARGINALS

BEST = 8
"""Rows of a feature that are kept with their strength."""
BLOCK = 1 << 16
"""Edges that are read at once."""
_AT_ONCE = 1 << 23
"""Postings that are sorted at once."""


class Postings(NamedTuple):
    """Where features are among the strongest."""

    features: NDArray[np.int64]
    rows: NDArray[np.int64]
    strengths: NDArray[np.float32]

    def at(self, places: NDArray[Any]) -> "Postings":
        """Some of them."""
        return Postings(self.features[places], self.rows[places], self.strengths[places])


def write_index(view: LayerView, filters: Filter) -> None:
    """The indexes of a layer whose columns are written."""
    for role in view.roles:
        write_role(view, role, view.group.require_group(f"index/{role.name}"), filters)


def write_role(view: LayerView, role: Role, group: h5py.Group, filters: Filter) -> None:
    """The index of one role, into an empty group."""
    few = len(view) * TOP_MARGINALS <= _AT_ONCE
    whole = collect(view, role) if few else None
    counts = _counts(view, role) if whole is None else np.bincount(whole.features)
    present = np.flatnonzero(counts)
    dtype = np.uint32 if len(view) < 1 << 32 else np.uint64
    columns: dict[str, Growing] = {}

    def add(name: str, rows: NDArray[Any]) -> None:
        if name not in columns:
            columns[name] = Growing(group, name, SCALAR_CHUNK, filters)
        columns[name].append(rows)

    add("feature", present.astype(np.uint32))
    for name, found in (("ptr", counts[present]), ("best_ptr", np.minimum(counts[present], BEST))):
        add(name, np.cumsum(np.concatenate([[0], found]), dtype=np.int64))
    for first, last in _ranges(counts[present]):
        low, high = int(present[first]), int(present[last - 1])
        found = _sorted(collect(view, role, low, high) if whole is None else whole)
        new = np.diff(found.features, prepend=-1) != 0
        add("step", np.where(new, found.rows, np.diff(found.rows, prepend=0)).astype(dtype))
        top = _best(found)
        add("best_row", top.rows.astype(dtype))
        add("best_strength", top.strengths)
    if not len(present):
        for name, kind in (("step", dtype), ("best_row", dtype), ("best_strength", np.float32)):
            add(name, np.empty(0, kind))
    for column in columns.values():
        column.finish()


def _counts(view: LayerView, role: Role) -> NDArray[np.int64]:
    """How often each feature is among the strongest."""
    counts = np.zeros(0, np.int64)
    for found in _blocks(view, role):
        here = np.bincount(found.features, minlength=len(counts))
        here[: len(counts)] += counts
        counts = here
    return counts


def _blocks(view: LayerView, role: Role) -> Iterator[Postings]:
    for start in range(0, len(view), BLOCK):
        rows = slice(start, min(start + BLOCK, len(view)))
        ids, strengths = view.strongest(role, rows, view.where(rows))
        some = ids >= 0
        numbers = np.broadcast_to(np.arange(rows.start, rows.stop)[:, None], ids.shape)
        yield Postings(ids[some], numbers[some], strengths[some])


def _ranges(counts: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of features with few enough postings, one feature at least."""
    first = 0
    ends = np.cumsum(counts)
    while first < len(counts):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _AT_ONCE, "right")))
        yield first, last
        first = last


def collect(
    view: LayerView, role: Role, low: int | None = None, high: int | None = None
) -> Postings:
    """The postings of all features, or of features low to high, read from the edges themselves."""
    none = np.empty(0, np.int64)
    parts = [Postings(none, none, np.empty(0, np.float32))]
    for found in _blocks(view, role):
        if low is not None and high is not None:
            found = found.at((found.features >= low) & (found.features <= high))
        parts.append(found)
    return Postings(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.strengths for part in parts]),
    )


def _sorted(found: Postings) -> Postings:
    """By feature, then row."""
    order = np.argsort(found.features.astype(np.uint16), kind="stable")  # by its low half: radix
    if found.features.max(initial=0) >> 16:
        order = order[np.argsort((found.features[order] >> 16).astype(np.uint16), kind="stable")]
    return found.at(order)  # rows are ascending already


def _best(found: Postings) -> Postings:
    """The strongest rows of each feature, strongest first; of equal ones the earlier row."""
    new = np.diff(found.features, prepend=-1) != 0
    begin, which = np.flatnonzero(new), np.cumsum(new) - 1
    last = np.minimum(begin + BEST, np.append(begin[1:], len(new))) - 1
    # a size as a whole number that falls as it grows, behind its feature: numbers sort fast
    weakness = 0xFFFFFFFF - np.abs(found.strengths).view(np.uint32).astype(np.uint64)
    keys = which.astype(np.uint64) << 32 | weakness
    places = np.flatnonzero(keys <= np.sort(keys)[last][which])  # and the equals of the last
    order = places[np.lexsort((weakness[places], which[places]))]
    begins = np.flatnonzero(np.diff(which[order], prepend=-1) != 0)
    rank = np.arange(len(order)) - begins[which[order]]
    return found.at(order[rank < BEST])


def role_index(view: LayerView, name: RoleName) -> "RoleIndex":
    """The index of the role of this name."""
    return RoleIndex(view, next(role for role in view.roles if role.name == name))


class RoleIndex:
    """The index of one role of one layer of an open shard."""

    def __init__(self, view: LayerView, role: Role) -> None:
        """`view`: the layer, written."""
        self.view, self.role = view, role
        self.group: Any = view.group[f"index/{role.name}"]

    def _place(self, feature: int) -> tuple[int, int, int]:
        """Place of the feature, where its postings begin and end; (-1, 0, 0) where it has none."""
        features = self.group["feature"][:]
        at = int(np.searchsorted(features, np.uint32(feature)))
        if at == len(features) or features[at] != feature:
            return -1, 0, 0
        start, stop = self.group["ptr"][at : at + 2].tolist()
        return at, start, stop

    def count(self, feature: int) -> int:
        """Edges where the feature is among the strongest."""
        _, start, stop = self._place(feature)
        return stop - start

    def best(self, feature: int) -> Postings:
        """Its strongest rows, at most BEST, strongest first."""
        at, _, _ = self._place(feature)
        if at < 0:
            none = np.empty(0, np.int64)
            return Postings(none, none, np.empty(0, np.float32))
        rows = slice(*self.group["best_ptr"][at : at + 2].tolist())
        found = self.group["best_row"][rows].astype(np.int64)
        return Postings(np.full(len(found), feature), found, self.group["best_strength"][rows])

    def features(self) -> NDArray[np.int64]:
        """All features that have the role, ascending."""
        return self.group["feature"][:].astype(np.int64)

    def counts(self) -> NDArray[np.int64]:
        """How many edges each of them has."""
        return np.diff(self.group["ptr"][:])

    def best_of(self, low: int, high: int) -> tuple[Postings, Postings]:
        """The strongest rows of features low to high; and for each of these features the strength
        that its other rows do not exceed, -1 where there are none."""
        features = self.features()
        first, last = np.searchsorted(features, [low, high + 1]).tolist()
        features, ends = features[first:last], self.group["best_ptr"][first : last + 1]
        kept, counts = np.diff(ends), np.diff(self.group["ptr"][first : last + 1])
        rows = slice(int(ends[0]), int(ends[-1]))
        strengths = self.group["best_strength"][rows]
        found = Postings(
            np.repeat(features, kept), self.group["best_row"][rows].astype(np.int64), strengths
        )
        bounds = np.abs(strengths[np.cumsum(kept) - 1]) if len(features) else strengths
        return found, Postings(
            features, np.zeros(len(features), np.int64), np.where(counts > kept, bounds, -1.0)
        )

    def rows(self, feature: int) -> NDArray[np.int64]:
        """All its rows, ascending."""
        _, start, stop = self._place(feature)
        return np.cumsum(self.group["step"][start:stop], dtype=np.int64)

    def all(self, feature: int) -> Postings:
        """All its rows with how strong it is in each, ascending."""
        rows = self.rows(feature)
        if not len(rows):
            return Postings(rows, rows, np.empty(0, np.float32))
        ids, strengths = self.view.strongest(self.role, rows, self.view.where(rows))
        return Postings(np.full(len(rows), feature), rows, strengths[ids == feature])
