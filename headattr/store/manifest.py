"""The manifest: what a run is, written once, compared before anything is added.

Two runs are the same when their identities are: the fields that change results, and the hashes of
the model, the dictionaries, the texts and the listed edges. Paths, device and batch size are not
part of it.
"""

import os
import socket
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headattr.config import RunConfig, canonical_hash
from headattr.errors import StoreError
from headattr.store.format import (
    LABELS,
    MANIFEST,
    SHARDS,
    STORE_FORMAT,
    VERSION,
    published,
    write_json,
)
from headattr.store.published import read_manifest
from headattr.store.writer import LayerPlan


def build_manifest(
    config: RunConfig,
    *,
    model: Mapping[str, Any],
    sources: Sequence[Mapping[str, Any]],
    plans: Sequence[LayerPlan],
    prompts: Sequence[int],
    set_aside: Sequence[Mapping[str, Any]],
    bos: Mapping[str, Any],
    texts_hash: str,
    layers_without_basis: Sequence[int],
    listed_hash: str | None,
    labelled: Collection[int],
) -> dict[str, Any]:
    """The manifest of a run; `prompts` are the ids that will run, `labelled` the sources whose
    labels are kept, `model` and `sources` carry their hashes."""
    chosen = config.identity()
    if listed_hash is not None:
        chosen["edges"] = f"file:{listed_hash}"
    layers = [plan._asdict() for plan in plans]
    identity = {
        "format": VERSION,
        "config": chosen,
        "model": model["hash"],
        "sources": [{key: source[key] for key in ("kind", "layer", "hash")} for source in sources],
        "layers": layers,
        "texts": texts_hash,
        "bos": bos["prepend"],
    }
    size = config.prompts_per_shard
    shards = [list(prompts[start : start + size]) for start in range(0, len(prompts), size)]
    manifest = {
        "format": STORE_FORMAT,
        "version": VERSION,
        "headattr": version("headattr"),
        "hash": canonical_hash(identity),
        "identity": identity,
        "config": {**chosen, "edges": config.edges},
        "model": dict(model),
        "bos": dict(bos),
        "sources": [
            {"index": i, **source, "labels": f"{i}.jsonl" if i in labelled else None}
            for i, source in enumerate(sources)
        ],
        "layers": layers,
        "layers_without_basis": list(layers_without_basis),
        "shards": [{"index": i, "prompts": ids} for i, ids in enumerate(shards)],
        "set_aside": [dict(entry) for entry in set_aside],
    }
    return manifest | {"content_hash": content_hash(manifest)}


def content_hash(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of all of a manifest but this hash itself."""
    return canonical_hash({k: v for k, v in manifest.items() if k != "content_hash"})


def begin(folder: Path, manifest: dict[str, Any], labels: Mapping[int, str | None]) -> None:
    """Make the folder ready: a new manifest, or the same one found there; copies of the labels.

    Raises StoreError if the folder holds something else; both hashes are shown.
    """
    if (folder / MANIFEST).exists():
        _compare(folder, read_manifest(folder), manifest)
    elif folder.exists() and (not folder.is_dir() or any(map(_foreign, folder.iterdir()))):
        raise StoreError(
            f"{folder} is there and is not a headattr store; give an empty or new --out folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST).exists():
            write_json(folder / MANIFEST, manifest)
        for part in (folder, folder / SHARDS, folder / LABELS):
            part.mkdir(exist_ok=True)
            for stale in stale_files(part):
                stale.unlink(missing_ok=True)
        for source, text in labels.items():
            path = folder / LABELS / f"{source}.jsonl"
            if text is not None and not path.exists():
                with published(path) as temporary:
                    temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write to --out {folder}: {error}") from error


def _foreign(path: Path) -> bool:
    """Anything but a manifest that was never finished."""
    return not (path.name.startswith(f".{MANIFEST}.") and path.name.endswith(".tmp"))


def _compare(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    if found["hash"] == wanted["hash"]:
        return
    one, other = found["identity"], wanted["identity"]
    changed = [
        f"{k}: {one['config'].get(k)} there, {v} here"
        for k, v in other["config"].items()
        if one["config"].get(k) != v
    ]
    changed += [key for key in other if key != "config" and one.get(key) != other[key]]
    raise StoreError(
        f"{folder} holds another run: its hash is {found['hash'][:16]}, this one's is "
        f"{wanted['hash'][:16]} "
        f"(different: {'; '.join(changed)}); give another --out folder"
    )


def stale_files(folder: Path) -> list[Path]:
    """Temporary files of processes of this machine that are gone."""
    host = socket.gethostname()
    found = []
    for path in sorted(folder.glob(f".*.{host}.*.tmp")):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and not _alive(int(pid)):
            found.append(path)
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
