"""Active lists of a source, prompt by prompt, as they are written."""

from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from headattr.store.format import SCALAR_CHUNK
from headattr.store.growing import Filter, Growing


class ActiveLists(NamedTuple):
    """Which features of a source are active at each position of a prompt."""

    ptr: NDArray[np.int64]
    features: NDArray[np.int64]
    acts: NDArray[np.floating]
    counted: NDArray[np.bool_]
    """[pos] positions that count for densities: those that do not swallow attention."""


class _Counts(NamedTuple):
    """Densities of some prompts."""

    present: NDArray[np.int64]
    times: NDArray[np.int64]
    positions: int


class SourceWriter:
    """The active lists of one source."""

    def __init__(self, group: h5py.Group, filters: Filter) -> None:
        """An empty source."""
        self.group = group
        self.filters: Filter = filters
        self.features = Growing(group, "feature", SCALAR_CHUNK, filters)
        self.acts = Growing(group, "act", SCALAR_CHUNK, filters)
        self.lengths: list[NDArray[np.int64]] = []
        self.counts = [_Counts(np.empty(0, np.int64), np.empty(0, np.int64), 0)]
        """Of the first prompts: none, one, two, ..."""

    @property
    def longest(self) -> int:
        """Features of a position, at most."""
        return max(int(lengths.max(initial=0)) for lengths in self.lengths)

    def add(self, active: ActiveLists) -> None:
        """The lists of the next prompt."""
        lengths, before = np.diff(active.ptr), self.counts[-1]
        self.lengths.append(lengths)
        self.features.append(active.features.astype(np.uint32))
        self.acts.append(active.acts.astype(np.float32))
        here = active.features[np.repeat(active.counted, lengths)]
        present, inverse = np.unique(np.concatenate([before.present, here]), return_inverse=True)
        weights = np.concatenate([before.times, np.ones(len(here), np.int64)])
        times = np.bincount(inverse, weights, len(present)).astype(np.int64)
        positions = before.positions + int(active.counted.sum())
        self.counts.append(_Counts(present, times, positions))

    def cut(self, prompts: int) -> None:
        """Forget all but the first prompts."""
        del self.lengths[prompts:], self.counts[prompts + 1 :]
        entries = int(sum(lengths.sum() for lengths in self.lengths))
        self.features.cut(entries)
        self.acts.cut(entries)

    def finish(self) -> None:
        """Write what is held."""
        self.group["ptr"] = np.cumsum(np.concatenate([[0], *self.lengths]), dtype=np.int64)
        self.features.finish()
        self.acts.finish()
        found = self.counts[-1]
        self._write("present", found.present.astype(np.uint32))
        self._write("present_count", found.times)
        self._write_inverse()
        self.group.attrs["positions_counted"] = found.positions

    def _write_inverse(self) -> None:
        """Where each feature is active."""
        group: Any = self.group
        found, ptr, positions = inverse_of(group["feature"][:], group["ptr"][:])
        self._write("inverse/feature", found)
        self._write("inverse/ptr", ptr)
        self._write("inverse/position", positions)

    def _write(self, name: str, rows: NDArray[Any]) -> None:
        kept = Growing(self.group, name, SCALAR_CHUNK, self.filters)
        kept.append(rows)
        kept.finish()


def inverse_of(
    ids: NDArray[np.uint32], ptr: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.uint32]]:
    """Of lists of features by position: the features, ascending, and where the positions of each,
    ascending, begin among the last."""
    order = np.argsort(ids, kind="stable")
    found, counts = np.unique(ids, return_counts=True)
    at = np.repeat(np.arange(len(ptr) - 1, dtype=np.uint32), np.diff(ptr))[order]
    return found, np.cumsum(np.concatenate([[0], counts]), dtype=np.int64), at
