"""What was written is read back before it takes its name: a disk may refuse late, or in silence.

HDF5 writes some things only when a dataset or the file is closed, and what fails then may be lost
without an error. So nothing is held back that need not be, and the closed file is compared with
what was in it while it was open.
"""

import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from headattr.errors import StoreError
from headattr.store.format import put_in_place, write_json
from headattr.store.opened import foreign, open_h5
from headattr.store.published import read_sidecar


class Written(NamedTuple):
    """A dataset as it was written."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int | None
    """Of all of it, where it is not in chunks: those are small."""


@contextmanager
def created(path: Path) -> Iterator[Any]:
    """A new HDF5 file; chunks are written when they are given, so that a full disk shows there.
    When something goes wrong inside, what goes wrong in closing after it is no news."""
    file = h5py.File(path, "w", rdcc_nbytes=0)
    try:
        yield file
    except BaseException:
        with suppress(OSError, RuntimeError, ValueError):
            file.close()
        raise
    try:
        file.flush()
        file.close()
    except (RuntimeError, ValueError) as error:
        raise OSError(str(error)) from error


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """A disk that refuses is a StoreError that names the file; HDF5 says so in any type."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        if not isinstance(error, OSError) and not re.search(r"errno = \d+", str(error)):
            raise
        raise StoreError(
            f"cannot write {path}: {error}; free the disk and run the same command again"
        ) from error


def receipt(file: h5py.File) -> dict[str, Written]:
    """What is in an open file, by name."""
    return {name: _written(dataset) for name, dataset in _datasets(file).items()}


def compare(path: Path, written: dict[str, Written]) -> None:
    """Raises StoreError where a closed file is not what was written.

    Names, shapes, and what is not in chunks, whole; of chunks, that each is there, begins with
    something, and that the last can be read.
    """
    try:
        with open_h5(path) as file, path.open("rb") as raw:
            found = receipt(file)
            if lost := [n for n in written.keys() | found.keys() if written.get(n) != found.get(n)]:
                raise StoreError(f"cannot write {path}: {min(lost)} was not kept by the disk")
            for name, dataset in _datasets(file).items():
                if dataset.chunks and not _whole(dataset, raw.fileno()):
                    raise StoreError(f"cannot write {path}: {name} was not kept by the disk")
    except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise StoreError(
            f"cannot write {path}: read back, it is damaged ({error}); free the disk and run the "
            "same command again"
        ) from error


def _written(dataset: Any) -> Written:
    checksum = None
    if dataset.chunks is None:
        rows = dataset[()]
        plain = repr(rows.tolist()).encode() if rows.dtype.kind == "O" else rows.tobytes()
        checksum = zlib.crc32(plain)
    return Written(dataset.shape, str(dataset.dtype), checksum)


def _whole(dataset: Any, file: int) -> bool:
    """Every chunk is there, none is a hole, and the last rows can be read."""
    chunks = int(np.prod([-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True)]))
    size, good = os.fstat(file).st_size, []

    def see(chunk: Any) -> None:
        end = chunk.byte_offset + chunk.size
        begins = any(os.pread(file, min(16, chunk.size), chunk.byte_offset))
        good.append(end <= size and (begins or chunk.filter_mask != 0))

    dataset.id.chunk_iter(see)
    last = dataset[-1:] if len(dataset) else dataset[:]
    return len(good) == chunks and all(good) and len(last) == min(1, len(dataset))


def _datasets(file: h5py.File) -> dict[str, Any]:
    found: dict[str, Any] = {}
    file.visititems(
        lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) else None
    )
    return found


def publish_shard(temporary: Path, path: Path, sidecar: dict[str, Any]) -> None:
    """A whole shard takes its name, then its sidecar. One that was finished meanwhile by another
    process is left as it is; what is left of a broken one goes first, its sidecar before it."""
    there = read_sidecar(path.parent, sidecar["shard"], sidecar["manifest_hash"])
    if there.sidecar is not None and foreign(path, there.sidecar) is None:
        return
    path.with_suffix(".json").unlink(missing_ok=True)
    put_in_place(temporary, path)
    write_json(path.with_suffix(".json"), sidecar)
