"""Sums of a head over all shards of a store."""

import numpy as np
from numpy.typing import NDArray

from headattr.edges import HeadId
from headattr.store.reader import Store
from headattr.store.tallies import EMPTY, SUMS, Table, Tally, add, head_sums, read_tally


def sums_of_heads(store: Store, layer: int) -> NDArray[np.float64]:
    """[head, 8] `tallies.head_sums` of a layer over all shards."""
    if store.merged is not None and (found := store.merged.sums(layer)) is not None:
        return found
    sums = np.zeros((len(store.heads_in(layer)), SUMS))
    for shard in store.shards:
        with store.tolerating(shard):
            if shard.has(layer):
                sums += head_sums(shard.layer(layer))
    return sums


def tally_of_head(
    store: Store, head: HeadId, table: Table
) -> tuple[Tally, NDArray[np.int64], NDArray[np.float64]]:
    """The tally of a head over all shards, and how much more each pair may have."""
    place = store.heads_in(head.layer).index(head.head)
    if store.merged is not None and (found := store.merged.tally(head.layer, place, table)):
        return found
    tallies: list[Tally] = []
    for shard in store.shards:
        with store.tolerating(shard):
            if shard.has(head.layer):
                tallies.append(read_tally(shard.layer(head.layer), place, table))
    return add(tallies or [EMPTY])
