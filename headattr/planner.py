"""Changes of one prompt -> edits of the model, with the amounts of the clean run."""

import math
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.basis.component import Components
from headattr.basis.rows import Matrix
from headattr.changes import (
    AddFeature,
    AddVector,
    Change,
    EditScore,
    FeatureChange,
    ForcePattern,
    ScaleFeature,
    SwapFeature,
)
from headattr.edges import HeadId, parse_head, position_problem
from headattr.errors import PromptError, UsageError
from headattr.model.capture import capture, pad
from headattr.model.edits import ModelEdit, PatternEdit, ScoreEdit, StreamEdit
from headattr.model.head import Side
from headattr.model.load import LoadedModel


@dataclass(frozen=True)
class Planner:
    """Changes of one prompt -> edits of the model; raises UsageError for what cannot be made."""

    model: LoadedModel
    tokens: Int[Tensor, "pos"]
    bases: dict[int, Any]
    """By the layer whose resid_pre each decomposes."""
    _found: dict[int, tuple[Components, Matrix]] = field(default_factory=dict)
    _windows: dict[int, int | None] = field(default_factory=dict)

    def edits(self, changes: Sequence[Any]) -> list[ModelEdit]:
        """The edits of one run; what changes nothing is left out."""
        made: list[ModelEdit] = []
        places: set[Hashable] = set()
        for change in changes:
            if not isinstance(change, Change):
                raise UsageError(
                    f"found {change!r} among the changes; expected AddVector, RemoveFeature, "
                    "ScaleFeature, AddFeature, SwapFeature, EditScore or ForcePattern"
                )
            edit, place = self._edit(change)
            if place is not None and place in places:
                raise UsageError(f"{change} changes what another change of the same run changes")
            places.add(place)
            if not _does_nothing(edit):
                made.append(edit)
        return made

    def _edit(self, change: Change) -> tuple[ModelEdit, Hashable]:
        """The edit, and the place that no other change of the run may name; None: any may."""
        if isinstance(change, EditScore):
            return self._score(change)
        if isinstance(change, ForcePattern):
            return self._pattern(change)
        layer = _index(change, "layer", len(self.model.layers))
        pos = _index(change, "pos", len(self.tokens))
        head, side = self._reader(change, layer)
        if isinstance(change, AddVector):
            vector, place = self._row(change, "vector", self.model.d_model), None
        else:
            vector = self._feature_vector(change, layer, pos)
            place = (layer, pos, operator.index(change.feature), head, side)
        return StreamEdit(layer, pos, vector, head, side), place

    def _reader(self, change: Any, layer: int) -> tuple[int | None, Side | None]:
        """The head and side that alone see the change; None, None for the stream."""
        if change.at == "stream":
            return None, None
        name, _, side = str(change.at).partition(".")
        if side not in ("query", "key", "value"):
            raise UsageError(
                f"{change}: at is {change.at!r}; expected stream, or one head's input as "
                "L5H1.query, L5H1.key or L5H1.value"
            )
        head = self._head(change, name)
        if head.layer != layer:
            raise UsageError(
                f"{change}: {head} reads the stream before layer {head.layer}, not {layer}; use "
                f"layer={head.layer}"
            )
        return head.head, side

    def _feature_vector(
        self, change: FeatureChange, layer: int, pos: int
    ) -> Float[Tensor, "d_model"]:
        if layer not in self.bases:
            raise UsageError(f"{change}: layer {layer} has no basis; give one with basis=")
        parts, directions = self._clean(layer)
        feature = _index(change, "feature", len(directions))
        if isinstance(change, AddFeature):
            amount = _number(change, "activation", self.model.dtype)
            _writes_here(change, directions[feature], feature, layer)
            return _finite(change, amount * parts.scale[pos] * directions[feature])
        coef = self._amount(change, parts, pos, feature)
        if isinstance(change, SwapFeature):
            other = _index(change, "other", len(directions))
            _writes_here(change, directions[other], other, layer)
            return _finite(change, coef * directions[other] - coef * directions[feature])
        kept = 0.0
        if isinstance(change, ScaleFeature):
            kept = _number(change, "factor", self.model.dtype)
        return _finite(change, (kept - 1) * (coef * directions[feature]))

    def _amount(
        self, change: FeatureChange, parts: Components, pos: int, feature: int
    ) -> Float[Tensor, ""]:
        """What an active feature has at a position: its activation times the scale there."""
        start, stop = parts.active.ptr[pos : pos + 2].tolist()
        ids = parts.active.ids[start:stop].tolist()
        if feature not in ids:
            shown = ", ".join(map(str, ids[:20])) + (", ..." if len(ids) > 20 else "")
            raise UsageError(
                f"{change}: feature {feature} is not active there; active are {shown or 'none'}"
            )
        return parts.coefs[start + ids.index(feature)]

    def _clean(self, layer: int) -> tuple[Components, Matrix]:
        """Components of the unchanged stream, and the directions of their features."""
        if layer not in self._found:
            basis = self.bases[layer]
            sites = [*basis.sites, *basis.source.sites]
            prompt = capture(self.model, *pad([self.tokens.tolist()]), layers=[], sites=sites)[0]
            if isinstance(prompt, PromptError):
                raise prompt
            parts = basis.components(prompt, basis.source.active(prompt))
            self._found[layer] = parts, basis.directions
        return self._found[layer]

    def _score(self, change: EditScore) -> tuple[ModelEdit, Hashable]:
        head = self._head(change, change.head)
        q_pos, k_pos = (_index(change, name, len(self.tokens)) for name in ("q_pos", "k_pos"))
        if problem := position_problem(q_pos, k_pos, len(self.tokens), self._window(head)):
            raise UsageError(f"{change}: {problem}")
        given = [name for name in ("add", "set") if getattr(change, name) is not None]
        if len(given) != 1:
            found = "both" if given else "neither"
            raise UsageError(f"{change}: found {found} of add and set; expected one of them")
        value = _number(change, given[0], self.model.dtype)
        edit = ScoreEdit(*head, q_pos, k_pos, value, given == ["add"])
        return edit, (head, q_pos, k_pos)

    def _pattern(self, change: ForcePattern) -> tuple[ModelEdit, Hashable]:
        head, length = self._head(change, change.head), len(self.tokens)
        q_pos = _index(change, "q_pos", length)
        weights = self._row(change, "weights", length)
        for k_pos in weights.nonzero().flatten().tolist():
            if problem := position_problem(q_pos, k_pos, length, self._window(head)):
                raise UsageError(f"{change}: expected weight 0 where the mask forbids; {problem}")
        return PatternEdit(*head, q_pos, weights), (head, q_pos)

    def _head(self, change: Any, text: Any) -> HeadId:
        head = parse_head(str(text))
        if head.layer >= len(self.model.layers) or head.head >= self.model.n_heads:
            raise UsageError(
                f"{change}: there is no head {head}; the model has layers 0 to "
                f"{len(self.model.layers) - 1} and heads 0 to {self.model.n_heads - 1}"
            )
        return head

    def _window(self, head: HeadId) -> int | None:
        if head.layer not in self._windows:
            weights = self.model.family.head_weights(self.model.hf, head.layer)
            self._windows[head.layer] = weights.window
        return self._windows[head.layer]

    def _row(self, change: Any, name: str, size: int) -> Float[Tensor, "size"]:
        """The numbers of a change, in the model's own type."""
        given = getattr(change, name)
        try:
            row = torch.as_tensor(given).detach().to(self.model.device, self.model.dtype)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"{change}: {name} is a {type(given).__name__}; expected {size} numbers"
            ) from None
        if row.shape != (size,):
            raise UsageError(f"{change}: {name} is {tuple(row.shape)}; expected ({size},)")
        return _finite(change, row)


def _writes_here(change: Any, direction: Tensor, feature: int, layer: int) -> None:
    """Refuse to add a feature of a later site, which writes nothing before this layer."""
    if not bool(direction.any()):
        raise UsageError(f"{change}: feature {feature} writes nothing before layer {layer}")


def _does_nothing(edit: ModelEdit) -> bool:
    if isinstance(edit, ScoreEdit):
        return edit.add and edit.value == 0
    return isinstance(edit, StreamEdit) and not edit.vector.any()


def whole_number(value: Any, count: int) -> int | None:
    """`value` as a whole number from 0 to `count` - 1, or None where it is none."""
    try:
        found = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
    return found if 0 <= found < count else None


def _index(change: Any, name: str, count: int) -> int:
    value = getattr(change, name)
    found = whole_number(value, count)
    if found is None:
        raise UsageError(
            f"{change}: {name} is {value!r}; expected a whole number, 0 to {count - 1}"
        )
    return found


def _number(change: Any, name: str, dtype: torch.dtype) -> float:
    value = getattr(change, name)
    try:
        found = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not abs(found) < torch.finfo(dtype).max / 2:
        raise UsageError(f"{change}: {name} is {value!r}; expected a finite number")
    return found


def _finite(change: Any, vector: Float[Tensor, "size"]) -> Float[Tensor, "size"]:
    if not bool(vector.isfinite().all()):
        raise UsageError(f"{change}: found a vector with non-finite numbers; expected finite ones")
    return vector
