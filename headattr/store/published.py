"""What is there: the manifest of a folder, and which of its shards are finished."""

import json
import re
from pathlib import Path
from typing import Any

from headattr.errors import StoreError
from headattr.store.format import MANIFEST, SHARDS, STORE_FORMAT, VERSION, shard_name

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


def read_sidecar(path: Path, manifest_hash: str) -> tuple[dict[str, Any] | None, str | None]:
    """The sidecar of a finished shard, or None; and what is wrong with it, or None if it is not
    there yet."""
    sidecar = path.with_suffix(".json")
    name = f"{SHARDS}/{path.name}"
    if not sidecar.is_file():
        return None, None
    try:
        found = json.loads(sidecar.read_text(encoding="utf-8"))
        wanted = found["bytes"], found["manifest_hash"], found["shard"]
        _ = found["sha256"], found["edges"], found["prompts"], found["set_aside"]
    except (ValueError, KeyError, TypeError):
        return None, f"{SHARDS}/{sidecar.name} is broken: run the same command again to redo {name}"
    if not path.is_file():
        return (
            None,
            f"{name} is missing though its sidecar is there: run the same command again to redo it",
        )
    if path.stat().st_size != wanted[0]:
        return (
            None,
            f"{name} is {path.stat().st_size} bytes, expected {wanted[0]}: run the same "
            "command again to redo it",
        )
    if wanted[1:] != (manifest_hash, int(path.stem)):
        return None, f"{name} belongs to another run: run the same command again to redo it"
    return found, None


def finished_shards(folder: Path, manifest: dict[str, Any]) -> list[int]:
    """Indexes of the shards of this run that are finished."""
    names = {
        e["index"]: folder / SHARDS / f"{shard_name(e['index'])}.h5" for e in manifest["shards"]
    }
    return [i for i, path in names.items() if read_sidecar(path, manifest["hash"])[0] is not None]
