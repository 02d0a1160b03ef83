"""Why here and not elsewhere, and what removing a feature does: against the definition, against
the model, and under everything that must not change them."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import torch

import headattr
from headattr import query
from headattr.attribution import prepared as shared
from headattr.attribution.contrast import Ends, rows_of
from headattr.attribution.layer import attribute_layer
from headattr.attribution.prepared import prepare
from headattr.attribution.qk import (
    QkBlock,
    QkEdges,
    contrast_pairs,
    contrasts_of,
    qk_edges,
    value_pairs,
)
from headattr.attribution.reference import edge_tables
from headattr.attribution.sides import Projected, Side, project
from headattr.attribution.task import LayerTask
from headattr.basis.plain import plain_basis
from headattr.basis.sae import from_object
from headattr.basis.tokens import token_basis
from headattr.edges import Edge, HeadId, same_edges
from headattr.interventions import RemoveFeature
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.row_means import batched as row_means
from headattr.kernels.row_means.batched import Keys
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.load import LoadedModel, load_model
from headattr.store.check import check_store
from headattr.tables import LayerTable

RANKS = ("value", "contrast")
BY_TURNS = [(family, RANKS[i % 2]) for i, family in enumerate(tiny.MODELS)]
"""Every family, ranked by one or the other."""
UNCAPPED = {"gemma2": {"attn_logit_softcapping": None}}
"""What a family needs for its softmax to see the scores themselves."""


def fit(model: LoadedModel) -> dict[str, Any]:
    return {"d_model": model.d_model, "dtype": model.dtype, "device": model.device}


def one(model: LoadedModel, tokens: list[int], layer: int) -> PromptCapture:
    found = capture(model, *pad([tokens]), layers=[layer], sites=[layer])[0]
    assert isinstance(found, PromptCapture)
    return found


def task_of(
    model: LoadedModel, tokens: list[int], basis: Any, layer: int = 1, **options: Any
) -> LayerTask:
    """One layer of one prompt, all heads, all edges that the mask allows."""
    prompt = one(model, tokens, layer)
    weights = model.family.head_weights(model.hf, layer)
    mask = weights.allowed(torch.arange(len(tokens)), len(tokens)).numpy()
    given: dict[str, Any] = {
        "weights": weights,
        "kept": prompt.layers[layer],
        "components": basis.components(prompt, basis.active(prompt)),
        "directions": basis.directions,
        "output": None,
        "every_output": False,
        "heads": tuple(range(model.n_heads)),
        "select": same_edges(*np.nonzero(mask)),
        "topk": 12,
    }
    return LayerTask(**{**given, **options})


def row_of(table: LayerTable, edge: Edge) -> int:
    start, stop = table.head_ptr[edge.head : edge.head + 2]
    here = (table.q_pos[start:stop] == edge.q_pos) & (table.k_pos[start:stop] == edge.k_pos)
    return int(start + np.flatnonzero(here)[0])


def size_of(task: LayerTask, edge: Edge) -> float:
    """scale |Q| |K| of an edge."""
    Q = task.kept.Q[edge.q_pos, edge.head]
    K = task.kept.K[edge.k_pos, task.weights.kv_head(edge.head)]
    return task.kept.scale * float(Q.norm() * K.norm())


def row_size(task: LayerTask, edge: Edge) -> float:
    """The same with the longest key of the row: what the errors of contrasts are relative to."""
    rows = range(edge.q_pos + 1)
    return max(size_of(task, edge._replace(k_pos=k)) for k in rows)


# ---- against the definition --------------------------------------------------------------------


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("family", tiny.MODELS)
def test_the_kept_pairs_and_features_are_the_strongest_of_the_whole_table(
    family: str, rank: str
) -> None:
    """By |value| or by |contrast|, both signs; beside each stands the other number."""
    model = load_model(tiny.MODELS[family]())
    tokens = tiny.prompts(9)[0]
    basis = from_object(tiny.sae("abstopk", layer=1), 1, **fit(model))
    task = task_of(model, tokens, basis, rank=rank, topk=7, top_marginals=3)
    table = attribute_layer(task)
    for edge in (Edge(1, 0, 8, 5), Edge(1, 2, 7, 7), Edge(1, 1, 0, 0)):
        row, full = row_of(table, edge), tables(task, edge)
        tolerance = 3e-6 * max(row_size(task, edge), float(full["values"].abs().max()))
        for name, column in (("values", table.values), ("contrasts", table.pair_contrasts)):
            kept = full[name][table.q_slots[row], table.k_slots[row]]
            assert column[row] == pytest.approx(kept.numpy(), abs=tolerance), name
        ranked = table.values if rank == "value" else table.pair_contrasts
        by = "values" if rank == "value" else "contrasts"
        strongest = full[by].abs().flatten().sort(descending=True).values[:7]
        assert abs(ranked[row]) == pytest.approx(strongest.numpy(), abs=tolerance)
        assert (np.diff(abs(ranked[row])) <= 1e-12).all()
        assert len(set(zip(table.q_slots[row], table.k_slots[row], strict=True))) == 7
        for side in "qk":
            top = getattr(table, f"{side}_top")[row]
            for name in ("marginals", "contrasts"):
                column = getattr(table, f"{side}_{name}")[row]
                wanted = full[f"{side}_{name}"]
                assert column == pytest.approx(wanted[top].numpy(), abs=10 * tolerance), name
            by = f"{side}_marginals" if rank == "value" else f"{side}_contrasts"
            largest = full[by].abs().sort(descending=True).values[:3]
            assert full[by][top].abs() == pytest.approx(largest.numpy(), abs=10 * tolerance)


def tables(task: LayerTask, edge: Edge) -> dict[str, torch.Tensor]:
    """The whole table of an edge by the slow definition: of pairs of features, and of each side."""
    wanted = edge_tables(task.weights, task.kept, task.components, task.directions, edge)
    n_q, n_k = (
        sum(part.kind == task.components.kind for part in parts)
        for parts in (wanted.q_components, wanted.k_components)
    )
    return {
        "values": wanted.qk[:n_q, :n_k],
        "contrasts": wanted.contrast[:n_q, :n_k],
        "q_marginals": wanted.qk[:n_q].sum(1),
        "k_marginals": wanted.qk[:, :n_k].sum(0),
        "q_contrasts": wanted.contrast[:n_q].sum(1) + wanted.elsewhere[:n_q],
        "k_contrasts": wanted.contrast[:, :n_k].sum(0),
        "elsewhere": wanted.elsewhere.sum(),
        "q_named": wanted.contrast[n_q:].sum(1) + wanted.elsewhere[n_q:],
        "k_named": wanted.contrast[:, n_k:].sum(0),
    }


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*product(tiny.MODELS, ["float32"]), ("gpt2", "float64"), ("gemma2", "float64")],
)
def test_contrasts_by_kind_are_the_definitions_and_sum_on_either_side(
    family: str, dtype: str
) -> None:
    model = load_model(tiny.MODELS[family](), dtype=dtype)  # pyright: ignore[reportArgumentType]
    exact = 1e-9 if dtype == "float64" else 1e-5
    for layer, basis in (
        (0, token_basis(model)),
        (1, from_object(tiny.sae("standard", layer=1), 1, **fit(model))),
    ):
        task = task_of(model, tiny.prompts(7)[0], basis, layer)
        table = attribute_layer(task)
        assert table.contrast_completeness.max() <= exact
        for edge in (Edge(layer, 1, 6, 4), Edge(layer, 2, 6, 6)):
            row, full = row_of(table, edge), tables(task, edge)
            tolerance = exact * row_size(task, edge)
            for side in "qk":
                found = getattr(table, f"{side}_contrast_totals")[row]
                named = full[f"{side}_named"].tolist()
                wanted = [float(full[f"{side}_contrasts"].sum()), *named]
                wanted += [float(full["elsewhere"])] * (side == "k")
                assert found == pytest.approx(np.array(wanted), abs=10 * tolerance)
                assert found.sum() == pytest.approx(table.score_contrast[row], abs=tolerance)


# ---- one vector for all keys -------------------------------------------------------------------


@dataclass(frozen=True)
class Shifted(Side):
    """A key side with one vector added to every rotated key."""

    u: torch.Tensor
    kind: int
    """The kind it is counted with; 0: the first feature of every position has it."""

    @cached_property
    def kinds(self) -> torch.Tensor:
        kinds = self._seen(self.plain_kinds, None).clone()
        kinds[:, self.kind] += self.u
        return kinds

    @cached_property
    def entries(self) -> Keys:
        plain = Side(*(getattr(self, part.name) for part in fields(Side))).entries
        first = self.prepared.components.active.slots == 0
        shift = (first & (self.kind == 0))[:, None] * self.u
        return plain._replace(vectors=plain.vectors + shift)

    def at(self, positions: torch.Tensor) -> Projected:
        assert len(self.entries.vectors)  # which are what it takes features from
        return super().at(positions)


def head_of(task: LayerTask, head: int, u: torch.Tensor, to: str) -> QkBlock:
    """One head of a task, `u` added to every rotated key: counted with the `bias`, or with the
    first `feature` of every position."""
    prepared = prepare(task.weights, task.components, task.directions, task.kept.resid_pre)
    group, rotary = task.weights.kv_head(head), task.kept.rotary
    everywhere = torch.arange(len(prepared.sigma))
    query = project(task.weights, "query", head, prepared, rotary).at(everywhere)
    kind = 0 if to == "feature" else task.components.kinds.index("bias")
    plain = project(task.weights, "key", group, prepared, rotary)
    key = Shifted(**{f.name: getattr(plain, f.name) for f in fields(plain)}, u=u, kind=kind)
    Q, K = task.kept.Q[:, head].double(), task.kept.K[:, group].double() + u
    scale = task.kept.scale
    scores = scale * Q @ K.T
    allowed = task.weights.allowed(everywhere, len(Q))
    pattern = task.weights.pattern(scores[None], allowed)[0]
    rows = rows_of(task.weights, query, key, 0, scale, scores, pattern)
    norms = Q.norm(dim=-1), K.norm(dim=-1)
    return QkBlock(task.weights, query, key, Q, K, *norms, scale, rows)


def everywhere(model: LoadedModel, length: int, *, seed: int = 0) -> Any:
    """A basis whose feature 0 is active at every position, by turns with others."""
    generator = torch.Generator().manual_seed(seed)
    acts = torch.randn(length, 9, generator=generator)
    acts[torch.rand(acts.shape, generator=generator) < 0.5] = 0
    acts[:, 0] = 1 + torch.rand(length, generator=generator)
    directions = torch.randn(9, model.d_model, generator=generator)
    plain = headattr.PlainDictionary(directions, [acts], directions[3] / 2)
    return plain_basis(plain, 1, **fit(model))


@pytest.mark.parametrize("to", ["bias", "feature"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("family", tiny.MODELS)
def test_what_all_keys_share_changes_no_contrast(family: str, rank: Any, to: str) -> None:
    """Softmax ignores a vector that is added to every rotated key of a row, and so do contrasts;
    values and marginals do not."""
    hf = tiny.MODELS[family](**UNCAPPED.get(family, {}))
    model = load_model(hf, dtype="float64")
    task = task_of(model, tiny.prompts(8)[0], everywhere(model, 8))
    q_pos, k_pos = task.weights.allowed(torch.arange(8), 8).nonzero(as_tuple=True)
    u = 5 * torch.randn(task.kept.K.shape[-1], generator=torch.Generator().manual_seed(7)).double()
    before, after = (
        everything(head_of(task, 2, shift, to), q_pos, k_pos, rank)
        for shift in (torch.zeros_like(u), u)
    )
    assert not torch.allclose(before.edges.score, after.edges.score)
    for name in ("score_contrast", "q_contrast_totals", "k_contrast_totals"):
        torch.testing.assert_close(
            getattr(before.edges, name), getattr(after.edges, name), atol=1e-9, rtol=1e-9
        )
    for by_name in (pairs, features):
        one_table, other = by_name(before), by_name(after)
        assert one_table.keys() == other.keys()
        assert all(abs(one_table[key] - other[key]) <= 1e-9 for key in one_table)
    if to == "feature":
        assert not torch.allclose(before.pairs.values, after.pairs.values)


class Found(NamedTuple):
    """What is computed of some edges."""

    edges: QkEdges
    pairs: PairTopK
    contrasts: torch.Tensor


def everything(block: QkBlock, q_pos: torch.Tensor, k_pos: torch.Tensor, rank: Any) -> Found:
    """All pairs and features of some edges, whose queries and keys are the first eight."""
    ends, key = Ends(q_pos, k_pos, q_pos, k_pos), block.key.at(torch.arange(8))
    edges = qk_edges(block, ends, key, top_marginals=9, rank=rank)
    if rank == "contrast":
        return Found(edges, *contrast_pairs(block, ends, 81))
    found = value_pairs(block, ends, key, 81)
    return Found(edges, found, contrasts_of(block, ends, found.left, found.right))


def pairs(found: Found) -> dict[Any, float]:
    """Contrasts of pairs, by edge and slots."""
    return {
        (row, int(q), int(k)): float(value)
        for row in range(len(found.contrasts))
        for q, k, value in zip(
            found.pairs.left[row], found.pairs.right[row], found.contrasts[row], strict=True
        )
        if q >= 0
    }


def features(whole: Found) -> dict[Any, float]:
    """Contrasts of features of both sides, by edge, side and slot."""
    found = whole.edges
    return {
        (row, side, int(slot)): float(value)
        for side, top, values in (
            ("q", found.q_top, found.q_contrasts),
            ("k", found.k_top, found.k_contrasts),
        )
        for row in range(len(found.score))
        for slot, value in zip(top[row], values[row], strict=True)
        if slot >= 0
    }


# ---- where features are ------------------------------------------------------------------------


def plain_run(
    hf: Any,
    directions: torch.Tensor,
    acts: torch.Tensor,
    tokens: list[int],
    out: Path,
    **options: Any,
) -> Any:
    """A run of one prompt through directions and activations that are written down, at layer 1."""
    plain = headattr.PlainDictionary(directions, [acts])
    store = headattr.attribute(hf, {1: plain}, [tokens], out, **{"edges": "all", **options})
    assert store.set_aside == []
    assert check_store(store)["problems"] == []
    return store


@pytest.mark.parametrize(("family", "rank"), BY_TURNS)
def test_a_key_feature_that_is_nowhere_else_contrasts_by_what_the_key_lacks_of_all_attention(
    family: str, rank: str, tmp_path: Path
) -> None:
    """Active at k only, its contrast is 1 - A of its product (r - A r of it under a cap); at the
    other keys of the row it is `elsewhere`, at queries before k nothing."""
    hf, tokens = tiny.MODELS[family](), tiny.prompts(8)[0]
    generator = torch.Generator().manual_seed(2)
    directions, acts = torch.randn(3, 24, generator=generator), torch.zeros(8, 3)
    acts[:, 0], acts[5, 1] = 1.5, -2.0  # feature 0 at all positions, feature 1 at 5 only
    store = plain_run(hf, directions, acts, tokens, tmp_path / "out", rank=rank)
    for head in (HeadId(1, 0), HeadId(1, 2)):
        at_5 = store.edge(0, Edge(1, head.head, 7, 5))
        answer = query.edge(store, 0, Edge(1, head.head, 7, 5))
        r, A = answer["cap_ratio"], at_5.pattern
        (pair,) = [p for p in answer["qk"]["pairs"] if p["k_feature"]["id"] == 1]
        assert pair["q_feature"]["id"] == 0
        wanted = r * (1 - A) * pair["value"]
        assert pair["contrast"] == pytest.approx(wanted, rel=2e-3, abs=1e-6)
        (own,) = [f for f in answer["qk"]["k_features"] if f["id"] == 1]
        assert own["contrast"] == pytest.approx(r * (1 - A) * own["marginal"], rel=1e-4, abs=1e-6)
        # seen from another key of the row, the feature is missing there
        away = query.edge(store, 0, Edge(1, head.head, 7, 6))["qk"]
        assert away["elsewhere"] == pytest.approx(-A * r * own["marginal"], rel=1e-4, abs=1e-6)
        assert away["contrast_totals"]["key"]["elsewhere"] == away["elsewhere"]
        before = query.edge(store, 0, Edge(1, head.head, 4, 3))["qk"]
        assert before["elsewhere"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2"])
def test_a_prompt_where_nothing_is_active_is_all_bias_and_error(
    family: str, rank: str, tmp_path: Path
) -> None:
    acts = torch.zeros(6, 3)
    store = plain_run(
        tiny.MODELS[family](), torch.randn(3, 24), acts, tiny.prompts(6)[0], tmp_path / "out",
        rank=rank,
    )  # fmt: skip
    for edge in (Edge(1, 0, 5, 3), Edge(1, 1, 0, 0)):
        qk = (answer := query.edge(store, 0, edge))["qk"]
        assert (qk["pairs"], qk["q_features"], qk["k_features"]) == ([], [], [])
        assert (qk["elsewhere"], qk["contrast_totals"]["key"]["feature"]) == (0, 0)
        for side in ("query", "key"):
            total = sum(qk["contrast_totals"][side].values())
            assert total == pytest.approx(answer["score_contrast"], abs=1e-5)


@pytest.mark.parametrize("family", tiny.MODELS)
def test_a_prompt_of_one_token_has_no_contrast(family: str, tmp_path: Path) -> None:
    basis = {0: "tokens", 1: tiny.sae()}
    store = headattr.attribute(
        tiny.MODELS[family](), basis, [[5]], tmp_path / "out", edges="all", heads="L0H0,L1H2"
    )
    assert store.set_aside == []
    assert check_store(store)["problems"] == []
    for head in store.heads:
        row = store.edge(0, Edge(head.layer, head.head, 0, 0))
        assert row.pattern == 1.0
        assert row.score_contrast == pytest.approx(0, abs=1e-6)
        for numbers in (row.pair_contrasts, row.q_contrasts, row.k_contrasts):
            assert numbers == pytest.approx(np.zeros_like(numbers), abs=1e-5)


@pytest.mark.parametrize("rank", RANKS)
def test_equal_features_have_equal_numbers_and_ties_go_to_the_lower_ones(rank: Any) -> None:
    """Features 1, 2 and 4 are one direction, active alike; 0 and 3 as well, with the other sign."""
    twins = [0, 1, 1, 0, 1]
    directions = torch.randn(2, 24, generator=torch.Generator().manual_seed(1))[twins]
    acts = torch.tensor([1.0, 2.0, 2.0, -1.0, 2.0]).expand(6, 5).clone()
    acts[3] = torch.tensor([0, 3.0, 3.0, 0, 3.0])
    model = load_model(tiny.llama())
    basis = plain_basis(headattr.PlainDictionary(directions, [acts]), 1, **fit(model))
    task = task_of(model, tiny.prompts(6)[0], basis, rank=rank, topk=40)
    table, active = attribute_layer(task), task.components.active
    ranked = table.values if rank == "value" else table.pair_contrasts
    for edge in (Edge(1, 1, 5, 3), Edge(1, 2, 5, 4), Edge(1, 0, 4, 4)):
        row = row_of(table, edge)
        n = [3, 5][edge.k_pos == 4] * 5
        slots = [table.q_slots[row][:n], table.k_slots[row][:n]]
        assert (table.q_slots[row][n:] == -1).all()
        order = np.lexsort((slots[1], slots[0], -abs(ranked[row][:n])))
        assert order.tolist() == list(range(n))
        ids = [
            active.ids[int(active.ptr[pos]) :][torch.from_numpy(part).long()].tolist()
            for pos, part in zip((edge.q_pos, edge.k_pos), slots, strict=True)
        ]
        for column in (table.values, table.pair_contrasts):
            found: dict[Any, list[float]] = {}
            for q, k, value in zip(*ids, column[row][:n], strict=True):
                found.setdefault((twins[q], twins[k]), []).append(abs(float(value)))
            assert len(found) == [2, 4][edge.k_pos == 4]
            for same in found.values():
                assert same == pytest.approx([same[0]] * len(same), abs=1e-6, rel=1e-5)


def test_a_feature_in_two_halves_contrasts_as_the_whole(tmp_path: Path) -> None:
    """Splitting a feature into two of the same direction changes no sum: contrasts are linear."""
    hf, tokens = tiny.gemma3(), tiny.prompts(7)[0]
    generator = torch.Generator().manual_seed(4)
    directions = torch.randn(3, 24, generator=generator)
    acts = torch.randn(7, 3, generator=generator)
    acts[::2, 1] = 0
    whole = plain_run(hf, directions, acts, tokens, tmp_path / "whole")
    halves = plain_run(
        hf, directions[[0, 1, 2, 1]], torch.cat([acts * torch.tensor([1, 0.25, 1]),
        0.75 * acts[:, 1:2]], 1), tokens, tmp_path / "halves",
    )  # fmt: skip
    for edge in (Edge(1, 0, 6, 5), Edge(1, 3, 6, 4), Edge(1, 1, 5, 5)):
        one_qk, two_qk = (query.edge(store, 0, edge)["qk"] for store in (whole, halves))
        for side in ("query", "key"):
            assert one_qk["contrast_totals"][side] == pytest.approx(
                two_qk["contrast_totals"][side], abs=1e-5
            )
        for side in ("q_features", "k_features"):
            found = [{f["id"]: f for f in qk[side]} for qk in (one_qk, two_qk)]
            if 1 in found[0]:
                wanted = found[0][1]["contrast"]
                parts = [found[1][feature]["contrast"] for feature in (1, 3)]
                assert sum(parts) == pytest.approx(wanted, abs=1e-5)
                assert parts[1] == pytest.approx(3 * parts[0], abs=1e-5)


# ---- what must not change them -----------------------------------------------------------------

COLUMNS = (
    *("score", "score_capped", "score_contrast", "pattern", "q_contrast_totals"),
    *("k_contrast_totals", "pair_contrasts", "values", "q_marginals", "q_contrasts"),
    *("q_ablations", "k_marginals", "k_contrasts", "k_ablations"),
)


@pytest.mark.parametrize(("family", "rank"), BY_TURNS)
def test_batches_padding_and_single_edges_give_the_same_contrasts_and_ablations(
    family: str, rank: str, tmp_path: Path
) -> None:
    hf, prompts = tiny.MODELS[family](), tiny.prompts(9, 14, 1)
    basis = {1: tiny.sae(layer=1)}
    ids, mask = pad(prompts, "left")
    left = {"input_ids": ids, "attention_mask": mask.long()}
    options = {"edges": "all", "heads": "L1H0,L1H2", "rank": rank}
    stores = [
        headattr.attribute(hf, basis, texts, tmp_path / name, batch_size=size, **options)
        for name, texts, size in (("alone", prompts, 1), ("left", left, 3))
    ]
    edges = [(0, Edge(1, 2, 8, 6)), (1, Edge(1, 0, 13, 13)), (1, Edge(1, 2, 12, 10))]
    edges += [(2, Edge(1, 0, 0, 0))]
    for prompt, edge in edges:
        rows = [answer_by_feature(query.edge(store, prompt, edge)) for store in stores]
        single = headattr.explain_edge(
            hf, basis, prompts[prompt], str(HeadId(1, edge.head)), edge.q_pos, edge.k_pos, rank=rank
        )
        rows.append(answer_by_feature(single))
        size = max(1.0, max(abs(v) for v in rows[0].values()))
        for other in rows[1:]:
            for key in rows[0].keys() & other.keys():
                rounding = 2**-10 * abs(rows[0][key]) if key[0] == "pair" else 0
                assert abs(rows[0][key] - other[key]) <= rounding + 1e-5 * size, key
        assert rows[0].keys() <= rows[2].keys()
        # a near tie at the last place may differ; no more than that
        assert len(rows[0].keys() ^ rows[1].keys()) <= 8


def answer_by_feature(answer: dict[str, Any]) -> dict[Any, float]:
    """The numbers of an answer by what they belong to."""
    qk = answer["qk"]
    found: dict[Any, float] = {
        ("edge", name): answer[name]
        for name in ("score", "score_capped", "score_contrast", "pattern")
    }
    for side, kinds in qk["contrast_totals"].items():
        found |= {("total", side, kind): value for kind, value in kinds.items()}
    for side, name in product(("q_features", "k_features"), ("marginal", "contrast", "ablation")):
        found |= {(side, name, f["id"]): f[name] for f in qk[side]}
    for name in ("value", "contrast"):
        found |= {
            ("pair", name, p["q_feature"]["id"], p["k_feature"]["id"]): p[name] for p in qk["pairs"]
        }
    return found


@pytest.mark.parametrize(
    ("family", "rank"), [("gpt_neox", "value"), ("qwen2", "contrast"), ("gemma2", "contrast")]
)
def test_chunks_change_no_contrast_and_no_ablation(
    family: str, rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of edges, of rows, of a feature's entries, and of positions: cut anywhere."""
    model = load_model(tiny.MODELS[family]())
    basis = from_object(tiny.sae(layer=1), 1, **fit(model))
    task = task_of(model, tiny.prompts(11)[0], basis, rank=rank, heads=(0, 3))
    whole = attribute_layer(task)
    # a query that sees one key has contrasts of 0, and rounding alone to rank them by
    ranked = whole.q_pos > 0
    for numbers in (1, 333):
        monkeypatch.setattr(row_means, "_CHUNK", numbers)
        monkeypatch.setattr(shared, "_CHUNK", numbers)
        small = attribute_layer(replace(task, memory=numbers))
        for name in ("q_slots", "k_slots", "q_top", "k_top"):
            found, wanted = getattr(small, name), getattr(whole, name)
            assert np.array_equal(found[ranked], wanted[ranked]), name
        for name in COLUMNS:
            found, wanted = getattr(small, name), getattr(whole, name)
            tolerance = 1e-6 * max(1, abs(wanted).max())
            assert np.allclose(found[ranked], wanted[ranked], atol=tolerance), name


# ---- removing a feature ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*product(tiny.MODELS, ["float32"]), *product(("gpt_neox", "gemma2", "qwen3"), ["float64"])],
)
def test_an_ablation_is_what_the_model_does_without_the_feature(family: str, dtype: str) -> None:
    """Tokens at layer 0, where the stream becomes exactly 0 if the model has no positions, and
    negative activations at layer 1: taken out in the model itself, at the query, at the key, and
    on the diagonal at both."""
    model = load_model(tiny.MODELS[family](), dtype=dtype)  # pyright: ignore[reportArgumentType]
    tokens, sae = tiny.prompts(7)[0], tiny.sae("abstopk", layer=1)
    exact = 1e-9 if dtype == "float64" else 1e-5
    for layer, basis, given in (
        (0, token_basis(model), {0: "tokens"}),
        (1, from_object(sae, 1, **fit(model)), {1: sae}),
    ):
        task = task_of(model, tokens, basis, layer, top_marginals=40)
        table = attribute_layer(task)
        active = task.components.active
        for edge in (Edge(layer, 0, 6, 4), Edge(layer, 2, 5, 5), Edge(layer, 2, 3, 0)):
            # in a window of 4 the last of these is the furthest key
            row, at, asked, wanted = row_of(table, edge), (edge.q_pos, edge.k_pos), [], []
            for side, pos in zip("qk", at, strict=True):
                slots = getattr(table, f"{side}_top")[row]
                effects = getattr(table, f"{side}_ablations")[row]
                for slot, effect in zip(slots, effects, strict=True):
                    if slot >= 0:
                        feature = int(active.ids[int(active.ptr[pos]) + slot])
                        asked.append(RemoveFeature(layer, pos, feature))
                        wanted.append(effect)
            head = HeadId(layer, edge.head)
            clean, *changed = headattr.intervene(
                model, tokens, [[], *asked], basis=given, heads=[str(head)]
            )
            before = float(clean.scores[head][at])
            found = [float(run.scores[head][at]) - before for run in changed]
            assert before == pytest.approx(table.score[row], abs=1e-5)
            assert np.abs(np.array(found) - wanted).max() <= 2 * exact * size_of(task, edge)


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_taking_a_token_away_leaves_exactly_nothing_however_long_it_is(
    family: str, eps: float, tmp_path: Path
) -> None:
    """The stream is one token and becomes 0: without biases no score is left, though the norms are
    those of epsilon alone, or nothing."""
    hf = tiny.MODELS[family](rms_norm_eps=eps, attention_bias=False)
    with torch.no_grad():
        hf.get_input_embeddings().weight[3] *= 1e4
    store = headattr.attribute(hf, {0: "tokens"}, [[1, 3, 2]], tmp_path / "out", edges="all")
    assert store.set_aside == []
    for head, (q_pos, k_pos) in product(store.heads, [(1, 0), (2, 1), (1, 1)]):
        row = store.edge(0, Edge(0, head.head, q_pos, k_pos))
        for effects in (row.q_ablations, row.k_ablations):
            assert effects[0] == pytest.approx(-row.score, abs=1e-5 * max(1, abs(row.score)))


# ---- vectors that are nothing ------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.0, 1e-5])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "qwen3", "gemma2"])
def test_a_token_whose_embedding_is_nothing_runs_like_any(
    family: str, size: float, tmp_path: Path
) -> None:
    """As a padding token's is: without biases its key is 0, or tiny beside the row's others."""
    hf = tiny.MODELS[family]()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
        embedding = hf.get_input_embeddings().weight
        embedding[7] *= size
    store = headattr.attribute(
        hf, {0: "tokens"}, [[3, 7, 5, 4], [7], [7, 7, 1]], tmp_path / "out", edges="all"
    )
    assert store.set_aside == []
    assert check_store(store)["problems"] == []
    for head in store.heads:
        row = store.edge(0, Edge(0, head.head, 3, 1))
        assert row.totals.sum() == pytest.approx(row.score, abs=1e-5)
        for side in (row.q_contrast_totals, row.k_contrast_totals):
            assert side.sum() == pytest.approx(row.score_contrast, abs=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_an_embedding_without_spread_runs_like_any(family: str, tmp_path: Path) -> None:
    """LayerNorm makes 0 of an embedding whose entries are all alike."""
    hf = tiny.MODELS[family]()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith("bias") or "wpe" in name:
                parameter.zero_()
        hf.get_input_embeddings().weight[7] = 0.1
    store = headattr.attribute(
        hf, {0: "tokens"}, [[3, 7, 5, 4]], tmp_path / "out", edges="all", output="unembed"
    )
    assert store.set_aside == []
    assert check_store(store)["problems"] == []
