"""The adapters compute what the model computes, whatever its padding, dtype, rotary and backend."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama

import headattr
from headattr.attribution.reference import edge_tables
from headattr.basis.tokens import token_basis
from headattr.basis.unembed import unembed_output
from headattr.edges import Edge, HeadId
from headattr.errors import HeadattrError, ProofError, UnsupportedModelError, UsageError
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.head import HeadWeights, Norm, Rotary
from headattr.model.load import LoadedModel, load_model
from headattr.model.proof import TOLERANCE, Errors, layer_errors, prove
from headattr.store.check import check_store

THETA = {"rope_type": "default", "rope_theta": 1e4}


def captured(model: LoadedModel, *prompts: list[int], **options: Any) -> list[PromptCapture]:
    """One capture a prompt, all layers and all rows of the pattern."""
    layers = list(range(len(model.layers)))
    found = capture(model, *pad(prompts), layers=layers, rows=None, **options)
    assert all(isinstance(prompt, PromptCapture) for prompt in found)
    return found  # pyright: ignore[reportReturnType]


def scores(model: LoadedModel, prompt: PromptCapture, layer: int = 0) -> torch.Tensor:
    """The model's own scores of a layer, [head, q_pos, k_pos]."""
    weights, kept = model.family.head_weights(model.hf, layer), prompt.layers[layer]
    return weights.scores(kept.Q, kept.K) * (kept.scale / weights.scale)


def hand_llama(q: list[float], k: list[float], *, heads: int = 1, **changes: Any) -> Any:
    """A one-layer Llama whose queries and keys are written down: only its biases speak."""
    d_head, kv_heads = len(q), changes.pop("kv_heads", heads)
    options = {
        "num_hidden_layers": 1,
        "hidden_size": heads * d_head,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": d_head,
        "rope_parameters": THETA,
    }
    model = tiny.llama(**{**options, **changes})
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for projection, vector in ((attention.q_proj, q * heads), (attention.k_proj, k)):
            projection.weight.zero_()
            projection.bias.copy_(torch.tensor(vector))
    return model


# ---- positions, groups, rotary ----------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.MODELS)
def test_left_padding_changes_neither_scores_nor_positions(family: str) -> None:
    """V04: [5, 6, 7] alone and as [P, P, 5, 6, 7] with mask 00111 beside a longer prompt."""
    model = load_model(tiny.MODELS[family]())
    alone = captured(model, [5, 6, 7])[0]
    ids = torch.tensor([[9, 9, 5, 6, 7], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    batch = capture(model, ids, mask, layers=[0, 1, 2], sites=[0, 3], rows=None)[0]
    assert isinstance(batch, PromptCapture)
    assert batch.tokens.tolist() == [5, 6, 7]
    W_E, W_pos = model.family.embedding(model.hf)
    embedded = W_E[[5, 6, 7]] if W_pos is None else W_E[[5, 6, 7]] + W_pos[:3]
    torch.testing.assert_close(batch.resid[0], embedded)
    for layer in range(3):
        padded = scores(model, batch, layer)
        torch.testing.assert_close(padded, scores(model, alone, layer))
        assert padded.shape == (model.n_heads, 3, 3)
        torch.testing.assert_close(batch.layers[layer].pattern, alone.layers[layer].pattern)
    if family == "gpt2":  # positions that are not derived from the mask show in its embeddings
        with torch.no_grad():
            naive = model.hf(input_ids=ids, attention_mask=mask.long()).logits[0, 2:]
            right = model.hf(input_ids=ids[:1, 2:]).logits[0]
        assert (naive - right).abs().max() > 1e-2


@pytest.mark.parametrize("family", tiny.MODELS)
def test_a_short_prompt_of_a_batch_keeps_its_six_edges(family: str, tmp_path: Path) -> None:
    model, sae = tiny.MODELS[family](), tiny.sae(layer=1)
    prompts = [[5, 6, 7], tiny.prompts(11)[0]]
    batch = headattr.attribute(model, {1: sae}, prompts, tmp_path / "batch", edges="all")
    alone = headattr.attribute(
        model, {1: sae}, prompts, tmp_path / "alone", edges="all", batch_size=1
    )
    for head in batch.heads:
        found, wanted = batch.edges(0, head), alone.edges(0, head)
        assert list(zip(found["q_pos"], found["k_pos"], strict=True)) == [
            (0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2),
        ]  # fmt: skip
        assert found["score"] == pytest.approx(wanted["score"], abs=1e-5)
        window = tiny.WINDOWS.get(family, (None, None))[1]
        assert len(batch.edges(1, head)["score"]) == tiny.n_edges(11, window)
    assert check_store(batch)["problems"] == []  # V12: nothing that is not finite is stored


@pytest.mark.parametrize("mask", ["10111", "01101", "00000"])
def test_a_mask_with_holes_is_refused(mask: str) -> None:
    model = load_model(tiny.gpt2())
    ids = torch.arange(10).view(2, 5)
    rows = torch.tensor([[1] * 5, [int(c) for c in mask]]).bool()
    with pytest.raises(HeadattrError, match="prompt 1 has holes or no token"):
        capture(model, ids, rows, layers=[0])


def test_grouped_heads_read_their_own_key_and_value_head() -> None:
    """V05: keys [1, 0] and [0, 1], every query [1, 2]: scores are 1, 1, 2, 2 over sqrt(2)."""
    eye = torch.eye(2)
    weights = HeadWeights(
        0, Norm("rms", torch.ones(2), None, 0.0),
        eye.expand(4, 2, 2), eye.expand(2, 2, 2), eye.expand(2, 2, 2), eye.expand(4, 2, 2),
        torch.zeros(4, 2), torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2), 2**-0.5,
    )  # fmt: skip
    found = weights.scores(torch.tensor([[[1.0, 2.0]] * 4]), eye[None])
    torch.testing.assert_close(found.flatten() * 2**0.5, torch.tensor([1.0, 1.0, 2.0, 2.0]))
    assert [weights.kv_head(head) for head in range(4)] == [0, 0, 1, 1]


def test_grouped_heads_of_a_real_model_score_and_move_what_their_group_holds(
    tmp_path: Path,
) -> None:
    hf = hand_llama([1.0, 2.0], [1.0, 0.0, 0.0, 1.0], heads=4, kv_heads=2)
    attention = hf.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.zero_()
        attention.v_proj.bias.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        attention.o_proj.weight.copy_(torch.eye(8))
        attention.o_proj.bias.zero_()
    model = load_model(hf)
    prompt = captured(model, [3], sites=[0])[0]
    torch.testing.assert_close(
        scores(model, prompt).flatten() * 2**0.5, torch.tensor([1.0, 1.0, 2.0, 2.0])
    )
    torch.testing.assert_close(
        prompt.layers[0].block[0], torch.tensor([1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0])
    )
    basis = token_basis(model)
    parts = basis.components(prompt, basis.active(prompt))
    store = headattr.attribute(
        hf, {0: "tokens"}, [[3]], tmp_path / "out", output="unembed", edges="all"
    )
    for head, value in enumerate(([1.0, 2.0], [1.0, 2.0], [3.0, 4.0], [3.0, 4.0])):
        tables = edge_tables(
            model.family.head_weights(hf, 0), prompt.layers[0], parts, basis.directions,
            Edge(0, head, 0, 0),
        )  # fmt: skip
        moved = torch.zeros(8, dtype=torch.float64)
        moved[2 * head : 2 * head + 2] = torch.tensor(value)
        torch.testing.assert_close(tables.writes.sum(0), moved)
        row = store.edge(0, Edge(0, head, 0, 0))
        assert row.score * 2**0.5 == pytest.approx(1 + head // 2, abs=1e-6)
        assert row.ov is not None
        rows = unembed_output(model).rows / prompt_sigma(model, 3)
        output = row.o_active.features[row.ov.o_top[0]]  # pyright: ignore
        assert row.ov.o_reads[0] == pytest.approx(float(rows[output] @ moved.float()), abs=1e-5)


@pytest.mark.parametrize("family", [f for f in tiny.MODELS if f not in ("gpt2", "gpt_neox")])
def test_every_grouped_family_reads_heads_in_order(family: str) -> None:
    """V05: queries [1, 2], keys [1, 0] and [0, 1], values [1, 2] and [3, 4]; QK-norm and the norm
    behind attention scale all heads alike."""
    q = torch.tensor([1.0, 2.0]).expand(1, 4, 2)
    k, v = torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    hf = tiny.by_hand(family, q, k, v, d_model=8)
    with torch.no_grad():
        tiny.outputs_of(hf).copy_(torch.eye(8))
        bias = hf.model.layers[0].self_attn.o_proj.bias
        if bias is not None:
            bias.zero_()
    model = load_model(hf)
    prompt = captured(model, [0])[0]
    assert prove(model).worst <= 1e-5
    found = scores(model, prompt).flatten()
    torch.testing.assert_close(found / found[0], torch.tensor([1.0, 1.0, 2.0, 2.0]))
    block = prompt.layers[0].block[0]
    wanted = torch.tensor([1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0])
    torch.testing.assert_close(block / block[0], wanted)


def prompt_sigma(model: LoadedModel, *tokens: int) -> float:
    """The frozen scale of the final norm at the last position."""
    found = capture(model, *pad([tokens]), layers=[], sites=[len(model.layers)])[0]
    assert isinstance(found, PromptCapture)
    last = found.resid[len(model.layers)]
    return float(model.family.unembedding(model.hf).norm.sigma(last)[-1])


def test_rotary_pairs_the_halves_of_a_head(tmp_path: Path) -> None:
    """V07: q = e0 at position 1 and k = e2 at 0 score sin(1) / 2; interleaved, 0."""
    angles = torch.tensor([[0.0, 0.0] * 2, [1.0, 0.01] * 2])
    turned = Rotary(angles.cos(), angles.sin()).rotate(torch.eye(4)[[0, 0]])
    assert float(turned[1, 2]) / 2 == pytest.approx(0.42074, abs=1e-5)
    hf = hand_llama([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0])
    store = headattr.attribute(hf, {0: "tokens"}, [[3, 4]], tmp_path / "out", edges="all")
    row = store.edge(0, Edge(0, 0, 1, 0))
    assert row.score == pytest.approx(math.sin(1) / 2, abs=1e-6)
    assert row.totals[1, 1] == pytest.approx(row.score, abs=1e-6)


ROTARY = [family for family in tiny.MODELS if family != "gpt2"]
NORMED = ("qwen3", "gemma3_text")


@pytest.mark.parametrize("family", ROTARY)
def test_every_rotary_family_pairs_the_halves_of_what_it_rotates(
    family: str, tmp_path: Path
) -> None:
    """V07: token 0 has key e2, token 1 query e0; QK-norm makes both twice as long."""
    q, k = torch.zeros(2, 2, 4), torch.zeros(2, 2, 4)
    q[1, :, 0] = k[0, :, 2] = 1.0
    q[0], k[1] = 1.0, 1.0
    changes: dict[str, Any] = {
        "llama": {"rope_parameters": THETA},
        "gpt_neox": {"rotary_pct": 1.0},
        "gemma2": {"query_pre_attn_scalar": 4, "attn_logit_softcapping": None},
        "gemma3_text": {"query_pre_attn_scalar": 4},
    }.get(family, {})
    hf = tiny.by_hand(family, q, k, **changes)
    store = headattr.attribute(hf, {0: "tokens"}, [[0, 1]], tmp_path / "out", edges="all")
    for head in (0, 1):
        row = store.edge(0, Edge(0, head, 1, 0))
        wanted = math.sin(1) / 2 * (4 if family in NORMED else 1)
        assert row.score == pytest.approx(wanted, rel=1e-4)
        assert row.totals[0, 0] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("part", [0.25, 0.5, 1.0])
def test_neox_rotates_a_part_of_each_head_and_lets_the_rest_pass(
    part: float, tmp_path: Path
) -> None:
    """Of 8 dimensions the first 2, 4 or 8: dimension 0 turns by the distance, and pairs with the
    one half of that part on; dimension 7 turns only where all are rotated."""
    rotated = int(8 * part)
    for dim, partner, wanted in (
        (0, 0, math.cos(3)),
        (0, rotated // 2, math.sin(3)),
        (7, 7, math.cos(3e-3) if part == 1 else 1.0),
    ):
        q, k = torch.zeros(2, 2, 8), torch.zeros(2, 2, 8)
        q[..., dim], k[..., partner] = 1.0, 1.0
        hf = tiny.by_hand("gpt_neox", q, k, rotary_pct=part)
        out = tmp_path / f"{dim}-{partner}"
        store = headattr.attribute(hf, {0: "tokens"}, [[0, 1, 0, 1]], out, edges="all")
        row = store.edge(0, Edge(0, 1, 3, 0))
        assert row.score == pytest.approx(wanted / 8**0.5, abs=1e-5)
        assert store.edge(0, Edge(0, 1, 2, 2)).score == pytest.approx(
            (dim == partner) / 8**0.5, abs=1e-6
        )


def test_rotary_leaves_what_it_does_not_rotate_and_turns_by_the_position() -> None:
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(5, 2, generator=generator).repeat(1, 2)
    rotary = Rotary(angles.cos(), angles.sin())
    x = torch.randn(5, 3, 7, generator=generator)
    turned = rotary.rotate(x)
    torch.testing.assert_close(turned[..., 4:], x[..., 4:])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotary.at(torch.tensor([3])).rotate(x[3:4]), turned[3:4])


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama3_scaling_reaches_the_score(tmp_path: Path) -> None:
    """V08: frequencies of head_dim 8, and 0.34159 at a distance of 20 (-0.14713 unscaled)."""
    unit = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    for rope, wanted in ((LLAMA3, 0.34159), (THETA, -0.14713)):
        hf = hand_llama(unit, unit, rope_parameters=rope)
        if rope is LLAMA3:
            assert hf.model.rotary_emb.inv_freq.tolist() == pytest.approx(
                [1, 0.0130423, 0.00125, 0.000125], rel=1e-5
            )
        out = tmp_path / str(rope["rope_type"])
        store = headattr.attribute(
            hf, {0: "tokens"}, tiny.prompts(21), out, edges="all", keep_sinks=True
        )
        assert store.edge(0, Edge(0, 0, 20, 0)).score == pytest.approx(wanted, abs=1e-5)
        assert store.edge(0, Edge(0, 0, 0, 0)).score == pytest.approx(8**-0.5, abs=1e-6)


ROPES: dict[str, dict[str, Any]] = {
    "default": THETA,
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4],
        "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0],
        "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
    "llama3": {**LLAMA3, "original_max_position_embeddings": 16},
}


def roped(kind: str) -> Any:
    """A tiny Llama whose original context is 16."""
    changes = {"max_position_embeddings": 16} if kind == "dynamic" else {}
    return tiny.llama(rope_parameters=dict(ROPES[kind]), **changes)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_rotary_scaling_is_rebuilt_at_short_and_long_range(kind: str, dtype: str) -> None:
    model = load_model(roped(kind), dtype=dtype)  # pyright: ignore[reportArgumentType]
    assert model.context == 64
    prove(model)
    for prompt in captured(model, *tiny.prompts(60, 13)):
        for layer, kept in prompt.layers.items():
            errors = layer_errors(model.family.head_weights(model.hf, layer), kept)
            assert errors.worst <= TOLERANCE[model.dtype]


@pytest.mark.parametrize("kind", ROPES)
def test_a_batch_beyond_the_original_context_equals_fresh_single_runs(
    kind: str, tmp_path: Path
) -> None:
    """Also one after the other: a long prompt leaves no frequencies behind for the next."""
    prompts = tiny.prompts(40, 9, 25, 16, 17)
    hf = roped(kind)
    before = hf.model.rotary_emb.inv_freq.clone()
    batch = captured(load_model(hf), *prompts)
    assert torch.equal(hf.model.rotary_emb.inv_freq, before)
    store = headattr.attribute(hf, {1: tiny.sae()}, prompts, tmp_path / "out", edges="all")
    assert store.set_aside == []
    for index, tokens in enumerate(prompts):
        fresh = roped(kind)
        fresh.set_attn_implementation("eager")
        with torch.no_grad():
            own = fresh(input_ids=torch.tensor([tokens]), output_attentions=True).attentions
        for layer, kept in batch[index].layers.items():
            torch.testing.assert_close(kept.pattern, own[layer][0], atol=1e-5, rtol=1e-5)
        for head in range(4):
            found = store.edges(index, HeadId(1, head))
            wanted = own[1][0, head][found["q_pos"], found["k_pos"]]
            assert found["pattern"] == pytest.approx(wanted.numpy(), abs=1e-5)


def scaled(family: str, kind: str) -> Any:
    """The tiny model of a family with an original context of 16, and windows that reach further."""
    if family == "llama":
        return roped(kind)
    rope, changes = dict(ROPES[kind]), {"max_position_embeddings": 16 if kind == "dynamic" else 64}
    if family in tiny.WINDOWS:
        changes["sliding_window"] = 24
    if family == "gpt_neox":  # 6 of 12 dimensions
        changes["num_attention_heads"] = 2
        rope["partial_rotary_factor"] = 0.5
    if family in ("gpt_neox", "qwen2"):
        rope = {name: v[:3] if name.endswith("_factor") and isinstance(v, list) else v
                for name, v in rope.items()}  # fmt: skip
    if family == "gemma3_text":
        rope = {"sliding_attention": dict(THETA), "full_attention": rope}
    return tiny.MODELS[family](rope_parameters=rope, **changes)


@pytest.mark.parametrize("kind", [kind for kind in ROPES if kind != "default"])
@pytest.mark.parametrize("family", [family for family in ROTARY if family != "llama"])
def test_every_family_is_rebuilt_beyond_its_original_context_under_any_scaling(
    family: str, kind: str
) -> None:
    """V08, in one batch, against fresh single runs of the model's own eager attention."""
    model, prompts = load_model(scaled(family, kind)), tiny.prompts(60, 9)
    assert model.context == 64
    assert prove(model).worst <= 1e-5
    for tokens, prompt in zip(prompts, captured(model, *prompts), strict=True):
        fresh = scaled(family, kind)
        fresh.set_attn_implementation("eager")
        with torch.no_grad():
            own = fresh(input_ids=torch.tensor([tokens]), output_attentions=True).attentions
        for layer, kept in prompt.layers.items():
            errors = layer_errors(model.family.head_weights(model.hf, layer), kept)
            assert errors.worst <= 1e-5
            torch.testing.assert_close(kept.pattern, own[layer][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in ROPES if kind != "default"])
def test_a_scaling_of_full_layers_leaves_sliding_ones_as_they_are(
    kind: str, tmp_path: Path
) -> None:
    """Gemma 3 has a rotary embedding a kind of layer; layers 0 and 2 slide."""
    hf, tokens = scaled("gemma3_text", kind), tiny.prompts(50)[0]
    plain = tiny.gemma3(
        sliding_window=24,
        rope_parameters={"sliding_attention": dict(THETA), "full_attention": dict(THETA)},
    )
    found, wanted = (captured(load_model(model), tokens)[0].layers for model in (hf, plain))
    for layer in (0, 2):
        assert all(map(torch.equal, found[layer].rotary, wanted[layer].rotary))  # pyright: ignore
    assert (found[1].rotary.cos - wanted[1].rotary.cos).abs().max() > 1e-2  # pyright: ignore
    store = headattr.attribute(
        hf, {1: tiny.sae(), 2: tiny.sae(layer=2)}, [tokens], tmp_path / "out"
    )
    assert store.set_aside == []
    assert check_store(store)["problems"] == []


# ---- backends and dtypes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "backend"),
    # SDPA cannot cap scores: transformers gives Gemma 2 its eager attention
    [(f, b) for f in tiny.MODELS for b in ("sdpa", "eager") if (f, b) != ("gemma2", "sdpa")],
)
def test_a_model_of_any_backend_is_attributed_as_eager_and_keeps_its_backend(
    family: str, backend: str, tmp_path: Path
) -> None:
    """V11: 15 edges a head of 5 tokens, 14 in a window of 4; exactly 0 where the mask forbids."""
    hf = tiny.MODELS[family]()
    windows = tiny.WINDOWS.get(family, (None, None, None))
    assert hf.config._attn_implementation == ("eager" if family == "gemma2" else "sdpa")
    hf.set_attn_implementation(backend)
    tokens = tiny.prompts(5)[0]
    store = headattr.attribute(hf, {1: tiny.sae()}, [tokens], tmp_path / "out", edges="all")
    prompt = captured(load_model(hf), tokens)[0]
    assert hf.config._attn_implementation == backend
    hf.set_attn_implementation("eager")
    with torch.no_grad():
        own = hf(input_ids=torch.tensor([tokens]), output_attentions=True).attentions
    for layer in range(3):
        kept = prompt.layers[layer].pattern
        assert (kept.triu(1) == 0).all()
        if windows[layer] is not None:
            assert (kept.tril(-windows[layer]) == 0).all()
        torch.testing.assert_close(kept, own[layer][0], atol=1e-5, rtol=1e-5)
    for head in store.heads:
        found = store.edges(0, head)
        assert len(found["pattern"]) == (15 if windows[1] is None else 14)
        wanted = own[1][0, head.head][found["q_pos"], found["k_pos"]]
        assert found["pattern"] == pytest.approx(wanted.numpy(), abs=1e-5)


def test_a_forward_pass_that_fails_puts_everything_back() -> None:
    hf = tiny.llama().train()
    handle = hf.model.layers[1].register_forward_hook(_fail)
    hooks = _hooks(hf)
    with pytest.raises(ZeroDivisionError):
        captured(load_model(hf), [1, 2, 3])
    assert hf.config._attn_implementation == "sdpa"
    assert all(module.training for module in hf.modules())
    assert _hooks(hf) == hooks
    handle.remove()
    captured(load_model(hf), [1, 2, 3])


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def _hooks(hf: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in hf.modules())


def test_a_model_that_checkpoints_its_activations_leaves_no_graph_behind() -> None:
    hf = tiny.llama().train()
    hf.gradient_checkpointing_enable()
    hf.enable_input_require_grads()
    prompt = captured(load_model(hf), [1, 2, 3], sites=[0, 3])[0]
    kept = [*prompt.resid.values(), *(layer.resid_pre for layer in prompt.layers.values())]
    assert not any(tensor.requires_grad for tensor in kept)


@pytest.mark.parametrize("family", tiny.MODELS)
def test_the_users_model_is_the_same_before_and_after(family: str, tmp_path: Path) -> None:
    """Its mode, module by module, its weights, hooks and gradients; dropout does not act."""
    changes = {"attn_pdrop": 0.5} if family == "gpt2" else {"attention_dropout": 0.5}
    hf = tiny.MODELS[family](**changes).train()
    hf.lm_head.eval()
    modes = [module.training for module in hf.modules()]
    state = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    hooks = _hooks(hf)
    headattr.attribute(hf, {1: tiny.sae()}, tiny.prompts(6), tmp_path / "out", output="unembed")
    assert [module.training for module in hf.modules()] == modes
    assert all(torch.equal(state[name], tensor) for name, tensor in hf.state_dict().items())
    assert _hooks(hf) == hooks
    assert all(parameter.requires_grad for parameter in hf.parameters())


@pytest.mark.parametrize(("pair", "wanted"), [(0, math.cos(257)), (1, math.cos(2.57))])
def test_a_bfloat16_model_runs_as_a_float32_copy(pair: int, wanted: float) -> None:
    """V13: positions 257 and 0 score cos(257) = 0.8193; in bfloat16, 257 would be 256, -0.0398.

    The frequency of the second pair, 0.01, is one that a cast of the whole model rounds.
    """
    unit = torch.eye(4)[pair].tolist()
    hf = hand_llama(unit, unit, max_position_embeddings=300).to(torch.bfloat16)
    state = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    frequencies = hf.model.rotary_emb.inv_freq.clone()
    model = load_model(hf)
    assert model.dtype == torch.float32
    assert model.notes == ("the bfloat16 model runs as a float32 copy",)
    prompt = captured(model, tiny.prompts(258)[0])[0]
    assert float(scores(model, prompt)[0, 257, 0]) * 2 == pytest.approx(wanted, abs=2e-5)
    assert {p.dtype for p in hf.parameters()} == {torch.bfloat16}
    assert all(torch.equal(state[name], tensor) for name, tensor in hf.state_dict().items())
    assert torch.equal(hf.model.rotary_emb.inv_freq, frequencies)


def by_cast(family: str, folder: Path) -> Any:
    return tiny.MODELS[family](**LONG.get(family, {"max_position_embeddings": 300})).to(
        torch.bfloat16
    )


def by_loading(family: str, folder: Path) -> Any:
    """As transformers gives a bfloat16 checkpoint: its factor of embeddings is made in bfloat16."""
    by_cast(family, folder).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def folder_of(family: str, folder: Path) -> str:
    by_cast(family, folder).save_pretrained(folder)
    return str(folder)


LONG = {"gpt2": {"n_positions": 300}}


@pytest.mark.parametrize("given", [by_cast, by_loading, folder_of])
@pytest.mark.parametrize("family", tiny.MODELS)
def test_a_bfloat16_model_of_any_family_is_its_weights_in_float32(
    family: str, given: Callable[[str, Path], Any], tmp_path: Path
) -> None:
    """V13: bit by bit what the same weights give that were upcast by hand, over 270 positions:
    neither rotary frequencies nor Gemma's factor are those of bfloat16."""
    source = given(family, tmp_path)
    model = load_model(source, device="cpu")
    kind = "checkpoint" if isinstance(source, str) else "model"
    assert model.notes == (f"the bfloat16 {kind} runs as a float32 copy",)
    upcast = tiny.MODELS[family](**LONG.get(family, {"max_position_embeddings": 300}))
    weights = by_cast(family, tmp_path).state_dict()
    upcast.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    by_hand = load_model(upcast)
    assert by_hand.notes == ()
    assert model.hash() == by_hand.hash()
    tokens = tiny.prompts(270)[0]
    one, other = (captured(m, tokens, sites=[0])[0] for m in (model, by_hand))
    assert torch.equal(one.resid[0], other.resid[0])
    for layer in range(3):
        for name in ("Q", "K", "V", "pattern", "block"):
            found, wanted = (getattr(p.layers[layer], name) for p in (one, other))
            assert found.dtype == torch.float32
            assert torch.equal(found, wanted), name
    if not isinstance(source, str):  # the user's model is as it was
        assert {p.dtype for p in source.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ROPES)
def test_a_bfloat16_model_in_memory_equals_its_folder(kind: str, tmp_path: Path) -> None:
    hf = roped(kind).to(torch.bfloat16)
    hf.save_pretrained(tmp_path)
    memory, folder = load_model(hf), load_model(tmp_path, device="cpu")
    assert memory.hash() == folder.hash()
    tokens = tiny.prompts(50)[0]
    one, other = captured(memory, tokens)[0], captured(folder, tokens)[0]
    for layer in range(3):
        torch.testing.assert_close(one.layers[layer], other.layers[layer], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_folder_says_what_it_was_stored_as(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny.llama().to(dtype).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    for declared in (name, None, "float32"):  # the weights know, whatever the configuration says
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": declared}))
        model = load_model(str(tmp_path), device="cpu")
        assert model.notes == (f"the {name} checkpoint runs as a float32 copy",)
        assert model.dtype == torch.float32
    assert (dtype == torch.float64) == (
        load_model(str(tmp_path), device="cpu", dtype="float64").notes == ()
    )


def test_a_float32_folder_has_nothing_to_say(tmp_path: Path) -> None:
    tiny.gpt2().save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu").notes == ()
    assert load_model(tmp_path, dtype="float64").notes == (
        "the float32 checkpoint runs as a float64 copy",
    )


GROUPED: list[dict[str, Any]] = [
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"rms_norm_eps": 0.1},
    {"num_hidden_layers": 1},
    {"tie_word_embeddings": True},
]
"""Settings of all families with Llama's parts."""
WIDTHS: list[dict[str, Any]] = [{"head_dim": 2}, {"head_dim": 32}]
BIASES: list[dict[str, Any]] = [{"attention_bias": True}, {"attention_bias": False}]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "gpt2": [
        {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": False},
        {"reorder_and_upcast_attn": True},
        {"layer_norm_epsilon": 0.1, "activation_function": "relu"},
        {"n_head": 1},
        {"n_positions": 1},
        {"tie_word_embeddings": False},
    ],
    "llama": [*GROUPED, *WIDTHS, *BIASES, {"mlp_bias": True}],
    "gpt_neox": [
        *BIASES,
        {"use_parallel_residual": True},
        {"use_parallel_residual": False},
        {"layer_norm_eps": 0.1},
        {"num_attention_heads": 1},
        {"tie_word_embeddings": True},
        *({"num_attention_heads": 2, "rotary_pct": part} for part in (0.25, 0.5, 1.0)),
    ],
    "mistral": [*GROUPED, *WIDTHS, {"sliding_window": None}, {"sliding_window": 1}],
    "qwen2": [
        *GROUPED,
        {"use_sliding_window": False},
        {"max_window_layers": 0},
        {"max_window_layers": 3},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ],
    "qwen3": [*GROUPED, *WIDTHS, *BIASES, {"use_sliding_window": False}, {"sliding_window": 1}],
    "gemma2": [
        *GROUPED,
        *WIDTHS,
        *BIASES,
        {"attn_logit_softcapping": None},
        {"attn_logit_softcapping": 0.7},
        {"query_pre_attn_scalar": 256},
        {"query_pre_attn_scalar": 1},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ],
    "gemma3_text": [
        *GROUPED,
        *WIDTHS,
        *BIASES,
        {"attn_logit_softcapping": 0.7},
        {"query_pre_attn_scalar": 256},
        {"sliding_window_pattern": 6},
        {"sliding_window_pattern": 1},
    ],
}


@pytest.mark.parametrize(
    ("family", "changes"), [(f, changes) for f in tiny.MODELS for changes in VARIANTS[f]]
)
def test_every_setting_of_a_family_is_proven(family: str, changes: dict[str, Any]) -> None:
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-9)):
        model = load_model(tiny.MODELS[family](**changes), dtype=dtype)  # pyright: ignore
        assert prove(model).worst <= tolerance


UNCAPPED = {"gemma2": {"final_logit_softcapping": None}}
"""Gemma 2 caps its logits by default."""


@pytest.mark.parametrize("family", tiny.MODELS)
@pytest.mark.parametrize("tied", [True, False])
def test_the_unembedding_gives_the_models_own_logits(family: str, tied: bool) -> None:
    hf = tiny.MODELS[family](tie_word_embeddings=tied, **UNCAPPED.get(family, {}))
    model = load_model(hf, dtype="float64")
    W_E, W_U = model.family.embedding(model.hf).W_E, model.family.unembedding(model.hf).W_U
    multiplied = W_U * (24**0.5 if family in ("gemma2", "gemma3_text") else 1)
    assert torch.allclose(W_E, multiplied, rtol=1e-6) == tied
    tokens = tiny.prompts(8)[0]
    prompt = capture(model, *pad([tokens]), layers=[], sites=[3])[0]
    assert isinstance(prompt, PromptCapture)
    active = unembed_output(model).active(prompt)
    with torch.no_grad():
        logits = hf(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(
        active.acts, logits[active.positions, active.ids].double(), atol=1e-5, rtol=1e-5
    )
    for pos in range(7):
        ids = active.ids[active.ptr[pos] : active.ptr[pos + 1]].tolist()
        assert tokens[pos + 1] in ids
        assert int(logits[pos].argmax()) in ids


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_the_activation_of_a_token_is_its_logit_before_the_final_cap(
    family: str, cap: float, tmp_path: Path
) -> None:
    """The cap is no part of the sum: reads and activations are those of the same model without."""
    capped, plain = (tiny.MODELS[family](final_logit_softcapping=value) for value in (cap, None))
    tokens = tiny.prompts(8)[0]
    with torch.no_grad():
        logits, before = (hf(input_ids=torch.tensor([tokens])).logits[0] for hf in (capped, plain))
    assert (logits - before).abs().max() > 1e-3
    torch.testing.assert_close(logits, cap * torch.tanh(before / cap), atol=1e-5, rtol=1e-5)
    stores = [
        headattr.attribute(
            hf, {1: tiny.sae()}, [tokens], tmp_path / name, output="unembed", edges="all"
        )
        for hf, name in ((capped, "capped"), (plain, "plain"))
    ]
    rows = [store.edge(0, Edge(1, 0, 6, 5)) for store in stores]
    for row in rows:
        found = dict(zip(row.o_active.features.tolist(), row.o_active.acts, strict=True))
        assert tokens[7] in found
        wanted = before[6][list(found)].tolist()
        assert list(found.values()) == pytest.approx(wanted, abs=1e-4, rel=1e-5)
        # the strongest tokens are the same: a cap does not change their order
        assert set(before[6].topk(16).indices.tolist()) <= found.keys()
    assert rows[0].ov.o_reads == pytest.approx(rows[1].ov.o_reads, abs=1e-6)


# ---- refusals ---------------------------------------------------------------------------------


class Renamed(transformers.LlamaForCausalLM):
    """Not the class that the adapter knows."""


def _other(name: str) -> Any:
    small = {
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2),
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
    }
    config = getattr(transformers, f"{name.split('For')[0].removesuffix('LMHeadModel')}Config")
    if name.startswith("GPTJ"):
        small |= {"rotary_dim": 4}
    return getattr(transformers, name)(config(**small))


def _multimodal() -> Any:
    """Gemma 3 with eyes: its text part is another class, which headattr does not look into."""
    config = transformers.Gemma3Config(
        text_config=tiny.gemma3().config.to_dict(),
        vision_config={
            **dict.fromkeys(("hidden_size", "intermediate_size", "image_size"), 8),
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1),
            "patch_size": 4,
        },
        mm_tokens_per_image=1,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: _other("GPTJForCausalLM"), "GPTJForCausalLM.*'gptj'"),
        (lambda: _other("CohereForCausalLM"), "CohereForCausalLM.*'cohere'"),
        (lambda: _other("Olmo2ForCausalLM"), "Olmo2ForCausalLM.*'olmo2'"),
        (lambda: _other("MixtralForCausalLM"), "MixtralForCausalLM.*'mixtral'"),
        (lambda: _other("GemmaForCausalLM"), "GemmaForCausalLM.*'gemma'"),
        (lambda: _other("BertForMaskedLM"), "BertForMaskedLM.*'bert'"),
        (lambda: _other("BertLMHeadModel"), "BertLMHeadModel.*'bert'"),
        (lambda: _other("LlamaForSequenceClassification"), "LlamaForSequenceClassification"),
        (lambda: _other("GPTNeoXForSequenceClassification"), "GPTNeoXForSequenceClassification"),
        (lambda: _other("Gemma2ForSequenceClassification"), "Gemma2ForSequenceClassification"),
        (lambda: _other("Qwen3ForTokenClassification"), "Qwen3ForTokenClassification"),
        (_multimodal, "Gemma3ForConditionalGeneration.*'gemma3'"),
        (lambda: tiny.llama().model, "LlamaModel"),
        (lambda: tiny.gemma3().model, "Gemma3TextModel"),
        (lambda: tiny.neox().gpt_neox, "GPTNeoXModel"),
        (lambda: tiny.gpt2().transformer, "GPT2Model"),
        (lambda: Renamed(tiny.llama().config), "Renamed"),
        (lambda: torch.compile(tiny.gpt2()), "OptimizedModule"),
        (lambda: torch.nn.Linear(2, 2), "Linear"),
        (object, "object"),
        (lambda: tiny.gpt2().state_dict(), "OrderedDict"),
        (lambda: 3, "int"),
        (lambda: None, "NoneType"),
    ],
)
def test_a_model_without_an_adapter_is_refused_by_its_class(
    build: Callable[[], Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        load_model(build())
    assert "expected" in str(caught.value)


def test_cross_attention_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="add_cross_attention"):
        load_model(tiny.gpt2(add_cross_attention=True))


def test_weights_that_are_packed_or_not_there_are_refused_by_name() -> None:
    packed = tiny.llama()
    weight = packed.model.layers[1].self_attn.q_proj.weight
    packed.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(
        weight.to(torch.int8), requires_grad=False
    )
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight is packed as torch\.int8"):
        load_model(packed)
    with torch.device("meta"):
        ghost = transformers.LlamaForCausalLM(tiny.llama().config)
    with pytest.raises(HeadattrError, match=r"embed_tokens\.weight is on the meta device"):
        load_model(ghost)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="--device gpu: expected cpu, cuda or auto"):
        load_model(tiny.gpt2(), device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="--device cuda: torch sees no GPU"):
            load_model(tiny.gpt2(), device="cuda")


def _own_forward(model: Any, layer: int) -> Any:
    return model.model.layers[layer].self_attn.forward


def _doubled(model: Any) -> None:
    own = _own_forward(model, 1)
    model.model.layers[1].self_attn.forward = lambda *a, **k: (2 * own(*a, **k)[0], None)


def _without_interface(model: Any) -> None:
    model.model.layers[1].self_attn.forward = lambda hidden_states, **k: (hidden_states, None)


def _gain_of_one_more(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    own = norm.forward
    norm.forward = lambda x: own(x) * (1 + norm.weight) / norm.weight


def _noisy_norm(model: Any) -> None:
    norm = model.model.layers[2].input_layernorm
    norm.register_forward_hook(lambda module, args, output: output + 0.1)


def _query_norm(model: Any) -> None:
    projection = model.model.layers[0].self_attn.q_proj
    projection.register_forward_hook(
        lambda module, args, output: output / output.norm(dim=-1, keepdim=True)
    )


def _output_gate(model: Any) -> None:
    projection = model.model.layers[0].self_attn.o_proj
    projection.register_forward_hook(lambda module, args, output: output.tanh())


def _skipped(model: Any) -> None:
    layer = model.model.layers[1]
    layer.forward = lambda hidden_states, *a, **k: hidden_states


def _swapped_layers(model: Any) -> None:
    layers = model.model.layers
    layers[0].self_attn.layer_idx, layers[1].self_attn.layer_idx = 1, 0


CHANGES = (
    _doubled, _without_interface, _gain_of_one_more, _noisy_norm, _query_norm, _output_gate,
    _skipped, _swapped_layers,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_llama_that_does_something_else_is_refused(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    hf = tiny.llama()
    change(hf)
    with pytest.raises(ProofError, match=r"layer \d"):
        headattr.attribute(hf, {1: tiny.sae()}, [[1, 2, 3]], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert hf.config._attn_implementation == "sdpa"


def _interleaved(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    def turn(x: torch.Tensor) -> torch.Tensor:
        half = cos.shape[-1] // 2
        c, s = (part.unsqueeze(unsqueeze_dim)[..., :half] for part in (cos, sin))
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)

    return turn(q), turn(k)


def _softcapped(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    group = module.num_key_value_groups
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * kwargs["scaling"]
    pattern = (torch.tanh(scores / 2) * 2 + mask).softmax(-1)
    return (pattern @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), pattern


def _with_a_sink(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    group = module.num_key_value_groups
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * kwargs["scaling"] + mask
    sink = torch.zeros_like(scores[..., :1])
    pattern = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (pattern @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), pattern


def _without_causal_mask(module: Any, query: Any, key: Any, value: Any, *a: Any, **k: Any) -> Any:
    group = module.num_key_value_groups
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * k["scaling"]
    pattern = scores.softmax(-1)
    return (pattern @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), pattern


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("apply_rotary_pos_emb", _interleaved),
        ("eager_attention_forward", _softcapped),
        ("eager_attention_forward", _with_a_sink),
        ("eager_attention_forward", _without_causal_mask),
    ],
)
def test_attention_code_that_was_changed_is_refused(
    name: str, other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny.llama())
    monkeypatch.setattr(modeling_llama, name, other)
    with pytest.raises(ProofError, match="is not what the llama adapter rebuilds"):
        prove(model)


class HarmlessAttention(modeling_llama.LlamaAttention):
    """Another class that computes the same."""


class GroupsTheOtherWay(modeling_llama.LlamaAttention):
    """Reads key and value heads in the order 0, 1, 0, 1."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def swapped(projection: Any) -> Any:
            return projection.weight.view(4, -1, 24)[[0, 2, 1, 3]].reshape(-1, 24)

        own = self.q_proj.weight.data
        self.q_proj.weight.data = swapped(self.q_proj)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.q_proj.weight.data = own


def test_an_attention_subclass_is_judged_by_what_it_computes() -> None:
    same, other = tiny.llama(), tiny.llama()
    for layer in range(3):
        same.model.layers[layer].self_attn.__class__ = HarmlessAttention
        other.model.layers[layer].self_attn.__class__ = GroupsTheOtherWay
    assert prove(load_model(same)).worst <= 1e-5
    with pytest.raises(ProofError, match="layer 0 is not what"):
        prove(load_model(other))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.2.self_attn.o_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_weights_that_are_not_finite_give_no_numbers(
    name: str, value: float, tmp_path: Path
) -> None:
    hf = tiny.llama()
    with torch.no_grad():
        dict(hf.named_parameters())[name].view(-1)[-1] = value
    with pytest.raises(ProofError, match="non-finite") as caught:
        headattr.attribute(
            hf, {1: tiny.sae()}, [[1, 2, 3]], tmp_path / "out", output=["unembed"], edges="all"
        )
    assert name in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [1e20, 1e38])
@pytest.mark.parametrize("family", tiny.MODELS)
def test_a_prompt_whose_numbers_overflow_is_set_aside(
    family: str, size: float, tmp_path: Path
) -> None:
    """Finite weights: the embedding of token 7 is too large to square in float32."""
    hf = tiny.MODELS[family]()
    with torch.no_grad():
        hf.get_input_embeddings().weight[7] = size
    prompts = [[1, 2, 3], [1, 7, 3], [4, 5]]
    store = headattr.attribute(hf, {1: tiny.sae()}, prompts, tmp_path / "out", edges="all")
    assert store.prompt_ids == [0, 2]
    assert "non-finite" in store.set_aside[0]["reason"]
    assert store.set_aside[0]["prompt"] == 1


def test_an_error_that_is_not_a_number_is_the_worst_error() -> None:
    for place in range(3):
        values = [1e-7, 1e-7, 1e-7]
        values[place] = math.nan
        assert not Errors(*values).worst <= 1e-5


# ---- folders ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny.llama().save_pretrained(folder)
    return folder


def _copied(whole: Path, to: Path, *, weights: bool = True) -> Path:
    to.mkdir()
    for path in whole.iterdir():
        if weights or path.suffix != ".safetensors":
            (to / path.name).write_bytes(path.read_bytes())
    return to


def _refusal(folder: Path) -> str:
    """What is said before any work, through the public door."""
    with pytest.raises(HeadattrError) as caught:
        headattr.attribute(str(folder), {1: tiny.sae()}, [[1, 2]], folder.parent / "out")
    assert not (folder.parent / "out").exists()
    return str(caught.value)


def test_a_folder_without_a_tokenizer_runs_token_ids(whole: Path, tmp_path: Path) -> None:
    hf = tiny.llama()
    prompts = tiny.prompts(6)
    one = headattr.attribute(
        whole, {1: tiny.sae()}, prompts, tmp_path / "a", edges="all", device="cpu"
    )
    other = headattr.attribute(hf, {1: tiny.sae()}, prompts, tmp_path / "b", edges="all")
    for head in one.heads:
        assert one.edges(0, head)["score"] == pytest.approx(other.edges(0, head)["score"])
    with pytest.raises(HeadattrError, match="has no tokenizer"):
        headattr.attribute(str(whole), {1: tiny.sae()}, ["text"], tmp_path / "c")


def test_a_folder_without_weights_says_what_it_holds(whole: Path, tmp_path: Path) -> None:
    folder = _copied(whole, tmp_path / "model", weights=False)
    said = _refusal(folder)
    assert f"{folder} has no .safetensors weights" in said
    assert "config.json" in said
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    assert "pytorch_model.bin" in _refusal(folder)


def test_truncated_weights_are_named_with_both_sizes(whole: Path, tmp_path: Path) -> None:
    folder = _copied(whole, tmp_path / "model")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-10])
    said = _refusal(folder)
    assert f"{path} is {len(data) - 10} bytes, its header requires {len(data)}" in said
    path.write_bytes(data[:6])
    assert f"{path} is not a safetensors file, or is cut in its header (6 bytes)" in _refusal(
        folder
    )


def test_a_missing_shard_and_a_truncated_shard_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.llama().save_pretrained(folder, max_shard_size="8KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    headattr.attribute(folder, {1: tiny.sae()}, [[1, 2]], tmp_path / "fine", device="cpu")
    data = shards[1].read_bytes()
    shards[1].write_bytes(data[:-1])
    assert shards[1].name in _refusal(folder)
    shards[1].unlink()
    assert shards[1].name in _refusal(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no config.json"),
        ("{", "JSON"),
        ("[]", "model_type"),
        ("{}", "model_type"),
        ('{"model_type": "nonsense"}', "nonsense"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "t5"}', "T5"),
    ],
)
def test_a_broken_configuration_is_refused(
    text: str | None, said: str, whole: Path, tmp_path: Path
) -> None:
    folder = _copied(whole, tmp_path / "model")
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    message = _refusal(folder)
    assert said in message
    assert str(folder) in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("model.layers.1.self_attn.q_proj.weight"), "lacks 1 tensors"),
        (lambda s: s.pop("lm_head.weight"), "lm_head.weight"),
        (
            lambda s: s.update({"model.layers.1.self_attn.q_proj.weight": torch.ones(3, 4)}),
            r"q_proj.weight is (3, 4); expected (40, 24)",
        ),
    ],
)
def test_weights_that_would_be_random_are_refused(
    change: Callable[[dict[str, Any]], Any], said: str, whole: Path, tmp_path: Path
) -> None:
    folder = _copied(whole, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert said in _refusal(folder)


def test_weights_that_are_not_used_are_said(whole: Path, tmp_path: Path) -> None:
    folder = _copied(whole, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(10)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    notes = load_model(folder, device="cpu").notes
    assert notes == ("not used by a LlamaForCausalLM: model.layers.0.self_attn.q_norm.weight",)


@pytest.mark.parametrize("name", ["nowhere", "model.gguf", "config.json"])
def test_a_path_that_is_no_model_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    path = (whole if name == "config.json" else tmp_path) / name
    with pytest.raises(HeadattrError, match=name):
        load_model(str(path))


def test_a_name_that_is_nothing_is_refused_with_what_is_expected() -> None:
    for name in ("no-such-model-anywhere", "no/such", "no/such/model", ""):
        with pytest.raises(HeadattrError, match="expected"):
            load_model(name)


# ---- hashes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.MODELS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_and_its_model_in_memory_have_one_hash(
    family: str, tied: bool, tmp_path: Path
) -> None:
    hf = tiny.MODELS[family](tie_word_embeddings=tied)
    hf.save_pretrained(tmp_path)
    memory = load_model(hf)
    assert memory.hash() == load_model(tmp_path, device="cpu").hash()
    assert memory.hash() == load_model(copy.deepcopy(hf).train()).hash()


@pytest.mark.parametrize("family", tiny.MODELS)
def test_one_changed_weight_changes_the_hash(family: str) -> None:
    hf = tiny.MODELS[family]()
    before = load_model(hf).hash()
    for name, parameter in hf.named_parameters():
        own = parameter.data.view(-1)[0].clone()
        parameter.data.view(-1)[0] = own + 1e-6 * (1 + own.abs())
        assert load_model(hf).hash() != before, name
        parameter.data.view(-1)[0] = own
    assert load_model(hf).hash() == before


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": False}),
        ("gpt2", {"layer_norm_epsilon": 1e-3}),
        ("gpt2", {"activation_function": "relu"}),
        ("llama", {"rope_parameters": THETA}),
        ("llama", {"rms_norm_eps": 1e-3}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("gpt_neox", {"rotary_pct": 1.0}),
        ("mistral", {"sliding_window": 5}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": False}),
        ("qwen3", {"rms_norm_eps": 1e-3}),
        ("gemma2", {"attn_logit_softcapping": 3.0}),
        ("gemma2", {"query_pre_attn_scalar": 14}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
    ],
)
def test_the_same_weights_under_another_configuration_are_another_model(
    family: str, changes: dict[str, Any]
) -> None:
    hf, other = tiny.MODELS[family](), tiny.MODELS[family](**changes)
    other.load_state_dict(hf.state_dict())
    assert load_model(hf).hash() != load_model(other).hash()
