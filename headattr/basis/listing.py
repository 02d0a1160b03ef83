"""The dictionaries on this machine that headattr knows of, read from their configurations alone."""

from pathlib import Path
from typing import Any

from headattr.basis.formats.registry import formats, open_release
from headattr.errors import HeadattrError
from headattr.model.embedded import cache_folder, embedded_folder


def list_dictionaries() -> list[dict[str, Any]]:
    """[{"name", "site", "features", "activation", "d_model", "path", "problem"}], embedded ones
    first."""
    roots = [embedded_folder(), cache_folder()]
    folders = [
        path
        for root in roots
        if root.is_dir()
        for path in sorted(root.glob("*/*/"))
        if any(known.matches(path) for known in formats())
    ]
    return [_row(folder) for folder in folders]


def _row(folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": f"{folder.parent.name}/{folder.name}",
        "path": str(folder),
        "problem": None,
    }
    try:
        release = open_release(folder)
    except HeadattrError as error:
        empty = dict.fromkeys(("site", "features", "activation", "d_model"))
        return {**row, **empty, "problem": str(error)}
    first = release.dictionaries[0]
    reads = [site for d in release.dictionaries for site in d.reads if site is not None]
    site = first.hook_name if len(release.dictionaries) == 1 else None
    if site is None and reads:
        site = f"{release.kind} at {', '.join(map(str, dict.fromkeys(reads)))}"
    return {
        **row,
        "site": site,
        "features": release.features,
        "activation": first.shown,
        "d_model": first.d_in,
    }


def render_dictionaries(rows: list[dict[str, Any]]) -> str:
    """The list as text for a terminal."""
    lines = [f"{'name':28} {'site':26} {'features':>8}  {'activation':14} path"]
    for row in rows:
        about = row["problem"] or (
            f"{row['site']!s:26} {row['features']:>8}  {row['activation']:14} {row['path']}"
        )
        lines.append(f"{row['name']:28} {about}")
    return "\n".join(lines)
