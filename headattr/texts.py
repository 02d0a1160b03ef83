"""Prompts from a file or from memory; a bad one is set aside with its line, the others are not
harmed."""

import hashlib
import json
import re
from collections.abc import Sequence
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
        """With the line as people count."""
        return {"prompt": self.id, "line": self.id + 1, "reason": self.reason}


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
    if path.suffix not in (".txt", ".jsonl"):
        raise UsageError(f"--texts {path}: expected a .txt file (a line a prompt) or a .jsonl file")
    if paragraphs and path.suffix != ".txt":
        raise UsageError("--paragraphs goes with a .txt file")
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    if paragraphs:
        pieces = re.split(rb"\n[ \t]*(?:\n[ \t]*)+", content.strip(b"\n"))
    else:
        pieces = content.removesuffix(b"\n").split(b"\n")
    read = _json_line if path.suffix == ".jsonl" else _text_line
    return _collect([_decoded(index, piece, read) for index, piece in enumerate(pieces)])


def texts_from_memory(given: Sequence[str | Sequence[int]]) -> Texts:
    """Prompts handed over as strings or as lists of token ids."""
    found: list[RawPrompt | SetAside] = []
    for index, item in enumerate(given):
        if isinstance(item, str):
            found.append(
                _text_line(index, item) if item == "" else RawPrompt(index, item, None, {})
            )
        else:
            found.append(_from_record(index, {"tokens": [int(token) for token in item]}))
    return _collect(found)


def _collect(found: Sequence[RawPrompt | SetAside | None]) -> Texts:
    prompts = [item for item in found if isinstance(item, RawPrompt)]
    aside = [item for item in found if isinstance(item, SetAside)]
    digest = hashlib.sha256()
    for item in (*prompts, *aside):
        digest.update(
            json.dumps(item, ensure_ascii=False, sort_keys=True, default=str).encode() + b"\n"
        )
    return Texts(prompts, aside, digest.hexdigest())


def _decoded(index: int, piece: bytes, read: Any) -> RawPrompt | SetAside | None:
    try:
        return read(index, piece.decode("utf-8"))
    except UnicodeDecodeError as error:
        return SetAside(
            index, f"not UTF-8: byte 0x{piece[error.start]:02x} at offset {error.start}"
        )


def _text_line(index: int, line: str) -> RawPrompt | SetAside:
    return RawPrompt(index, line, None, {}) if line.strip() else SetAside(index, "empty")


def _json_line(index: int, line: str) -> RawPrompt | SetAside | None:
    if not line.strip():
        return None
    try:
        record = json.loads(line)
    except ValueError as error:
        return SetAside(index, f"not JSON: {error}")
    return _from_record(index, record)


def _from_record(index: int, record: Any) -> RawPrompt | SetAside:
    if not isinstance(record, dict):
        return SetAside(
            index, f"a JSON {type(record).__name__}; expected an object with text or tokens"
        )
    extra = {key: value for key, value in record.items() if key not in ("text", "tokens")}
    if ("text" in record) == ("tokens" in record):
        found = ", ".join(record) or "nothing"
        return SetAside(index, f"expected exactly one of the fields text and tokens; found {found}")
    if "text" in record:
        text = record["text"]
        if not isinstance(text, str):
            return SetAside(index, f"text is {json.dumps(text)}; expected a string")
        return RawPrompt(index, text, None, extra) if text else SetAside(index, "empty")
    tokens = record["tokens"]
    whole = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
    if not whole:
        return SetAside(index, "tokens is not a list of token ids (integers from 0)")
    return RawPrompt(index, None, tuple(tokens), extra) if tokens else SetAside(index, "empty")
