"""One index over all shards, made from theirs: the first page of a feature, and what a head does,
without opening a shard.

It is disposable: it says which shards it was made from, is used while exactly those are served, and
may be deleted or made again at any time.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from headattr.errors import StoreError
from headattr.store.columns import RoleName
from headattr.store.format import SCALAR_CHUNK, published
from headattr.store.growing import Filter, Growing
from headattr.store.hits import edge_facts
from headattr.store.index import Postings, RoleIndex, collect, role_index
from headattr.store.merged import FORMAT, KEEP, NAME, covered
from headattr.store.reader import Store
from headattr.store.shard import Shard
from headattr.store.tallies import KEPT, SUMS, Tally, add, cut, head_sums, read_tally

WORTH = 16
"""Shards from which on a run makes it."""
_AT_ONCE = 1 << 22
"""Postings that are put in order at once."""


_FEW = 32
"""Features of a shard that are read one by one."""


class _Best(NamedTuple):
    """Edges of some features, by feature, strongest first."""

    feature: NDArray[np.int64]
    shard: NDArray[np.int64]
    """Place among the shards."""
    row: NDArray[np.int64]
    strength: NDArray[np.float32]

    def at(self, places: NDArray[Any]) -> "_Best":
        return _Best(
            self.feature[places], self.shard[places], self.row[places], self.strength[places]
        )


def make_index(store: Store) -> Path:
    """Write the index of the shards that are served; returns where.

    Raises StoreError where one of them is damaged, or the disk refuses.
    """
    path = store.path / NAME
    filters: Filter = "checked"
    try:
        with published(path) as temporary, h5py.File(temporary, "w") as file:
            file.attrs.update(format=FORMAT, manifest_hash=store.manifest["hash"])
            file["shard"] = covered(store.shards)
            texts: dict[str, int] = {}
            for plan in store.manifest["layers"]:
                group = file.create_group(f"layer/{plan['layer']}")
                _write_layer(store, plan, group, filters, texts)
            file.create_dataset("text", data=list(texts), dtype=h5py.string_dtype())
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    return path


def _write_layer(
    store: Store,
    plan: dict[str, Any],
    group: h5py.Group,
    filters: Filter,
    texts: dict[str, int],
) -> None:
    layer = plan["layer"]
    shards = [shard for shard in store.shards if shard.has(layer)]
    moved = plan["output"] is not None
    roles: tuple[RoleName, ...] = ("q", "k", "v", "o") if moved else ("q", "k")
    for role in roles if shards else ():
        _write_role(shards, layer, role, group.create_group(role), filters, texts)
    sums = [head_sums(shard.layer(layer)) for shard in shards]
    group["sums"] = np.sum(sums, axis=0) if sums else np.zeros((len(plan["heads"]), SUMS))
    for table in ("qk", "ov") if moved else ("qk",):
        for place in range(len(plan["heads"])):
            found: list[Tally] = []
            for shard in shards:
                with shard.reading():
                    found.append(read_tally(shard.layer(layer), place, table))
            if found:
                _write_tally(found, group.create_group(f"tally/{table}/{place}"))


def _write_tally(found: Sequence[Tally], group: h5py.Group) -> None:
    whole, more, more_size = add(list(found))
    kept = cut(whole, KEPT)
    at = np.searchsorted(whole.left << 32 | whole.right, kept.left << 32 | kept.right)
    for name, column in zip(Tally._fields, kept, strict=True):
        group[name] = column
    group["more"], group["more_size"] = more[at], more_size[at]


def _write_role(
    shards: Sequence[Shard],
    layer: int,
    role: RoleName,
    group: h5py.Group,
    filters: Filter,
    texts: dict[str, int],
) -> None:
    counts = _counts(shards, layer, role)
    present = np.flatnonzero(counts)
    columns: dict[str, Growing] = {}

    def put(name: str, rows: NDArray[Any]) -> None:
        if name not in columns:
            columns[name] = Growing(group, name, SCALAR_CHUNK, filters)
        columns[name].append(rows)

    put("feature", present.astype(np.uint32))
    put("count", counts[present])
    kept = [np.zeros(1, np.int64)]
    for low, high in _ranges(present, counts):
        best = _strongest(shards, layer, role, low, high)
        here = present[(present >= low) & (present <= high)]
        kept.append(np.bincount(np.searchsorted(here, best.feature), minlength=len(here)))
        for name, rows in _facts(shards, layer, best, texts).items():
            put(name, rows)
    put("ptr", np.cumsum(np.concatenate(kept), dtype=np.int64))
    for column in columns.values():
        column.finish()


def _counts(shards: Sequence[Shard], layer: int, role: RoleName) -> NDArray[np.int64]:
    """How many edges each feature has."""
    counts = np.zeros(0, np.int64)
    for shard in shards:
        with shard.reading():
            index = role_index(shard.layer(layer), role)
            features, found = index.features(), index.counts()
        if len(features) and features[-1] >= len(counts):
            counts = np.pad(counts, (0, int(features[-1]) + 1 - len(counts)))
        counts[features] += found
    return counts


def _ranges(present: NDArray[np.int64], counts: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """First and last feature of parts that are put in order at once."""
    ends, first = np.cumsum(counts[present]), 0
    while first < len(present):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _AT_ONCE, "right")))
        yield int(present[first]), int(present[last - 1])
        first = last


def _strongest(shards: Sequence[Shard], layer: int, role: RoleName, low: int, high: int) -> _Best:
    """The KEEP strongest edges of features low to high: a shard whose kept ones might leave one out
    is read for that feature."""
    parts, open_ends = [], []
    for place, shard in enumerate(shards):
        with shard.reading():
            found, bounds = role_index(shard.layer(layer), role).best_of(low, high)
        parts.append(_best_of(found, place))
        unread = bounds.strengths >= 0
        open_ends.append((bounds.features[unread], bounds.strengths[unread]))
    best = _ordered(parts)
    last = _last_kept(best, low, high)
    more = []
    for place, (features, bounds) in enumerate(open_ends):
        left = features[bounds >= last.take(features - low, mode="clip")]
        with shards[place].reading():
            more += _read_on(role_index(shards[place].layer(layer), role), left, place)
    if more:
        read = np.concatenate([part.feature << 24 | part.shard for part in more])
        code = best.feature << 24 | best.shard
        best = _ordered([best.at(~np.isin(code, read)), *more])
    return best.at(_rank(best.feature) < KEEP)


def _read_on(index: RoleIndex, features: NDArray[np.int64], place: int) -> list[_Best]:
    """All edges of some features in one shard: of many by reading all of it."""
    if len(features) <= _FEW:
        return [_best_of(index.all(feature), place) for feature in features.tolist()]
    found = collect(index.view, index.role, int(features[0]), int(features[-1]))
    best = _ordered([_best_of(found.at(np.isin(found.features, features)), place)])
    return [best.at(_rank(best.feature) < KEEP)]


def _best_of(found: Postings, place: int) -> _Best:
    where = np.full(len(found.rows), place, np.int64)
    return _Best(found.features, where, found.rows, found.strengths)


def _ordered(parts: Sequence[_Best]) -> _Best:
    """By feature, strongest first; of equal ones the earlier shard and row."""
    whole = _Best(
        np.concatenate([part.feature for part in parts]),
        np.concatenate([part.shard for part in parts]),
        np.concatenate([part.row for part in parts]),
        np.concatenate([part.strength for part in parts]),
    )
    order = (whole.row, whole.shard, -np.abs(whole.strength), whole.feature)
    return whole.at(np.lexsort(order))


def _rank(feature: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place of each row among those of its feature; features are in order."""
    begin = np.flatnonzero(np.diff(feature, prepend=-1) != 0)
    return np.arange(len(feature)) - np.repeat(begin, np.diff(begin, append=len(feature)))


def _last_kept(best: _Best, low: int, high: int) -> NDArray[np.float32]:
    """[feature from low] strength of the last edge that is kept, 0 where there are fewer."""
    last = np.zeros(high - low + 1, np.float32)
    at = _rank(best.feature) == KEEP - 1
    last[best.feature[at] - low] = np.abs(best.strength[at])
    return last


def _facts(
    shards: Sequence[Shard], layer: int, best: _Best, texts: dict[str, int]
) -> dict[str, NDArray[Any]]:
    """What an answer says of each edge; tokens as places in `texts`, which grows."""
    n = len(best.row)
    facts: dict[str, NDArray[Any]] = {
        **{name: np.empty(n, np.int64) for name in ("prompt", "q_pos", "k_pos")},
        "head": np.empty(n, np.uint16),
        "strength": best.strength.astype(np.float32),
        **{name: np.empty(n, np.float32) for name in ("score", "pattern")},
        **{name: np.empty(n, np.uint32) for name in ("q_token", "k_token")},
    }
    for place in np.unique(best.shard).tolist():
        at = np.flatnonzero(best.shard == place)
        rows, back = np.unique(best.row[at], return_inverse=True)
        with shards[place].reading():
            found = edge_facts(shards[place], shards[place].layer(layer), rows)
        for name in ("q_token", "k_token"):
            places = [texts.setdefault(text, len(texts)) for text in found[name].tolist()]
            found[name] = np.array(places, np.uint32)
        for name in facts.keys() - {"strength"}:
            facts[name][at] = found[name][back]
    return facts
