"""What the layers of a run share from prompt to prompt, and the memory that there is for it."""

from typing import Any, NamedTuple

import torch

from headattr.attribution.pushed import Pushed, read_maps, written_maps
from headattr.budget import Budget, budget_for
from headattr.model.head import HeadWeights
from headattr.plan import GUESSED_SLOTS, Run, shape_of
from headattr.store.writer import LayerPlan


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


def _by_head(output: Any) -> bool:
    """Does it read the heads' outputs side by side, before W_O?"""
    return any(site.kind == "z" for site in output.sites)
