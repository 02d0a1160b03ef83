"""An estimate, before anything heavy, is what the run then takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import headattr
from headattr.cli import main
from headattr.config import RunConfig
from headattr.estimate import estimate_run
from headattr.model.embedded import embedded_folder
from headattr.model.load import load_model
from headattr.model.outline import outline_model
from headattr.store.reader import Store

LENGTHS = (12, 1, 30, 7)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of three kinds of mask, a dictionary, and prompts of several lengths."""
    root = tmp_path_factory.mktemp("estimate")
    for family in ("llama", "mistral", "gemma2"):
        tiny.MODELS[family]().save_pretrained(root / family)
    tiny.sae("topk", layer=1).save_model(root / "sae1")
    tiny.sae("jumprelu", layer=2).save_model(root / "sae2")
    prompts = tiny.prompts(*LENGTHS)
    lines = [json.dumps({"tokens": tokens}) for tokens in prompts]
    (root / "texts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {path.name: path for path in root.iterdir()}


def _config(made: dict[str, Path], family: str, **options: Any) -> RunConfig:
    basis = (f"1={made['sae1']}", f"2={made['sae2']}")
    given = {"basis": basis, "out": "", "progress": False, **options}
    return RunConfig(model=str(made[family]), texts=str(made["texts.jsonl"]), **given)


def _edges(store: Store) -> int:
    return sum(
        len(store.edges(prompt, head)["q_pos"])
        for prompt in store.prompt_ids
        for head in store.heads
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(
    "options",
    [
        {"edges": "all"},
        {"edges": "all", "q_token": "/[0-4]>/", "k_token": "/[2-9]>/"},
        {"edges": "all", "heads": "L1H2,L2H*"},
    ],
)
def test_the_edges_of_all_are_counted_exactly(
    made: dict[str, Path], tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    answer = estimate_run(_config(made, family, **options))
    basis = [f"1={made['sae1']}", f"2={made['sae2']}"]
    store = headattr.attribute(
        str(made[family]), basis, made["texts.jsonl"], tmp_path / "out", **options
    )
    assert answer["edges_are"] == "exact"
    assert answer["edges"] == _edges(store) > 0
    assert answer["prompts"] == len(LENGTHS)
    assert answer["tokens"] == sum(LENGTHS)
    assert answer["heads"] == len(store.heads)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize(
    "options",
    [
        {"edges": "top:2"},
        {"edges": "top:3", "keep_sinks": True},
        {"edges": "threshold:0.2"},
        {"edges": "threshold:0"},
        {"edges": "top:2", "k_token": "/[2-9]>/"},
    ],
)
def test_where_the_pattern_decides_there_are_at_most_as_many(
    made: dict[str, Path], tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    answer = estimate_run(_config(made, family, **options))
    basis = [f"1={made['sae1']}", f"2={made['sae2']}"]
    store = headattr.attribute(
        str(made[family]), basis, made["texts.jsonl"], tmp_path / "out", **options
    )
    assert answer["edges_are"] == "at most"
    assert 0 < _edges(store) <= answer["edges"] <= 4 * _edges(store)


def test_listed_edges_are_counted(made: dict[str, Path], tmp_path: Path) -> None:
    listed = tmp_path / "edges.jsonl"
    edge = {"prompt": 0, "layer": 1, "head": 0, "q_pos": 5, "k_pos": 4}
    listed.write_text("\n".join(json.dumps({**edge, "q_pos": q}) for q in (5, 6, 5)) + "\n")
    answer = estimate_run(_config(made, "mistral", edges=f"file:{listed}"))
    assert (answer["edges"], answer["edges_are"]) == (2, "exact")


def test_the_demos_store_has_the_size_and_edges_that_were_estimated(tmp_path: Path) -> None:
    texts = str(embedded_folder() / "demo" / "texts.txt")
    config = RunConfig("demo", ("demo",), texts, str(tmp_path / "out"), ("demo",), progress=False)
    answer = estimate_run(config)
    store = headattr.attribute("demo", "demo", texts, tmp_path / "out", output="demo")
    size = sum(path.stat().st_size for path in (tmp_path / "out" / "shards").iterdir())
    assert answer["edges"] == _edges(store)
    assert answer["bytes"] / 2 <= size <= 2 * answer["bytes"]
    parts = {name: value for name, value in answer["memory"].items() if name != "peak"}
    assert answer["memory"]["peak"] > sum(parts.values())
    assert parts["model"] == 4 * sum(p.numel() for p in load_model("demo").hf.parameters())


def test_an_outline_has_no_weights_and_the_same_facts(made: dict[str, Path]) -> None:
    for family in ("llama", "mistral", "gemma2"):
        outline, whole = outline_model(str(made[family])), load_model(str(made[family]))
        assert all(parameter.is_meta for parameter in outline.hf.parameters())
        for name in ("context", "vocabulary", "n_heads", "d_model"):
            assert getattr(outline, name) == getattr(whole, name)
        for layer in range(len(whole.layers)):
            one, other = (model.family.head_weights(model.hf, layer) for model in (outline, whole))
            assert (one.window, one.softcap, one.scale) == (
                other.window,
                other.softcap,
                other.scale,
            )


def test_nothing_is_written_and_no_weight_is_read(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = _config(made, "llama")
    before = torch.get_rng_state()
    estimate_run(config)
    assert not list(tmp_path.iterdir())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_configuration_does_not_say_is_assumed_aloud(made: dict[str, Path]) -> None:
    assert estimate_run(_config(made, "llama"))["assumed"] == [
        "sae2: 40 active features a position (its configuration does not say)"
    ]


def test_the_command_takes_the_flags_of_run_and_answers_in_words_and_json(
    made: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(made["llama"]), "--basis", f"1={made['sae1']}"]
    flags += ["--texts", str(made["texts.jsonl"]), "--edges", "all", "--output", "unembed"]
    assert main(["estimate", *flags]) == 0
    said = capsys.readouterr().out
    assert "edges: 4 prompts of 50 tokens in all, 4 heads" in said
    assert "memory at its peak" in said
    assert main(["estimate", *flags, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == [
        "prompts", "tokens", "set_aside", "heads", "edges", "edges_are", "bytes",
        "bytes_per_edge", "memory", "seconds", "assumed",
    ]  # fmt: skip
    assert set(answer["seconds"]) == {"start", "forward", "attribution", "writing", "total"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (["--basis", "1=nowhere"], "nowhere"),
        (["--heads", "L9H0"], "layers 0 to 2"),
        (["--heads", "L0H0"], "have no basis"),
        (["--edges", "most"], "expected top:M"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
    ],
)
def test_what_the_run_would_refuse_is_refused(
    made: dict[str, Path], capsys: pytest.CaptureFixture[str], change: list[str], match: str
) -> None:
    flags = {"--model": str(made["llama"]), "--basis": f"1={made['sae1']}"}
    flags |= {"--texts": str(made["texts.jsonl"]), change[0]: change[1]}
    arguments = [part for pair in flags.items() for part in pair]
    assert main(["estimate", *arguments]) in (1, 2)
    assert match in capsys.readouterr().err
