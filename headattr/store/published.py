"""What is there: the manifest of a folder, and which of its shards are finished."""

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from headattr.errors import StoreError
from headattr.store.format import MANIFEST, SHARDS, STORE_FORMAT, VERSION, shard_name
from headattr.store.opened import foreign

_PARTS = {
    "hash": str,
    "identity": dict,
    "config": dict,
    "model": dict,
    "bos": dict,
} | dict.fromkeys(("sources", "layers", "shards", "set_aside"), list)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the store at `path`; raises StoreError if there is none, or of a newer
    version."""
    file = path / MANIFEST
    if not file.is_file():
        raise StoreError(f"{path} is not a headattr store: it has no {MANIFEST}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(
            f"{file} is not JSON ({error}); the store cannot be read without it"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != STORE_FORMAT:
        raise StoreError(f"{file} is not the manifest of a headattr store")
    version = str(manifest.get("version"))
    if not re.fullmatch(r"\d+(\.\d+)*", version):
        raise StoreError(f"{file} is broken: its version is {version}, expected {VERSION}")
    found, known = ([int(part) for part in text.split(".")] for text in (version, VERSION))
    if found > known:
        raise StoreError(
            f"{path} was written by a newer version (format {version}); upgrade headattr"
        )
    if found < known:
        raise StoreError(
            f"{path} has format {version}, and this headattr reads {VERSION}; formats before 1.0 "
            "are not carried over: run again into another folder"
        )
    for key, kind in _PARTS.items():
        if not isinstance(manifest.get(key), kind):
            raise StoreError(f"{file} is broken: {key} is not a {kind.__name__}")
    return manifest


class Found(NamedTuple):
    """What there is of one shard."""

    sidecar: dict[str, Any] | None
    """Its content, where the shard is finished."""
    problem: str | None
    """What is wrong with it; None if it is finished, or not there yet."""
    stamp: tuple[int, ...] | None
    """Of the sidecar: changes when another is put in its place. None if there is none."""


def read_sidecar(folder: str | Path, index: int, manifest_hash: str) -> Found:
    """What there is of shard `index` in `folder`, from its sidecar and the size of its file."""
    name = shard_name(index)
    path, again = f"{folder}/{name}.h5", "run the same command again to redo"
    try:
        with open(f"{folder}/{name}.json", "rb") as file:  # noqa: PTH123  10,000 a second
            raw, stamp = file.read(), _stamp(os.fstat(file.fileno()))
    except FileNotFoundError:
        return Found(None, None, None)
    except OSError as error:
        return Found(None, f"{SHARDS}/{name}.json cannot be read ({error.strerror})", (0,))
    name = f"{SHARDS}/{name}.h5"
    try:
        found = json.loads(raw)
        size, owner = found["bytes"], (found["manifest_hash"], found["shard"])
        listed = found["prompts"], found["set_aside"]
        if type(size) is not int or not all(isinstance(part, list) for part in listed):
            raise TypeError
        _ = found["sha256"], found["edges"]
    except (ValueError, KeyError, TypeError):
        broken = f"{name.removesuffix('.h5')}.json is broken: {again} {name}"
        return Found(None, broken, stamp)
    there = _size(path, size)
    if there is None:
        problem = f"{name} is missing though its sidecar is there: {again} it"
    elif there != size:
        problem = f"{name} is {there} bytes, expected {size}: {again} it"
    elif owner != (manifest_hash, index):
        problem = f"{name} belongs to another run: {again} it"
    else:
        return Found(found, None, stamp)
    return Found(None, problem, stamp)


def sidecar_stamp(folder: str | Path, index: int) -> tuple[int, ...] | None:
    """As in `Found`, without reading it."""
    try:
        return _stamp(os.stat(f"{folder}/{shard_name(index)}.json"))  # noqa: PTH116
    except OSError:
        return None


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _size(path: str, expected: int) -> int | None:
    """Bytes of a file, None if there is none. What is not as expected is asked again of the open
    file: a network file system may remember an older answer, but not across an open."""
    try:
        size = os.stat(path).st_size  # noqa: PTH116
    except OSError:
        size = None
    if size == expected:
        return size
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return os.fstat(file.fileno()).st_size
    except OSError:
        return size


def finished_shards(folder: Path, manifest: dict[str, Any]) -> list[int]:
    """Indexes of the shards of this run that are finished, for a writer: each is opened, so that
    a file of the right size that is no shard is not taken for one."""
    shards, done = folder / SHARDS, []
    for index in (entry["index"] for entry in manifest["shards"]):
        sidecar = read_sidecar(shards, index, manifest["hash"]).sidecar
        if sidecar is not None and not foreign(shards / f"{shard_name(index)}.h5", sidecar):
            done.append(index)
    return done
