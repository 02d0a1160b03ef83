"""Some prompts at work: captured together, encoded, attributed layer by layer, given to a shard."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from headattr.attribution.layer import stream_layer
from headattr.attribution.pushed import Pushed, read_maps, written_maps
from headattr.attribution.task import LayerTask, swallow_attention
from headattr.basis.component import ActiveFeatures
from headattr.budget import Budget, budget_for
from headattr.edges import HeadId, parse_edge_rule, select_edges, token_filter
from headattr.errors import PromptError
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.head import HeadWeights
from headattr.model.proof import TOLERANCE
from headattr.model.sites import Site
from headattr.model.tokens import Prompt
from headattr.plan import GUESSED_SLOTS, Run, shape_of
from headattr.store.sources import ActiveLists
from headattr.store.writer import LayerPlan, PromptRecord, ShardWriter
from headattr.tables import EdgePart, non_finite

Advance = Callable[[int], Any]
"""Told how many more rows of attention are done, one a query and head."""

_Item = TypeVar("_Item")


class FailedPrompts(Exception):
    """Prompts of a batch that cannot be run, by their place in it."""

    def __init__(self, errors: dict[int, PromptError]) -> None:
        """`errors`: why each cannot."""
        super().__init__(errors)
        self.errors = errors


def rows_of_prompt(run: Run, prompt: Prompt) -> int:
    """Rows of attention to attribute: one a query and head."""
    return len(prompt.tokens) * sum(len(plan.heads) for plan in run.plans)


def budget_of(run: Run) -> Budget:
    """What the run may use, by default half of the memory that is free."""
    model = run.model
    total = None
    if run.config.memory is None and model.device.type == "cuda":
        total = torch.cuda.mem_get_info(model.device)[0] // 2
    slots = [slots_of(source) for source in run.source_list]
    views = [run.sources.bases[plan.layer] for plan in run.plans]
    views += [run.outputs[plan.layer] for plan in run.plans if plan.output is not None]
    shape = shape_of(model, run.plans, run.source_list, slots, views)
    return budget_for(shape, run.config.memory, total)


def slots_of(source: Any) -> int:
    """Active features a position, as far as a source says."""
    if source.about.kind == "tokens":
        return 1
    coders = source.coders if hasattr(source, "coders") else [getattr(source, "coder", None)]
    found = 0
    for coder in coders:
        features = source.about.n_features if coder is None else coder.dictionary.features
        k = None if coder is None else coder.dictionary.activation.k
        found += k or min(GUESSED_SLOTS, features)
    return found


class LayerParts(NamedTuple):
    """What all prompts share of one layer."""

    weights: HeadWeights
    pushed: Pushed | None
    pushed_output: Pushed | None


class Layers:
    """What the layers of a run need, kept from batch to batch while it fits in an eighth of the
    budget; else one layer at a time."""

    def __init__(self, run: Run, budget: Budget) -> None:
        """Nothing is made yet."""
        self.run, self.budget = run, budget
        self._kept: dict[int, LayerParts] = {}

    def of(self, plan: LayerPlan) -> LayerParts:
        """Of one layer."""
        if plan.layer not in self._kept:
            if not self._all_fit():
                self._kept.clear()
            self._kept[plan.layer] = self._parts(plan)
        return self._kept[plan.layer]

    def _parts(self, plan: LayerPlan) -> LayerParts:
        model, sources = self.run.model, self.run.source_list
        basis = self.run.sources.bases[plan.layer]
        weights = model.family.head_weights(model.hf, plan.layer)
        entries = self.budget.shape.slots * sum(len(prompt.tokens) for prompt in self.run.prompts)
        few = entries < 2 * sources[plan.basis].about.n_features
        if few or self._bytes(plan) > self.budget.shared_bytes():
            return LayerParts(weights, None, None)
        heads, has_output = tuple(plan.heads), plan.output is not None
        maps = read_maps(weights, heads, values=has_output)
        pushed, written = Pushed(basis.directions, maps), None
        if plan.output is not None:
            output = self.run.outputs[plan.layer]
            through = weights.side_by_side if _by_head(output) else weights.writes
            rows = output.read_rows(self.run.config.read)
            written = Pushed(rows, written_maps(through, heads))
        return LayerParts(weights, pushed, written)

    def _bytes(self, plan: LayerPlan) -> int:
        """Of the projections and the folded weights of a layer."""
        shape, sources = self.budget.shape, self.run.source_list
        exact = (shape.n_heads + 2 * shape.n_kv_heads) * shape.d_head * 8
        found = exact * (sources[plan.basis].about.n_features + shape.d_model)
        if plan.output is not None:
            features = sources[plan.output].about.n_features
            found += len(plan.heads) * shape.d_head * shape.number * features
        return found

    def _all_fit(self) -> bool:
        return sum(map(self._bytes, self.run.plans)) <= self.budget.shared_bytes()


class Batch:
    """Some prompts at work. The layers are the outer loop: what one needs is made once."""

    def __init__(
        self,
        layers: "Layers",
        prompts: Sequence[Prompt],
        shard: ShardWriter,
        advance: Advance,
    ) -> None:
        """`shard` takes the prompts and their edges."""
        self.run, self.budget, self.layers = layers.run, layers.budget, layers
        self.prompts, self.shard = prompts, shard
        self.advanced = 0
        """Rows that were told to `advance`."""
        self._advance = advance
        self._actives: list[dict[int, ActiveFeatures]] = [{} for _ in prompts]
        self._lists: list[dict[int, ActiveLists]] = [{} for _ in prompts]
        """Of every prompt, by source."""

    def attribute(self) -> None:
        """Raises FailedPrompts where some cannot be run; whatever the shard was given of the batch
        is then void."""
        tokens = len(self.prompts) * max(len(prompt.tokens) for prompt in self.prompts)
        sources = dict(enumerate(self.run.source_list))
        groups = list(_parts(self.run.plans, self.budget.layers_at_once(tokens)))
        if len(groups) == 1:
            encoded = {site for source in sources.values() for site in source.sites}
            captured = self._capture(self.run.plans, encoded | self._sites(self.run.plans))
            self._encode(captured, sources)
            self._add_prompts()
            self._layers(self.run.plans, captured)
            return
        for some in _sharing(sources, self.budget.sites_at_once(tokens)):
            sites = {site for index in some for site in sources[index].sites}
            self._encode(self._capture([], sites), {index: sources[index] for index in some})
        self._add_prompts()
        for plans in groups:
            self._layers(plans, self._capture(plans, self._sites(plans)))

    def _sites(self, plans: Sequence[LayerPlan]) -> set[Site]:
        """What bases and outputs of some layers need of a prompt."""
        used = [self.run.sources.bases[plan.layer] for plan in plans]
        used += [self.run.outputs[plan.layer] for plan in plans if plan.output is not None]
        return {site for one in used for site in one.sites}

    def _capture(self, plans: Sequence[LayerPlan], sites: Iterable[Site]) -> list[PromptCapture]:
        found = capture(
            self.run.model,
            *pad([prompt.tokens for prompt in self.prompts]),
            layers=[plan.layer for plan in plans],
            sites=sorted(sites),
            ids_in_run=[prompt.id for prompt in self.prompts],
            numbers=self.budget.attention_numbers(),
        )
        errors = {i: item for i, item in enumerate(found) if isinstance(item, PromptError)}
        if errors:
            raise FailedPrompts(errors)
        return [item for item in found if isinstance(item, PromptCapture)]

    def _encode(self, captured: Sequence[PromptCapture], sources: Mapping[int, Any]) -> None:
        """Which features are active where, of some sources."""
        for index, source in sources.items():
            stream = [site for site in source.sites if site.kind == "resid_pre"][-1]
            for i, prompt in enumerate(captured):
                active = source.active(prompt, self.budget.encode_numbers())
                counted = ~swallow_attention(prompt.at(stream))
                ptr, ids, acts = (
                    part.cpu().numpy() for part in (active.ptr, active.ids, active.acts)
                )
                self._actives[i][index] = active
                self._lists[i][index] = ActiveLists(ptr, ids, acts, counted)

    def _add_prompts(self) -> None:
        for prompt, lists in zip(self.prompts, self._lists, strict=True):
            facts = (prompt.id, prompt.tokens, prompt.token_texts, prompt.text)
            self.shard.add_prompt(PromptRecord(*facts, prompt.extra, prompt.truncated, lists))

    def _layers(self, plans: Sequence[LayerPlan], captured: Sequence[PromptCapture]) -> None:
        model = self.run.model
        for plan in plans:
            layer = self.layers.of(plan)
            for i, prompt in enumerate(captured):
                task = layer_task(
                    self.run,
                    plan,
                    layer.weights,
                    self.prompts[i],
                    prompt,
                    self._actives[i],
                    pushed=layer.pushed,
                    pushed_output=layer.pushed_output,
                    memory=self.budget.block_bytes(len(self.prompts[i].tokens)),
                    tolerance=TOLERANCE[model.dtype],
                )
                try:
                    facts = stream_layer(task, self._keep(plan.layer), self._told)
                    check_finite(plan.layer, facts._asdict())
                except PromptError as error:
                    raise FailedPrompts({i: error}) from error
                self.shard.add_layer(facts)

    def _keep(self, layer: int) -> Callable[[EdgePart], None]:
        def keep(part: EdgePart) -> None:
            check_finite(layer, part.columns | (part.ov or {}))
            self.shard.add_edges(layer, part)

        return keep

    def _told(self, rows: int) -> None:
        self.advanced += rows
        self._advance(rows)


def _by_head(output: Any) -> bool:
    """Does it read the heads' outputs side by side, before W_O?"""
    return any(site.kind == "z" for site in output.sites)


def _sharing(sources: Mapping[int, Any], most: int) -> Iterator[list[int]]:
    """Sources in groups that need at most `most` sites together, one source at least."""
    group: list[int] = []
    sites: set[Site] = set()
    for index, source in sorted(sources.items(), key=lambda item: item[1].sites):
        if group and len(sites | set(source.sites)) > most:
            yield group
            group, sites = [], set()
        group.append(index)
        sites |= set(source.sites)
    yield group


def _parts(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def check_finite(layer: int, columns: dict[str, Any]) -> None:
    """Raises PromptError for numbers that the store cannot keep."""
    if name := non_finite(columns):
        raise PromptError(
            f"non-finite numbers: {name} of layer {layer}; its activations are too large "
            "for float32"
        )


def layer_task(
    run: Run,
    layer_plan: LayerPlan,
    weights: HeadWeights,
    prompt: Prompt,
    captured: PromptCapture,
    actives: Mapping[int, ActiveFeatures],
    **options: Any,
) -> LayerTask:
    """What to attribute in one layer of one prompt."""
    layer, basis = layer_plan.layer, run.sources.bases[layer_plan.layer]
    reads = None
    if layer_plan.output is not None:
        output = run.outputs[layer]
        reads = output.reads(captured, actives[layer_plan.output], run.config.read)
    return LayerTask(
        weights,
        captured.layers[layer],
        basis.components(captured, actives[layer_plan.basis]),
        basis.directions,
        reads,
        layer_plan.every_output,
        tuple(layer_plan.heads),
        _selector(run, layer_plan, prompt, swallow_attention(captured.layers[layer].resid_pre)),
        run.config.topk,
        run.config.rank,
        **options,
    )


def _selector(run: Run, layer_plan: LayerPlan, prompt: Prompt, flagged: NDArray[np.bool_]) -> Any:
    rule, layer = parse_edge_rule(run.config.edges), layer_plan.layer
    q_allowed = token_filter(run.config.q_token, prompt.token_texts)
    k_allowed = token_filter(run.config.k_token, prompt.token_texts)

    def select(
        head: int, rows: range, pattern: NDArray[np.floating]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        back = np.array(rows)[:, None] - np.arange(rows.stop)
        mask = back >= 0
        if layer_plan.window is not None:
            mask &= back < layer_plan.window
        if rule.kind == "file":
            edges = run.listed.get((prompt.id, HeadId(layer, head)), [])  # in order
            first, last = (bisect_left(edges, (q_pos, 0)) for q_pos in (rows.start, rows.stop))
            q_pos, k_pos = np.array(edges[first:last], np.int64).reshape(-1, 2).T
            mask[:] = False
            mask[q_pos - rows.start, k_pos] = True
        q_pos, k_pos = select_edges(
            pattern,
            rule,
            flagged=flagged[: rows.stop],
            keep_sinks=run.config.keep_sinks or bool(flagged.all()),
            q_allowed=q_allowed[rows.start : rows.stop],
            k_allowed=k_allowed[: rows.stop],
            mask=mask,
        )
        return q_pos + rows.start, k_pos

    return select
