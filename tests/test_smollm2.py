"""The real model: SmolLM2-135M from its GGUF, two residual SAEs trained here, fifty paragraphs.

Needs `make smollm2-saes`; says what is missing and skips otherwise (in CI a missing piece fails).
"""

import json
import os
import pydoc_data.topics
import re
from pathlib import Path

import numpy as np
import pytest

import headattr
from headattr.cli import main
from headattr.model.embedded import cache_folder
from headattr.model.load import load_model
from headattr.model.proof import prove

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
