"""Some prompts at work: captured together, encoded, attributed layer by layer, given to a shard."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headattr.attribution.layer import stream_layer
from headattr.attribution.task import LayerTask, swallow_attention
from headattr.basis.active import ActiveFeatures
from headattr.edges import HeadId, parse_edge_rule, select_edges, token_filter
from headattr.errors import PromptError
from headattr.layers import Layers
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.head import HeadWeights
from headattr.model.proof import TOLERANCE
from headattr.model.sites import Site
from headattr.model.tokens import Prompt
from headattr.plan import Run
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
