"""Names of the store, keys of edges, and how a file is published; FORMAT.md says it in words."""

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

VERSION = "1.0"
STORE_FORMAT, SHARD_FORMAT = "headattr-store", "headattr-shard"
MANIFEST = "manifest.json"
SHARDS, LABELS = "shards", "labels"
PAIR_CHUNK, SCALAR_CHUNK = 256, 4096


def shard_name(index: int) -> str:
    """Name of a shard without its ending."""
    return f"{index:05d}"


def key_type(longest: int) -> np.dtype[Any]:
    """Type of an edge key: uint32 (q << 16 | k) up to 65,536 tokens, else uint64 (q << 32 | k)."""
    return np.dtype(np.uint32 if longest <= 1 << 16 else np.uint64)


def make_keys(
    q_pos: NDArray[np.int64], k_pos: NDArray[np.int64], dtype: np.dtype[Any]
) -> NDArray[np.unsignedinteger]:
    """Edge keys; they sort by query position, then key position."""
    shift = np.uint64(4 * dtype.itemsize)
    return ((q_pos.astype(np.uint64) << shift) | k_pos.astype(np.uint64)).astype(dtype)


def split_keys(keys: NDArray[np.unsignedinteger]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Query and key positions of edge keys."""
    bits = 4 * keys.dtype.itemsize
    wide = keys.astype(np.uint64)
    return (wide >> np.uint64(bits)).astype(np.int64), (wide & np.uint64((1 << bits) - 1)).astype(
        np.int64
    )


def file_hash(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A temporary path that is never read, gone at the end."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """All of a file is on disk; raises OSError where the disk could not take it after all."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def put_in_place(temporary: Path, path: Path) -> None:
    """A file that is on disk takes its name."""
    temporary.replace(path)
    sync_folder(path.parent)


@contextlib.contextmanager
def published(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its name only when the block ends well and the data
    is on disk."""
    with temporary_beside(path) as temporary:
        yield temporary
        sync(temporary)
        put_in_place(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Publish a JSON file whole."""
    with published(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        _dump(value, file)


def _dump(value: Any, file: IO[str]) -> None:
    json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
    file.write("\n")


def sync_folder(folder: Path) -> None:
    """Names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
