"""Which rows of a store are asked for: prompts and heads."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headattr.edges import HeadId
from headattr.errors import UsageError
from headattr.store.shard import Shard


@runtime_checkable
class Stored(Protocol):
    """What a store is, here."""

    manifest: dict[str, Any]
    shards: list[Shard]

    @property
    def prompt_ids(self) -> list[int]:
        """Finished prompts."""
        ...


class Choice(NamedTuple):
    """Which rows of a store."""

    ranges: NDArray[np.int64] | None
    """[n, 2] first and last ids, apart and ascending; None is all."""
    heads: tuple[HeadId, ...]

    def of(self, prompts: Sequence[int]) -> NDArray[np.bool_]:
        """Which of these prompts are chosen."""
        if self.ranges is None:
            return np.ones(len(prompts), bool)
        ids = np.asarray(prompts, np.int64)
        at = np.searchsorted(self.ranges[:, 0], ids, "right") - 1
        return (at >= 0) & (ids <= self.ranges[at, 1])


def choose(store: Stored, heads: str = "all", prompts: str | Iterable[int] = "all") -> Choice:
    """Heads as `L5H1,L3H*`, prompts as `0-99,120` or ids; raises UsageError for what is not
    there."""
    return Choice(_prompts(store, prompts), tuple(_heads(store, heads)))


def _heads(store: Stored, text: str) -> list[HeadId]:
    held = [HeadId(plan["layer"], h) for plan in store.manifest["layers"] for h in plan["heads"]]
    if text == "all":
        return sorted(held)
    found: set[HeadId] = set()
    for part in text.split(","):
        match = re.fullmatch(r"L(\d+)H(\d+|\*)", part.strip())
        if not match:
            raise UsageError(f"--heads {part.strip()!r}: expected all, or a list such as L5H1,L3H*")
        here = [h for h in held if h.layer == int(match[1]) and match[2] in ("*", str(h.head))]
        if not here:
            raise UsageError(
                f"--heads {part.strip()}: not in this store; it holds {', '.join(map(str, held))}"
            )
        found.update(here)
    return sorted(found)


def _prompts(store: Stored, given: str | Iterable[int]) -> NDArray[np.int64] | None:
    if isinstance(given, str) and given == "all":
        return None
    held = np.array(store.prompt_ids, np.int64)
    some = f"{held[0]} to {held[-1]}" if len(held) else "none yet"
    ranges = _ranges(given) if isinstance(given, str) else [(int(i), int(i)) for i in given]
    merged: list[list[int]] = []
    for first, last in sorted(ranges):
        if np.searchsorted(held, first) == np.searchsorted(held, last, "right"):
            shown = str(first) if first == last else f"{first}-{last}"
            raise UsageError(
                f"--prompts {shown}: no finished prompt of this store; it holds {some}"
            )
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(last, merged[-1][1])
        else:
            merged.append([first, last])
    if not merged:
        raise UsageError(f"--prompts: none given; this store holds {some}")
    return np.array(merged, np.int64)


def _ranges(text: str) -> list[tuple[int, int]]:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(
                f"--prompts {part.strip()!r}: expected all, or a list such as 0-99,120"
            )
        found.append((int(match[1]), int(match[2] or match[1])))
    return found


def shards_of(store: Stored, choice: Choice) -> list[Shard]:
    """The finished shards that hold a chosen prompt."""
    return [shard for shard in store.shards if choice.of(shard.ids).any()]
