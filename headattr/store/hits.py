"""Edges that a question found, as columns: which they are, how strong, with what score."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.store.shard import Shard
from headattr.store.view import LayerView

_FEW = 64
"""Texts that are read one by one."""


class Hits(NamedTuple):
    """A page of edges, strongest first; columns of equal length."""

    prompt: NDArray[np.int64]
    layer: NDArray[np.int64]
    head: NDArray[np.int64]
    q_pos: NDArray[np.int64]
    k_pos: NDArray[np.int64]
    strength: NDArray[np.float32]
    score: NDArray[np.float32]
    pattern: NDArray[np.float32]
    q_token: NDArray[Any]
    k_token: NDArray[Any]


class Page(NamedTuple):
    """Some of the edges that a question found."""

    hits: Hits
    total: int | None
    """How many there are, None where only some were counted (a filter, and a page that was known
    before all were read)."""


def no_hits() -> Hits:
    """A page without edges."""
    floats = ("strength", "score", "pattern")
    columns: dict[str, Any] = {
        name: np.empty(0, np.float32 if name in floats else np.int64) for name in Hits._fields
    }
    return Hits(**columns)


def edge_facts(shard: Shard, view: LayerView, rows: NDArray[np.int64]) -> dict[str, Any]:
    """Which edges some ascending rows are, with score, pattern and tokens."""
    where = view.where(rows)
    ends = {"q_token": where.begin + where.q_pos, "k_token": where.begin + where.k_pos}
    tokens = {name: _texts(shard, positions) for name, positions in ends.items()}
    return {
        "prompt": np.array(shard.ids, np.int64)[where.prompt],
        "layer": np.full(len(rows), view.layer),
        "head": np.array(view.heads, np.int64)[where.head],
        "q_pos": where.q_pos,
        "k_pos": where.k_pos,
        "score": view.take("score", rows),
        "pattern": view.take("pattern", rows),
        **tokens,
    }


def _texts(shard: Shard, positions: NDArray[np.int64]) -> NDArray[Any]:
    """What positions show; many are read at once."""
    found, back = np.unique(positions, return_inverse=True)
    if len(found) < _FEW:
        shown = [shard.token_text[at] for at in found.tolist()]
    else:
        shown = shard.token_text[:][found].tolist()
    return np.array([text.decode() for text in shown], object)[back]
