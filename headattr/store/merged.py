"""The index over all shards, as it is read: see `merge.py`, which makes it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headattr.store.columns import RoleName
from headattr.store.opened import open_h5
from headattr.store.shard import Shard
from headattr.store.tallies import Table, Tally, tally

NAME, FORMAT = "index.h5", "headattr-index"
KEEP = 64
"""Edges of a feature that are kept, strongest first."""
COLUMNS = ("prompt", "head", "q_pos", "k_pos", "strength", "score", "pattern", "q_token", "k_token")


def covered(shards: Sequence[Shard]) -> NDArray[Any]:
    """What some shards are: number and hash of each."""
    names = [f"{shard.sidecar['shard']} {shard.sidecar['sha256']}" for shard in shards]
    return np.array(names or [""], "S")


def open_merged(folder: Path, manifest_hash: str, shards: Sequence[Shard]) -> "Merged | None":
    """The index of a store, where it is there and was made from just these shards."""
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        file = open_h5(path)
        same = (
            file.attrs.get("format") == FORMAT
            and file.attrs.get("manifest_hash") == manifest_hash
            and np.array_equal(file["shard"][:], covered(shards))
        )
    except (OSError, KeyError, RuntimeError):
        return None
    if not same:
        file.close()
        return None
    return Merged(file)


class Merged:
    """The index of a store, open for reading."""

    def __init__(self, file: Any) -> None:
        """`file`: open, and made from the shards that are served."""
        self.file = file

    def page(self, layer: int, role: RoleName, feature: int) -> tuple[dict[str, Any], int] | None:
        """Columns of the strongest edges of a feature, at most KEEP, and how many it has; None
        where no edge has it."""
        name = f"layer/{layer}/{role}"
        if name not in self.file:
            return None
        group = self.file[name]
        features = group["feature"][:]
        at = int(np.searchsorted(features, np.uint32(feature)))
        if at == len(features) or features[at] != feature:
            return None
        start, stop = group["ptr"][at : at + 2].tolist()
        return {key: group[key][start:stop] for key in COLUMNS}, int(group["count"][at])

    def texts(self, places: NDArray[np.integer]) -> NDArray[Any]:
        """The texts of tokens, by their places."""
        found, back = np.unique(places, return_inverse=True)
        known = [self.file["text"][place].decode() for place in found.tolist()]
        return np.array(known, object)[back] if known else np.empty(0, object)

    def sums(self, layer: int) -> NDArray[np.float64] | None:
        """`tallies.head_sums` of a layer over all shards."""
        name = f"layer/{layer}/sums"
        return self.file[name][:] if name in self.file else None

    def tally(
        self, layer: int, place: int, table: Table
    ) -> tuple[Tally, NDArray[np.int64], NDArray[np.float64]] | None:
        """What `tallies.add` gives over all shards, of the pairs that are kept."""
        name = f"layer/{layer}/tally/{table}/{place}"
        if name not in self.file:
            return None
        group = self.file[name]
        columns = [group[key][()] for key in Tally._fields]
        missed = int(columns[5]), float(columns[6])
        return tally(columns[:5], *missed), group["more"][:], group["more_size"][:]
