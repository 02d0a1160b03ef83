"""Prompts from a file or from memory; a bad one is set aside with its line."""

import hashlib
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headattr.errors import UsageError


class RawPrompt(NamedTuple):
    """One prompt before tokenisation: a text, or token ids that are taken as they are."""

    id: int
    """0-based line or paragraph."""
    text: str | None
    tokens: tuple[int, ...] | None
    extra: dict[str, Any]
    """Other keys of its JSONL line."""


class SetAside(NamedTuple):
    """A prompt that cannot be run, and why."""

    id: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """With the line as people count, the reason on one line."""
        return {"prompt": self.id, "line": self.id + 1, "reason": " ".join(self.reason.split())}


class Texts(NamedTuple):
    """All prompts of a run, in order."""

    prompts: list[RawPrompt]
    set_aside: list[SetAside]
    hash: str
    """SHA-256 of the prompts, whatever file they came from."""


def read_texts(path: Path, *, paragraphs: bool = False) -> Texts:
    """Read a .txt or .jsonl file; raises UsageError if it is missing or of another kind."""
    if not path.is_file():
        raise UsageError(f"--texts {path}: no such file; expected a .txt or .jsonl file")
    kind = path.suffix.lower()
    if kind not in (".txt", ".jsonl"):
        raise UsageError(f"--texts {path}: expected a .txt file (a line a prompt) or a .jsonl file")
    if paragraphs and kind != ".txt":
        raise UsageError(f"--paragraphs goes with a .txt file, not with {path}")
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    read = _json_line if kind == ".jsonl" else _text_line
    pieces = _paragraphs(content) if paragraphs else content.removesuffix(b"\n").split(b"\n")
    return _collect([_decoded(index, piece, read) for index, piece in enumerate(pieces)])


def texts_from_memory(given: Sequence[Any] | Mapping[str, Any]) -> Texts:
    """Prompts handed over as strings, as lists of token ids, or as a tokenizer's padded batch.

    A batch is a mapping with `input_ids` and `attention_mask`; padding is taken off on either side.
    """
    if isinstance(given, Mapping):
        rows = zip(given["input_ids"], given["attention_mask"], strict=True)
        given = [[int(t) for t, real in zip(*row, strict=True) if real] for row in rows]
    return _collect([_from_object(index, item) for index, item in enumerate(given)])


def _paragraphs(content: bytes) -> list[bytes]:
    """What stands between blank lines, indents kept."""
    content = re.sub(rb"\A(?:[ \t]*\n)+|\s+\Z", b"", content)
    return re.split(rb"\n(?:[ \t]*\n)+", content)


def _from_object(index: int, item: Any) -> RawPrompt | SetAside:
    if isinstance(item, str | bytes):
        return _from_record(index, {"text": item})
    try:
        tokens = [t if isinstance(t, bool) else operator.index(t) for t in item]
    except TypeError:
        return SetAside(
            index, f"a {type(item).__name__}; expected a string or a list of token ids (integers)"
        )
    return _from_record(index, {"tokens": tokens})


def _collect(found: Sequence[RawPrompt | SetAside | None]) -> Texts:
    prompts = [item for item in found if isinstance(item, RawPrompt)]
    aside = [item for item in found if isinstance(item, SetAside)]
    digest = hashlib.sha256()
    for item in (*prompts, *aside):
        digest.update(json.dumps(item, sort_keys=True).encode() + b"\n")
    return Texts(prompts, aside, digest.hexdigest())


def _decoded(
    index: int, piece: bytes, read: Callable[[int, str], RawPrompt | SetAside | None]
) -> RawPrompt | SetAside | None:
    try:
        return read(index, piece.decode("utf-8"))
    except UnicodeDecodeError as error:
        return SetAside(
            index, f"not UTF-8: byte 0x{piece[error.start]:02x} at offset {error.start}"
        )


def _text_line(index: int, line: str) -> RawPrompt | SetAside:
    return _from_record(index, {"text": line if line.strip() else ""})


def _json_line(index: int, line: str) -> RawPrompt | SetAside | None:
    if not line.strip():
        return None
    try:
        record = json.loads(line)
        json.dumps(record, allow_nan=False)
    except (ValueError, RecursionError) as error:
        return SetAside(index, f"not JSON: {error}")
    return _from_record(index, record)


def _from_record(index: int, record: Any) -> RawPrompt | SetAside:
    if not isinstance(record, dict):
        return SetAside(
            index, f"a JSON {type(record).__name__}; expected an object with text or tokens"
        )
    extra = {key: value for key, value in record.items() if key not in ("text", "tokens")}
    if ("text" in record) == ("tokens" in record):
        found = _short(", ".join(record) or "nothing")
        return SetAside(index, f"expected exactly one of the fields text and tokens; found {found}")
    if "text" in record:
        return _from_text(index, record["text"], extra)
    tokens = record["tokens"]
    whole = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
    if not whole:
        return SetAside(
            index, f"tokens is {_short(json.dumps(tokens))}; expected token ids (integers from 0)"
        )
    return RawPrompt(index, None, tuple(tokens), extra) if tokens else SetAside(index, "empty")


def _from_text(index: int, text: Any, extra: dict[str, Any]) -> RawPrompt | SetAside:
    if not isinstance(text, str):
        return SetAside(
            index, f"text is {_short(json.dumps(text, default=repr))}; expected a string"
        )
    # neither can be kept as text: half of a surrogate pair is no character, and HDF5 ends at NUL
    broken = re.search("[\ud800-\udfff\0]", text)
    if broken:
        found = f"U+{ord(broken[0]):04X} at offset {broken.start()}"
        return SetAside(index, f"text holds {found}, which is not a character of a text")
    return RawPrompt(index, text, None, extra) if text else SetAside(index, "empty")


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
