"""Attention that is not a plain softmax of Q . K: QK-norm, windows, caps, norms behind it. Written
down by hand, where every number is known, and against the models' own eager attention."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tiny
import torch

import headattr
from headattr.attribution.reference import edge_tables
from headattr.basis.tokens import token_basis
from headattr.cli import main
from headattr.edges import Edge, HeadId
from headattr.errors import DictionaryError, HeadattrError, PromptError, ProofError, UsageError
from headattr.model import family as families
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.family import Family
from headattr.model.head import HeadWeights
from headattr.model.load import load_model
from headattr.model.proof import prove
from headattr.store.check import check_store
from headattr.store.reader import Store

WINDOWED = tuple(tiny.WINDOWS)
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def by_token(hf: Any, tokens: list[int], out: Path, **options: Any) -> Store:
    """All edges of one prompt, its layer 0 through the token basis; the store is checked."""
    store = headattr.attribute(hf, {0: "tokens"}, [tokens], out, **{"edges": "all", **options})
    assert store.set_aside == []
    answer = check_store(store)
    assert answer["problems"] == []
    return store


def own_pattern(hf: Any, tokens: list[int]) -> list[torch.Tensor]:
    """The model's own eager pattern, [head, q_pos, k_pos] of every layer."""
    before = hf.config._attn_implementation
    hf.set_attn_implementation("eager")
    with torch.no_grad():
        found = hf(input_ids=torch.tensor([tokens]), output_attentions=True).attentions
    hf.set_attn_implementation(before)
    return [layer[0] for layer in found]


# ---- QK-norm, and a d_head of its own ----------------------------------------------------------

Q_K_NORM = ("qwen3", "gemma3_text")
FREE_WIDTH = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text")
"""Families whose d_head is not d_model / heads."""


def head_gains(hf: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Make the gain of the norms over queries and keys `q` and `k`; Gemma keeps gain - 1."""
    attention = hf.model.layers[0].self_attn
    one = 1 if hf.config.model_type.startswith("gemma") else 0
    with torch.no_grad():
        attention.q_norm.weight.copy_(q - one)
        attention.k_norm.weight.copy_(k - one)


def test_qk_norm_and_a_head_wider_than_its_share_score_as_qwen3_does(tmp_path: Path) -> None:
    """V06: hidden 16, heads 4, head_dim 8, q = 8 x 2.0, k = 8 x 1.0, unit norms, no rotation: 8 /
    sqrt(8) = 2.828, not 5.657 (norm skipped) and not 4.0 (scale from hidden / heads)."""
    q, k = torch.full((3, 4, 8), 2.0), torch.full((3, 4, 8), 1.0)
    hf = tiny.still(tiny.by_hand("qwen3", q, k, d_model=16))
    assert (hf.config.hidden_size, hf.config.head_dim) == (16, 8)
    for dtype in ("float32", "float64"):
        store = by_token(hf, [0, 1, 2, 1], tmp_path / dtype, dtype=dtype)
        for head in store.heads:
            assert store.edges(0, head)["score"] == pytest.approx([8**0.5] * 10, abs=1e-5)
        row = store.edge(0, Edge(0, 3, 3, 1))
        assert row.totals.sum() == pytest.approx(8**0.5, abs=1e-5)
        # all of the score is the product of the two tokens: nothing is left to the bias
        assert row.values[0] == pytest.approx(8**0.5, rel=2**-11)


@pytest.mark.parametrize("family", Q_K_NORM)
@pytest.mark.parametrize(("d_head", "eps"), [(2, 1e-6), (8, 0.5), (32, 0.5)])
def test_qk_norm_has_its_own_gains_and_epsilon(
    family: str, d_head: int, eps: float, tmp_path: Path
) -> None:
    """Grouped heads, gains that are not 1, an epsilon that counts, a scale that is written down."""
    generator = torch.Generator().manual_seed(d_head)
    q, k = (torch.randn(5, n, d_head, generator=generator) for n in (4, 2))
    gains = [1 + 0.5 * torch.randn(d_head, generator=generator) for _ in "qk"]
    scalar = {"query_pre_attn_scalar": 50} if family == "gemma3_text" else {}
    hf = tiny.still(tiny.by_hand(family, q, k, d_model=16, rms_norm_eps=eps, **scalar))
    head_gains(hf, *gains)
    normed = [
        gain * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
        for gain, x in zip(gains, own_projections(hf, 5), strict=True)
    ]
    scale = scalar.get("query_pre_attn_scalar", d_head) ** -0.5
    tokens = [0, 3, 1, 2, 4]
    store = by_token(hf, tokens, tmp_path / "out")
    for head in store.heads:
        found = store.edges(0, head)
        at_q, at_k = (torch.tensor(tokens)[found[name]] for name in ("q_pos", "k_pos"))
        wanted = scale * (normed[0][at_q, head.head] * normed[1][at_k, head.head // 2]).sum(-1)
        assert found["score"] == pytest.approx(wanted.numpy(), abs=2e-6 * d_head)


def own_projections(hf: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of the model's own modules, by token, before any norm of theirs."""
    layer = hf.model.layers[0]
    with torch.no_grad():
        x = layer.input_layernorm(hf.model.embed_tokens(torch.arange(tokens)))
        parts = [getattr(layer.self_attn, name)(x) for name in ("q_proj", "k_proj")]
    return tuple(part.unflatten(-1, (-1, hf.config.head_dim)) for part in parts)  # pyright: ignore


@pytest.mark.parametrize("family", FREE_WIDTH)
@pytest.mark.parametrize("d_head", [2, 32])
def test_the_scale_is_the_models_own_and_never_that_of_d_model_over_heads(
    family: str, d_head: int, tmp_path: Path
) -> None:
    q, k = torch.ones(2, 4, d_head), torch.ones(2, 2, d_head)
    scalars = (None,) if not family.startswith("gemma") else (3, 256)
    for scalar in scalars:
        changes = {} if scalar is None else {"query_pre_attn_scalar": scalar}
        if family == "gemma2":
            changes["attn_logit_softcapping"] = None
        hf = tiny.still(tiny.by_hand(family, q, k, d_model=16, **changes))
        store = by_token(hf, [0, 1], tmp_path / f"{scalar}")
        wanted = d_head * (scalar or d_head) ** -0.5
        for head in store.heads:
            assert store.edges(0, head)["score"] == pytest.approx([wanted] * 3, rel=1e-5)


@pytest.mark.parametrize("family", Q_K_NORM)
def test_taking_away_all_of_a_normed_query_takes_away_the_score(
    family: str, tmp_path: Path
) -> None:
    """Half of the only feature would change nothing behind QK-norm; all of it leaves a query of
    0."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(3, 4, 8, generator=generator) for _ in "qk")
    hf = tiny.by_hand(family, q, k, d_model=16)
    row = by_token(hf, [0, 1, 2], tmp_path / "out").edge(0, Edge(0, 1, 2, 1))
    assert row.q_marginals[0] == pytest.approx(row.score, rel=1e-5)
    assert row.q_ablations[0] == pytest.approx(-row.score, rel=1e-5)
    assert row.k_ablations[0] == pytest.approx(-row.score, rel=1e-5)
    before = captured(hf, [0, 1, 2]).layers[0].Q
    with torch.no_grad():
        hf.model.embed_tokens.weight[2] /= 2
    torch.testing.assert_close(captured(hf, [0, 1, 2]).layers[0].Q, before, atol=1e-5, rtol=1e-5)


def captured(hf: Any, tokens: list[int], **options: Any) -> PromptCapture:
    """One prompt, layer 0, all rows."""
    model = load_model(hf)
    found = capture(model, *pad([tokens]), layers=[0], sites=[0], rows=None, **options)[0]
    assert isinstance(found, PromptCapture)
    return found


# ---- sliding windows ---------------------------------------------------------------------------


def windowed(family: str, window: int | None, **changes: Any) -> Any:
    """The tiny model of a family with another window."""
    if window is None and family != "mistral":
        return tiny.MODELS[family](layer_types=["full_attention"] * 3, **changes)
    return tiny.MODELS[family](sliding_window=window, **changes)


@pytest.mark.parametrize("family", WINDOWED)
def test_ten_tokens_in_a_window_of_four_have_34_edges_a_head(family: str, tmp_path: Path) -> None:
    """V09: not 40 (5 keys a row) and not 55 (causal); query 9 sees keys 6 to 9, the others are not
    rows of zeros but absent."""
    hf, tokens = tiny.MODELS[family](), tiny.prompts(10)[0]
    basis = {0: "tokens", 1: tiny.sae(layer=1), 2: tiny.sae(layer=2)}
    own = own_pattern(hf, tokens)
    options = {"heads": "L0H0,L1H1,L2H0,L2H3"}
    for edges in ("all", "threshold:0") if family in ("mistral", "gemma2") else ("threshold:0",):
        store = headattr.attribute(
            hf, basis, [tokens], tmp_path / edges[:3], edges=edges, **options
        )
        assert check_store(store)["problems"] == []
        for head in store.heads:
            window = tiny.WINDOWS[family][head.layer]
            found = store.edges(0, head)
            assert len(found["q_pos"]) == (55 if window is None else 34)
            last = found["k_pos"][found["q_pos"] == 9].tolist()
            assert last == list(range(0 if window is None else 6, 10))
            q_pos, k_pos = np.nonzero(own[head.layer][head.head].numpy())
            assert found["q_pos"].tolist() == q_pos.tolist()
            assert found["k_pos"].tolist() == k_pos.tolist()
            mass = np.bincount(found["q_pos"], found["pattern"])
            assert mass == pytest.approx(np.ones(10), abs=1e-5)


@pytest.mark.parametrize(
    ("family", "window"),
    [
        *product(("mistral", "gemma3_text"), (1, 10, 11, None)),
        *product(("qwen2", "qwen3", "gemma2"), (1,)),
    ],
)
def test_any_window_has_its_edges(family: str, window: int | None, tmp_path: Path) -> None:
    hf, tokens = windowed(family, window), tiny.prompts(10)[0]
    wide = [None if w is None else window for w in tiny.WINDOWS[family]]
    basis, heads = {1: tiny.sae(layer=1), 2: tiny.sae(layer=2)}, "L1H0,L2H0,L2H3"
    store = headattr.attribute(hf, basis, [tokens], tmp_path / "out", edges="all", heads=heads)
    assert store.set_aside == []
    assert check_store(store)["problems"] == []
    for head in store.heads:
        found = store.edges(0, head)
        assert len(found["q_pos"]) == tiny.n_edges(10, wide[head.layer])
        assert (found["q_pos"] - found["k_pos"]).max() < (wide[head.layer] or 10)
        if wide[head.layer] == 1:  # a query that sees itself only
            assert found["pattern"] == pytest.approx(np.ones(10))
            row = store.edge(0, Edge(head.layer, head.head, 9, 9))
            assert row.score_contrast == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "changes", "sliding"),
    [
        ("mistral", {}, [True, True, True, True]),
        ("qwen2", {"max_window_layers": 1}, [False, True, True, True]),
        ("qwen2", {"max_window_layers": 0, "use_sliding_window": False}, [False] * 4),
        ("qwen3", {"max_window_layers": 3}, [False, False, False, True]),
        ("gemma2", {}, [True, False, True, False]),
        ("gemma3_text", {"sliding_window_pattern": 2}, [True, False, True, False]),
        ("gemma3_text", {"sliding_window_pattern": 6}, [True, True, True, True]),
        (
            "gemma2",
            {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2},
            [False, False, True, True],
        ),
        (
            "qwen3",
            {"layer_types": ["sliding_attention", "full_attention"] * 2},
            [True, False, True, False],
        ),
    ],
)
def test_the_layers_that_slide_are_those_of_the_configuration(
    family: str, changes: dict[str, Any], sliding: list[bool], tmp_path: Path
) -> None:
    hf = tiny.MODELS[family](num_hidden_layers=4, **changes)
    basis = {layer: tiny.sae(layer=layer) for layer in range(4)}
    store = headattr.attribute(
        hf, basis, tiny.prompts(6), tmp_path / "out", edges="all", heads="L0H1,L1H1,L2H1,L3H1"
    )
    counts = [len(store.edges(0, head)["q_pos"]) for head in store.heads]
    assert counts == [tiny.n_edges(6, tiny.WINDOW if slides else None) for slides in sliding]
    plans = [plan["window"] for plan in store.manifest["layers"]]
    assert plans == [tiny.WINDOW if slides else None for slides in sliding]


@pytest.mark.parametrize("family", WINDOWED)
def test_left_padding_does_not_move_a_window(family: str, tmp_path: Path) -> None:
    """As a tokenizer pads a batch: positions, windows and scores are those of each prompt alone."""
    hf, prompts = tiny.MODELS[family](), tiny.prompts(10, 6, 4, 1)
    ids, mask = pad(prompts, "left")
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    options = {"edges": "all", "heads": "L2H0,L2H3"}
    store = headattr.attribute(hf, {2: tiny.sae(layer=2)}, batch, tmp_path / "batch", **options)
    alone = headattr.attribute(
        hf, {2: tiny.sae(layer=2)}, prompts, tmp_path / "alone", batch_size=1, **options
    )
    model = load_model(hf)
    kept = capture(model, ids, mask, layers=[2], rows=None)
    for index, prompt in enumerate(prompts):
        own = own_pattern(hf, prompt)[2]
        padded = kept[index]
        assert isinstance(padded, PromptCapture)
        torch.testing.assert_close(padded.layers[2].pattern, own, atol=1e-5, rtol=1e-5)
        for head in store.heads:
            found, wanted = store.edges(index, head), alone.edges(index, head)
            assert len(found["q_pos"]) == tiny.n_edges(len(prompt), tiny.WINDOWS[family][2])
            assert found["k_pos"].tolist() == wanted["k_pos"].tolist()
            assert found["score"] == pytest.approx(wanted["score"], abs=1e-5)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("m", [1, 3, 9])
def test_top_m_stays_within_the_window(family: str, m: int, tmp_path: Path) -> None:
    hf, tokens = tiny.MODELS[family](), tiny.prompts(12)[0]
    own = own_pattern(hf, tokens)[2]
    for keep_sinks in (False, True):
        store = headattr.attribute(
            hf,
            {2: tiny.sae(layer=2)},
            [tokens],
            tmp_path / f"{keep_sinks}",
            edges=f"top:{m}",
            keep_sinks=keep_sinks,
            heads="L2H0,L2H3",
        )
        for head in store.heads:
            found = store.edges(0, head)
            for q_pos in range(12):
                keys = found["k_pos"][found["q_pos"] == q_pos]
                inside = range(max(0, q_pos - tiny.WINDOW + 1), q_pos + 1)
                allowed = [k for k in inside if keep_sinks or k != 0]
                assert len(keys) == min(m, len(allowed))
                strongest = sorted(allowed, key=lambda k: -own[head.head, q_pos, k])
                assert sorted(keys.tolist()) == sorted(strongest[:m])


@pytest.mark.parametrize("family", WINDOWED)
def test_an_edge_outside_the_window_is_refused_wherever_it_is_named(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, tokens, basis = tiny.MODELS[family](), tiny.prompts(10)[0], {2: tiny.sae(layer=2)}
    said = r"edge q 9, k 5 is masked: the layer's window is 4 keys.* sees keys 6 to 9"
    listed = tmp_path / "edges.jsonl"
    lines = [{"prompt": 0, "layer": 2, "head": 1, "q_pos": 9, "k_pos": k} for k in (6, 9, 5)]
    listed.write_text("\n".join(map(json.dumps, lines[:2])) + "\n")
    store = headattr.attribute(hf, basis, [tokens], tmp_path / "two", edges=f"file:{listed}")
    assert store.edges(0, HeadId(2, 1))["k_pos"].tolist() == [6, 9]
    listed.write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(UsageError, match=f"edges.jsonl line 3: prompt 0: {said}"):
        headattr.attribute(hf, basis, [tokens], tmp_path / "out", edges=f"file:{listed}")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match=said):
        headattr.explain_edge(hf, basis, tokens, "L2H1", 9, 5)
    with pytest.raises(UsageError, match=said):
        store.edge(0, Edge(2, 1, 9, 5))
    named = ["--prompt", "0", "--head", "L2H1", "--q", "9", "--k"]
    capsys.readouterr()
    assert main(["query", "edge", str(tmp_path / "two"), *named, "5"]) == 2
    assert "the layer's window is 4 keys" in capsys.readouterr().err
    assert main(["query", "edge", str(tmp_path / "two"), *named, "6"]) == 0
    # a full layer of the same model has that edge
    for layer in (i for i, window in enumerate(tiny.WINDOWS[family]) if window is None):
        answer = headattr.explain_edge(
            hf, {layer: tiny.sae(layer=layer)}, tokens, f"L{layer}H1", 9, 5
        )
        assert answer["pattern"] > 0


def test_a_stored_edge_outside_the_window_is_a_problem(tmp_path: Path) -> None:
    options = {"edges": "all", "heads": "L1H0"}
    store = headattr.attribute(
        tiny.mistral(), {1: tiny.sae()}, tiny.prompts(10), tmp_path / "out", **options
    )
    assert check_store(store)["ok"]
    store.close()
    path = tmp_path / "out" / "shards" / "00000.h5"
    with h5py.File(path, "r+") as file:
        keys = file["layer/1/key"]
        row = int(np.flatnonzero(keys[:] == (9 << 16 | 6))[0])
        keys[row] = 9 << 16 | 5  # in order and causal, but a key too far back
    sidecar = json.loads(path.with_suffix(".json").read_text())
    sidecar |= {"bytes": path.stat().st_size, "sha256": sha256(path)}
    path.with_suffix(".json").write_text(json.dumps(sidecar))
    problems = check_store(headattr.open_store(tmp_path / "out"))["problems"]
    assert problems == ["shards/00000.h5 layer 1: an edge is masked or beyond its prompt"]


def sha256(path: Path) -> str:
    from headattr.store.format import file_hash

    return file_hash(path)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_prompt_of_one_token_and_one_of_the_window_have_all_edges(
    family: str, tmp_path: Path
) -> None:
    prompts = tiny.prompts(1, tiny.WINDOW, tiny.WINDOW + 1)
    store = headattr.attribute(
        tiny.MODELS[family](), {2: tiny.sae(layer=2)}, prompts, tmp_path / "out", edges="all"
    )
    for head in store.heads:
        assert [len(store.edges(p, head)["score"]) for p in range(3)] == [1, 10, 14]
        assert store.edge(0, Edge(2, head.head, 0, 0)).pattern == 1.0


# ---- capped scores -----------------------------------------------------------------------------


def spread(scores: list[float], family: str = "gemma2", **changes: Any) -> Any:
    """One head whose query of every token scores `scores[t]` with the key of token t."""
    tokens = len(scores)
    q = torch.zeros(tokens, 2, 4)
    q[..., 0] = 1.0
    k = torch.zeros(tokens, 1, 4)
    k[:, 0, 0] = torch.tensor(scores)
    k[:, 0, 1] = 1.0  # no key is 0, though a score may be
    changes = {"query_pre_attn_scalar": 1, "sliding_window": 64, **changes}
    return tiny.still(tiny.by_hand(family, q, k, d_model=16, **changes))


def test_a_score_of_100_is_kept_beside_what_the_cap_makes_of_it(tmp_path: Path) -> None:
    """V10: cap 50. The products sum to 100, softmax sees 48.2014, and both are in the store."""
    wanted = [100.0, -100.0, 3.0, 0.0, 49.0]
    hf = spread(wanted, attn_logit_softcapping=50.0)
    for dtype in ("float32", "float64"):
        store = by_token(hf, [0, 1, 2, 3, 4], tmp_path / dtype, dtype=dtype)
        for key, score in enumerate(wanted):
            row = store.edge(0, Edge(0, 0, 4, key))
            capped = 50 * math.tanh(score / 50)
            assert row.score == pytest.approx(score, abs=1e-4)
            assert row.totals.sum() == pytest.approx(score, abs=1e-4)
            assert row.score_capped == pytest.approx(capped, abs=1e-4)
            answer = headattr.query_edge(store, 0, "L0H0", 4, key)
            assert answer["score_capped"] == row.score_capped
            assert answer["cap_ratio"] == pytest.approx(capped / score if score else 1.0, abs=1e-6)
        assert store.edge(0, Edge(0, 0, 4, 0)).score_capped == pytest.approx(48.2014, abs=1e-4)
        # the pattern is that of the capped scores: 100 alone would take all of it
        capped = 50 * np.tanh(np.array(wanted) / 50)
        pattern = np.exp(capped - capped.max())
        found = store.edges(0, HeadId(0, 0))
        last = found["q_pos"] == 4
        assert found["pattern"][last] == pytest.approx(pattern / pattern.sum(), abs=1e-6)
        assert found["pattern"][last][4] > 1e-5


@pytest.mark.parametrize(("cap", "size"), [(0.7, 40.0), (0.7, 0.01), (2.0, 1.0), (50.0, 40.0)])
def test_contrasts_under_a_cap_sum_to_what_softmax_sees(
    cap: float, size: float, tmp_path: Path
) -> None:
    """Scores of both signs, far above and far below the cap: s' - E_A[s'] on either side."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(6, n, 8, generator=generator) for n in (4, 2))
    hf = tiny.by_hand(
        "gemma2", size * q, k, d_model=16, attn_logit_softcapping=cap, sliding_window=5
    )
    tokens = [0, 3, 1, 4, 2, 5, 0, 3]
    store = by_token(hf, tokens, tmp_path / "out")
    for head in store.heads:
        found = store.edges(0, head)
        rows = [
            store.edge(0, Edge(0, head.head, int(q_pos), int(k_pos)))
            for q_pos, k_pos in zip(found["q_pos"], found["k_pos"], strict=True)
        ]
        scores = np.array([row.score for row in rows], np.float64)
        capped = cap * np.tanh(scores / cap)
        weights = np.exp(capped)
        weights /= np.bincount(found["q_pos"], weights)[found["q_pos"]]
        mean = np.bincount(found["q_pos"], weights * capped)[found["q_pos"]]
        for row, s, A, wanted in zip(rows, capped, weights, capped - mean, strict=True):
            assert row.score_capped == pytest.approx(s, abs=1e-5)
            assert row.pattern == pytest.approx(A, abs=1e-5)
            assert row.score_contrast == pytest.approx(wanted, abs=2e-5)
            assert row.q_contrast_totals.sum() == pytest.approx(wanted, abs=5e-5)
            assert row.k_contrast_totals.sum() == pytest.approx(wanted, abs=5e-5)


def test_a_cap_that_transformers_does_not_apply_is_not_applied(tmp_path: Path) -> None:
    """Gemma 3 has the setting and ignores it: the capped score is the score, and the model's."""
    hf = tiny.gemma3(attn_logit_softcapping=0.7)
    tokens = tiny.prompts(9)[0]
    options = {"edges": "all"}
    store = headattr.attribute(hf, {1: tiny.sae()}, [tokens], tmp_path / "out", **options)
    assert check_store(store)["problems"] == []
    own, plain = own_pattern(hf, tokens)[1], own_pattern(tiny.gemma3(), tokens)[1]
    assert torch.equal(own, plain)
    assert store.manifest["layers"][0]["softcap"] is None
    for head in store.heads:
        found = store.edges(0, head)
        wanted = own[head.head][found["q_pos"], found["k_pos"]]
        assert found["pattern"] == pytest.approx(wanted.numpy(), abs=1e-5)
        answer = headattr.query_edge(store, 0, str(head), 8, 3)
        assert (answer["score_capped"], answer["cap_ratio"]) == (answer["score"], 1.0)
        assert abs(answer["score"]) != 0
    assert max(abs(store.edges(0, head)["score"]).max() for head in store.heads) > 0.7


# ---- a norm behind attention -------------------------------------------------------------------


def two_writers(family: str, b_O: list[float] | None = None, **changes: Any) -> Any:
    """Two heads of one token that write [3, 0] and [0, 4] into a stream of width 2."""
    q = torch.ones(1, 2, 2)
    v = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    hf = tiny.by_hand(family, q, q, v, **{"d_model": 2, "attention_bias": True, **changes})
    if not changes:  # an epsilon of 0 where the case has it
        hf.model.layers[0].post_attention_layernorm.eps = 0.0
    with torch.no_grad():
        tiny.outputs_of(hf).copy_(torch.eye(2).repeat(2, 1))
        bias = hf.model.layers[0].self_attn.o_proj.bias
        bias.copy_(torch.zeros(2) if b_O is None else torch.tensor(b_O))
    return hf


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("changes", [{}, {"rms_norm_eps": 0.0}], ids=["there", "everywhere"])
def test_two_heads_behind_one_norm_share_its_scale(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """V17: [0.8485, 0] and [0, 1.1314], which sum to the residual change; not [3, 0] as written
    before the norm, nor [1.414, 0] as if each head had its own. Epsilon is 0 there, or
    everywhere."""
    hf = two_writers(family, **changes)
    wanted = torch.tensor([[0.8485, 0.0], [0.0, 1.1314]], dtype=torch.float64)
    writes, prompt = written(hf, [0])
    torch.testing.assert_close(writes, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        writes.sum(0), prompt.layers[0].block[0].double(), atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(prompt.layers[0].attn_out[0], torch.tensor([3.0, 4.0]))
    store = by_token(hf, [0], tmp_path / "out", output="unembed")
    for head, size in enumerate((0.8485, 1.1314)):
        row = store.edge(0, Edge(0, head, 0, 0))
        assert row.ov.v_norms[0] == pytest.approx(size, abs=1e-4)
        assert_reads(hf, row, writes[head])


def written(hf: Any, tokens: list[int], q_pos: int = -1) -> tuple[torch.Tensor, PromptCapture]:
    """What each head writes at a query, over all keys, by the slow definition."""
    model, prompt = load_model(hf), captured(hf, tokens)
    weights, basis = model.family.head_weights(hf, 0), token_basis(model)
    parts = basis.components(prompt, basis.active(prompt))
    q_pos %= len(tokens)
    sums = [
        sum(
            edge_tables(
                weights, prompt.layers[0], parts, basis.directions, Edge(0, head, q_pos, k_pos)
            ).writes.sum(0)
            for k_pos in range(q_pos + 1)
        )
        for head in range(model.n_heads)
    ]
    return torch.stack(sums), prompt  # pyright: ignore[reportArgumentType]


def assert_reads(hf: Any, row: Any, vector: torch.Tensor) -> None:
    """Every read of an edge is W_U of the token, through the frozen final norm, times `vector`."""
    model = load_model(hf)
    found = capture(model, *pad([[0]]), layers=[], sites=[len(model.layers)])[0]
    assert isinstance(found, PromptCapture)
    norm = hf.model.norm
    last = found.resid[len(model.layers)][-1].detach()
    gain = (1 + norm.weight) / (last.square().mean() + norm.eps).sqrt()
    for slot, value, totals in zip(
        row.ov.o_top.tolist(), row.ov.o_reads, row.ov.o_totals, strict=True
    ):
        token = int(row.o_active.features[slot])
        wanted = float((hf.lm_head.weight[token] * gain).detach().double() @ vector)
        assert value == pytest.approx(wanted, abs=1e-5)
        assert totals.sum() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_the_bias_behind_the_heads_goes_through_the_norm_and_belongs_to_no_edge(
    family: str, tmp_path: Path
) -> None:
    """b_O = [1, -4] makes the summed output [4, 0]: the scale is that of the sum, bias included."""
    hf = two_writers(family, b_O=[1.0, -4.0])
    writes, prompt = written(hf, [0])
    scale = 1 / 8**0.5
    torch.testing.assert_close(
        writes, scale * torch.tensor([[3.0, 0.0], [0.0, 4.0]]).double(), atol=1e-6, rtol=1e-6
    )
    rest = prompt.layers[0].block[0].double() - writes.sum(0)
    torch.testing.assert_close(
        rest, scale * torch.tensor([1.0, -4.0]).double(), atol=1e-6, rtol=1e-6
    )
    store = by_token(hf, [0], tmp_path / "out", output="unembed")
    for head in (0, 1):
        row = store.edge(0, Edge(0, head, 0, 0))
        assert_reads(hf, row, writes[head])
        assert row.ov.block_completeness <= 1e-5


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_gains_and_epsilon_of_the_norm_behind_attention_count(
    family: str, eps: float, tmp_path: Path
) -> None:
    hf = two_writers(family, b_O=[0.5, 0.25], rms_norm_eps=eps)
    with torch.no_grad():
        hf.model.layers[0].post_attention_layernorm.weight.copy_(torch.tensor([1.0, -3.0]))
    writes, prompt = written(hf, [0])
    out = prompt.layers[0].attn_out[0].double()
    gain = torch.tensor([2.0, -2.0]).double() / (out.square().mean() + eps).sqrt()
    values = torch.stack([out - torch.tensor([0.5, 0.25]).double()] * 2) * torch.eye(2).double()
    torch.testing.assert_close(writes, gain * values, atol=1e-6, rtol=1e-6)
    store = by_token(hf, [0], tmp_path / "out", output="unembed")
    for head in (0, 1):
        assert_reads(hf, store.edge(0, Edge(0, head, 0, 0)), writes[head])


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
@pytest.mark.parametrize("read", ["encoder", "decoder"])
def test_edges_behind_a_norm_sum_to_what_attention_adds(
    family: str, read: str, tmp_path: Path
) -> None:
    """I2 on a rough model: all edges of a row, and M(b_O), are the difference of the stream."""
    hf = tiny.MODELS[family](attention_bias=True)
    tokens = tiny.prompts(9)[0]
    basis = {1: tiny.sae(layer=1), 2: tiny.sae(layer=2, seed=5)}
    store = headattr.attribute(
        hf, basis, [tokens], tmp_path / "out", edges="all", read=read, topk=1
    )
    assert check_store(store)["problems"] == []
    model = load_model(hf)
    prompt = capture(model, *pad([tokens]), layers=[1], sites=[2])[0]
    assert isinstance(prompt, PromptCapture)
    kept, post = prompt.layers[1], hf.model.layers[1].post_attention_layernorm
    with torch.no_grad():
        torch.testing.assert_close(kept.block, post(kept.attn_out), atol=1e-6, rtol=1e-6)
    sae, at = tiny.sae(layer=2, seed=5), 8
    frozen = (1 + post.weight) / (kept.attn_out[at].square().mean() + post.eps).sqrt()
    constant = (frozen * hf.model.layers[1].self_attn.o_proj.bias).detach()
    reads: dict[int, float] = {}
    for head in store.heads[:4]:
        found = store.edges(0, head)
        for k_pos in found["k_pos"][found["q_pos"] == at].tolist():
            row = store.edge(0, Edge(1, head.head, at, k_pos))
            for slot, value in zip(row.ov.o_top.tolist(), row.ov.o_reads, strict=True):
                if slot >= 0:
                    feature = int(row.o_active.features[slot])
                    reads[feature] = reads.get(feature, 0) + float(value)
    acts = sae.encode(prompt.resid[2][at])
    for feature, total in reads.items():
        direction = (
            sae.W_enc[:, feature] if read == "encoder" else acts[feature] * sae.W_dec[feature]
        )
        wanted = float(direction.detach() @ (kept.block[at] - constant))
        assert total == pytest.approx(wanted, abs=1e-4)


# ---- facts that are wrong ----------------------------------------------------------------------


def told_wrong(
    monkeypatch: pytest.MonkeyPatch, family: str, wrong: Callable[[HeadWeights], HeadWeights]
) -> None:
    """From here on a family's adapter states other facts of its layers."""
    _tampered(monkeypatch, family, lambda old: {
        "head_weights": lambda model, layer: wrong(old.head_weights(model, layer))
    })  # fmt: skip


def _tampered(
    monkeypatch: pytest.MonkeyPatch, family: str, changes: Callable[[Family], dict[str, Any]]
) -> None:
    changed = tuple(
        replace(known, **changes(known)) if known.name == family else known
        for known in families.families()
    )
    monkeypatch.setattr(families, "families", lambda: changed)


WRONG: dict[str, tuple[str, Callable[[HeadWeights], HeadWeights]]] = {
    **{
        f"{family} without its window": (family, lambda w: replace(w, window=None))
        for family in WINDOWED
    },
    "a window of one key more": ("mistral", lambda w: replace(w, window=w.window and w.window + 1)),
    "a window of one key less": ("mistral", lambda w: replace(w, window=w.window and w.window - 1)),
    "a window that is not there": ("llama", lambda w: replace(w, window=4)),
    "windows of all layers": ("gemma2", lambda w: replace(w, window=4)),
    "no cap": ("gemma2", lambda w: replace(w, softcap=None)),
    "another cap": ("gemma2", lambda w: replace(w, softcap=2.5)),
    "a cap that is not there": ("gemma3_text", lambda w: replace(w, softcap=50.0)),
    **{
        f"{family} without its norm of {side[0]}": (
            family,
            lambda w, side=side: replace(w, **{side: None}),
        )
        for family in Q_K_NORM
        for side in ("q_norm", "k_norm")
    },
    "queries and keys swap their norms": (
        "qwen3",
        lambda w: replace(w, q_norm=w.k_norm, k_norm=w.q_norm),
    ),
    "gains of Gemma less one": (
        "gemma3_text",
        lambda w: replace(w, q_norm=replace(w.q_norm, gain=w.q_norm.gain - 1)),  # pyright: ignore
    ),
    **{
        f"{family} without the norm behind attention": (
            family,
            lambda w: replace(w, post_norm=None),
        )
        for family in ("gemma2", "gemma3_text")
    },
    "the scale of d_head": ("gemma2", lambda w: replace(w, scale=w.W_Q.shape[-1] ** -0.5)),
    "no bias of keys": ("qwen2", lambda w: replace(w, b_K=torch.zeros_like(w.b_K))),
    "another epsilon": ("qwen3", lambda w: replace(w, norm=replace(w.norm, eps=1e-2))),
    "values in the order of queries": ("gpt_neox", lambda w: replace(w, W_V=w.W_V.flip(0))),
}


@pytest.mark.parametrize(("family", "wrong"), WRONG.values(), ids=WRONG)
def test_an_adapter_whose_facts_are_wrong_is_refused_before_any_work(
    family: str,
    wrong: Callable[[HeadWeights], HeadWeights],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hf, refused = tiny.MODELS[family](), rf"layer \d is not what the {family} adapter rebuilds"
    asked = [({layer: tiny.sae(layer=layer)}, [1, 2, 3], f"L{layer}H0", 2, 1) for layer in (1, 2)]
    right = [headattr.explain_edge(hf, *edge) for edge in asked]
    told_wrong(monkeypatch, family, wrong)
    with pytest.raises(ProofError, match=refused):
        headattr.attribute(hf, {1: tiny.sae()}, [[1, 2, 3]], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    found = []
    for edge, answer in zip(asked, right, strict=True):
        try:  # the facts of this very layer may be right
            found.append(headattr.explain_edge(hf, *edge) == answer)
        except ProofError:
            found.append(False)
    assert not all(found)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_beyond_the_proof_is_found_on_the_prompts_that_reach_it(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short proof at load cannot see a window of 20; prompts up to it are right, longer ones
    are set aside."""
    hf = windowed(family, 20)
    told_wrong(monkeypatch, family, lambda w: replace(w, window=None))
    prove(load_model(hf))
    prompts = tiny.prompts(20, 40, 21)
    store = headattr.attribute(
        hf, {2: tiny.sae(layer=2)}, prompts, tmp_path / "out", edges="all", heads="L2H0,L2H3"
    )
    assert store.prompt_ids == [0]
    for entry in store.set_aside:
        assert "the pattern of layer 2 is off by" in entry["reason"]
    own = own_pattern(hf, prompts[0])[2]
    for head in store.heads:
        found = store.edges(0, head)
        wanted = own[head.head][found["q_pos"], found["k_pos"]]
        assert found["pattern"] == pytest.approx(wanted.numpy(), abs=1e-5)
    with pytest.raises(PromptError, match="the pattern of layer 2 is off by"):
        headattr.explain_edge(hf, {2: tiny.sae(layer=2)}, prompts[1], "L2H0", 39, 39)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_embeddings_without_their_factor_are_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = tiny.MODELS[family]()

    def bare(model: Any) -> Any:
        return families.Embedding(model.model.embed_tokens.weight.detach())

    _tampered(monkeypatch, family, lambda old: {"embedding": bare})
    with pytest.raises(DictionaryError, match="resid_pre 0 is not the sum"):
        headattr.attribute(hf, {0: "tokens"}, tiny.prompts(5), tmp_path / "out")


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_model_that_sees_later_tokens_is_refused_by_name(family: str, tmp_path: Path) -> None:
    hf = tiny.MODELS[family](use_bidirectional_attention=True)
    with pytest.raises(HeadattrError, match="use_bidirectional_attention is on"):
        headattr.attribute(hf, {1: tiny.sae()}, [[1, 2, 3]], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", tiny.MODELS)
def test_a_model_whose_layers_are_not_causal_is_refused(family: str, tmp_path: Path) -> None:
    """Whatever its configuration says: the mask is taken away in the model's own forward pass."""
    hf = tiny.MODELS[family]()
    name = "attn" if family == "gpt2" else "attention" if family == "gpt_neox" else "self_attn"
    module = getattr(tiny._trunk(hf)[1], name)
    own = module.forward

    def sighted(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{**kwargs, "attention_mask": None})

    module.forward = sighted
    with pytest.raises(ProofError, match="layer 0 is not what"):
        headattr.attribute(hf, {0: "tokens"}, [[1, 2, 3]], tmp_path / "out")
