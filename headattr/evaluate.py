"""Which dictionary to choose: sparsity, fit, loss recovered, and how much of a model's attention it
explains.

    recovered = (loss ablated - loss spliced) / (loss ablated - loss clean)

Loss: cross-entropy of the next token. Spliced: what the dictionary makes of a site is put in its
place. Ablated: the site's mean is. Features are those of the clean run. Positions that swallow
attention are left as they are, and not counted in sparsity and fit; scores and outputs of heads
are over all allowed edges.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headattr.attribution.shares import ShareSums, layer_shares, no_shares
from headattr.basis.active import ActiveFeatures
from headattr.basis.report import Tally
from headattr.basis.whole import Whole, load_whole
from headattr.comparison import row_of
from headattr.edges import HeadId, parse_heads, parse_layers
from headattr.errors import PromptError
from headattr.inputs import releases_of
from headattr.judging import Evaluate
from headattr.losses import Losses, losses_of
from headattr.model.capture import PromptCapture, pad
from headattr.model.load import LoadedModel
from headattr.model.proof import TOLERANCE, prove
from headattr.model.sites import Site
from headattr.model.tokens import Prompt
from headattr.passes import Passes, bar, counted_of, given_each
from headattr.query import share_of


class Chosen(NamedTuple):
    """Which heads are judged, and how."""

    heads: tuple[HeadId, ...]
    batch_size: int = 8
    memory: str | None = None
    progress: bool = False
    layers: tuple[int, ...] | None = None
    """Those that were asked for; None: all."""


def evaluate(asked: Evaluate) -> dict[str, Any]:
    """The command `evaluate`: {"model", "prompts", "tokens", "left", "bos", "set_aside",
    "dictionaries": [the answer of `judge`, "path", "bos" and "tokens"]}. Each is judged with or
    without BOS as it was trained: where that is not the same for all, "bos" and "tokens" of all are
    null.

    Raises HeadattrError, before any pass, for whatever does not fit.
    """
    asked.check_given("evaluate")
    named = releases_of(asked.dictionaries)
    found = given_each(asked, named)
    model = found[0].model
    layers = set(parse_layers(asked.layers, len(model.layers)))
    heads = parse_heads(asked.heads, len(model.layers), model.n_heads)
    chosen = Chosen(
        tuple(head for head in heads if head.layer in layers),
        asked.batch_size,
        asked.memory,
        asked.progress,
        None if asked.layers == "all" else tuple(sorted(layers)),
    )
    prove(model, sorted({head.layer for head in chosen.heads}))
    answers = []
    for one, here in zip(named, found, strict=True):
        whole = load_whole(one.release, model, one.layer)
        answer = judge(model, whole, here.prompts, chosen)
        said = {"path": one.release.path, "bos": here.bos._asdict(), "tokens": here.tokens}
        answers.append({**said, **answer})
    about = found[0].about()
    if any(here.bos.prepend != found[0].bos.prepend for here in found):
        about |= {"bos": None, "tokens": None}
    return {**about, "dictionaries": answers}


def judge(
    model: LoadedModel, whole: Whole, prompts: Sequence[Prompt], chosen: Chosen
) -> dict[str, Any]:
    """One dictionary over some prompts.

    {"name", "kind", "features", "activation", "assumed", "positions", "left_out", "l0", "dead",
    "dense", "groups": [{"layer", "site", "features", "l0", "dead"}], "explained_variance": {site},
    "loss_clean", "loss": {site or "together": {"spliced", "ablated", "recovered"}}, "layers":
    [{"layer", "feature_share", "feature_share_centred" (of all edges), "feature_share_counted",
    "feature_share_counted_centred", "output_share" (without positions that swallow attention)}],
    "heads": [the same with "head"], "layers_without_basis", "failed": {prompt: reason}, "row": what
    is compared (`comparison.row_of`)}. Losses are in nats a token.
    """
    work = _Judge(model, whole, prompts, chosen)
    about = whole.source.about
    work.measure()
    nothing = {"loss_clean": None, "loss": {}}
    losses = work.splice() if work.tally.positions else nothing
    answer = {
        "name": about.name,
        "kind": about.kind,
        "features": about.n_features,
        "activation": about.activation,
        "assumed": list(about.assumed),
        **work.tally.report,
        "dead": work.tally.dead,
        "dense": work.tally.dense,
        "groups": work.tally.groups,
        **losses,
        **_shares(work.sums, work.heads),
        "layers_without_basis": sorted({head.layer for head in chosen.heads} - whole.views.keys()),
        "failed": {str(prompt): reason for prompt, reason in work.passes.failed.items()},
    }
    return {**answer, "row": row_of(whole.source, answer, chosen.layers)}


class _Judge:
    """One dictionary at work."""

    def __init__(
        self, model: LoadedModel, whole: Whole, prompts: Sequence[Prompt], chosen: Chosen
    ) -> None:
        self.model, self.source, self.views = model, whole.source, whole.views
        self.progress = chosen.progress
        self.heads: dict[int, list[int]] = {}
        for head in chosen.heads:
            if head.layer in whole.views:
                self.heads.setdefault(head.layer, []).append(head.head)
        self.tally = Tally(whole.source)
        self.sums: dict[int, ShareSums] = {}
        self.needed = self.tally.needed
        seen = {site for layer in self.heads for site in self.views[layer].sites}
        self.passes = Passes(
            model,
            prompts,
            whole.source,
            seen | set(self.needed),
            layers=len(self.heads),
            batch_size=chosen.batch_size,
            memory=chosen.memory,
        )

    def measure(self) -> None:
        """Sparsity, fit and shares of every prompt that can run."""
        total = sum(len(prompt.tokens) for prompt in self.passes.prompts)
        advance, close = bar(total, "fit", shown=self.progress)
        for prompts in self.passes.batches():
            tallies, sums, actives = {}, {}, {}
            for layers in self._groups(prompts):
                sites = {site for layer in layers for site in self.views[layer].sites}
                captured = self.passes.captured(prompts, layers, {*self.needed, *sites})
                for key, prompt in captured.items():
                    if key not in tallies:
                        tallies[key], actives[key] = self._tally(prompt)
                for layer in layers:
                    self._shares(layer, captured, actives, sums)
            self._commit(tallies, sums)
            advance(sum(len(prompt.tokens) for prompt in prompts))
        close()

    def _groups(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Layers whose attention is captured at once; one empty group where none is judged."""
        tokens = len(prompts) * max(len(prompt.tokens) for prompt in prompts)
        layers, size = sorted(self.heads), self.passes.budget.layers_at_once(tokens)
        return [layers[start : start + size] for start in range(0, len(layers), size)] or [[]]

    def _tally(self, prompt: PromptCapture) -> tuple[Tally, ActiveFeatures]:
        active = self.source.active(prompt, self.passes.budget.encode_numbers())
        tally = Tally(self.source)
        tally.add(prompt, active, counted_of(self.source, prompt))
        return tally, active

    def _shares(
        self,
        layer: int,
        captured: Mapping[int, PromptCapture],
        actives: Mapping[int, ActiveFeatures],
        sums: dict[tuple[int, int], ShareSums],
    ) -> None:
        """Put the sums of some prompts and one layer into `sums`."""
        weights = self.model.family.head_weights(self.model.hf, layer)
        for key, prompt in captured.items():
            try:
                sums[key, layer] = layer_shares(
                    weights,
                    prompt.layers[layer],
                    self.views[layer].components(prompt, actives[key]),
                    self.heads[layer],
                    memory=self.passes.budget.block_bytes(len(prompt.tokens)),
                    tolerance=TOLERANCE[self.model.dtype],
                )
            except PromptError as error:
                self.passes.failed[key] = str(error)

    def _commit(
        self, tallies: Mapping[int, Tally], sums: Mapping[tuple[int, int], ShareSums]
    ) -> None:
        """Add up a batch, without the prompts that failed anywhere."""
        for key, tally in tallies.items():
            if key in self.passes.failed:
                continue
            self.tally.merge(tally)
            for layer, heads in self.heads.items():
                before = self.sums.get(layer, no_shares(len(heads)))
                self.sums[layer] = before.plus(sums[key, layer])

    def splice(self) -> dict[str, Any]:
        """Losses with what the dictionary makes of its sites in their place."""
        sites = list(self.tally.sites)
        sets = {str(site): [site] for site in sites}
        if self.source.about.kind == "transcoders" and len(sites) > 1:
            sets["together"] = sites
        losses = Losses(list(sets))
        d_model, number = self.model.d_model, self.model.dtype.itemsize
        more = number * (3 * self.model.vocabulary + 4 * len(sites) * d_model)
        total = sum(len(prompt.tokens) for prompt in self.passes.prompts)
        advance, close = bar(total, "loss", shown=self.progress)
        for prompts in self.passes.batches(more):
            captured = self.passes.captured(prompts, [], self.needed)
            kept = [prompt for prompt in prompts if prompt.id in captured]
            if kept:
                self._splice(kept, captured, sets, losses)
            advance(sum(len(prompt.tokens) for prompt in prompts))
        close()
        return losses.answer()

    def _splice(
        self,
        prompts: Sequence[Prompt],
        captured: Mapping[int, PromptCapture],
        sets: Mapping[str, list[Site]],
        losses: Losses,
    ) -> None:
        """One batch, every set of sites."""
        ids, mask = pad([prompt.tokens for prompt in prompts])
        numbers = self.passes.budget.attention_numbers()
        found = [captured[prompt.id] for prompt in prompts]
        where = _padded([counted_of(self.source, one)[:, None] for one in found])[..., 0]
        made: list[dict[Site, Tensor]] = []
        for one in found:
            active = self.source.active(one, self.passes.budget.encode_numbers())
            made.append(self.source.reconstruct(one, active))

        def loss(put: Mapping[Site, Tensor]) -> list[float]:
            return losses_of(self.model, ids, mask, put, where, numbers)

        losses.add_clean(loss({}), [len(prompt.tokens) - 1 for prompt in prompts])
        for name, sites in sets.items():
            means = {site: self.tally.sites[site].mean for site in sites}
            spliced = {site: _padded([one[site] for one in made]) for site in sites}
            ablated = {
                site: means[site].to(spliced[site]).expand_as(spliced[site]) for site in sites
            }
            losses.add(name, loss(spliced), loss(ablated))


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """Prompts under each other, zeros behind each one's last position."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def _shares(sums: Mapping[int, ShareSums], heads: Mapping[int, list[int]]) -> dict[str, Any]:
    """By layer, and by head."""
    by_layer, by_head = [], []
    for layer, found in sorted(sums.items()):
        by_layer.append({"layer": layer, **_named(*(part.sum(0) for part in found))})
        for at, head in enumerate(heads[layer]):
            row = _named(*(part[at] for part in found))
            by_head.append({"layer": layer, "head": head, **row})
    return {"layers": by_layer, "heads": by_head}


def _named(scores: Any, counted: Any, outputs: Any) -> dict[str, float]:
    return {
        "feature_share": share_of(scores[0], scores[1]),
        "feature_share_centred": share_of(scores[2], scores[3]),
        "feature_share_counted": share_of(counted[0], counted[1]),
        "feature_share_counted_centred": share_of(counted[2], counted[3]),
        "output_share": share_of(outputs[0], outputs[1]),
    }
