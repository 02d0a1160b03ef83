"""The export: every table of every finished shard, part by part; the same call goes on."""

from collections.abc import Callable, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, NamedTuple

from headattr.budget import parse_bytes, show_bytes
from headattr.errors import StoreError, UsageError
from headattr.export.folder import (
    EXPORT_FORMAT,
    VERSION,
    Done,
    finish,
    part_name,
    prepare,
    shard_of,
)
from headattr.export.parts import Kind, csv_kind, parquet_kind, without_first, write_parts
from headattr.store.choice import Choice, choose, shards_of
from headattr.store.edge_frames import Naming
from headattr.store.fields import TABLES, Field, fields
from headattr.store.format import MANIFEST, SHARDS, file_hash, shard_name
from headattr.store.frames import frames, naming
from headattr.store.reader import Store, open_store
from headattr.store.shard import Shard

KINDS: dict[str, Callable[[Sequence[Field]], Kind]] = {"parquet": parquet_kind, "csv": csv_kind}
Say = Callable[[str], None]


class _Export(NamedTuple):
    folder: Path
    tables: tuple[str, ...]
    largest: int
    choice: Choice
    names: Naming
    kinds: dict[str, Kind]
    """By table."""
    say: Say


def export_store(
    store: Path,
    out: Path,
    kind: str = "parquet",
    *,
    tables: str = "all",
    heads: str = "all",
    prompts: str = "all",
    max_file: str | int = "256MiB",
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Write tables of a store into a folder: {"out", "kind", "complete", "tables": {name: {"rows",
    "bytes", "parts"}}, "rows", "bytes", "parts", "kept", "set_aside", "problems"}.

    `complete` is false where shards that were asked for are not finished or are damaged; they are
    in `problems` and in the manifest. Raises UsageError for what makes no sense, StoreError for a
    folder that holds something else.
    """
    chosen, largest = _tables(tables), _size(max_file)
    with open_store(store) as opened:
        choice = choose(opened, heads, prompts)
        asked = _asked(opened, kind, chosen, choice)
        shards, problems = shards_of(opened, choice), _missing(opened, choice)
        for problem in problems:
            say(f"left out: {problem}")
        names = naming(opened, choice, list(islice(filter(_sound, shards), 1)))
        columns = {table: fields(table, names.kinds) for table in chosen}
        kinds = {table: KINDS[kind](found) for table, found in columns.items()}
        prepare(out, asked)
        job = _Export(out, chosen, largest, choice, names, kinds, say)
        parts, kept = _write(job, shards, problems)
        made = _manifest(opened, asked | {"max_file": largest}, columns, parts, problems)
        finish(out, made)
        return _answer(out, made, kept, len(opened.set_aside))


def _tables(text: str) -> tuple[str, ...]:
    if text == "all":
        return TABLES
    asked = [part.strip() for part in text.split(",")]
    for table in asked:
        if table not in TABLES:
            raise UsageError(f"--tables {table!r}: expected all, or a list of {', '.join(TABLES)}")
    return tuple(table for table in TABLES if table in asked)


def _size(text: str | int) -> int:
    try:
        return parse_bytes(text)
    except UsageError:
        raise UsageError(f"--max-file {text!r}: expected a size such as 256MiB") from None


def _asked(store: Store, kind: str, tables: Sequence[str], choice: Choice) -> dict[str, Any]:
    return {
        "format": EXPORT_FORMAT,
        "version": VERSION,
        "kind": kind,
        "store": store.manifest["hash"],
        "tables": list(tables),
        "heads": [str(head) for head in choice.heads],
        "prompts": "all" if choice.ranges is None else choice.ranges.tolist(),
    }


def _missing(store: Store, choice: Choice) -> list[str]:
    """What is wrong with chosen shards that are not finished."""
    held, problems = {shard.sidecar["shard"] for shard in store.shards}, list[str]()
    for entry in store.manifest["shards"]:
        if entry["index"] not in held and choice.of(entry["prompts"]).any():
            name = f"{SHARDS}/{shard_name(entry['index'])}"
            named = [p for p in store.problems if f"{name}.h5" in p or f"{name}.json" in p]
            problems += named or [f"{name}.h5 is not finished"]
    return problems


def _sound(shard: Shard) -> bool:
    """Does it hold what was published?"""
    return file_hash(shard.path) == shard.sidecar["sha256"]


def _write(
    job: _Export, shards: Sequence[Shard], problems: list[str]
) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """The parts of all tables, and how many of them were there; what is damaged is added to
    `problems`."""
    parts: dict[str, list[dict[str, Any]]] = {table: [] for table in job.tables}
    kept = 0
    for number, shard in enumerate(shards, 1):
        done = Done(job.folder, shard.sidecar["shard"], shard.sidecar["sha256"], job.largest)
        before = sum(len(done.parts(table)) for table in job.tables)
        try:
            _write_shard(job, shard, done)
        except StoreError as error:
            job.say(f"left out: {error}")
            problems.append(str(error))
            done.forget()
            continue
        for table in job.tables:
            parts[table] += done.parts(table)
        kept += before
        rows = sum(part["rows"] for table in job.tables for part in done.parts(table))
        job.say(f"shard {number} of {len(shards)}: {rows:,} rows")
    return parts, kept


def _write_shard(job: _Export, shard: Shard, done: Done) -> None:
    if all(map(done.whole, job.tables)):
        return
    (job.folder / MANIFEST).unlink(missing_ok=True)  # from here on the export is not finished
    if not _sound(shard):
        raise StoreError(
            f"{SHARDS}/{shard.path.name} does not have the hash of its sidecar: it was changed"
        )
    for table in job.tables:
        _write_table(job, shard, table, done)
    done.close()


def _write_table(job: _Export, shard: Shard, table: str, done: Done) -> None:
    if done.whole(table):
        return
    kind, index, there = job.kinds[table], done.shard, done.parts(table)
    found = frames(table, job.choice, job.names, [shard])
    rest = without_first(found, sum(part["rows"] for part in there))
    first = next(rest, None)
    if first is not None or not there:
        names = (part_name(table, index, number, kind.name) for number in count(len(there)))
        every = () if first is None else chain([first], rest)
        paths = (job.folder / name for name in names)
        for part in write_parts(kind, every, paths, job.largest, table):
            done.add(table, part)
    done.finish(table)


def _manifest(
    store: Store,
    asked: dict[str, Any],
    columns: dict[str, tuple[Field, ...]],
    parts: dict[str, list[dict[str, Any]]],
    problems: list[str],
) -> dict[str, Any]:
    tables = {
        table: {
            "columns": [field._asdict() for field in columns[table]],
            "rows": sum(part["rows"] for part in found),
            "bytes": sum(part["bytes"] for part in found),
            "parts": [{**part, "shard": shard_of(part["file"])} for part in found],
        }
        for table, found in parts.items()
    }
    named = ("index", "kind", "layer", "name", "n_features", "groups")
    return {
        **asked,
        "headattr": store.manifest["headattr"],
        "complete": not problems,
        "problems": problems,
        "sources": [{k: source.get(k) for k in named} for source in store.manifest["sources"]],
        "tables": tables,
    }


def _answer(out: Path, manifest: dict[str, Any], kept: int, set_aside: int) -> dict[str, Any]:
    tables = {
        name: {"rows": t["rows"], "bytes": t["bytes"], "parts": len(t["parts"])}
        for name, t in manifest["tables"].items()
    }
    sums = {key: sum(t[key] for t in tables.values()) for key in ("rows", "bytes", "parts")}
    return {
        "out": str(out),
        "kind": manifest["kind"],
        "complete": manifest["complete"],
        "tables": tables,
        **sums,
        "kept": kept,
        "set_aside": set_aside,
        "problems": manifest["problems"],
    }


def render_export(answer: dict[str, Any]) -> str:
    """An export as text for a terminal."""
    whole = "" if answer["complete"] else f" of a store that is NOT WHOLE ({answer['kind']})"
    lines = [
        f"{answer['out']}: {answer['rows']:,} rows in {answer['parts']:,} {answer['kind']} files, "
        f"{show_bytes(answer['bytes'])}{whole}; {answer['kept']:,} files were there already"
    ]
    lines += [
        f"  {name:9} {t['rows']:>14,} rows  {t['parts']:>6,} files  {show_bytes(t['bytes'])}"
        for name, t in answer["tables"].items()
    ]
    return "\n".join([*lines, *(f"  left out: {problem}" for problem in answer["problems"])])
