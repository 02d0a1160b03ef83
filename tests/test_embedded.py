"""The embedded pair learned something, its dictionaries explain it, and the demo shows it."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import headattr
from headattr.basis.sae import load_sae
from headattr.cli import main
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.embedded import embedded_folder
from headattr.model.load import LoadedModel, load_model
from headattr.model.proof import prove
from headattr.store.check import check_store

FOLDER = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("demo")


@pytest.fixture(scope="module")
def repeated(model: LoadedModel) -> torch.Tensor:
    """Sixteen random segments of 64 tokens, each twice, behind BOS."""
    generator = torch.Generator().manual_seed(7)
    segment = torch.randint(2, model.vocabulary, (16, 64), generator=generator)
    return torch.cat([torch.zeros(16, 1, dtype=torch.long), segment, segment], 1)


def _patterns(model: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    found = capture(
        model, ids, torch.ones_like(ids, dtype=torch.bool), layers=[0, 1, 2, 3], rows=None
    )
    layers = [p.layers for p in found if isinstance(p, PromptCapture)]
    assert len(layers) == len(ids)
    return torch.stack(
        [torch.stack([p[layer].pattern for p in layers]).mean(0) for layer in range(4)]
    )


def test_two_heads_are_induction_heads_and_some_attend_to_the_previous_token(
    model: LoadedModel, repeated: torch.Tensor
) -> None:
    pattern = _patterns(model, repeated)
    query = torch.arange(66, 129)
    induction = pattern[:, :, query, query - 63].mean(-1)
    previous = pattern[:, :, query, query - 1].mean(-1)
    assert (induction > 0.7).sum() >= 2
    assert induction.argmax() // 4 == 3
    assert previous.max() > 0.9


def test_a_repeat_is_predicted_far_better_than_its_first_copy(
    model: LoadedModel, repeated: torch.Tensor
) -> None:
    with torch.no_grad():
        logits = model.hf(repeated, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), repeated[:, 1:], reduction="none"
    )
    assert losses[:, :64].mean() > 4
    assert losses[:, 65:].mean() < 1


@pytest.mark.parametrize(("layer", "floor"), [(1, 0.9), (2, 0.85), (3, 0.75)])
def test_each_dictionary_explains_its_site(model: LoadedModel, layer: int, floor: float) -> None:
    folder = embedded_folder() / "demo" / f"resid_pre_{layer}"
    fit = {"d_model": model.d_model, "dtype": model.dtype, "device": model.device}
    basis = load_sae(folder, layer, **fit)
    texts = (embedded_folder() / "demo" / "texts.txt").read_text(encoding="utf-8").splitlines()
    prompts = [model.tokenizer(text).input_ids for text in texts]  # pyright: ignore[reportOptionalCall]
    error, total = 0.0, 0.0
    for prompt in capture(model, *pad(prompts), layers=[], sites=[layer]):
        assert isinstance(prompt, PromptCapture)
        x = prompt.resid[layer][1:].double()
        missed = basis.components(prompt, basis.active(prompt)).named["error"][1:]
        error += float(missed.square().sum())
        total += float((x - x.mean(0)).square().sum())
    assert 1 - error / total > floor


def test_every_feature_that_fires_has_a_label() -> None:
    for layer in (1, 2, 3):
        path = embedded_folder() / "demo" / f"resid_pre_{layer}" / "labels.jsonl"
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [record["id"] for record in records] == list(range(1024))
        assert all(record["label"] for record in records if record["contexts"])
        assert sum(bool(record["label"]) for record in records) > 500


def test_the_embedded_data_is_small() -> None:
    sizes = [path.stat().st_size for path in embedded_folder().rglob("*") if path.is_file()]
    assert sum(sizes) < 12e6


def test_the_embedded_model_is_proven(model: LoadedModel) -> None:
    assert prove(model).worst <= 1e-5


def test_the_demo_prints_edges_in_words_and_draws_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "Heads worth a look" in text
    assert text.count("why it looks there") == 3
    assert "worst completeness" in " ".join(text.split())
    assert (out / "attribution.png").read_bytes().startswith(b"\x89PNG")
    with headattr.open_store(out) as store:
        checked = check_store(store)
    assert checked["ok"]
    assert checked["completeness"]["worst"] <= 1e-5
    assert checked["ov"]["block_completeness"]["worst"] <= 1e-5
    assert main(["demo", "--out", str(out), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert len(again["edges"]) == 3
    assert again["check"]["edges"] == checked["edges"]


def test_the_wheel_carries_the_embedded_pair(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=FOLDER, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert "headattr/dictionaries/demo/model/model.safetensors" in names
    assert "headattr/dictionaries/demo/resid_pre_3/sae_weights.safetensors" in names
    assert "headattr/model/proven.json" in names
    assert not any(name.startswith(("tests/", "scripts/")) for name in names)
