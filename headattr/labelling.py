"""Labels for the features of any dictionary: where each one fires, how often, which logits it
moves; or labels that others have written, in headattr's own form."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from headattr.basis.dictionary import Dictionary, Release
from headattr.basis.rows import Matrix
from headattr.basis.whole import Whole, load_whole, written_rows
from headattr.errors import UsageError
from headattr.inputs import NamedRelease, releases_of
from headattr.judging import Label
from headattr.model.load import LoadedModel
from headattr.model.tokens import vocabulary_texts
from headattr.passes import Given, Passes, bar, counted_of, given
from headattr.store.format import published
from headattr.training.collected import QUANTILES, Collected
from headattr.training.given_labels import Part, given_labels, with_measured
from headattr.training.labels import Effect, FeatureLabel, label_features, write_labels

TOKENS = 8
"""Tokens promoted and suppressed that are kept a feature."""
_NUMBERS = 1 << 24  # effects at once


def label(asked: Label) -> dict[str, Any]:
    """The command `dictionaries label`: {"written": [{"name", "out", "features", "labelled"}],
    "set_aside"}.

    Raises UsageError where a file is there already (--replace), DictionaryError for files of
    labels that do not fit.
    """
    named = releases_of([asked.dictionary])
    if asked.out is not None and len(named) > 1:
        names = ", ".join(one.name for one in named)
        raise UsageError(f"--out is one file, and {asked.dictionary} names {names}; give one")
    outs = [asked.out or _beside(one.release) for one in named]
    for out in outs:
        if out.exists() and not asked.replace:
            raise UsageError(f"{out} is there already; give another --out, or --replace")
    written, aside = [], []
    if asked.given is not None:
        for one, out in zip(named, outs, strict=True):
            labels = given_labels(asked.given, _parts(one.release))
            if out.exists():
                labels = with_measured(labels, out, one.release.features)
            written.append(_write(labels, one, out))
        return {"written": written, "set_aside": []}
    asked.check_given("dictionaries label")
    found = given(asked, named)
    aside = [entry.as_dict() for entry in found.set_aside]
    for one, out in zip(named, outs, strict=True):
        whole = load_whole(one.release, found.model, one.layer)
        labels, failed = labels_of_texts(whole, found, asked)
        aside += [{"prompt": p, "line": p + 1, "reason": why} for p, why in failed.items()]
        written.append(_write(labels, one, out))
    return {"written": written, "set_aside": aside}


def labels_of_texts(
    whole: Whole, found: Given, asked: Label
) -> tuple[Iterator[FeatureLabel], dict[int, str]]:
    """One label a feature, in id order, and why prompts could not run, by id."""
    source, model = whole.source, found.model
    options = {"batch_size": asked.batch_size, "memory": asked.memory}
    passes = Passes(model, found.prompts, source, source.sites, **options)
    collected, rows = Collected(source.about.n_features), []
    advance, close = bar(found.tokens, "labels", shown=asked.progress)
    for prompts in passes.batches():
        captured = passes.captured(prompts, [], source.sites)
        for prompt in prompts:
            if prompt.id in captured:
                one = captured[prompt.id]
                active = source.active(one, passes.budget.encode_numbers())
                collected.add(active, counted_of(source, one))
                rows.append(prompt.tokens)
        advance(sum(len(prompt.tokens) for prompt in prompts))
    close()
    texts = vocabulary_texts(model)
    labels = label_features(collected.top(), rows, texts)
    effects = _effects(written_rows(whole, model), model, texts) if asked.logits else None
    return _with_facts(labels, collected.quantiles(), effects), passes.failed


def _with_facts(
    labels: Iterable[FeatureLabel],
    quantiles: Tensor,
    effects: Iterator[tuple[list[Effect], list[Effect]]] | None,
) -> Iterator[FeatureLabel]:
    for found, row in zip(labels, quantiles.tolist(), strict=True):
        top, bottom = (None, None) if effects is None else next(effects)
        yield found._replace(
            quantiles={str(q): x for q, x in zip(QUANTILES, row, strict=True)},
            top_logits=top,
            bottom_logits=bottom,
        )


def _effects(
    rows: Matrix, model: LoadedModel, texts: Sequence[str]
) -> Iterator[tuple[list[Effect], list[Effect]]]:
    """The tokens that each feature promotes and suppresses most, in id order."""
    unembedding = model.family.unembedding(model.hf)
    folded = unembedding.norm.fold(unembedding.W_U.T)
    count = min(TOKENS, folded.shape[1])
    step = max(1, _NUMBERS // folded.shape[1])
    for start in range(0, len(rows), step):
        moved = rows[start : start + step].to(folded) @ folded
        top, bottom = (moved.topk(count, largest=largest) for largest in (True, False))
        lists = [_named(found.values, found.indices, texts) for found in (top, bottom)]
        yield from zip(*lists, strict=True)


def _named(values: Tensor, ids: Tensor, texts: Sequence[str]) -> list[list[Effect]]:
    found: list[tuple[list[int], list[float]]] = list(
        zip(ids.tolist(), values.tolist(), strict=True)
    )
    return [
        [Effect(texts[token], effect) for token, effect in zip(*row, strict=True)] for row in found
    ]


def _write(labels: Iterable[FeatureLabel], one: NamedRelease, out: Path) -> dict[str, Any]:
    """Under a temporary name first."""
    labelled = 0

    def counted() -> Iterator[FeatureLabel]:
        nonlocal labelled
        for found in labels:
            labelled += found.label is not None
            yield found

    with published(out) as temporary:
        write_labels(counted(), temporary)
    return {
        "name": one.name,
        "out": str(out),
        "features": one.release.features,
        "labelled": labelled,
    }


def _beside(release: Release) -> Path:
    if release.path is None:
        raise UsageError(f"{release.name} is no file; give --out")
    path = Path(release.path)
    return (path if path.is_dir() else path.parent) / "labels.jsonl"


def _parts(release: Release) -> list[Part]:
    return [Part(_layer_of(d), d.features) for d in release.dictionaries]


def _layer_of(dictionary: Dictionary) -> int | None:
    """The layer as the dictionary's own files count: of a block's output, that block."""
    site = dictionary.reads[0]
    numbers = re.findall(r"\d+", dictionary.hook_name or "")
    if len(numbers) == 1:
        return int(numbers[0])
    return None if site is None else site.layer
