"""One published HDF5 file, open for reading."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  registers the zstd filter
import numpy as np
from numpy.typing import NDArray

from headattr.errors import StoreError
from headattr.store.format import SHARD_FORMAT
from headattr.store.rows import Active
from headattr.store.view import LayerView, SourceView


class Shard:
    """One published file; datasets are kept open, indexes in memory."""

    def __init__(self, path: Path, sidecar: dict[str, Any]) -> None:
        """`sidecar` is the content of the JSON beside it."""
        self.path, self.sidecar = path, sidecar
        self._layers: dict[int, LayerView] = {}
        self._sources: dict[int, SourceView] = {}

    @cached_property
    def file(self) -> Any:
        """The open HDF5 file."""
        try:
            file = _opened(self.path)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be read ({error}); if it is there and may be read, delete it "
                "and run the same command again"
            ) from error
        if file.attrs.get("format") != SHARD_FORMAT:
            raise StoreError(f"{self.path} is not a headattr shard")
        return file

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Whatever goes wrong inside is a StoreError that names this file."""
        try:
            yield
        except (OSError, LookupError, ValueError, TypeError, RuntimeError) as error:
            raise StoreError(
                f"{self.path} is damaged ({error}); delete it and run the same command again"
            ) from error

    @cached_property
    def ids(self) -> list[int]:
        """Prompt ids, in order."""
        return self.sidecar["prompts"]

    @cached_property
    def ptr(self) -> NDArray[np.int64]:
        """Where each prompt's positions begin."""
        return self.file["prompt/ptr"][:]

    @cached_property
    def token_text(self) -> Any:
        """What positions show, on disk."""
        return self.file["prompt/token_text"]

    def has(self, layer: int) -> bool:
        """A shard none of whose prompts could run has no layers."""
        return f"layer/{layer}" in self.file

    def layer(self, layer: int) -> LayerView:
        """The edges of a layer, kept open."""
        if layer not in self._layers:
            self._layers[layer] = LayerView(self.file, layer)
        return self._layers[layer]

    def source(self, source: int) -> SourceView:
        """The active lists of a source, kept open."""
        if source not in self._sources:
            self._sources[source] = SourceView(self.file, source)
        return self._sources[source]

    def active(self, source: int, position: int) -> Active:
        """Active features of one position of the shard."""
        view = self.source(source)
        start, stop = view.ptr[position : position + 2]
        return Active(view.feature[start:stop], view.act[start:stop])

    def counts(self, source: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Features of a source that are active somewhere, how often, over how many positions."""
        name = f"source/{source}"
        with self.reading():
            if name not in self.file:
                return np.empty(0, np.int64), np.empty(0, np.int64), 0
            group = self.file[name]
            positions = int(group.attrs["positions_counted"])
            return group["present"][:].astype(np.int64), group["present_count"][:], positions

    def close(self) -> None:
        """Close the file; it opens again when it is asked."""
        self._layers.clear()
        self._sources.clear()
        for name in ("token_text", "ptr"):
            vars(self).pop(name, None)
        if "file" in vars(self):
            self.file.close()
            del self.file


def _opened(path: Path) -> h5py.File:
    """Published files do not change, so no lock is needed; HDF5 wants the same choice of all
    handles of a process, so where one was opened with locks, so is this."""
    try:
        return h5py.File(path, "r", locking=False)
    except OSError as error:
        if "locking" not in str(error):
            raise
        return h5py.File(path, "r")
