"""The dictionaries on this machine that headattr knows of, read from their configurations alone."""

from pathlib import Path
from typing import Any

from headattr.basis.formats.saelens import CONFIG, read_config
from headattr.errors import HeadattrError
from headattr.model.embedded import cache_folder, embedded_folder


def list_dictionaries() -> list[dict[str, Any]]:
    """[{"name", "site", "features", "activation", "d_model", "path", "problem"}], embedded ones
    first."""
    roots = [embedded_folder(), cache_folder()]
    folders = [
        path.parent
        for root in roots
        if root.is_dir()
        for path in sorted(root.glob(f"*/*/{CONFIG}"))
    ]
    return [_row(folder) for folder in folders]


def _row(folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": f"{folder.parent.name}/{folder.name}",
        "path": str(folder),
        "problem": None,
    }
    try:
        config = read_config(folder)
    except HeadattrError as error:
        empty = dict.fromkeys(("site", "features", "activation", "d_model"))
        return {**row, **empty, "problem": str(error)}
    activation = config.architecture + (f" k={config.fields['k']}" if "k" in config.fields else "")
    return {
        **row,
        "site": config.hook_name,
        "features": config.fields["d_sae"],
        "activation": activation,
        "d_model": config.fields["d_in"],
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
