"""Names, element types and rounding of the store, version 0.2; FORMAT.md says the same in words."""

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

VERSION = "0.3"
STORE_FORMAT, SHARD_FORMAT = "headattr-store", "headattr-shard"
MANIFEST = "manifest.json"
SHARDS, LABELS = "shards", "labels"
PAIR_CHUNK, SCALAR_CHUNK = 256, 4096
MANTISSA_BITS = 10
"""Pair values keep this many bits of mantissa: relative error at most 2**-11. Nothing else is
rounded, nor are values that rounding would make infinite, or that are too small for it."""


def shard_name(index: int) -> str:
    """Name of a shard without its ending."""
    return f"{index:05d}"


def slot_type(longest: int) -> np.dtype[Any]:
    """The smallest type of a slot when lists have up to `longest` entries; its largest value means
    none."""
    return next(np.dtype(t) for t in (np.uint8, np.uint16, np.uint32) if longest < np.iinfo(t).max)


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


def encode_slots(slots: NDArray[np.integer], dtype: np.dtype[Any]) -> NDArray[np.unsignedinteger]:
    """Slots with -1 as the type's largest value."""
    return np.where(slots < 0, np.iinfo(dtype).max, slots).astype(dtype)


def decode_slots(stored: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
    """Stored slots with -1 for none."""
    slots = stored.astype(np.int64)
    return np.where(slots == np.iinfo(stored.dtype).max, -1, slots)


def round_values(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Round to nearest at MANTISSA_BITS bits of mantissa, as float32."""
    dropped = 23 - MANTISSA_BITS
    exact = np.ascontiguousarray(values, np.float32)
    bits = exact.view(np.uint32).astype(np.uint64)
    bits = (bits + (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)) & ~np.uint64(
        (1 << dropped) - 1
    )
    rounded = bits.astype(np.uint32).view(np.float32)
    normal = np.isfinite(exact + rounded) & (np.abs(exact) >= np.finfo(np.float32).tiny)
    return np.where(normal, rounded, exact)


def file_hash(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def published(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its name only when the block ends well and the data
    is on disk."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Publish a JSON file whole."""
    with published(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        _dump(value, file)


def _dump(value: Any, file: IO[str]) -> None:
    json.dump(value, file, indent=1, ensure_ascii=False, allow_nan=False)
    file.write("\n")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
