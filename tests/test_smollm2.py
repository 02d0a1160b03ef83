"""The real model: SmolLM2-135M from its GGUF, two residual SAEs trained here, fifty paragraphs.

Needs `make smollm2-saes`; says what is missing and skips otherwise (in CI a missing piece fails).
"""

import json
import os
import pydoc_data.topics
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headattr
from headattr.attribution.layer import attribute_layer
from headattr.batch import layer_task
from headattr.cli import main
from headattr.edges import same_edges
from headattr.inputs import inputs_from_memory
from headattr.interventions import RemoveFeature
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.embedded import cache_folder
from headattr.model.load import load_model
from headattr.model.proof import prove
from headattr.plan import make_run

pytestmark = pytest.mark.slow
CACHE = cache_folder()
SAES = [CACHE / "smollm2-saes" / f"resid_pre_{layer}" for layer in (12, 13)]


def _need(path: Path) -> None:
    if not path.exists():
        message = f"{path} is missing: run `make smollm2-saes`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="module")
def paragraphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty paragraphs of prose from CPython's own documentation."""
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    found = [re.sub(r"\s+", " ", part).strip() for part in text.split("\n\n")]
    chosen = [
        part for part in found if 300 < len(part) < 600 and not part.startswith(("|", "*", ">>>"))
    ]
    path = tmp_path_factory.mktemp("texts") / "paragraphs.txt"
    path.write_text("\n\n".join(chosen[:50]) + "\n", encoding="utf-8")
    assert len(chosen) >= 50
    return path


@pytest.fixture(scope="module")
def store(paragraphs: Path, tmp_path_factory: pytest.TempPathFactory) -> headattr.Store:
    for path in (CACHE / "smollm2" / "config.json", *SAES):
        _need(path)
    out = tmp_path_factory.mktemp("smollm2") / "store"
    arguments = [
        "run",
        "--model",
        "smollm2",
        "--basis",
        f"12={SAES[0]}",
        f"13={SAES[1]}",
        "--heads",
        "all",
    ]
    code = main(
        [*arguments, "--texts", str(paragraphs), "--paragraphs", "--out", str(out), "--no-progress"]
    )
    assert code == 0
    return headattr.open_store(out)


def test_every_layer_is_proven_on_the_real_model() -> None:
    _need(CACHE / "smollm2" / "config.json")
    assert prove(load_model("smollm2")).worst <= 1e-5


def test_the_gguf_itself_gives_the_converted_model() -> None:
    _need(CACHE / "smollm2.gguf")
    direct, converted = load_model(str(CACHE / "smollm2.gguf")), load_model("smollm2")
    assert "dequantised" in direct.notes[0]
    assert {k: tuple(v.shape) for k, v in direct.hf.state_dict().items()} == {
        k: tuple(v.shape) for k, v in converted.hf.state_dict().items()
    }
    for (name, one), other in zip(
        direct.hf.state_dict().items(), converted.hf.state_dict().values(), strict=True
    ):
        assert (one == other).all(), name


def test_fifty_paragraphs_check_ok(
    store: headattr.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(store.path), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["ok"]
    assert checked["shards"] >= 1
    assert len(store.prompt_ids) == 50
    for error in (
        checked["completeness"],
        checked["ov"]["completeness"],
        checked["ov"]["block_completeness"],
    ):
        assert error["worst"] <= 1e-5
    assert checked["pattern_error"]["worst"] <= 1e-5


def test_a_thousand_ablations_are_what_the_model_does_without_the_feature(
    paragraphs: Path,
) -> None:
    """Random edges of layer 12, random active features of either side, removed from the stream."""
    for path in (CACHE / "smollm2" / "config.json", SAES[0]):
        _need(path)
    random, model = np.random.default_rng(0), load_model("smollm2")
    texts = paragraphs.read_text(encoding="utf-8").split("\n\n")[:10]
    predicted, frozen, happened, sizes = [], [], [], []
    for text in texts:
        config, inputs = inputs_from_memory(model, {12: SAES[0]}, (), [text], "", None, {})
        run = make_run(config, inputs, every_layer=False)
        prompt, weights = run.prompts[0], model.family.head_weights(model.hf, 12)
        captured = capture(model, *pad([prompt.tokens]), layers=[12], sites=[12])[0]
        assert isinstance(captured, PromptCapture)
        actives = {i: s.active(captured) for i, s in enumerate(run.source_list)}
        every = layer_task(run, run.plans[0], weights, prompt, captured, actives, top_marginals=32)
        rows = np.sort(random.choice(np.arange(1, len(prompt.tokens)), 12, replace=False))
        columns = np.array([random.integers(0, q + 1) for q in rows])
        table = attribute_layer(replace(every, select=same_edges(rows, columns)))
        changes, heads = [], []
        for edge in random.choice(len(table.q_pos), 100, replace=True):
            side = random.choice(["q", "k"])
            pos = int(getattr(table, f"{side}_pos")[edge])
            slots = getattr(table, f"{side}_top")[edge]
            rank = int(random.integers((slots >= 0).sum()))
            start = int(actives[0].ptr[pos])
            feature = int(actives[0].ids[start + int(slots[rank])])
            changes.append(RemoveFeature(12, pos, feature))
            heads.append((int(np.searchsorted(table.head_ptr, edge, "right")) - 1, edge))
            predicted.append(getattr(table, f"{side}_ablations")[edge, rank])
            frozen.append(-getattr(table, f"{side}_marginals")[edge, rank])
        names = [f"L12H{head}" for head in range(model.n_heads)]
        *changed, clean = headattr.intervene(
            model, prompt.tokens, [*changes, []], basis={12: SAES[0]}, heads=names, batch_size=25
        )
        kept = captured.layers[12]
        for (head, edge), outcome in zip(heads, changed, strict=True):
            at, name = (int(table.q_pos[edge]), int(table.k_pos[edge])), headattr.HeadId(12, head)
            happened.append(float(outcome.scores[name][at] - clean.scores[name][at]))
            Q, K = kept.Q[at[0], head], kept.K[at[1], weights.kv_head(head)]
            sizes.append(kept.scale * float(Q.norm() * K.norm()))
    predicted, happened, sizes = map(np.array, (predicted, happened, sizes))
    gap = np.abs(predicted - happened)
    large = np.abs(happened) > 0.01 * sizes
    print(
        f"correlation {np.corrcoef(predicted, happened)[0, 1]:.7f}, of the frozen marginal "
        f"{np.corrcoef(frozen, happened)[0, 1]:.4f}; worst error {(gap / sizes).max():.1e} of "
        f"scale |Q||K|, {(gap / np.abs(happened))[large].max():.1e} of {large.sum()} large effects"
    )
    assert len(predicted) == 1000
    assert np.corrcoef(predicted, happened)[0, 1] >= 0.9999
    assert (gap <= 1e-5 * sizes).all()
    assert (gap[large] <= 1e-4 * np.abs(happened)[large]).all()


def test_the_first_position_is_flagged_and_its_share_is_kept(store: headattr.Store) -> None:
    shard = store.shards[0].file
    flagged, shares = shard["layer/12/flagged"][:], shard["layer/12/sink_share"][:]
    first = shard["prompt/ptr"][:-1]
    assert flagged[first].all()
    assert flagged.mean() < 0.05
    assert np.all((shares >= 0) & (shares <= 1 + 1e-5))
    assert shares.mean() > 0.2
    for prompt in store.prompt_ids[:3]:
        for head in store.heads[:9]:
            assert (store.edges(prompt, head)["k_pos"] > 0).all()


def test_an_edge_is_answered_with_labels(
    store: headattr.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = store.prompt_ids[0]
    head = store.heads[4]
    edges = store.edges(prompt, head)
    strongest = int(np.argmax(edges["pattern"]))
    q, k = (str(edges[name][strongest]) for name in ("q_pos", "k_pos"))
    arguments = ["--prompt", str(prompt), "--head", str(head), "--q", q, "--k", k, "--json"]
    assert main(["query", "edge", str(store.path), *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    total = sum(value for row in answer["qk"]["totals"].values() for value in row.values())
    assert total == pytest.approx(answer["score"] - answer["position_bias"], abs=1e-3)
    assert any(pair["q_feature"]["label"] for pair in answer["qk"]["pairs"])
    assert answer["ov"][0]["output"] == "resid_pre_13"
