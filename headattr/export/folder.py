"""An export's folder: what it is, which parts are there, and the manifest that ends it.

manifest.json                  last: tables, columns, parts with rows, bytes and SHA-256
pairs/part-00003-000.parquet   rows of the store's shard 3
.parts/export.json             what was asked for
.parts/00003.json              the parts of shard 3 that are there, table by table
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headattr.config import canonical_hash
from headattr.errors import StoreError
from headattr.export.parts import Part
from headattr.store.fields import TABLES
from headattr.store.format import MANIFEST, file_hash, write_json
from headattr.store.manifest import stale_files

EXPORT_FORMAT, VERSION = "headattr-export", "1.0"
PARTS, ASKED = ".parts", "export.json"
NAME = re.compile(rf"({'|'.join(TABLES)})/part-\d{{5,}}-\d{{3,}}\.(parquet|csv)")


def part_name(table: str, shard: int, number: int, kind: str) -> str:
    """Where a part lies in its folder."""
    return f"{table}/part-{shard:05d}-{number:03d}.{kind}"


def shard_of(name: str) -> int:
    """The shard whose rows a part holds."""
    return int(name.rpartition("/")[2].split("-")[1])


def prepare(folder: Path, asked: Mapping[str, Any]) -> None:
    """Make the folder ready for this export, new or to go on with.

    Raises StoreError if it holds something else, showing what differs.
    """
    path = folder / PARTS / ASKED
    if path.is_file() and _begun(folder):
        _compare(folder, _json(path), asked)
    elif path.is_file():
        path.unlink()
    elif folder.exists() and (not folder.is_dir() or any(map(_foreign, folder.iterdir()))):
        raise StoreError(f"{folder} is there and is no export; give an empty or new --out folder")
    try:
        for part in (folder, folder / PARTS, *(folder / table for table in asked["tables"])):
            part.mkdir(parents=True, exist_ok=True)
            for stale in stale_files(part):
                stale.unlink(missing_ok=True)
        if not path.is_file():
            write_json(path, asked)
    except OSError as error:
        raise StoreError(f"cannot write to --out {folder}: {error}") from error


def _begun(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or any((folder / PARTS).glob("[0-9]*.json"))


def _foreign(path: Path) -> bool:
    """Anything but what an export leaves that was stopped before it had begun."""
    return not (path.is_dir() and path.name == PARTS and all(map(_temporary, path.iterdir())))


def _temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _compare(folder: Path, found: Any, asked: Mapping[str, Any]) -> None:
    if found == asked:
        return
    there = found if isinstance(found, dict) else {}
    changed = [
        f"{key}: {there.get(key)} there, {value} here"
        for key, value in asked.items()
        if there.get(key) != value
    ]
    raise StoreError(
        f"{folder} holds another export ({'; '.join(changed)}); give another --out folder"
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}); export into another folder") from error


class Done:
    """The parts of one shard that are there; kept on disk after each."""

    def __init__(self, folder: Path, shard: int, sha256: str, largest: int) -> None:
        """`sha256`: of the shard, from its sidecar; parts of another content are not kept, nor
        those that are too large."""
        self.folder, self.shard, self.sha256 = folder, shard, sha256
        self.path = folder / PARTS / f"{shard:05d}.json"
        self.tables: dict[str, dict[str, Any]] = {}
        for table, entry in self._there().items():
            good = 0
            while good < len(entry["parts"]) and _agrees(folder, entry["parts"][good], largest):
                good += 1
            whole = bool(entry["whole"]) and good == len(entry["parts"])
            self.tables[table] = {"parts": entry["parts"][:good], "whole": whole}

    def _there(self) -> dict[str, Any]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["sha256"] != self.sha256:
                return {}
            for table, entry in found["tables"].items():
                _ = entry["whole"]
                for number, part in enumerate(entry["parts"]):
                    kind = part["file"].rpartition(".")[2]
                    if part["file"] != part_name(table, self.shard, number, kind):
                        return {}
                    _ = part["rows"] + part["bytes"], part["sha256"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        return found["tables"]

    def parts(self, table: str) -> list[dict[str, Any]]:
        """Of a table."""
        return self.tables.get(table, {"parts": []})["parts"]

    def whole(self, table: str) -> bool:
        """Are all rows of the table there?"""
        return self.tables.get(table, {"whole": False})["whole"]

    def add(self, table: str, part: Part) -> None:
        """One more."""
        entry = self.tables.setdefault(table, {"parts": [], "whole": False})
        name = f"{table}/{part.path.name}"
        made = {"file": name, "rows": part.rows, "bytes": part.bytes, "sha256": part.sha256}
        entry["parts"].append(made)
        self._write()

    def finish(self, table: str) -> None:
        """No more comes of a table; kept on disk with what comes next."""
        self.tables[table]["whole"] = True

    def close(self) -> None:
        """No more comes of the shard."""
        self._write()

    def forget(self) -> None:
        """Nothing of the shard is there."""
        self.path.unlink(missing_ok=True)
        self.tables = {}

    def _write(self) -> None:
        write_json(self.path, {"sha256": self.sha256, "tables": self.tables})


def _agrees(folder: Path, part: Mapping[str, Any], largest: int) -> bool:
    path = folder / part["file"]
    return (
        part["bytes"] <= largest
        and path.is_file()
        and path.stat().st_size == part["bytes"]
        and file_hash(path) == part["sha256"]
    )


def finish(folder: Path, manifest: dict[str, Any]) -> None:
    """Remove parts that are not listed, then write the manifest."""
    whole = manifest | {"content_hash": content_hash(manifest)}
    path = folder / MANIFEST
    same = path.is_file() and _json(path) == whole
    if not same:
        path.unlink(missing_ok=True)
    listed = {part["file"] for table in manifest["tables"].values() for part in table["parts"]}
    for table in TABLES:
        for part in (folder / table).glob("part-*"):
            name = f"{table}/{part.name}"
            if NAME.fullmatch(name) and name not in listed:
                part.unlink()
    if not same:
        write_json(path, whole)


def content_hash(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of all of a manifest but this hash itself."""
    return canonical_hash({k: v for k, v in manifest.items() if k != "content_hash"})


def is_export(folder: Path) -> bool:
    """Is it, or was it to become, an export?"""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if isinstance(manifest, dict) and manifest.get("format") == EXPORT_FORMAT:
            return True
    except (OSError, ValueError):
        pass
    return (folder / PARTS / ASKED).is_file()


def read_export(folder: Path) -> dict[str, Any]:
    """The manifest of an export; raises StoreError where there is none, or none that can be
    read."""
    path = folder / MANIFEST
    if not path.is_file():
        raise StoreError(
            f"{folder} has no {MANIFEST}: the export was not finished, or the file was deleted; "
            "the same `headattr export` command goes on"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(f"{path} is not JSON ({error}); run the same export again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != EXPORT_FORMAT:
        raise StoreError(f"{path} is not the manifest of an export")
    if manifest.get("version") != VERSION:
        raise StoreError(
            f"{path} has version {manifest.get('version')}, and this headattr reads {VERSION}"
        )
    if fault := _fault(manifest):
        raise StoreError(f"{path} is broken: {fault}; run the same export again")
    return manifest


def _fault(manifest: dict[str, Any]) -> str | None:
    """What a manifest lacks; a part that lies elsewhere is no part."""
    if manifest.get("content_hash") != content_hash(manifest):
        return "its hash is not that of its content"
    try:
        for table in manifest["tables"].values():
            for part in table["parts"]:
                _ = part["rows"], part["bytes"], part["sha256"]
                if not NAME.fullmatch(part["file"]):
                    return f"{part['file']!r} is no name of a part"
    except (KeyError, TypeError, AttributeError) as error:
        return f"{error} is missing or of another kind"
    return None
