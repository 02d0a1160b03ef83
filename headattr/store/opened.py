"""Open a published HDF5 file, and keep open those that were used last.

A process has at most `MOST` shards open. One that was forked opens its own: what it inherited is
let go of, never closed by name, so nothing changes for the process that it came from.
"""

import os
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import h5py
import hdf5plugin  # noqa: F401  registers the zstd filter

from headattr.errors import StoreError
from headattr.store.format import SHARD_FORMAT

MOST = 128
"""Shards that a store keeps open."""


def open_h5(path: Path) -> Any:
    """Published files do not change, so no lock is needed; HDF5 wants the same choice of all
    handles of a process, so where one was opened with locks, so is this."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "locking" not in str(error):
            raise
        return h5py.File(path, "r")


def open_shard(path: Path, sidecar: dict[str, Any]) -> Any:
    """The open file of a shard; raises StoreError, naming it, if it is not the one of its
    sidecar."""
    try:
        file = open_h5(path)
        attrs = {name: file.attrs.get(name) for name in ("format", "manifest_hash", "shard")}
    except (OSError, RuntimeError) as error:
        raise StoreError(
            f"{path} cannot be read ({error}); if it is there and may be read, delete it "
            "and run the same command again"
        ) from error
    if attrs["format"] != SHARD_FORMAT:
        raise StoreError(
            f"{path} is not a headattr shard; delete it and run the same command again"
        )
    if (attrs["manifest_hash"], attrs["shard"]) != (sidecar["manifest_hash"], sidecar["shard"]):
        raise StoreError(
            f"{path} belongs to another run or place; delete it and run the same command again"
        )
    return file


def foreign(path: Path, sidecar: dict[str, Any]) -> str | None:
    """Why a file is not the shard of its sidecar, as far as opening it says; None if it is."""
    try:
        open_shard(path, sidecar).close()
    except StoreError as error:
        return str(error)
    return None


@runtime_checkable
class Openable(Protocol):
    """Something that holds an open file, and can let go of it."""

    def forget(self) -> None:
        """Let go of the file; it closes when nothing of it is in use."""
        ...


class Handles:
    """What is open, least recently used first."""

    def __init__(self, most: int = MOST) -> None:
        """At most `most`."""
        self.most = most
        self._open: dict[int, Openable] = {}
        self._last: Openable | None = None

    def used(self, one: Openable) -> None:
        """It is open, and in use now; the one that was not used for longest is let go of."""
        if one is self._last:
            return
        self._open.pop(id(one), None)
        self._open[id(one)] = self._last = one
        while len(self._open) > self.most:
            oldest = self._open.pop(next(iter(self._open)), None)
            if oldest is not None:
                oldest.forget()

    def gone(self, one: Openable) -> None:
        """It is not open any more."""
        self._open.pop(id(one), None)
        if self._last is one:
            self._last = None

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)


def here() -> int:
    """Which process this is: a forked one is another."""
    return os.getpid()
