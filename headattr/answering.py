"""From a command that asks a store to its answer, and from the answer to words."""

from collections.abc import Callable
from typing import Any

from headattr import comparisons, questions
from headattr.asking import (
    QueryDiff,
    QueryFeature,
    QueryHead,
    QueryPair,
    QueryPrompt,
    QueryRow,
    QuerySpan,
)
from headattr.errors import UsageError
from headattr.store.filters import EdgeFilter, span_of
from headattr.store.reader import Store, open_store
from headattr.viewers import found


def _filter(command: QueryFeature | QueryPair) -> dict[str, Any]:
    """The page and the filter of a command."""
    for name, least in (("start", 0), ("count", 1)):
        if getattr(command, name) < least:
            raise UsageError(
                f"--{name} is {getattr(command, name)}; expected a whole number, at least {least}"
            )
    names = ("heads", "prompts", "min_pattern", "distance", "q_token", "k_token", "sign")
    chosen = EdgeFilter(**{name: getattr(command, name) for name in names})
    return {"chosen": chosen, "start": command.start, "count": command.count}


def _feature(store: Store, command: QueryFeature) -> dict[str, Any]:
    role = None if command.role == "all" else command.role
    return questions.feature(store, command.feature, command.source, role, **_filter(command))


def _pair(store: Store, command: QueryPair) -> dict[str, Any]:
    kind = "ov" if command.moved else "qk"
    ids = command.left, command.right
    return questions.pair(store, *ids, kind, command.source, **_filter(command))


def _head(store: Store, command: QueryHead) -> dict[str, Any]:
    return questions.head(store, command.head, count=_count(command.count))


def _row(store: Store, command: QueryRow) -> dict[str, Any]:
    return questions.row(store, command.prompt, command.head, command.q)


def _span(store: Store, command: QuerySpan) -> dict[str, Any]:
    q, k = (span_of(text, name) for text, name in ((command.q, "q"), (command.k, "k")))
    count = _count(command.count)
    return comparisons.span(store, command.prompt, command.head, q, k, count=count)


def _prompt(store: Store, command: QueryPrompt) -> dict[str, Any]:
    return questions.prompt(store, command.prompt, count=_count(command.count))


def _diff(store: Store, command: QueryDiff) -> dict[str, Any]:
    with open_store(command.other) as other:
        return comparisons.difference(
            store, other, heads=command.heads, count=_count(command.count)
        )


def _count(count: int) -> int:
    if count < 1:
        raise UsageError(f"--count is {count}; expected a whole number, at least 1")
    return count


ANSWERS: dict[type[Any], tuple[Callable[[Store, Any], Any], Callable[[Any], str]]] = {
    QueryFeature: (_feature, found.render_feature),
    QueryPair: (_pair, found.render_pair),
    QueryHead: (_head, found.render_head),
    QueryRow: (_row, found.render_row),
    QuerySpan: (_span, found.render_span),
    QueryPrompt: (_prompt, found.render_prompt),
    QueryDiff: (_diff, found.render_difference),
}
