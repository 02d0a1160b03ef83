"""The commands that ask a store, their flags and their help; nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class _Ask:
    store: tyro.conf.Positional[Path]
    """A result folder."""


@dataclass(frozen=True, kw_only=True)
class _Filtered:
    source: str | None = None
    """The dictionary, by its name or its number in the store, where there are several."""
    heads: str = "all"
    """Only these heads: all, or a list such as L5H1,L3H*."""
    prompts: str = "all"
    """Only this prompt, or this range of ids, such as 10-19."""
    min_pattern: float = 0.0
    """Only edges with at least this softmax weight."""
    distance: str = "all"
    """Only keys this far before the query, such as 1 or 1-8."""
    q_token: str | None = None
    """Only queries whose token is this text, or matches /this expression/."""
    k_token: str | None = None
    """Only keys whose token is this text, or matches /this expression/."""
    sign: Literal["both", "positive", "negative"] = "both"
    """Only edges where it raises (lowers) what is asked for."""
    start: int = 0
    """Leave out the strongest so many: the next page."""
    count: int = 20
    """Edges to give."""
    json: bool = False
    """Print the answer as JSON."""


@dataclass(frozen=True, kw_only=True)
class QueryFeature(_Filtered, _Ask):
    """Where does a feature matter? The edges where it is among the strongest, strongest first.

    Example:
      headattr query feature headattr-demo 405 --source resid_pre_3 --role key --min-pattern 0.1
    """

    feature: tyro.conf.Positional[int]
    """The feature's id."""
    role: Literal["all", "query", "key", "value", "output"] = "all"
    """As what: query or key of a score, value that is moved, output that reads it."""


@dataclass(frozen=True, kw_only=True)
class QueryPair(_Filtered, _Ask):
    """Where does a pair of features matter? The edges that keep it, and what it comes to by head.

    Example:
      headattr query pair headattr-demo 171 405 --source resid_pre_3
    """

    left: tyro.conf.Positional[int]
    """The query feature (with --moved the value feature)."""
    right: tyro.conf.Positional[int]
    """The key feature (with --moved the output feature)."""
    moved: bool = False
    """A pair of what is moved: value feature to output feature."""


@dataclass(frozen=True, kw_only=True)
class QueryHead(_Ask):
    """What does a head do? Its strongest and most frequent pairs over the whole store.

    Example:
      headattr query head headattr-demo L3H0
    """

    head: tyro.conf.Positional[str]
    """The head, as L5H1."""
    count: int = 10
    """Pairs to give of each list."""
    json: bool = False
    """Print the answer as JSON."""


@dataclass(frozen=True, kw_only=True)
class QueryRow(_Ask):
    """What else did a query look at? All its kept keys, by softmax weight.

    Example:
      headattr query row headattr-demo --prompt 2 --head L3H0 --q 29
    """

    prompt: int
    """The prompt's id: its 0-based line."""
    head: str
    """The head, as L5H1."""
    q: int
    """Query position."""
    json: bool = False
    """Print the answer as JSON."""


@dataclass(frozen=True, kw_only=True)
class QuerySpan(_Ask):
    """Sums over the edges from some tokens to others, such as from a sentence to a name.

    Example:
      headattr query span headattr-demo --prompt 2 --head L3H0 --q 24-35 --k 0-11
    """

    prompt: int
    """The prompt's id: its 0-based line."""
    head: str
    """The head, as L5H1."""
    q: str
    """Query positions, such as 24-35 or 29."""
    k: str
    """Key positions."""
    count: int = 10
    """Pairs to give."""
    json: bool = False
    """Print the answer as JSON."""


@dataclass(frozen=True, kw_only=True)
class QueryPrompt(_Ask):
    """A prompt's tokens with their positions, and the strongest edges of each head in it.

    Example:
      headattr query prompt headattr-demo 2
    """

    prompt: tyro.conf.Positional[int]
    """The prompt's id: its 0-based line."""
    count: int = 3
    """Edges to give of each head."""
    json: bool = False
    """Print the answer as JSON."""


@dataclass(frozen=True, kw_only=True)
class QueryDiff(_Ask):
    """What changed between two stores of the same texts, such as of two checkpoints?

    Example:
      headattr query diff before after --heads L5H*
    """

    other: tyro.conf.Positional[Path]
    """The other result folder."""
    heads: str = "all"
    """Only these heads: all, or a list such as L5H1,L3H*."""
    count: int = 20
    """Edges to give."""
    json: bool = False
    """Print the answer as JSON."""


@dataclass(frozen=True, kw_only=True)
class Index(_Ask):
    """Make one index over all shards, for stores of many: first pages and heads at once.

    A run of 16 shards or more makes it by itself. It is disposable: it is used while just the
    shards are there that it was made from, and may be deleted.

    Example:
      headattr index results
    """

    json: bool = False
    """Print what was made as JSON."""
