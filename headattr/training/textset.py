"""A set of texts -> windows of token ids, some for training and others for the scores."""

import ast
import hashlib
import pydoc_data.topics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headattr.errors import HeadattrError, UsageError
from headattr.model.load import LoadedModel
from headattr.texts import RawPrompt, read_texts
from headattr.training.recipe import Recipe

STDLIB = "stdlib"
_SHORTEST = 30  # characters of a docstring that is text
_NO_TEXT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}


class Windows(NamedTuple):
    """Windows of consecutive tokens, none in both parts."""

    train: Int[Tensor, "window pos"]
    held_out: Int[Tensor, "window pos"]
    hash: str
    """SHA-256 of both."""


def make_windows(recipe: Recipe, model: LoadedModel, base: Path) -> Windows:
    """Windows of the recipe's texts, drawn with its seed; `base`: the folder of its relative paths.

    Raises UsageError for texts that are missing, not texts, or too few for the tokens asked for,
    and HeadattrError for a model without tokenizer or BOS where they are needed.
    """
    length = recipe.context_size - recipe.prepend_bos
    if recipe.context_size > model.context:
        raise UsageError(
            f"context_size is {recipe.context_size}; expected at most {model.context}, the model's"
        )
    ids: list[int] = []
    for document in documents(recipe.texts, base):
        ids += _token_ids(document, model)
    counts = [n // recipe.context_size for n in (recipe.tokens, recipe.held_out_tokens)]
    found = torch.tensor(ids[: len(ids) // length * length], dtype=torch.long).view(-1, length)
    if len(found) < sum(counts):
        raise UsageError(
            f"texts hold {len(found)} windows of {length} tokens; the recipe asks for "
            f"{sum(counts)}: give more texts or lower tokens"
        )
    generator = torch.Generator().manual_seed(recipe.seed)
    found = found[torch.randperm(len(found), generator=generator)[: sum(counts)]]
    if recipe.prepend_bos:
        bos = torch.full((len(found), 1), _bos(model), dtype=torch.long)
        found = torch.cat([bos, found], 1)
    digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()
    return Windows(found[: counts[0]], found[counts[0] :], digest)


def counted_positions(
    windows: Int[Tensor, "window pos"], recipe: Recipe, model: LoadedModel
) -> Bool[Tensor, "window pos"]:
    """True where a position may be trained on, by its place and its token."""
    counted = torch.ones_like(windows, dtype=torch.bool)
    if recipe.leave_out_first:
        counted[:, 0] = False
    if recipe.leave_out_special and model.tokenizer is not None:
        special = torch.tensor(sorted(model.tokenizer.all_special_ids), dtype=torch.long)
        counted &= ~torch.isin(windows, special)
    return counted


def documents(texts: Sequence[str], base: Path) -> Iterator[str | tuple[int, ...]]:
    """Texts, or token ids where a line of JSONL gives them, in the order of their files."""
    for name in texts:
        if name == STDLIB:
            yield from stdlib_texts()
            continue
        path = base / Path(name).expanduser()
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix.lower() in (".txt", ".jsonl"))
            if not files:
                raise UsageError(f"texts: {name} holds no .txt or .jsonl file")
        else:
            files = [path]
        for file in files:
            yield from _documents_of(file)


def stdlib_texts() -> Iterator[str]:
    """The help topics of this CPython, and the docstrings of its library, each once."""
    yield from (text for _, text in sorted(pydoc_data.topics.topics.items()))
    root, seen = Path(ast.__file__).parent, set()
    for path in sorted(root.rglob("*.py")):
        if _NO_TEXT & set(path.relative_to(root).parts[:-1]):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > _SHORTEST and text not in seen:
                    seen.add(text)
                    yield f"{text}\n\n"


def token_texts(model: LoadedModel) -> list[str]:
    """The text of every id, for labels."""
    if model.tokenizer is None:
        raise HeadattrError(f"labels need a tokenizer; {model.name} has none")
    return model.tokenizer.batch_decode([[token] for token in range(model.vocabulary)])


def _documents_of(file: Path) -> Iterator[str | tuple[int, ...]]:
    if file.suffix.lower() == ".txt" and file.is_file():
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"texts: {file} is not UTF-8 ({error})") from error
        return
    read = read_texts(file)
    if read.set_aside:
        bad = read.set_aside[0]
        raise UsageError(f"texts: {file}, line {bad.id + 1}: {bad.reason}")
    yield from (_content(prompt) for prompt in read.prompts)


def _content(prompt: RawPrompt) -> str | tuple[int, ...]:
    return prompt.text if prompt.text is not None else prompt.tokens or ()


def _token_ids(document: str | tuple[int, ...], model: LoadedModel) -> list[int]:
    if isinstance(document, tuple):
        wrong = next((token for token in document if token >= model.vocabulary), None)
        if wrong is not None:
            raise UsageError(f"texts: token id {wrong}; the vocabulary has {model.vocabulary}")
        return list(document)
    if model.tokenizer is None:
        raise HeadattrError(f"{model.name} has no tokenizer; expected texts as token ids (.jsonl)")
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return model.tokenizer(document, **options).input_ids


def _bos(model: LoadedModel) -> int:
    bos = getattr(model.tokenizer, "bos_token_id", None)
    if bos is None:
        raise HeadattrError(f"prepend_bos is true, but {model.name} has no BOS token")
    return bos
