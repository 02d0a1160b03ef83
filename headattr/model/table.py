"""The table of `headattr models`: families and the errors that were measured."""

import json
from importlib.resources import files
from typing import Any

from headattr.model.family import families


def model_table() -> list[dict[str, Any]]:
    """[{"family", "special", "proven_error", "since"}]; proven_error is the worst float32 error of
    any identity."""
    proven = proven_errors()
    return [
        {
            "family": family.name,
            "special": family.special,
            "proven_error": proven.get(family.name),
            "since": family.since,
        }
        for family in families()
    ]


def proven_errors() -> dict[str, float]:
    """The packaged figures, by family."""
    return json.loads(files("headattr.model").joinpath("proven.json").read_text(encoding="utf-8"))


def render_models(table: list[dict[str, Any]]) -> str:
    """The table as text for a terminal."""
    lines = [f"{'family':12} {'error':>8}  {'since':7} special"]
    for row in table:
        error = "none" if row["proven_error"] is None else f"{row['proven_error']:.0e}"
        lines.append(f"{row['family']:12} {error:>8}  {row['since']:7} {row['special']}")
    return "\n".join(lines)
