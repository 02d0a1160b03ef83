"""What batchtopk is saved with has as many active features as in training, however short that
was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file

from headattr.training import calibration
from headattr.training.calibration import Largest
from headattr.training.loop import train
from headattr.training.recipe import recipe_of
from headattr.training.run import train_dictionaries

SITES: dict[str, dict[str, Any]] = {
    "sae": {"site": "resid_pre 1"},
    "transcoder": {"layers": [0, 1, 2]},
    "crosscoder": {"sites": [1, 2, 3], "causal": True},
}


@pytest.fixture
def short(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], Path]]:
    """A training of a dozen steps at a rate at which values change all along."""
    lines = [json.dumps({"tokens": p}) + "\n" for p in tiny.prompts(*[400] * 25)]
    (tmp_path / "tokens.jsonl").write_text("".join(lines))
    model = tiny.gpt2()

    def run(kind: str, name: str = "out", say: Any = lambda _: None, **changes: Any) -> Any:
        said = {
            "model": "tiny",
            "texts": ["tokens.jsonl"],
            "context_size": 16,
            "prepend_bos": False,
            "tokens": 6400,
            "held_out_tokens": 1600,
            "d_sae": 48,
            "k": 5,
            "epochs": 0.25,
            "batch_size": 128,
            "learning_rate": 2e-2,
            "checkpoint_every": 4,
        }
        recipe = recipe_of({**said, **SITES[kind], **changes}, kind)
        out = tmp_path / name
        return train_dictionaries(recipe, out, base=tmp_path, model=model, say=say), out

    return run


@pytest.mark.parametrize("kind", SITES)
def test_a_very_short_training_has_k_features_active_on_held_out_positions(
    short: Any, kind: str
) -> None:
    card, _ = short(kind)
    for name, found in card["dictionaries"].items():
        assert found["l0"] == pytest.approx(5, rel=0.25)
        assert card["threshold_positions"][name] == card["trained_positions"][name]


@pytest.mark.parametrize("kind", SITES)
def test_a_threshold_is_the_same_after_a_stop(
    short: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = short(kind, "whole")
    calls = 0

    def stopped(*given: Any) -> float:
        nonlocal calls
        calls += 1
        train(*given)
        raise RuntimeError

    monkeypatch.setattr("headattr.training.run.train", stopped)
    with pytest.raises(RuntimeError):
        short(kind, "stopped")
    monkeypatch.undo()
    _, out = short(kind, "stopped")
    assert calls == 1
    for path in sorted(whole.glob("*.safetensors")):
        first, second = load_file(path), load_file(out / path.name)
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_threshold_of_some_positions_is_near_that_of_all(
    short: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "POSITIONS", 1000)
    card, _ = short("sae")
    (found,) = card["dictionaries"].values()
    assert card["threshold_positions"] == {"resid_pre_1": 1000}
    assert found["l0"] == pytest.approx(5, rel=0.25)


def test_thresholds_of_jumprelu_are_those_that_were_learnt(short: Any) -> None:
    card, out = short("sae", activation="jumprelu")
    assert card["threshold_positions"] == {"resid_pre_1": None}
    assert len(load_file(out / "sae_weights.safetensors")["threshold"].unique()) > 1


@pytest.mark.parametrize("count", [1, 7, 40])
def test_exactly_so_many_values_exceed_the_threshold(count: int) -> None:
    values = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    found = Largest(count)
    for batch in values.split(3):
        found.add(batch)
    assert int((values > found.threshold()).sum()) == count


def test_where_no_more_are_positive_all_of_them_count() -> None:
    found = Largest(10)
    found.add(torch.tensor([[1.0, -2.0, 0.0, 3.0]]))
    assert found.threshold() == 0.0
