"""Labels that others have written: explanations as Neuronpedia exports them, and the feature files
of circuit-tracer.

    explanations      a list (.json, or a line each in .jsonl; .gz of both) of {"index" or
                      "feature", "description", "layer": "5-res-jb" where it holds several layers}
    circuit-tracer    a folder of {cantor(layer, index)}.json: {"index", "examples_quantiles":
                      [{"quantile_name", "examples": [{"tokens_acts_list", "train_token_ind",
                      "tokens"}]}], "top_logits", "bottom_logits", "act_max",
                      "activation_frequency"}
"""

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

from headattr.errors import DictionaryError
from headattr.training.labels import Effect, FeatureLabel, label_of, quoted


class Part(NamedTuple):
    """Features of one layer; ids run through the parts in order."""

    layer: int | None
    features: int


def given_labels(path: Path, parts: Sequence[Part]) -> Iterator[FeatureLabel]:
    """One label a feature, in id order; a feature that the file does not name has none.

    Raises DictionaryError for a file of another kind, and for layers or features that the
    dictionary does not have.
    """
    found = _folder(path, parts) if path.is_dir() else _explanations(path, parts)
    for feature in range(sum(part.features for part in parts)):
        yield found.get(feature, FeatureLabel(feature, None, None, None, []))


def with_measured(
    labels: Iterable[FeatureLabel], path: Path, features: int
) -> Iterator[FeatureLabel]:
    """The labels, with what the labels.jsonl at `path` says of the same features where they say
    nothing. It is read at once. Raises DictionaryError for a file of other features."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        found = [label_of(json.loads(line)) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise DictionaryError(
            f"{path} is no labels.jsonl ({type(error).__name__}: {error}); remove it first"
        ) from error
    if [label.id for label in found] != list(range(features)):
        raise DictionaryError(
            f"{path} has labels of {len(found)} features; the dictionary has {features}: it is of "
            "another one; remove it first"
        )
    return (_joined(new, old) for new, old in zip(labels, found, strict=True))


def _joined(new: FeatureLabel, old: FeatureLabel) -> FeatureLabel:
    missing = {name for name, value in new._asdict().items() if value is None or value == []}
    return new._replace(**{name: getattr(old, name) for name in missing})


def cantor_pair(number: int) -> tuple[int, int]:
    """(x, y) of (x + y)(x + y + 1) / 2 + y."""
    total = (isqrt(8 * number + 1) - 1) // 2
    y = number - total * (total + 1) // 2
    return total - y, y


def _explanations(path: Path, parts: Sequence[Part]) -> dict[int, FeatureLabel]:
    said: dict[int, dict[str, None]] = {}
    for at, record in enumerate(_records(path)):
        where = f"{path}: entry {at}"
        if not isinstance(record, Mapping) or not isinstance(record.get("description"), str):
            raise DictionaryError(f'{where} has no "description"; expected a text')
        index, layer = record.get("index", record.get("feature")), record.get("layer")
        number = _number(index)
        if number is None:
            raise DictionaryError(
                f'{where}: "index" (or "feature") is {index!r}; expected the number of a feature'
            )
        feature = _id(number, None if layer is None else _layer(layer, where), parts, where)
        said.setdefault(feature, {})[" ".join(record["description"].split())] = None
    return {
        feature: FeatureLabel(feature, "; ".join(texts), None, None, [])
        for feature, texts in said.items()
    }


def _records(path: Path) -> Iterable[Any]:
    if not path.is_file():
        raise DictionaryError(f"{path} does not exist; expected a file of explanations")
    if path.suffix == ".bin":
        raise DictionaryError(
            f"{path}: the layout of packed feature files is not documented and is not read; "
            "expected explanations (.json, .jsonl), or a folder of {cantor}.json"
        )
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lined = ".jsonl" in path.suffixes
    try:
        text = data.decode("utf-8")
        found = [json.loads(line) for line in text.splitlines() if line.strip()] if lined else None
        found = json.loads(text) if found is None else found
    except ValueError as error:
        raise DictionaryError(f"{path} is not JSON: {error}") from error
    found = found.get("explanations", found) if isinstance(found, dict) else found
    if not isinstance(found, list):
        raise DictionaryError(f"{path} holds a JSON {type(found).__name__}; expected a list")
    return found


def _folder(path: Path, parts: Sequence[Part]) -> dict[int, FeatureLabel]:
    files = sorted(file for file in path.glob("*.json") if file.stem.isdigit())
    if not files:
        listed = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        raise DictionaryError(
            f"{path} has no feature files (found {listed}); expected {{cantor}}.json of "
            "circuit-tracer, one a feature"
        )
    found = {}
    for file in files:
        layer, index = cantor_pair(int(file.stem))
        feature = _id(index, layer, parts, str(file))
        found[feature] = _traced(file, feature)
    return found


def _traced(file: Path, feature: int) -> FeatureLabel:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        examples = [
            example
            for quantile in record.get("examples_quantiles") or []
            for example in quantile["examples"]
        ]
        places = [
            (example["tokens"], pos, float(example["tokens_acts_list"][pos]))
            for example in examples
            for pos in [int(example["train_token_ind"])]
        ]
        label, contexts = quoted(sorted(places, key=lambda place: -place[2]))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DictionaryError(
            f"{file} is no feature file of circuit-tracer ({type(error).__name__}: {error})"
        ) from error
    logits = [
        [Effect(str(token), None) for token in record[key]] if record.get(key) else None
        for key in ("top_logits", "bottom_logits")
    ]
    facts = record.get("activation_frequency"), record.get("act_max")
    return FeatureLabel(feature, label, *facts, contexts, None, *logits)


def _id(index: int, layer: int | None, parts: Sequence[Part], where: str) -> int:
    """The id of a feature of a layer."""
    start = 0
    for part in parts:
        alone = len(parts) == 1 and (layer is None or part.layer is None)
        if alone or (layer is not None and part.layer == layer):
            if not 0 <= index < part.features:
                raise DictionaryError(
                    f"{where}: feature {index}; the dictionary has {part.features} there"
                )
            return start + index
        start += part.features
    layers = [part.layer for part in parts]
    found = "no layer" if layer is None else f"layer {layer}"
    raise DictionaryError(f"{where} names {found}; expected one of the dictionary's, {layers}")


def _layer(text: Any, where: str) -> int:
    match = re.match(r"(\d+)(?:-|$)", str(text))
    if match is None:
        raise DictionaryError(f'{where}: "layer" is {text!r}; expected one such as 5-res-jb')
    return int(match[1])


def _number(given: Any) -> int | None:
    if isinstance(given, str) and given.isdigit():
        return int(given)
    return given if type(given) is int and given >= 0 else None
