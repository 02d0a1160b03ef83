"""SQL over a store or an export, by DuckDB.

Over an export the files are read where they lie. Over a store the tables that the query names are
first made in a temporary database on disk: memory does not grow, but it takes as long as exporting
them.
"""

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from headattr.errors import StoreError, UsageError
from headattr.export.check import part_problem
from headattr.export.folder import is_export, read_export
from headattr.export.optional import arrow_schema, arrow_table, needed
from headattr.store.choice import choose, shards_of
from headattr.store.fields import TABLES, fields
from headattr.store.frames import frames, naming
from headattr.store.reader import open_store

_TYPES = {
    "int64": "BIGINT",
    "int32": "INTEGER",
    "float32": "FLOAT",
    "bool": "BOOLEAN",
    "text": "VARCHAR",
}


class _Ready(NamedTuple):
    """A database with the tables of a store or an export."""

    connection: Any
    problems: list[str]


def sql(
    store: Path, query: str, *, limit: int = 1000, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """{"columns": [{"name", "type"}], "rows": [[...]], "more", "non_finite", "complete",
    "problems"}.

    At most `limit` rows; `more` says whether there are others. Numbers that JSON has not (NaN,
    infinity) are null, and counted in `non_finite`. Raises UsageError for a query that DuckDB
    refuses.
    """
    if limit < 0:
        raise UsageError(f"--limit is {limit}; expected at least 0")
    duckdb = needed("duckdb", "sql")
    ready = _export(store, duckdb) if is_export(store) else _made(store, query, duckdb, say)
    with ready as (connection, problems):
        for problem in problems:
            say(f"not whole: {problem}")
        try:
            found = _ask(connection, query, limit)
        except duckdb.Error as error:
            raise UsageError(_said(error)) from error
    return {**found, "complete": not problems, "problems": problems}


def _said(error: Exception) -> str:
    """What DuckDB says, without its picture of the query; which tables there are where one is
    missing."""
    said = " ".join(str(error).split("\nLINE ")[0].split())
    tables = f"; there are {', '.join(TABLES)}" if "Table with name" in said else ""
    return f"sql: {said}{tables}"


def _ask(connection: Any, query: str, limit: int) -> dict[str, Any]:
    if len(statements := connection.extract_statements(query)) != 1:
        raise UsageError(f"sql: found {len(statements)} statements; expected one")
    connection.execute(statements[0])
    columns = [{"name": name, "type": str(kind)} for name, kind, *_ in connection.description or ()]
    rows = connection.fetchmany(limit + 1) if columns else []
    plain = _Plain()
    shown = [[plain.of(value) for value in row] for row in rows[:limit]]
    more = len(rows) > limit
    return {"columns": columns, "rows": shown, "more": more, "non_finite": plain.non_finite}


class _Plain:
    """Values as JSON has them."""

    def __init__(self) -> None:
        self.non_finite = 0

    def of(self, value: Any) -> Any:
        if isinstance(value, Decimal):
            value = float(value)
        if isinstance(value, float) and not math.isfinite(value):
            self.non_finite += 1
            return None
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, dict):
            return {str(key): self.of(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(one) for one in value]
        return str(value)


@contextmanager
def _export(folder: Path, duckdb: Any) -> Iterator[_Ready]:
    """The files of an export as views. Raises StoreError where one is missing or truncated."""
    manifest = read_export(folder)
    parts = [part for table in manifest["tables"].values() for part in table["parts"]]
    if wrong := [p for part in parts if (p := part_problem(folder, part, hashed=False))]:
        raise StoreError(f"{folder}: {wrong[0]}")
    with duckdb.connect(config=_CONFIG) as connection:
        for table, found in manifest["tables"].items():
            files = [str(folder / part["file"]) for part in found["parts"]]
            columns = {column["name"]: column["type"] for column in found["columns"]}
            source = _source(manifest["kind"], files, columns)
            connection.execute(f"CREATE VIEW {table} AS SELECT * FROM {source}")
        problems = [] if manifest["complete"] else manifest["problems"]
        yield _Ready(connection, problems)


_CONFIG = {"autoinstall_known_extensions": "false", "python_enable_replacements": "false"}
"""Nothing is fetched, and names are those of tables, not of variables of this program."""


def _source(kind: str, files: list[str], columns: dict[str, str]) -> str:
    if not files:
        none = ", ".join(f'NULL::{_TYPES[kind]} AS "{name}"' for name, kind in columns.items())
        return f"(SELECT {none} WHERE false)"
    listed = f"[{', '.join(map(_quoted, files))}]"
    if kind == "parquet":
        return f"read_parquet({listed})"
    types = ", ".join(f"{_quoted(name)}: '{_TYPES[kind]}'" for name, kind in columns.items())
    texts = ", ".join(_quoted(name) for name, kind in columns.items() if kind == "text")
    return (
        f"read_csv({listed}, header = true, auto_detect = false, delim = ',', quote = '\"', "
        f"escape = '\"', columns = {{{types}}}, force_not_null = [{texts}], "
        "new_line = '\\r\\n', max_line_size = 1073741824)"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@contextmanager
def _made(path: Path, query: str, duckdb: Any, say: Callable[[str], None]) -> Iterator[_Ready]:
    """The tables of a store that the query names, in a database that is gone afterwards."""
    words = {word.lower() for word in re.findall(r"\w+", query)}
    with open_store(path) as store, tempfile.TemporaryDirectory(prefix="headattr-sql-") as folder:
        choice = choose(store)
        shards = shards_of(store, choice)
        names = naming(store, choice, shards)
        config = _CONFIG | {"temp_directory": folder}
        with duckdb.connect(str(Path(folder) / "store.duckdb"), config=config) as connection:
            for table in TABLES:
                schema = arrow_schema(fields(table, names.kinds))
                connection.register("frame_at_hand", schema.empty_table())
                connection.execute(f"CREATE TABLE {table} AS SELECT * FROM frame_at_hand")
                if table not in words:
                    continue
                say(f"making table {table} of {len(shards)} shards")
                for frame in frames(table, choice, names, shards):
                    connection.register("frame_at_hand", arrow_table(frame, schema))
                    connection.execute(f"INSERT INTO {table} SELECT * FROM frame_at_hand")
            connection.unregister("frame_at_hand")
            yield _Ready(connection, _unfinished(store))


def _unfinished(store: Any) -> list[str]:
    left = len(store.manifest["shards"]) - len(store.shards) - len(store.problems)
    return [*store.problems, *([f"{left} shards are not finished"] if left > 0 else [])]


def render_sql(answer: dict[str, Any]) -> str:
    """Rows as text for a terminal: columns, then a row a line."""
    table = [[column["name"] for column in answer["columns"]]]
    table += [[_shown(value) for value in row] for row in answer["rows"]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    if answer["more"]:
        lines.append(f"... more than {len(answer['rows']):,} rows (--limit)")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
