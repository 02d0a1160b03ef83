"""Run the model with changes inside: the stream, one head's inputs, scores, rows of the pattern.

Everything goes through the model's own modules. What one head reads is changed by running its layer
a second time on the changed stream, up to the attention, and taking that head's query, key or value
from there; the layer itself goes on with the clean ones. Nothing here knows features.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.edges import HeadId
from headattr.errors import ProofError
from headattr.model.forward import Enough, as_bias, first_of, listening, run_model, scale_of
from headattr.model.head import Side
from headattr.model.load import LoadedModel


class StreamEdit(NamedTuple):
    """Add a vector to resid_pre of a layer at a position: for all, or for what one head reads."""

    layer: int
    pos: int
    vector: Float[Tensor, "d_model"]
    head: int | None = None
    side: Side | None = None


class ScoreEdit(NamedTuple):
    """Change the raw score of an edge, before any cap."""

    layer: int
    head: int
    q_pos: int
    k_pos: int
    value: float
    add: bool
    """Add `value`; else the score becomes it."""


class PatternEdit(NamedTuple):
    """Replace a row of a head's pattern."""

    layer: int
    head: int
    q_pos: int
    weights: Float[Tensor, "k_pos"]


ModelEdit = StreamEdit | ScoreEdit | PatternEdit


class Outcome(NamedTuple):
    """What was asked for, of one changed run."""

    scores: dict[HeadId, Float[Tensor, "q_pos k_pos"]]
    """By head, `scores[5, 1]` for L5H1: scale * Q . K, edited scores as edited, before any cap;
    also where the mask forbids."""
    pattern: dict[HeadId, Float[Tensor, "q_pos k_pos"]]
    """By head: what the values were weighted with, forced rows as forced."""
    resid: dict[int, Float[Tensor, "pos d_model"]]
    """By site: resid_pre of a layer, with what was added there for all; n_layers is the last
    output, before the final norm."""
    logits: Float[Tensor, "pos vocab"] | None
    """The model's own, behind any cap; None if they were not asked for."""


@torch.no_grad()
def run_edited(
    model: LoadedModel,
    tokens: Int[Tensor, "pos"],
    runs: Sequence[Sequence[ModelEdit]],
    *,
    heads: Sequence[HeadId] = (),
    sites: Sequence[int] = (),
    logits: bool = False,
) -> list[Outcome]:
    """One outcome a run, all in one batch of the same prompt; nothing beyond what is read is run.

    Raises ProofError where the model has an attention that headattr cannot enter.
    """
    ids = tokens.expand(len(runs), -1)
    tap = _EditedRun(runs, frozenset(heads), frozenset(sites))
    modules = model.layers
    last = len(modules) if logits else max([head.layer for head in heads] + [*sites], default=0)
    tap.last = last
    with listening(model, tap.attend) as stack:
        for layer in range(min(last + 1, len(modules))):
            hook = modules[layer].register_forward_pre_hook(tap.before(layer), with_kwargs=True)
            stack.callback(hook.remove)
        if len(modules) in sites:
            stack.callback(modules[-1].register_forward_hook(tap.after(len(modules))).remove)
        output = run_model(model, ids, torch.ones_like(ids, dtype=torch.bool), logits=logits)
    inside = {edit.layer for _, edit in tap.edits if not isinstance(edit, StreamEdit)}
    tap.check_entered({head.layer for head in heads} | {layer for layer in inside if layer < last})
    found = output.logits if logits else None
    return [
        Outcome(
            {head: tap.scores[head][run] for head in heads},
            {head: tap.pattern[head][run] for head in heads},
            {site: tap.resid[site][run] for site in sites},
            None if found is None else found[run],
        )
        for run in range(len(runs))
    ]


class _EditedRun:
    """The edits of a batch of runs, and what is read of it."""

    def __init__(
        self,
        runs: Sequence[Sequence[ModelEdit]],
        heads: frozenset[HeadId],
        sites: frozenset[int],
    ) -> None:
        self.edits = [(run, edit) for run, edits in enumerate(runs) for edit in edits]
        self.heads, self.sites = heads, sites
        self.last = 0
        """The layer after whose attention (or before which) nothing more is wanted."""
        self.probe: list[Tensor] | None = None
        """Where a layer that runs a second time leaves its query, key and value."""
        self.changed: dict[tuple[int, int, Side], Tensor] = {}
        """(run, head, side) of this layer -> that head's vectors, [pos, d_head]."""
        self.entered: set[int] = set()
        """The layers whose attention came through here."""
        self.scores: dict[HeadId, Tensor] = {}
        self.pattern: dict[HeadId, Tensor] = {}
        self.resid: dict[int, Tensor] = {}

    def of(self, layer: int, kind: type) -> list[tuple[int, Any]]:
        """(run, edit) of one layer and kind."""
        return [(r, e) for r, e in self.edits if isinstance(e, kind) and e.layer == layer]

    def check_entered(self, layers: set[int]) -> None:
        """Raises ProofError if the attention of one of them did not come through here."""
        for layer in sorted(layers - self.entered):
            raise ProofError(
                f"the attention of layer {layer} does not run through transformers' attention "
                "interface; expected the family's own forward, this model is changed and is refused"
            )

    def before(self, layer: int) -> Any:
        """A hook before a layer: change the stream, and find what single heads read instead."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            stream = args[0] if args else kwargs["hidden_states"]
            everywhere = [(r, e) for r, e in self.of(layer, StreamEdit) if e.head is None]
            if everywhere:
                stream = stream.clone()
                for run, edit in everywhere:
                    stream[run, edit.pos] += edit.vector
                args, kwargs = _with_stream(args, kwargs, stream)
            if layer in self.sites:
                self.resid[layer] = stream
            if layer == self.last and not any(head.layer == layer for head in self.heads):
                raise Enough
            self._find_changed(layer, module, args, kwargs, stream)
            return args, kwargs

        return hook

    def after(self, site: int) -> Any:
        """A hook behind the last layer: keep its output."""

        def hook(module: Any, args: Any, output: Any) -> None:
            self.resid[site] = first_of(output)

        return hook

    def _find_changed(
        self,
        layer: int,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stream: Tensor,
    ) -> None:
        """Run the layer up to its attention on every stream that only one head's side reads."""
        single: dict[tuple[int, int, Side], list[StreamEdit]] = {}
        for run, edit in self.of(layer, StreamEdit):
            if edit.head is not None:
                single.setdefault((run, edit.head, edit.side), []).append(edit)
        self.changed = {}
        keys, batch = list(single), len(stream)
        for start in range(0, len(keys), batch):
            some = keys[start : start + batch]
            read = stream[[run for run, *_ in some] + [0] * (batch - len(some))]
            for row, key in enumerate(some):
                for edit in single[key]:
                    read[row, edit.pos] += edit.vector
            self.probe = []
            try:
                again, named = _with_stream(args, kwargs, read)
                module.forward(*again, **named)
            except Enough:
                pass
            self.check_entered({layer})
            found, self.probe = dict(zip(("query", "key", "value"), self.probe, strict=True)), None
            n_heads = found["query"].shape[1]
            for row, (run, head, side) in enumerate(some):
                vectors = found[side]
                group = n_heads // vectors.shape[1]
                self.changed[run, head, side] = vectors[row, head // group]

    def attend(
        self,
        eager: Any,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """The module's own attention, with this layer's edits."""
        layer, scale = module.layer_idx, scale_of(query, kwargs)
        self.entered.add(layer)
        if self.probe is not None:
            self.probe += [query, key, value]
            raise Enough
        if self.changed:
            group = query.shape[1] // key.shape[1]
            query = query.clone()
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            for (run, head, side), changed in self.changed.items():
                {"query": query, "key": key, "value": value}[side][run, head] = changed
            module = _Ungrouped(module)
        group = query.shape[1] // key.shape[1]
        read = {head.head for head in self.heads if head.layer == layer}
        read |= {edit.head for _, edit in self.of(layer, ScoreEdit)}
        scores = {h: scale * query[:, h] @ key[:, h // group].transpose(1, 2) for h in read}
        bias = as_bias(mask, query.dtype)
        bias = self._edit_scores(layer, scores, bias, query, kwargs.get("softcap"))
        output, pattern = eager(module, query, key, value, bias, **kwargs)
        for run, edit in self.of(layer, PatternEdit):
            pattern[run, edit.head, edit.q_pos] = edit.weights
            values = value[run, edit.head // group]
            output[run, edit.q_pos, edit.head] = edit.weights @ values
        for head in self.heads:
            if head.layer == layer:
                self.scores[head] = scores[head.head]
                self.pattern[head] = pattern[:, head.head].clone()  # not to keep all other heads
        if layer == self.last:
            raise Enough
        return output

    def _edit_scores(
        self,
        layer: int,
        scores: dict[int, Tensor],
        bias: Tensor | None,
        query: Tensor,
        softcap: float | None,
    ) -> Tensor | None:
        """Edit `scores`, and a bias that adds the same change behind the cap."""
        edits = self.of(layer, ScoreEdit)
        if not edits:
            return bias
        batch, heads, length = query.shape[:3]
        bias = query.new_zeros(1, 1, length, length) if bias is None else bias
        bias = bias.expand(batch, heads, length, length).clone()
        for run, edit in edits:
            at = run, edit.q_pos, edit.k_pos
            before = scores[edit.head][at].clone()
            after = before + edit.value if edit.add else torch.full_like(before, edit.value)
            scores[edit.head][at] = after
            if softcap is not None:
                before, after = (softcap * (s / softcap).tanh() for s in (before, after))
            bias[run, edit.head, edit.q_pos, edit.k_pos] += after - before
        return bias


class _Ungrouped:
    """An attention module whose heads each have their own keys and values."""

    num_key_value_groups = 1

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _with_stream(
    args: tuple[Any, ...], kwargs: dict[str, Any], stream: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer with another stream."""
    if args:
        return (stream, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": stream}
