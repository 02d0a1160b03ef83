"""One published HDF5 file, open for reading."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headattr.errors import StoreError
from headattr.store.opened import Handles, here, open_shard
from headattr.store.rows import Active
from headattr.store.view import LayerView, SourceView


class Shard:
    """One published file; it opens when it is asked, and again after it was closed."""

    def __init__(self, path: Path, sidecar: dict[str, Any], handles: Handles | None = None) -> None:
        """`sidecar` is the content of the JSON beside it; `handles`: what else is open."""
        self.path, self.sidecar = path, sidecar
        self._handles = Handles() if handles is None else handles
        self._opened: _Opened | None = None

    @property
    def _here(self) -> "_Opened":
        """What is open in this process."""
        opened = self._opened
        if opened is None or opened.process != here():
            opened = self._opened = None  # let go of first: HDF5 shares what is open already
            opened = self._opened = _Opened(open_shard(self.path, self.sidecar))
        self._handles.used(self)
        return opened

    @property
    def file(self) -> Any:
        """The open HDF5 file."""
        return self._here.file

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Whatever goes wrong inside is a StoreError that names this file."""
        try:
            yield
        except (OSError, LookupError, ValueError, TypeError, RuntimeError) as error:
            raise StoreError(
                f"{self.path} is damaged ({error}); delete it and run the same command again"
            ) from error

    @property
    def ids(self) -> list[int]:
        """Prompt ids, in order."""
        return self.sidecar["prompts"]

    @property
    def ptr(self) -> NDArray[np.int64]:
        """Where each prompt's positions begin."""
        return self._here.ptr

    @property
    def token_text(self) -> Any:
        """What positions show, on disk."""
        return self._here.token_text

    def has(self, layer: int) -> bool:
        """A shard none of whose prompts could run has no layers."""
        return f"layer/{layer}" in self.file

    def layer(self, layer: int) -> LayerView:
        """The edges of a layer, kept open."""
        opened = self._here
        if layer not in opened.layers:
            opened.layers[layer] = LayerView(opened.file, layer)
        return opened.layers[layer]

    def source(self, source: int) -> SourceView:
        """The active lists of a source, kept open."""
        opened = self._here
        if source not in opened.sources:
            opened.sources[source] = SourceView(opened.file, source)
        return opened.sources[source]

    def active(self, source: int, position: int) -> Active:
        """Active features of one position of the shard."""
        view = self.source(source)
        start, stop = view.ptr[position : position + 2]
        return Active(view.feature[start:stop], view.act[start:stop])

    def counts(self, source: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Features of a source that are active somewhere, how often, over how many positions."""
        name = f"source/{source}"
        with self.reading():
            file = self.file
            if name not in file:
                return np.empty(0, np.int64), np.empty(0, np.int64), 0
            group = file[name]
            positions = int(group.attrs["positions_counted"])
            return group["present"][:].astype(np.int64), group["present_count"][:], positions

    def forget(self) -> None:
        """Let go of the file: it closes when nothing of it is in use, and opens when asked."""
        self._opened = None

    def close(self) -> None:
        """Close the file, with all that is in use of it; it opens again when it is asked."""
        opened, self._opened = self._opened, None
        self._handles.gone(self)
        if opened is not None and opened.process == here():
            opened.file.close()


class _Opened:
    """An open file; datasets are kept open, indexes in memory."""

    def __init__(self, file: Any) -> None:
        self.file, self.process = file, here()
        self.layers: dict[int, LayerView] = {}
        self.sources: dict[int, SourceView] = {}

    @cached_property
    def ptr(self) -> NDArray[np.int64]:
        return self.file["prompt/ptr"][:]

    @cached_property
    def token_text(self) -> Any:
        return self.file["prompt/token_text"]
