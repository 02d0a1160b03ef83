"""The commands, their flags and their help; nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import tyro

from headattr.config import RunConfig


@dataclass(frozen=True)
class Demo:
    """See it work on the embedded model and texts: heads, three edges in words, a picture.

    Example:
      headattr demo --out headattr-demo
    """

    out: Path = Path("headattr-demo")
    """The folder of the result, a store with a picture in it; running again reuses it."""
    json: bool = False
    """Print the findings as JSON."""


@dataclass(frozen=True)
class QueryEdge:
    """Why is this edge there, and what does it move?

    Example:
      headattr query edge headattr-demo --prompt 2 --head L3H0 --q 17 --k 6
    """

    store: tyro.conf.Positional[Path]
    """A result folder."""
    prompt: int
    """The prompt's id: its 0-based line."""
    head: str
    """The head, as L5H1."""
    q: int
    """Query position."""
    k: int
    """Key position."""
    pairs: int = 8
    """Pairs to print (JSON has all that are kept)."""
    features: int = 3
    """Features a side to print (JSON has all that are kept)."""
    json: bool = False
    """Print the answer as JSON."""


@dataclass(frozen=True)
class Check:
    """Is a result whole, and does it add up? Is an export whole? Exit 1 if anything is off.

    Example:
      headattr check headattr-demo
    """

    store: tyro.conf.Positional[Path]
    """A result folder, or the folder of an export."""
    json: bool = False
    """Print the answer as JSON."""


@dataclass(frozen=True)
class Repair:
    """Set damaged shards aside, so that the same `run` command makes them again.

    Nothing is deleted but temporary files of processes that are gone. Exit 1 if something is wrong
    that the command cannot mend.

    Example:
      headattr repair headattr-demo --dry-run
    """

    store: tyro.conf.Positional[Path]
    """A result folder."""
    dry_run: bool = False
    """Only say what would be done."""
    json: bool = False
    """Print the answer as JSON."""


@dataclass(frozen=True)
class _Export:
    store: tyro.conf.Positional[Path]
    """A result folder."""
    out: Path
    """The folder of the export; the same command goes on after a stop."""
    tables: str = "all"
    """`all`, or a list of edges, pairs, moved, features, parts, prompts and tokens."""
    heads: str = "all"
    """`all`, or a list such as L5H1,L3H*."""
    prompts: str = "all"
    """`all`, or a list of ids and ranges such as 0-99,120."""
    max_file: str = "256MiB"
    """No file is larger than this."""
    json: bool = False
    """Print what was written as JSON."""


@dataclass(frozen=True)
class ExportParquet(_Export):
    """Write a result as Parquet tables, one or more files a shard (extra `export`). Exit 3 if some
    of it is not finished.

    Example:
      headattr export parquet headattr-demo --out demo-tables
    """


@dataclass(frozen=True)
class ExportCsv(_Export):
    """Write a result as CSV tables, one or more files a shard. Exit 3 if some of it is not
    finished.

    Example:
      headattr export csv headattr-demo --out demo-csv --tables edges,pairs --heads L3H*
    """


@dataclass(frozen=True)
class Sql:
    """Ask a result or an export in SQL (extra `export`): the tables edges, pairs, moved, features,
    parts, prompts and tokens, by DuckDB.

    Tables of a result that the query names are made first, every time: export a large one to
    Parquet once, and ask the export. Exit 3 if the result is not whole.

    Example:
      headattr sql headattr-demo "SELECT layer, head, avg(pattern) FROM edges GROUP BY ALL"
    """

    store: tyro.conf.Positional[Path]
    """A result folder, or the folder of an export (much faster)."""
    query: tyro.conf.Positional[str]
    """One statement."""
    limit: int = 1000
    """Rows to print, at most."""
    json: bool = False
    """Print columns and rows as JSON."""


@dataclass(frozen=True)
class Models:
    """The families whose attention is rebuilt exactly, with the error that was proven.

    Example:
      headattr models
    """

    json: bool = False
    """Print the table as JSON."""


@dataclass(frozen=True)
class DictionariesList:
    """The dictionaries that came with headattr or are in its cache.

    Example:
      headattr dictionaries list
    """

    json: bool = False
    """Print the table as JSON."""


@dataclass(frozen=True)
class Estimate(RunConfig):
    """What a run would take - edges, bytes, memory, time - with the same flags, before anything
    heavy.

    Example:
      headattr estimate --model demo --basis demo --texts prompts.txt --out results
    """

    out: str = ""
    """Not used: nothing is written."""


@dataclass(frozen=True)
class _Train:
    recipe: tyro.conf.Positional[Path]
    """A TOML file that says all that decides the result; its keys are listed above."""
    out: Path | None = None
    """The folder of the result, in place of the recipe's; the same command goes on after a stop."""
    progress: bool = True
    """Say on standard error how far it is."""
    json: bool = False
    """Print the card as JSON."""
    kind: ClassVar[str]
    """Of its recipes."""

    @classmethod
    def more_help(cls) -> str:
        """The keys of a recipe."""
        from headattr.training.recipe_help import keys_in_words

        return keys_in_words(cls.kind)


@dataclass(frozen=True)
class TrainSae(_Train):
    """Train a sparse dictionary of one site.

    Example:
      headattr train sae dictionaries/smollm2/resid_pre_12.toml --out resid_pre_12
    """

    kind: ClassVar[str] = "sae"


@dataclass(frozen=True)
class TrainTranscoder(_Train):
    """Train transcoders of MLPs, one a layer.

    Example:
      headattr train transcoder dictionaries/demo/transcoders.toml --out transcoders
    """

    kind: ClassVar[str] = "transcoder"


@dataclass(frozen=True)
class TrainCrosscoder(_Train):
    """Train a crosscoder of residual streams, weakly causal or acausal.

    Example:
      headattr train crosscoder dictionaries/demo/crosscoder.toml --out crosscoder
    """

    kind: ClassVar[str] = "crosscoder"
