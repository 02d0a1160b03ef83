"""Rows -> files that are each published whole, and none of which is larger than asked."""

import csv
import io
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headattr.errors import UsageError
from headattr.export.optional import arrow_schema, arrow_table, needed
from headattr.store.edge_frames import Frame
from headattr.store.fields import Field
from headattr.store.format import file_hash, published
from headattr.store.frames import count_rows

_CSV_ROWS = 8192
"""Rows that are put in words at once."""
_PARQUET_ROWS = 1 << 16
"""Rows of a row group that is read again."""
_AT_MOST = 1 << 20
"""Rows of a row group."""


class Part(NamedTuple):
    """A published file."""

    path: Path
    rows: int
    bytes: int
    sha256: str


@runtime_checkable
class Writing(Protocol):
    """A file at work."""

    def add(self, frame: Frame) -> int:
        """Take as many of the first rows as should fit, one at least where there is none yet; how
        many it took, 0 where it is full."""
        ...

    def close(self) -> None:
        """No more comes."""
        ...


class Kind(NamedTuple):
    """A kind of file."""

    name: str
    begin: Callable[[Path, int], Writing]
    """A new file that should have at most so many bytes."""
    read: Callable[[Path], Iterator[Frame]]
    """The rows of a file that came out too large."""


def write_parts(
    kind: Kind, frames: Iterable[Frame], paths: Iterator[Path], largest: int, what: str
) -> Iterator[Part]:
    """Write all rows into as many files as it takes, one at least, and yield each when it is
    there.

    Raises UsageError where one row does not fit.
    """
    yield from _write(kind, _Feed(frames), paths, largest, largest, what)


def _write(
    kind: Kind, feed: "_Feed", paths: Iterator[Path], largest: int, aim: int, what: str
) -> Iterator[Part]:
    for path in paths:
        name = f".{path.name}.{aim}.{socket.gethostname()}.{os.getpid()}.tmp"
        working = path.with_name(name)  # another one for every aim
        try:
            rows, size = _fill(kind.begin(working, aim), feed), working.stat().st_size
            if size <= largest:
                with published(path) as temporary:
                    working.replace(temporary)
                    digest = file_hash(temporary)
                yield Part(path, rows, size, digest)
            elif rows <= 1:
                raise UsageError(
                    f"--max-file is {largest} bytes, and a {kind.name} file of {what} with {rows} "
                    f"rows is {size} bytes; give at least that"
                )
            else:  # the guess was off: the same rows again, in smaller files
                again, rest = _Feed(kind.read(working)), itertools.chain([path], paths)
                yield from _write(kind, again, rest, largest, min(aim, largest) // 2, what)
        finally:
            working.unlink(missing_ok=True)
        if not feed.more():
            return


def _fill(part: Writing, feed: "_Feed") -> int:
    rows = 0
    try:
        while feed.more() and (taken := part.add(feed.rest())):
            feed.skip(taken)
            rows += taken
    finally:
        part.close()
    return rows


class _Feed:
    """Frames as one stream of rows."""

    def __init__(self, frames: Iterable[Frame]) -> None:
        self.frames, self.held, self.at = iter(frames), Frame(), 0

    def more(self) -> bool:
        """Is there a row left?"""
        while not self.held or self.at >= count_rows(self.held):
            found = next(self.frames, None)
            if found is None:
                return False
            self.held, self.at = found, 0
        return True

    def rest(self) -> Frame:
        """The rows at hand."""
        return rows_of(self.held, self.at, None)

    def skip(self, rows: int) -> None:
        """These are done."""
        self.at += rows


def rows_of(frame: Frame, start: int, stop: int | None) -> Frame:
    """Some rows of a frame."""
    return {name: column[start:stop] for name, column in frame.items()}


def without_first(frames: Iterable[Frame], rows: int) -> Iterator[Frame]:
    """Frames but for their first rows."""
    for frame in frames:
        here = min(rows, count_rows(frame))
        rows -= here
        if here < count_rows(frame):
            yield rows_of(frame, here, None) if here else frame


class _Csv:
    """RFC 4180 in UTF-8, with a header; nulls are empty, numbers read back exactly."""

    def __init__(self, path: Path, aim: int, fields: Sequence[Field]) -> None:
        self.file, self.aim, self.fields, self.rows = path.open("wb"), aim, fields, 0
        self.size = self.file.write(_csv_lines([[field.name for field in fields]]))

    def add(self, frame: Frame) -> int:
        rows, taken, step, full = count_rows(frame), 0, 64, False
        while taken < rows:
            cells = [_cells(frame[f.name][taken : taken + step], f) for f in self.fields]
            lines = _csv_lines(zip(*cells, strict=True))
            first = self.rows + taken == 0 and step == 1
            if self.size + len(lines) <= self.aim or first:
                self.size += self.file.write(lines)
                taken += len(cells[0])
                step = step if full else min(2 * step, _CSV_ROWS)
            elif step == 1:
                break
            else:
                step, full = step // 2, True
        self.rows += taken
        return taken

    def close(self) -> None:
        self.file.close()


def _cells(column: NDArray[Any], field: Field) -> list[Any]:
    if field.type == "float32":  # the shortest text that is this float32 and no other
        texts = np.ma.getdata(column).astype(np.str_)
        return np.where(np.ma.getmaskarray(column), "", texts).tolist()
    return np.where(column, "true", "false").tolist() if field.type == "bool" else column.tolist()


def _csv_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def _never(path: Path) -> Iterator[Frame]:
    raise AssertionError(f"{path}: the size of a CSV file is known as it is written")


def csv_kind(fields: Sequence[Field]) -> Kind:
    """CSV files of these columns."""
    return Kind("csv", lambda path, aim: _Csv(path, aim, fields), _never)


class _Parquet:
    """A row group for every frame; how many rows fit is guessed from those that are there."""

    def __init__(self, path: Path, aim: int, schema: Any) -> None:
        arrow, parquet = needed("pyarrow", "Parquet"), needed("pyarrow.parquet", "Parquet")
        self.schema, self.aim, self.rows, self.groups = schema, aim, 0, 0
        self.sink = arrow.OSFile(str(path), "wb")
        self.writer = parquet.ParquetWriter(self.sink, schema, compression="zstd")

    def add(self, frame: Frame) -> int:
        footer = len(self.schema) * (100 + 150 * (self.groups + 1))
        room = self.aim - footer - self.sink.tell()
        table = arrow_table(rows_of(frame, 0, min(max(1, room), _AT_MOST)), self.schema)
        a_row = self.sink.tell() / self.rows if self.rows else table.nbytes / len(table)
        taken = min(len(table), int(room / (1.1 * max(1, a_row))))
        if taken < 1 or (taken < len(table) and self.rows and taken < self.rows // 16):
            if self.rows:
                return 0
            taken = 1
        self.writer.write_table(table.slice(0, taken))
        self.rows, self.groups = self.rows + taken, self.groups + 1
        return taken

    def close(self) -> None:
        self.writer.close()
        self.sink.close()


def _read_parquet(path: Path) -> Iterator[Frame]:
    """Its rows, as arrow columns: those that are at hand take no more memory than a frame."""
    with needed("pyarrow.parquet", "Parquet").ParquetFile(path) as file:
        for batch in file.iter_batches(_PARQUET_ROWS):
            yield dict(zip(batch.schema.names, batch.columns, strict=True))


def parquet_kind(fields: Sequence[Field]) -> Kind:
    """Parquet files of these columns."""
    schema = arrow_schema(fields)
    return Kind("parquet", lambda path, aim: _Parquet(path, aim, schema), _read_parquet)
