"""The columns of the tables that a store is read and exported as; the README says what each is."""

from collections.abc import Sequence
from typing import NamedTuple

from headattr.errors import StoreError, UsageError

TABLES = ("edges", "pairs", "moved", "features", "parts", "prompts", "tokens")


class Field(NamedTuple):
    """A column of a table."""

    name: str
    type: str
    """int64, int32, float32, bool or text."""
    optional: bool = False
    """A row may lack it."""


_PROMPT = Field("prompt", "int64")
_IDS = (
    _PROMPT,
    *(Field(name, "int32") for name in ("layer", "head")),
    *(Field(name, "int64") for name in ("q_pos", "k_pos")),
)
_LONG = (*_IDS, Field("place", "int32"))


def _maybe(*names: str) -> tuple[Field, ...]:
    return tuple(Field(name, "float32", True) for name in names)


_FIELDS: dict[str, tuple[Field, ...]] = {
    "edges": (
        *_IDS,
        *(Field(name, "text") for name in ("q_token", "k_token")),
        *(Field(name, "float32") for name in ("score", "score_capped", "score_contrast")),
        *(Field(name, "float32") for name in ("pattern", "feature_share")),
        *(Field(name, "float32") for name in ("completeness", "contrast_completeness")),
        Field("flagged", "bool"),
        *_maybe("ov_completeness", "block_completeness"),
    ),
    "pairs": (
        *_LONG,
        *(Field(name, "int64") for name in ("q_feature", "k_feature")),
        *(Field(name, "float32") for name in ("value", "contrast")),
        Field("source", "text"),
    ),
    "moved": (
        *_LONG,
        *(Field(name, "int64") for name in ("v_feature", "o_feature")),
        Field("value", "float32"),
        *(Field(name, "text") for name in ("source", "output")),
    ),
    "features": (
        *_IDS,
        Field("role", "text"),
        Field("place", "int32"),
        Field("feature", "int64"),
        *_maybe("activation", "marginal", "contrast", "ablation", "norm", "read"),
        Field("source", "text"),
    ),
    "parts": (
        *_IDS,
        Field("role", "text"),
        Field("place", "int32"),
        *(Field(name, "text") for name in ("kind", "name")),
        *_maybe("marginal", "contrast", "norm"),
    ),
    "prompts": (
        _PROMPT,
        Field("text", "text"),
        Field("n_tokens", "int64"),
        Field("truncated", "bool"),
        Field("extra", "text"),
    ),
    "tokens": (
        _PROMPT,
        Field("position", "int64"),
        Field("token", "int32"),
        Field("text", "text"),
    ),
}


def fields(table: str, kinds: Sequence[str]) -> tuple[Field, ...]:
    """The columns of a table of layers with these kinds; raises UsageError for a table that is
    none."""
    if table not in _FIELDS:
        raise UsageError(f"table {table!r}: expected {', '.join(TABLES)}")
    if table != "edges":
        return _FIELDS[table]
    made = (
        *(f"total_{q}_{k}" for q in kinds for k in kinds),
        *(f"q_contrast_{kind}" for kind in kinds),
        *(f"k_contrast_{kind}" for kind in kinds),
    )
    if len(set(made)) < len(made):
        raise StoreError(f"kinds {', '.join(kinds)} make two columns of one name")
    return (*_FIELDS[table], *_maybe(*made, "k_contrast_elsewhere"))
