"""Which edges a question is about: heads, prompts, pattern, distance, tokens, sign."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headattr.edges import HeadId, parse_heads, token_filter
from headattr.errors import UsageError
from headattr.store.view import LayerView, Where

EVERY = "all"


@dataclass(frozen=True)
class EdgeFilter:
    """A question's edges are those for which all of this holds."""

    heads: str = EVERY
    """all, or a list such as L5H1,L3H*."""
    prompts: str = EVERY
    """all, or an id, or a range of ids such as 10-19."""
    min_pattern: float = 0.0
    """Softmax weight, at least."""
    distance: str = EVERY
    """all, or how far the key is before the query: a number or a range such as 1-8."""
    q_token: str | None = None
    """The query's token: this text, or /this expression/."""
    k_token: str | None = None
    """The key's."""
    sign: str = "both"
    """Of what edges are ranked by: both, positive or negative."""

    def __post_init__(self) -> None:
        """Refuse what is none."""
        for name in ("prompts", "distance"):
            _range(getattr(self, name), name)
        if self.sign not in ("both", "positive", "negative"):
            raise UsageError(f"--sign {self.sign}: expected both, positive or negative")
        if not 0 <= self.min_pattern <= 1:
            raise UsageError(f"--min-pattern {self.min_pattern}: expected 0 to 1")
        for name in ("q_token", "k_token"):
            token_filter(getattr(self, name), [])

    def heads_of(self, known: list[HeadId]) -> set[HeadId]:
        """The heads asked for of those that a store has; raises UsageError for one it lacks."""
        if self.heads == EVERY:
            return set(known)
        layers, heads = (max(part) + 1 for part in zip(*known, strict=True))
        asked = set(parse_heads(self.heads, layers, heads))
        if "*" not in self.heads and not asked <= set(known):
            missing = min(asked - set(known))
            raise UsageError(
                f"head {missing} is not in this store; it holds {', '.join(map(str, known))}"
            )
        return asked & set(known)

    @property
    def edges_alone(self) -> bool:
        """Nothing but heads and sign is asked for."""
        return self == EdgeFilter(heads=self.heads, sign=self.sign)

    def keep(
        self, view: LayerView, rows: NDArray[np.integer], where: Where, heads: set[HeadId]
    ) -> NDArray[np.bool_]:
        """Which rows of a layer are meant, by all but the sign."""
        asked = np.array([HeadId(view.layer, head) in heads for head in view.heads])
        kept = asked[where.head]
        if low_high := _range(self.prompts, "prompts"):
            ids = view.file["prompt/id"][:][where.prompt]
            kept &= (ids >= low_high[0]) & (ids <= low_high[1])
        if low_high := _range(self.distance, "distance"):
            back = where.q_pos - where.k_pos
            kept &= (back >= low_high[0]) & (back <= low_high[1])
        if self.min_pattern > 0 and kept.any():
            kept &= view.take("pattern", rows) >= self.min_pattern
        for text, positions in ((self.q_token, where.q_pos), (self.k_token, where.k_pos)):
            if text is not None and kept.any():
                kept &= view.matching(text)[where.begin + positions]
        return kept

    def signed(self, strengths: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Which strengths have the sign that is asked for."""
        if self.sign == "both":
            return np.ones(len(strengths), bool)
        return strengths > 0 if self.sign == "positive" else strengths < 0


def span_of(text: str, name: str) -> tuple[int, int]:
    """`7` as (7, 7), `1-8` as (1, 8); raises UsageError for anything else."""
    found = _range(text, name)
    if found is None:
        raise UsageError(f"--{name} all: expected a position, or a range such as 1-8")
    return found


def _range(text: str, name: str) -> tuple[int, int] | None:
    """`all` as None, `7` as (7, 7), `1-8` as (1, 8); raises UsageError for anything else."""
    if text == EVERY:
        return None
    first, dash, last = text.partition("-")
    try:
        low, high = int(first), int(last if dash else first)
    except ValueError:
        low, high = 0, -1
    if not 0 <= low <= high:
        raise UsageError(f"--{name} {text!r}: expected all, a number, or a range such as 1-8")
    return low, high
