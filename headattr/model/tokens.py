"""Prompts -> token ids, and token ids -> what a person reads.

Positions are keyed by index, never by text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from headattr.errors import HeadattrError
from headattr.model.load import LoadedModel
from headattr.texts import RawPrompt, SetAside


class Prompt(NamedTuple):
    """One prompt as it runs."""

    id: int
    tokens: tuple[int, ...]
    token_texts: tuple[str, ...]
    """One valid string a position; bytes that are no character alone are shown as <0xF0>."""
    text: str | None
    extra: dict[str, Any]
    truncated: bool


class Bos(NamedTuple):
    """Whether texts begin with BOS, and why."""

    prepend: bool
    id: int | None
    why: str


def decide_bos(tokenizer: Any | None, asked: str, declared: dict[str, bool]) -> Bos:
    """`asked` is auto, yes or no; `declared` what each dictionary was trained with.

    Raises HeadattrError where they disagree, or where there is no BOS token to prepend.
    """
    if len(set(declared.values())) > 1:
        said = ", ".join(
            f"{name}: {'with' if bos else 'without'} BOS" for name, bos in declared.items()
        )
        raise HeadattrError(
            f"the dictionaries disagree on BOS ({said}); expected all with or all without"
        )
    trained = next(iter(declared.values()), None)
    if asked != "auto" and trained is not None and trained != (asked == "yes"):
        raise HeadattrError(
            f"--bos {asked}, but the dictionaries were trained "
            f"{'with' if trained else 'without'} BOS "
            f"({', '.join(declared)}); use --bos auto"
        )
    if tokenizer is None:
        return Bos(False, None, "there is no tokenizer: token ids are taken as they are")
    bos_id = tokenizer.bos_token_id
    if asked != "auto":
        prepend, why = asked == "yes", f"--bos {asked}"
    elif trained is not None:
        prepend, why = (
            trained,
            f"the dictionaries were trained {'with' if trained else 'without'} it",
        )
    else:
        prepend = bos_id is not None and tokenizer("a").input_ids[:1] == [bos_id]
        why = "as the tokenizer does"
    if prepend and bos_id is None:
        raise HeadattrError(
            f"BOS is asked for ({why}), but the tokenizer has no BOS token; use --bos no"
        )
    return Bos(prepend, bos_id, why)


def tokenize(
    model: LoadedModel, raw: Sequence[RawPrompt], bos: Bos, *, truncate: bool
) -> tuple[list[Prompt], list[SetAside]]:
    """Token ids of every prompt; what cannot run is set aside with its reason."""
    prompts: list[Prompt] = []
    aside: list[SetAside] = []
    shown = _TokenTexts(model.tokenizer)
    for item in raw:
        tokens = item.tokens if item.tokens is not None else _encode(model, item.text or "", bos)
        if problem := _problem(model, tokens, truncate):
            aside.append(SetAside(item.id, problem))
            continue
        kept = tokens[: model.context]
        texts = tuple(shown(token) for token in kept)
        prompts.append(Prompt(item.id, kept, texts, item.text, item.extra, len(kept) < len(tokens)))
    return prompts, aside


def _encode(model: LoadedModel, text: str, bos: Bos) -> tuple[int, ...]:
    if model.tokenizer is None:
        raise HeadattrError(f"{model.name} has no tokenizer; give one, or prompts as token ids")
    ids = tuple(model.tokenizer(text, add_special_tokens=False).input_ids)
    if bos.prepend and bos.id is not None and ids[:1] != (bos.id,):
        ids = (bos.id, *ids)
    return ids


def _problem(model: LoadedModel, tokens: Sequence[int], truncate: bool) -> str | None:
    if not tokens:
        return "empty"
    if len(tokens) > model.context and not truncate:
        return f"too long: {len(tokens)} tokens > context {model.context} (--truncate cuts it)"
    wrong = next((token for token in tokens if token >= model.vocabulary), None)
    if wrong is not None:
        return f"token id {wrong} is not in the vocabulary of {model.vocabulary}"
    return None


class _TokenTexts:
    """Display text of single tokens, cached."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self.cache: dict[int, str] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = "" if backend is None or backend.decoder is None else str(backend.decoder)
        self.bytes = _byte_alphabet() if "ByteLevel" in decoder else None
        self.added = getattr(tokenizer, "added_tokens_decoder", {})

    def __call__(self, token: int) -> str:
        if token not in self.cache:
            self.cache[token] = self._show(token)
        return self.cache[token]

    def _show(self, token: int) -> str:
        if self.tokenizer is None:
            return f"<{token}>"
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return f"<{token}>"
        if token in self.added:
            return _readable(piece.encode())
        if self.bytes is not None and all(character in self.bytes for character in piece):
            return _readable(bytes(self.bytes[character] for character in piece))
        return _readable(piece.replace("\u2581", " ").encode())


def _readable(data: bytes) -> str:
    """UTF-8 text; bytes that are no character alone, and NUL, which ends texts in HDF5, as
    <0xF0>."""
    return re.sub(
        "[\0\udc80-\udcff]",
        lambda match: f"<0x{ord(match[0]) & 0xFF:02X}>",
        data.decode("utf-8", "surrogateescape"),
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map from the characters of byte-level tokens to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def vocabulary_texts(model: LoadedModel) -> list[str]:
    """What every token id shows, in order."""
    shown = _TokenTexts(model.tokenizer)
    return [shown(token) for token in range(model.vocabulary)]


def vocabulary_lines(model: LoadedModel) -> str:
    """labels.jsonl of the unembedding: {"id", "label"} for every token."""
    lines = [
        json.dumps({"id": token, "label": text}, ensure_ascii=False)
        for token, text in enumerate(vocabulary_texts(model))
    ]
    return "\n".join(lines) + "\n"
