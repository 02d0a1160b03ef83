"""Change something inside the model, run the rest, and read what follows.

    headattr.intervene(model, text, [RemoveFeature(3, pos=6, feature=17)], basis={3: sae},
                       heads=["L3H0"])

Amounts are those of the clean run: a feature's activation is the dictionary's own on the unchanged
stream, whatever other changes the same run makes before it. Asking nothing changes nothing, bit for
bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.component import Components
from headattr.basis.load import load_sources
from headattr.edges import HeadId, parse_head, position_problem
from headattr.errors import PromptError, UsageError
from headattr.inputs import specs_from_memory
from headattr.model.capture import capture, pad
from headattr.model.edits import ModelEdit, Outcome, PatternEdit, ScoreEdit, StreamEdit, run_edited
from headattr.model.head import HeadWeights, Side
from headattr.model.load import LoadedModel, load_model
from headattr.model.tokens import decide_bos, tokenize
from headattr.texts import RawPrompt


@dataclass(frozen=True)
class AddVector:
    """Add a vector, in the stream's units, to resid_pre of a layer at a position."""

    layer: int
    pos: int
    vector: Tensor
    """[d_model]"""
    at: str = "stream"
    """`stream`: for everything that follows; or one head's input only, as L5H1.query, L5H1.key or
    L5H1.value."""


@dataclass(frozen=True)
class RemoveFeature:
    """Subtract an active feature: its activation times its decoder direction."""

    layer: int
    pos: int
    feature: int
    at: str = "stream"
    """As in AddVector."""


@dataclass(frozen=True)
class ScaleFeature:
    """Multiply the activation of an active feature."""

    layer: int
    pos: int
    feature: int
    factor: float
    """1 changes nothing, 0 removes it."""
    at: str = "stream"


@dataclass(frozen=True)
class AddFeature:
    """Add a feature, active or not, with an activation in the dictionary's own units."""

    layer: int
    pos: int
    feature: int
    activation: float
    at: str = "stream"


@dataclass(frozen=True)
class SwapFeature:
    """Put another feature in the place of an active one, with the same activation."""

    layer: int
    pos: int
    feature: int
    other: int
    at: str = "stream"


@dataclass(frozen=True)
class EditScore:
    """Change the raw score of one edge, before any cap; softmax follows."""

    head: str
    """As L5H1."""
    q_pos: int
    k_pos: int
    add: float | None = None
    """Add this; or"""
    set: float | None = None
    """make it this."""


@dataclass(frozen=True)
class ForcePattern:
    """Replace a row of one head's pattern."""

    head: str
    """As L5H1."""
    q_pos: int
    weights: Tensor | Sequence[float]
    """One a position of the prompt, 0 where the mask forbids; zeros take the head's output away."""


FeatureChange = RemoveFeature | ScaleFeature | AddFeature | SwapFeature
Change = FeatureChange | AddVector | EditScore | ForcePattern


def intervene(
    model: Any,
    prompt: str | Sequence[int],
    interventions: Sequence[Change | Sequence[Change]],
    *,
    basis: Any = (),
    heads: Sequence[str] = (),
    sites: Sequence[int] = (),
    logits: bool = False,
    tokenizer: Any | None = None,
    bos: str = "auto",
    device: str = "auto",
    dtype: Any = "float32",
    batch_size: int = 16,
) -> list[Outcome]:
    """Run the model once for every intervention - one change, or several at once - in batches.

    `model` as in `attribute`, or a `LoadedModel`, which saves loading it again; `basis` as there,
    for changes that name features. What is read: scores and pattern of `heads`, the residual stream
    at `sites` (L: resid_pre of layer L; the number of layers: the last output), and `logits`.
    Returns one `Outcome` an intervention, in order; an empty list is the clean run. Raises
    UsageError for a change that cannot be made: a position beyond the prompt, a feature that is not
    active, an edge that is masked.
    """
    if type(batch_size) is not int or batch_size < 1:
        raise UsageError(f"batch_size is {batch_size!r}; expected a whole number, at least 1")
    if not isinstance(model, LoadedModel):
        model = load_model(model, tokenizer=tokenizer, device=device, dtype=dtype)
    bases = load_sources(model, specs_from_memory(basis, "basis"), []).bases
    declared = {
        basis.about.name: basis.about.prepend_bos
        for basis in bases.values()
        if basis.about.prepend_bos is not None
    }
    tokens = torch.tensor(_tokens(model, prompt, bos, declared), device=model.device)
    read_heads = [_head(model, name) for name in heads]
    wrong = [site for site in sites if not 0 <= site <= len(model.layers)]
    if wrong:
        raise UsageError(f"there is no site {wrong[0]}; they are 0 to {len(model.layers)}")
    changes = [[c] if isinstance(c, Change) else list(c) for c in interventions]
    planner = _Planner(model, tokens, bases)
    runs = [planner.edits(run) for run in changes]
    reads = {"heads": read_heads, "sites": sorted(set(sites)), "logits": logits}
    outcomes: dict[int, Outcome] = {}
    clean = [i for i, run in enumerate(runs) if not run]
    if clean:  # alone, so that not even the size of a batch differs from the model's own run
        outcomes |= dict.fromkeys(clean, run_edited(model, tokens, [[]], **reads)[0])
    changed = [i for i, run in enumerate(runs) if run]
    for start in range(0, len(changed), batch_size):
        some = changed[start : start + batch_size]
        found = run_edited(model, tokens, [runs[i] for i in some], **reads)
        outcomes |= dict(zip(some, found, strict=True))
    return [outcomes[i] for i in range(len(runs))]


def _tokens(
    model: LoadedModel, prompt: str | Sequence[int], bos: str, declared: dict[str, bool]
) -> tuple[int, ...]:
    text = prompt if isinstance(prompt, str) else None
    raw = RawPrompt(0, text, None if text is not None else tuple(map(int, prompt)), {})
    found, aside = tokenize(
        model, [raw], decide_bos(model.tokenizer, bos, declared), truncate=False
    )
    if aside:
        raise UsageError(f"the prompt cannot run: {aside[0].reason}")
    return found[0].tokens


def _head(model: LoadedModel, text: str) -> HeadId:
    head = parse_head(text)
    if head.layer >= len(model.layers) or head.head >= model.n_heads:
        raise UsageError(
            f"head {text}: the model has layers 0 to {len(model.layers) - 1} and heads 0 to "
            f"{model.n_heads - 1}"
        )
    return head


class _Planner:
    """Changes -> edits of the model, with the activations of the clean run."""

    def __init__(self, model: LoadedModel, tokens: Tensor, bases: dict[int, Any]) -> None:
        self.model, self.tokens, self.bases = model, tokens, bases
        self.found: dict[int, Components] = {}

    def edits(self, changes: Sequence[Any]) -> list[ModelEdit]:
        """The edits of one run; what changes nothing is left out."""
        made: list[ModelEdit] = []
        places: set[Any] = set()
        for change in changes:
            if not isinstance(change, Change):
                raise UsageError(f"found {type(change).__name__}; expected one of the changes")
            edit, place = self._edit(change)
            if place in places:
                raise UsageError(f"{change} changes what another change of the same run changes")
            places.add(place)
            if not (isinstance(edit, StreamEdit) and not edit.vector.any()):
                made.append(edit)
        return made

    def _edit(self, change: Any) -> tuple[ModelEdit, Any]:
        if isinstance(change, EditScore):
            return self._score(change)
        if isinstance(change, ForcePattern):
            return self._pattern(change)
        self._check_position(change, change.pos)
        if not 0 <= change.layer < len(self.model.layers):
            raise UsageError(f"{change}: the layers are 0 to {len(self.model.layers) - 1}")
        head, side = self._reader(change)
        if isinstance(change, AddVector):
            vector, name = change.vector.to(self.model.device, self.model.dtype), id(change)
            if vector.shape != (self.model.d_model,) or not bool(vector.isfinite().all()):
                raise UsageError(
                    f"AddVector at layer {change.layer}: found a vector {tuple(vector.shape)}; "
                    f"expected ({self.model.d_model},), finite"
                )
        else:
            vector, name = self._feature_vector(change), change.feature
        edit = StreamEdit(change.layer, change.pos, vector, head, side)
        return edit, (change.layer, change.pos, change.at, name)

    def _check_position(self, change: Any, pos: int) -> None:
        if not 0 <= pos < len(self.tokens):
            raise UsageError(
                f"{type(change).__name__}: position {pos} is beyond the prompt; its positions are "
                f"0 to {len(self.tokens) - 1}"
            )

    def _reader(self, change: Any) -> tuple[int | None, Side | None]:
        if change.at == "stream":
            return None, None
        name, _, side = change.at.partition(".")
        if side not in ("query", "key", "value"):
            raise UsageError(
                f"at={change.at!r}: expected stream, or one head's input as L5H1.query, L5H1.key "
                "or L5H1.value"
            )
        head = _head(self.model, name)
        if head.layer != change.layer:
            raise UsageError(
                f"at={change.at!r} with layer {change.layer}: a head reads the stream before its "
                f"own layer; use layer {head.layer}"
            )
        return head.head, side

    def _feature_vector(self, change: FeatureChange) -> Float[Tensor, "d_model"]:
        basis = self.bases.get(change.layer)
        if basis is None:
            raise UsageError(f"{change}: layer {change.layer} has no basis; give one with basis=")
        directions = basis.directions
        for feature in (change.feature, getattr(change, "other", change.feature)):
            if not 0 <= feature < len(directions):
                raise UsageError(
                    f"{change}: features of {basis.about.name} are 0 to {len(directions) - 1}"
                )
        parts = self._components(change.layer)
        if isinstance(change, AddFeature):
            return change.activation * parts.scale[change.pos] * directions[change.feature]
        start, stop = parts.active.ptr[change.pos : change.pos + 2].tolist()
        ids = parts.active.ids[start:stop].tolist()
        if change.feature not in ids:
            shown = ", ".join(map(str, ids[:20])) or "none"
            raise UsageError(
                f"{change}: the feature is not active there; active are {shown}"
                + (", ..." if len(ids) > 20 else "")
            )
        coef = parts.coefs[start + ids.index(change.feature)]
        written = coef * directions[change.feature]
        if isinstance(change, SwapFeature):
            return coef * directions[change.other] - written
        return ((change.factor if isinstance(change, ScaleFeature) else 0.0) - 1) * written

    def _components(self, layer: int) -> Components:
        if layer not in self.found:
            prompt = capture(self.model, *pad([self.tokens.tolist()]), layers=[], sites=[layer])[0]
            if isinstance(prompt, PromptError):
                raise prompt
            basis = self.bases[layer]
            self.found[layer] = basis.components(prompt, basis.active(prompt))
        return self.found[layer]

    def _weights(self, head: HeadId) -> HeadWeights:
        return self.model.family.head_weights(self.model.hf, head.layer)

    def _score(self, change: EditScore) -> tuple[ModelEdit, Any]:
        head = _head(self.model, change.head)
        window = self._weights(head).window
        problem = position_problem(change.q_pos, change.k_pos, len(self.tokens), window)
        given = [value for value in (change.add, change.set) if value is not None]
        if len(given) != 1 or not torch.tensor(given[0]).isfinite():
            problem = "expected add or set, one of them, finite"
        if problem:
            raise UsageError(f"{change}: {problem}")
        add = change.add is not None
        edit = ScoreEdit(*head, change.q_pos, change.k_pos, float(given[0]), add)
        return edit, (head, change.q_pos, change.k_pos)

    def _pattern(self, change: ForcePattern) -> tuple[ModelEdit, Any]:
        head, length = _head(self.model, change.head), len(self.tokens)
        self._check_position(change, change.q_pos)
        weights = torch.as_tensor(change.weights).to(self.model.device, self.model.dtype)
        allowed = self._weights(head).allowed(torch.tensor([change.q_pos]), length)[0]
        if weights.shape != (length,) or not bool(weights.isfinite().all()):
            raise UsageError(
                f"ForcePattern {change.head} q {change.q_pos}: found weights "
                f"{tuple(weights.shape)}; expected ({length},), finite"
            )
        if masked := weights[~allowed.to(weights.device)].nonzero().numel():
            raise UsageError(
                f"ForcePattern {change.head} q {change.q_pos}: {masked} of the weights are on keys "
                "that the mask forbids; expected 0 there"
            )
        return PatternEdit(*head, change.q_pos, weights), (head, change.q_pos, "row")
