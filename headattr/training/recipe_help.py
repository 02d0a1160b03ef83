"""The keys of a recipe in words, from the recipe's own fields."""

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from headattr.training.recipe import KINDS, in_words

_WIDTH = 78


def keys_in_words(kind: str) -> str:
    """Every key of a recipe of this kind: its type, its default and what it says; those that a
    recipe has to have first."""
    recipe, said = KINDS[kind], _docstrings(KINDS[kind])
    hints = get_type_hints(recipe)
    needed = [field for field in fields(recipe) if field.default is MISSING]
    others = [field for field in fields(recipe) if field.default is not MISSING]
    lines = [f"Keys of a {kind} recipe (TOML), those that it needs first:"]
    for field in needed + others:
        default = "" if field.default is MISSING else f", by default {_toml(field.default)}"
        lines.append(f"  {field.name}: {in_words(hints[field.name])}{default}")
        about = " ".join(said[field.name].split())
        lines += textwrap.wrap(about, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _docstrings(recipe: type[Any]) -> dict[str, str]:
    """What follows each field in the source of a class and of those that it extends."""
    found: dict[str, str] = {}
    for part in reversed(recipe.__mro__[:-1]):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                assert isinstance(text, ast.Expr)
                found[field.target.id] = ast.literal_eval(text.value)
    return found


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"
