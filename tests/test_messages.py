"""What is off in dictionaries and commands is said as it is: what was found, and what to do."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_releases as releases
import yaml

from headattr.basis.dictionary import Activation
from headattr.basis.formats.crosscoder import CrosscoderConfig, write_crosscoder
from headattr.basis.formats.registry import open_release
from headattr.cli import main
from headattr.errors import UsageError
from headattr.model.files import locate
from headattr.training.recipe import KINDS
from headattr.training.results import write_transcoder
from headattr.viewers.dictionaries import FEW, render_report

D = 24


def transcoders(folder: Path, layers: tuple[int, ...]) -> Path:
    for layer in layers:
        write_transcoder(folder, layer, releases.random_tensors(1, 1, layer))
    said = {"model_name": "tiny", "model_kind": "transcoder_set", "prepend_bos": False}
    hooks = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}
    (folder / "config.yaml").write_text(yaml.safe_dump({**said, **hooks}))
    return folder


def crosscoder(folder: Path, layers: tuple[int, ...], bos: bool = False, d: int = D) -> Path:
    n = len(layers)
    groups = [releases.random_tensors(1, n - i, i, d=d) for i in range(n)]
    groups = [groups[0], *(g._replace(b_dec=(None,) * len(g.b_dec)) for g in groups[1:])]
    hooks = tuple(f"blocks.{layer}.hook_resid_pre" for layer in layers)
    sizes = tuple(len(group.W_enc[0]) for group in groups)
    kind = Activation("relu", None)
    write_crosscoder(folder, CrosscoderConfig("tiny", hooks, True, d, sizes, kind, bos), groups)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, dictionaries of every kind, and texts."""
    folder = tmp_path_factory.mktemp("messages")
    tiny.llama(vocab_size=tiny.BYTES, num_hidden_layers=4).save_pretrained(folder / "model")
    tiny.byte_tokenizer(bos="<s>").save_pretrained(folder / "model")
    (folder / "texts.txt").write_text("the cat sat on the mat\nabcabc abc")
    transcoders(folder / "gappy", (0, 1, 3))
    transcoders(folder / "whole", (0, 1, 2, 3))
    crosscoder(folder / "several" / "cc", (1, 2, 3))
    tiny.sae(layer=3, seed=3).save_model(folder / "several" / "sae3")
    crosscoder(folder / "with-bos", (1, 2), bos=True)
    crosscoder(folder / "narrow", (1, 2), bos=True, d=16)
    return folder


def said(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 2) -> str:
    """The line on standard error; nothing may be printed beside it."""
    capsys.readouterr()
    assert main([str(word) for word in argv]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def run(place: Path, *words: object, out: str = "out") -> list[object]:
    given = ["--model", place / "model", "--texts", place / "texts.txt", "--no-progress"]
    return ["run", *given, "--out", place / out, *words]


def judged(place: Path, *words: object) -> list[object]:
    given = ["--model", place / "model", "--texts", place / "texts.txt", "--no-progress"]
    return ["evaluate", *words, *given]


# Transcoder sets that are not whole ---------------------------------------------------------------


def test_a_layer_that_a_set_cannot_decompose_is_said_with_the_file_that_is_missing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = said(capsys, *run(place, "--basis", place / "gappy", "--heads", "L3H0"))
    for part in (
        "layers [3] have no basis",
        "it has transcoders of layers 0-1,3; the basis of layer 3 needs those of 0-2",
        "layer_2.safetensors is missing",
        f"--basis 3={place / 'gappy'}",
    ):
        assert part in err


def test_the_way_out_that_is_said_is_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gappy = place / "gappy"
    words = ["--basis", gappy, f"3={gappy}", "--heads", "L3H0", "--edges", "top:1", "--json"]
    assert main([str(word) for word in run(place, *words)]) == 0
    (source,) = json.loads(capsys.readouterr().out)["sources"]
    assert source["decomposes"] == [3]
    assert any("no transcoder of layers [2]" in one for one in source["assumed"])


def test_a_layer_beyond_a_whole_set_is_no_gap(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = said(capsys, *run(place, "--basis", place / "whole", "--heads", "L0H0"))
    assert "give one each" in err


def test_inspect_shows_a_gap_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dictionaries", "inspect", str(place / "gappy")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "transcoders" in lines[0]
    assert lines[1].startswith("  not whole: it has transcoders of layers 0-1,3;")
    assert "layer_2.safetensors is missing" in lines[1]
    assert main(["dictionaries", "inspect", str(place / "whole"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["gap"] is None


# Which dictionary was meant -----------------------------------------------------------------------


def test_a_folder_of_dictionaries_of_the_same_layers_is_said_to_be_none(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = said(capsys, *run(place, "--basis", place / "several"))
    assert "is no dictionary, but holds these: cc (layers 1-3), sae3 (layers 3)" in err
    assert f"give one, as {place / 'several' / 'cc'}" in err


def test_two_dictionaries_of_one_layer_are_named_with_how_to_give_one_each(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cc, sae = place / "several" / "cc", place / "several" / "sae3"
    err = said(capsys, *run(place, "--basis", cc, sae))
    assert f"layer 3 is given twice, by {cc} and by {sae}" in err
    assert f"say which, as 1={cc} 2={cc} 3=..." in err
    words = run(place, "--basis", f"1={cc}", f"2={cc}", f"3={sae}", out="one-each")
    assert main([str(word) for word in words]) == 0


@pytest.mark.parametrize("command", [["evaluate"], ["dictionaries", "inspect"]])
def test_what_names_no_dictionary_is_named_without_a_flag_that_was_not_given(
    place: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    words = [place / "whole", "nope"] if command == ["evaluate"] else ["nope"]
    options = ["--model", place / "model", "--texts", place / "texts.txt"]
    err = said(capsys, *command, *words, *options)
    assert "'nope': no such file or folder" in err
    assert "--basis" not in err


# BOS and width ------------------------------------------------------------------------------------


def test_each_dictionary_is_judged_with_or_without_bos_as_it_was_trained(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cc, other = place / "several" / "cc", place / "with-bos"
    alone = []
    for one in (cc, other):
        assert main([str(word) for word in judged(place, one, "--json")]) == 0
        alone.append(json.loads(capsys.readouterr().out))
    assert main([str(word) for word in judged(place, cc, other, "--json")]) == 0
    both = json.loads(capsys.readouterr().out)
    assert (both["bos"], both["tokens"]) == (None, None)
    assert [one["bos"]["prepend"] for one in both["dictionaries"]] == [False, True]
    assert both["dictionaries"] == [one["dictionaries"][0] for one in alone]
    assert main([str(word) for word in judged(place, cc, other)]) == 0
    out = capsys.readouterr().out
    assert "cc is judged without BOS" in out
    assert "with-bos is judged with BOS" in out
    assert "2 prompts of 32 or 34 tokens" in out


def test_a_wrong_width_is_said_before_a_disagreement_on_bos(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cc, narrow = place / "several" / "cc", place / "narrow"
    for words in (judged(place, cc, narrow), run(place, "--basis", f"3={cc}", narrow)):
        err = said(capsys, *words, code=1)
        assert "width 16" in err
        assert "BOS" not in err


# Options that a basis does not have; fits ---------------------------------------------------------


def test_heads_apart_are_refused_without_transcoders(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run(place, "--basis", place / "several" / "cc", "--attention", "heads")
    err = said(capsys, *words)
    assert "--attention heads takes the attention outputs apart" in err
    assert "the basis here is crosscoder" in err


@pytest.mark.parametrize(("n", "few"), [(FEW - 1, True), (FEW, False)])
def test_a_fit_below_nothing_says_of_how_many_positions_it_is(n: int, few: bool) -> None:
    report = {"positions": n, "l0": 3.0, "explained_variance": {"resid_pre 1": -0.5}}
    line = render_report(report)[1]
    assert f"below 0 on {n} positions" in line
    assert "undertrained" in line
    assert ("few or unusual" in line) is few


def test_a_crosscoder_is_said_to_be_at_all_of_its_layers(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = run(place, "--basis", place / "several" / "cc", "--edges", "top:1", out="layers")
    assert main([str(word) for word in words]) == 0
    out = capsys.readouterr().out
    assert "  layers 1-3: cc (crosscoder" in out
    assert "decomposes 1-3" in out


# Names that mean something else -------------------------------------------------------------------


@pytest.mark.parametrize("command", [["check"], ["query", "edge"]])
def test_what_is_no_result_is_said_to_be_what_it_is(
    place: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    edge = ["--prompt", 0, "--head", "L1H0", "--q", 1, "--k", 0] if len(command) > 1 else []
    assert "nope does not exist" in said(capsys, *command, place / "nope", *edge, code=1)
    err = said(capsys, *command, place / "several" / "sae3", *edge, code=1)
    assert "sae3 is a dictionary (saelens), not a result" in err
    assert "headattr dictionaries inspect" in err


def test_a_slip_in_an_option_is_put_apart_from_what_was_meant(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = said(capsys, *run(place, "--basis", "demo", "--haeds", "L3H0"))
    assert "--haeds, L3H0; perhaps you meant: --heads" in err


@pytest.mark.parametrize(
    ("slip", "meant"), [("demoo", "demo"), ("smollm", "smollm2"), ("gemma-270m", "gemma3-270m")]
)
def test_a_slip_in_a_models_name_is_not_looked_up(slip: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        locate(slip)
    assert locate("gpt2") == ("gpt2", None)
    assert locate("org/demoo") == ("org/demoo", None)


# Training -----------------------------------------------------------------------------------------

RECIPE: dict[str, Any] = {
    "model": "./model",
    "texts": ["texts.txt"],
    "context_size": 4,
    "prepend_bos": False,
    "tokens": 16,
    "held_out_tokens": 8,
    "d_sae": 16,
    "k": 3,
    "batch_size": 4,
}
OWN: dict[str, dict[str, Any]] = {
    "sae": {"site": "resid_pre 1"},
    "transcoder": {"layers": [0, 1]},
    "crosscoder": {"sites": [1, 2], "causal": True},
}


def recipe(place: Path, kind: str) -> Path:
    path = place / f"{kind}.toml"
    keys = {**RECIPE, **OWN[kind]}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_what_headattr_wrote_itself_leaves_nothing_to_assume(
    place: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    out = place / "trained" / kind
    assert main(["train", kind, str(recipe(place, kind)), "--out", str(out), "--no-progress"]) == 0
    assert capsys.readouterr().err == ""
    found = open_release(out).dictionaries
    assert [one.assumed for one in found] == [()] * len(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_a_recipe_of_another_kind_is_said_to_be_one(
    place: Path, capsys: pytest.CaptureFixture[str], kind: str, other: str
) -> None:
    if kind != other:
        err = said(capsys, "train", kind, recipe(place, other), "--out", place / "none")
        assert f"it looks like a {other} recipe, which `headattr train {other}` takes" in err


@pytest.mark.parametrize("kind", KINDS)
def test_the_help_of_a_training_lists_every_key_of_its_recipe(
    capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    assert main(["train", "--help"]) == 0
    assert "lists the keys of a recipe" in capsys.readouterr().out
    assert main(["train", kind, "--help"]) == 0
    shown = capsys.readouterr().out
    for field in fields(KINDS[kind]):
        assert f"\n  {field.name}: " in shown
    lines = "  batch_size: an integer, by default 1024\n    Positions in one optimiser step.\n"
    assert lines in shown
