"""Is an export what its manifest says? Every file by name."""

from pathlib import Path
from typing import Any

from headattr.budget import show_bytes
from headattr.export.folder import PARTS, read_export
from headattr.store.format import MANIFEST, file_hash


def check_export(folder: Path) -> dict[str, Any]:
    """{"ok", "export": true, "kind", "complete", "parts", "rows", "bytes", "problems"}.

    `problems` names files that are missing, truncated, changed or foreign; `complete` is false for
    the export of a store that was not whole. Raises StoreError without a manifest.
    """
    manifest = read_export(folder)
    tables = manifest["tables"].values()
    parts = [part for table in tables for part in table["parts"]]
    problems = [problem for part in parts if (problem := part_problem(folder, part))]
    problems += [
        f"{name} is not in {MANIFEST}: it is of another export, or of one that was not finished"
        for name in _files(folder)
        if name not in {part["file"] for part in parts}
    ]
    return {
        "ok": not problems,
        "export": True,
        "kind": manifest["kind"],
        "complete": manifest["complete"],
        "parts": len(parts),
        "rows": sum(part["rows"] for part in parts),
        "bytes": sum(part["bytes"] for part in parts),
        "problems": problems,
    }


def part_problem(folder: Path, part: dict[str, Any], *, hashed: bool = True) -> str | None:
    """What is wrong with a part that the manifest lists, or None; `hashed`: read it whole."""
    path, again = folder / part["file"], "run the same export again"
    if not path.is_file():
        return f"{part['file']} is missing: {again}"
    size = path.stat().st_size
    if size != part["bytes"]:
        return f"{part['file']} is {size} bytes, expected {part['bytes']}: {again}"
    if hashed and file_hash(path) != part["sha256"]:
        return f"{part['file']} does not have the hash that {MANIFEST} says: {again}"
    return None


def _files(folder: Path) -> list[str]:
    """All files but the manifest, and those that are kept while exporting."""
    paths = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    names = (path.relative_to(folder) for path in paths)
    return sorted(
        name.as_posix()
        for name in names
        if name.parts[0] != PARTS and not name.name.startswith(".") and str(name) != MANIFEST
    )


def render_export_check(answer: dict[str, Any]) -> str:
    """A check as text for a terminal."""
    lines = [
        f"{'ok' if answer['ok'] else 'NOT OK'}: an export, {answer['parts']:,} {answer['kind']} "
        f"files, {answer['rows']:,} rows, {show_bytes(answer['bytes'])}"
    ]
    if not answer["complete"]:
        lines.append(f"  of a store that was not whole: {MANIFEST} says what is left out")
    return "\n".join([*lines, *(f"  problem: {problem}" for problem in answer["problems"])])
