"""Labels for the features of a dictionary: where in a set of texts each one fires most.

Windows of activations go in a batch at a time; `TopWindows` keeps, for every feature, the windows
with its strongest activations, each window once. Out comes one `FeatureLabel` a feature, and
`labels.jsonl`: one JSON object a line, in id order,

    {"id", "label", "density", "max_activation",
     "contexts": [{"before", "token", "after", "activation"}, ...],
     "quantiles": {"0.5", "0.9", "0.99"},
     "top_logits": [{"token", "effect"}, ...], "bottom_logits"}      the last three where known

A label quotes the strongest contexts: the token that the feature fires on in brackets, after the
text before it, `…ver[y] , …ver[s]`. It is a quotation, not an explanation. A feature that is never
active has label null and no contexts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.errors import HeadattrError


class Context(NamedTuple):
    """One place where a feature fires."""

    before: str
    """Text before the token."""
    token: str
    """The token that the feature fires on."""
    after: str
    """Text after the token."""
    activation: float
    """How strongly."""


class Effect(NamedTuple):
    """What an activation of 1 does to a token's logit, the final norm's scale apart."""

    token: str
    effect: float | None
    """None where a file names the token alone."""


class FeatureLabel(NamedTuple):
    """What is known of one feature; a line of labels.jsonl."""

    id: int
    """Index of the feature in the dictionary."""
    label: str | None
    """Its strongest contexts, abridged; None where it was never active."""
    density: float | None
    """Share of the positions at which it was active; None where it was not counted."""
    max_activation: float | None
    """The largest activation seen, 0 where there was none; None where it was not counted."""
    contexts: list[Context]
    """Its strongest contexts, no two with the same tail and token."""
    quantiles: dict[str, float] | None = None
    """Of its activations where it is active; None where they were not counted."""
    top_logits: list[Effect] | None = None
    """The tokens that it promotes most; None where it was not asked for."""
    bottom_logits: list[Effect] | None = None
    """The tokens that it suppresses most."""


class LabelStyle(NamedTuple):
    """How much text is shown; lengths are in tokens."""

    contexts: int = 5
    """Contexts a feature."""
    before: int = 16
    """Tokens before the one it fires on."""
    after: int = 6
    """Tokens after it."""
    quoted: int = 3
    """Contexts quoted in the label."""
    tail: int = 4
    """Tokens before the bracket in the label."""


class TopWindows(NamedTuple):
    """For each feature, the windows in which it was strongest, strongest first.

    Windows in which it was active only early come after all others.
    """

    activation: Float[Tensor, "rank d_sae"]
    """The largest activation in the window; 0 where it was not active in as many windows."""
    window: Int[Tensor, "rank d_sae"]
    """Which window, counted over all batches."""
    pos: Int[Tensor, "rank d_sae"]
    """Where in it."""
    active: Int[Tensor, " d_sae"]
    """Number of positions at which the feature was active."""
    strongest: Float[Tensor, " d_sae"]
    """Its largest activation, early positions included."""
    positions: int
    """Number of positions seen."""


def top_windows(
    batches: Iterable[tuple[Float[Tensor, "window pos d_sae"], int]],
    ranks: int = 20,
    early: int = 8,
) -> TopWindows:
    """The `ranks` strongest windows of each feature.

    A batch is activations, zero at positions that do not count, and the number of positions that
    do. Windows may differ in length from batch to batch. Positions before `early` have little text
    to quote: they are taken for features that are active nowhere else in the window.
    HeadattrError where there is no batch.
    """
    top: TopWindows | None = None
    seen = 0
    for acts, counted in batches:
        peaks, pos = _peaks(acts, early)
        window = torch.arange(seen, seen + len(acts)).unsqueeze(1).expand_as(pos)
        active, strongest = (acts > 0).sum((0, 1)), acts.amax((0, 1))
        here = TopWindows(peaks, window, pos, active, strongest, counted)
        top = here if top is None else _joined(top, here)
        top = _best(top, ranks, early)
        seen += len(acts)
    if top is None:
        raise HeadattrError("no activations to label features from: the text set gave no window")
    return top


def label_features(
    top: TopWindows,
    windows: Int[Tensor, "window pos"] | Sequence[Sequence[int]],
    token_text: Sequence[str],
    style: LabelStyle = LabelStyle(),  # noqa: B008 - a constant
) -> Iterator[FeatureLabel]:
    """One label a feature, in id order.

    `windows` holds the token ids of all the batches that `top` was made from, of any lengths,
    `token_text` the text of every id.
    """
    density = (top.active.double() / max(1, top.positions)).tolist()
    rows = windows.tolist() if isinstance(windows, Tensor) else windows
    strongest = top.strongest.tolist()
    columns = (top.activation.T.tolist(), top.window.T.tolist(), top.pos.T.tolist())
    for feature, places in enumerate(zip(*columns, strict=True)):
        contexts: dict[str, Context] = {}
        for activation, window, pos in zip(*places, strict=True):
            if activation <= 0 or len(contexts) == style.contexts:
                break
            snippet = _snippet(rows[window], pos, token_text, style)
            if snippet not in contexts:
                contexts[snippet] = _context(rows[window], pos, token_text, style, activation)
        label = " , ".join(list(contexts)[: style.quoted]) if contexts else None
        found = list(contexts.values())
        yield FeatureLabel(feature, label, density[feature], strongest[feature], found)


def quoted(
    places: Iterable[tuple[Sequence[str], int, float]],
    style: LabelStyle = LabelStyle(),  # noqa: B008 - a constant
) -> tuple[str | None, list[Context]]:
    """A label and its contexts from (texts of the tokens, position, activation), strongest
    first; None where there is no place."""
    contexts: dict[str, Context] = {}
    for texts, pos, activation in places:
        row = range(len(texts))
        snippet = _snippet(row, pos, texts, style)
        if len(contexts) < style.contexts and snippet not in contexts:
            contexts[snippet] = _context(row, pos, texts, style, activation)
    label = " , ".join(list(contexts)[: style.quoted]) if contexts else None
    return label, list(contexts.values())


def label_of(record: dict[str, Any]) -> FeatureLabel:
    """A line of labels.jsonl; KeyError or TypeError where it is none."""
    effects = {
        name: [Effect(**effect) for effect in record[name]]
        for name in ("top_logits", "bottom_logits")
        if record.get(name) is not None
    }
    contexts = [Context(**context) for context in record["contexts"]]
    return FeatureLabel(**{**record, **effects, "contexts": contexts})


def write_labels(labels: Iterable[FeatureLabel], path: Path) -> None:
    """Write labels.jsonl, compactly; numbers keep three significant digits, what is not known of
    any feature is left out."""
    with path.open("w", encoding="utf-8") as lines:
        for label in labels:
            record = {
                **label._asdict(),
                "density": _rounded(label.density),
                "max_activation": _rounded(label.max_activation),
                "contexts": [
                    {**c._asdict(), "activation": _rounded(c.activation)} for c in label.contexts
                ],
            }
            for name in ("top_logits", "bottom_logits"):
                effects = record[name]
                if effects is not None:
                    record[name] = [
                        {"token": e.token, "effect": _rounded(e.effect)} for e in effects
                    ]
            if label.quantiles is not None:
                record["quantiles"] = {q: _rounded(x) for q, x in label.quantiles.items()}
            for name in _LATER:
                if record[name] is None:
                    del record[name]
            lines.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


_LATER = ("quantiles", "top_logits", "bottom_logits")


def _peaks(acts: Tensor, early: int) -> tuple[Tensor, Tensor]:
    """Largest activation and its position [window, d_sae], early ones only where no other is."""
    late = acts[:, early:]
    first_peaks, first_pos = acts.max(1)
    if not late.shape[1]:
        return first_peaks, first_pos
    peaks, pos = late.max(1)
    return torch.where(peaks > 0, peaks, first_peaks), torch.where(
        peaks > 0, pos + early, first_pos
    )


def _joined(top: TopWindows, more: TopWindows) -> TopWindows:
    return TopWindows(
        torch.cat([top.activation, more.activation]),
        torch.cat([top.window, more.window]),
        torch.cat([top.pos, more.pos]),
        top.active + more.active,
        torch.maximum(top.strongest, more.strongest),
        top.positions + more.positions,
    )


def _best(top: TopWindows, ranks: int, early: int) -> TopWindows:
    """The first `ranks` windows of each feature: late ones by activation, then early ones."""
    late = (top.pos >= early) & (top.activation > 0)
    order = top.activation + late * 2 * (1 + top.strongest)
    kept = order.topk(min(ranks, len(order)), dim=0).indices
    return top._replace(
        activation=top.activation.gather(0, kept),
        window=top.window.gather(0, kept),
        pos=top.pos.gather(0, kept),
    )


def _context(
    row: Sequence[int], pos: int, token_text: Sequence[str], style: LabelStyle, activation: float
) -> Context:
    before = "".join(token_text[token] for token in row[max(0, pos - style.before) : pos])
    after = "".join(token_text[token] for token in row[pos + 1 : pos + 1 + style.after])
    return Context(before, token_text[row[pos]], after, activation)


def _snippet(row: Sequence[int], pos: int, token_text: Sequence[str], style: LabelStyle) -> str:
    """`…ver[y]`, newlines as ⏎ so that a label stays on one line."""
    start = max(0, pos - style.tail)
    before = "".join(token_text[token] for token in row[start:pos])
    text = f"{'…' if start else ''}{before}[{token_text[row[pos]]}]"
    return text.replace("\r", "").replace("\n", "⏎")


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.3g}")
