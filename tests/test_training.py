"""Dictionaries that are trained here: recipes, harvests, the three kinds, and going on after a
stop."""

import dataclasses
import json
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from headattr.basis.active import ActiveFeatures
from headattr.basis.coder import Coder
from headattr.basis.crosscoder import load_crosscoder
from headattr.basis.dictionary import Dictionary, Tensors
from headattr.basis.formats import circuit_tracer
from headattr.basis.formats.crosscoder import CrosscoderConfig, write_crosscoder
from headattr.basis.formats.registry import open_release
from headattr.basis.load import layers_of
from headattr.basis.site import hook_name_of, site_of
from headattr.basis.whole import load_whole
from headattr.cli import main
from headattr.errors import DictionaryError, UsageError
from headattr.model.load import LoadedModel, load_model
from headattr.model.sites import Site
from headattr.training import harvest as harvesting
from headattr.training.blocks import BlockCoder, Group, Moments, Sparsity
from headattr.training.loop import Schedule
from headattr.training.recipe import KINDS, Recipe, SaeRecipe, read_recipe, recipe_of
from headattr.training.run import train_dictionaries
from headattr.training.textset import counted_positions, documents, make_windows

COMMON: dict[str, Any] = {
    "model": "tiny",
    "texts": ["tokens.jsonl"],
    "context_size": 16,
    "prepend_bos": False,
    "tokens": 6400,
    "held_out_tokens": 640,
    "d_sae": 32,
    "k": 6,
    "epochs": 4.0,
    "batch_size": 128,
    "learning_rate": 3e-3,
    "warm_up": 10,
    "dead_after": 2000,
}
SITES: dict[str, dict[str, Any]] = {
    "sae": {"site": "resid_pre 1"},
    "transcoder": {"layers": [0, 2]},
    "crosscoder": {"sites": [1, 2, 3], "causal": True},
}


def recipe(kind: str, **changes: Any) -> Any:
    return recipe_of({**COMMON, **SITES[kind], **changes}, kind)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(tiny.gpt2())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "tokens.jsonl").write_text(
        "".join(json.dumps({"tokens": p}) + "\n" for p in tiny.prompts(*[400] * 25))
    )
    return folder


@pytest.fixture
def trained(model: LoadedModel, base: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(made: Recipe, name: str = "out", **options: Any) -> tuple[dict[str, Any], Path]:
        out = tmp_path / name
        return train_dictionaries(made, out, base=base, model=model, **options), out

    return run


def weights(out: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.name} {name}": tensor
        for path in sorted(out.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def vectors(model: LoadedModel, *sites: Site) -> list[torch.Tensor]:
    ids = torch.tensor(tiny.prompts(12, seed=9))
    found = harvesting.capture(model, ids, torch.ones_like(ids).bool(), layers=[], sites=sites)
    return [found[0].at(site)[1:] for site in sites]


def dense(active: ActiveFeatures, features: int) -> torch.Tensor:
    found = torch.zeros(len(active.counts), features)
    found[active.positions, active.ids] = active.acts
    return found


def coder(dictionary: Dictionary) -> Coder:
    return Coder(dictionary, torch.float32, torch.device("cpu"))


# Every kind trains --------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["batchtopk", "topk", "jumprelu"])
def test_an_sae_explains_positions_that_it_has_not_seen(trained: Any, activation: str) -> None:
    card, out = trained(recipe("sae", activation=activation))
    (found,) = card["dictionaries"].values()
    assert found["explained_variance"]["resid_pre 1"] > 0.4
    assert found["l0"] == pytest.approx(6, abs=2)
    release = open_release(out)
    assert release.kind == "sae"
    assert release.dictionaries[0].hook_name == "blocks.1.hook_resid_pre"
    norms = weights(out)["sae_weights.safetensors W_dec"].norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(32))


def test_an_sae_is_loaded_by_sae_lens_with_the_same_activations(
    trained: Any, model: LoadedModel
) -> None:
    from sae_lens import SAE

    _, out = trained(recipe("sae"))
    (x,) = vectors(model, Site("resid_pre", 1))
    ours = dense(coder(open_release(out).dictionaries[0]).encode([x]), 32)
    torch.testing.assert_close(ours, SAE.load_from_disk(out).encode(x), rtol=0, atol=0)


@pytest.mark.parametrize("site", ["z 1", "attn_out 1", "resid_mid 0", "mlp_out 2", "resid_pre 3"])
def test_an_sae_of_any_site_trains_and_says_its_site(trained: Any, site: str) -> None:
    card, out = trained(recipe("sae", site=site, epochs=1.0))
    (found,) = card["dictionaries"].values()
    assert found["explained_variance"][site] > 0.1
    assert str(open_release(out).dictionaries[0].reads[0]) == site


@pytest.mark.parametrize("activation", ["batchtopk", "jumprelu"])
def test_transcoders_explain_the_outputs_of_their_mlps(trained: Any, activation: str) -> None:
    card, out = trained(recipe("transcoder", activation=activation))
    assert list(card["dictionaries"]) == ["layer_0", "layer_2"]
    for layer in (0, 2):
        found = card["dictionaries"][f"layer_{layer}"]
        assert found["explained_variance"][f"mlp_out {layer}"] > 0.4
        assert found["l0"] == pytest.approx(6, abs=2)
    said = (out / "config.yaml").read_text()
    for line in (
        'model_name: "tiny"',
        'model_kind: "transcoder_set"',
        'feature_input_hook: "mlp.hook_in"',
        'feature_output_hook: "hook_mlp_out"',
    ):
        assert f"{line}\n" in said
    stored = load_file(out / "layer_2.safetensors")
    assert {name: tuple(part.shape) for name, part in stored.items()} == {
        "W_enc": (32, 24),
        "W_dec": (32, 24),
        "b_enc": (32,),
        "b_dec": (24,),
        "activation_function.threshold": (32,),
    }
    torch.testing.assert_close(stored["W_dec"].norm(dim=1), torch.ones(32))


@pytest.mark.parametrize("activation", ["batchtopk", "jumprelu"])
def test_a_causal_crosscoder_explains_all_of_its_sites(trained: Any, activation: str) -> None:
    card, out = trained(recipe("crosscoder", activation=activation, k=10))
    found = card["dictionaries"]["crosscoder"]
    assert min(found["explained_variance"].values()) > 0.35
    assert found["l0"] == pytest.approx(10, abs=3)
    release = open_release(out)
    assert (release.kind, release.features) == ("crosscoder", 96)
    assert layers_of(release, "basis") == [1, 2, 3]
    reads = [[str(site) for site in d.reads] for d in release.dictionaries]
    assert reads == [["resid_pre 1"], ["resid_pre 2"], ["resid_pre 3"]]
    assert [len(d.writes) for d in release.dictionaries] == [3, 2, 1]
    assert json.loads((out / "cfg.json").read_text())["sites"] == [
        "blocks.1.hook_resid_pre",
        "blocks.2.hook_resid_pre",
        "blocks.2.hook_resid_post",
    ]


@pytest.mark.parametrize("activation", ["batchtopk", "topk", "jumprelu"])
def test_an_acausal_crosscoder_explains_all_of_its_sites(trained: Any, activation: str) -> None:
    card, out = trained(recipe("crosscoder", causal=False, activation=activation, k=10, d_sae=64))
    found = card["dictionaries"]["crosscoder"]
    assert min(found["explained_variance"].values()) > 0.35
    (only,) = open_release(out).dictionaries
    assert len(only.reads) == len(only.writes) == 3
    assert only.activation.kind == ("topk" if activation == "topk" else "jumprelu")


def test_what_a_causal_feature_may_not_write_is_exactly_zero(
    trained: Any, model: LoadedModel
) -> None:
    _, out = trained(recipe("crosscoder", epochs=0.5))
    fit = {"d_model": 24, "dtype": torch.float32, "device": torch.device("cpu")}
    found = load_crosscoder(open_release(out), **fit)
    from headattr.basis.crosscoder import CrosscoderAt

    for index, layer in enumerate((1, 2, 3)):
        rows = CrosscoderAt(found, Site("resid_pre", layer)).directions[:]
        assert bool((rows[: 32 * (index + 1)] != 0).any(1).all())
        assert not bool(rows[32 * (index + 1) :].any())


# Saved is what was trained ------------------------------------------------------------------------


def blocks(
    kind: str, causal: bool = True, sites: int = 3
) -> tuple[BlockCoder, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    xs = tuple(torch.randn(40, 8, generator=generator) * (i + 1) for i in range(sites))
    every = tuple(range(sites))
    groups = [Group((s,), every[s:], 10) for s in every] if causal else [Group(every, every, 30)]
    scales = tuple(8**0.5 / float(x.norm(dim=1).mean()) for x in xs)
    found = BlockCoder(
        groups, Moments(scales, tuple(x.mean(0) for x in xs)), Sparsity(kind, 4, 1.0, 1.0), 0
    )
    found.prepare(xs)
    adam = torch.optim.Adam(found.parameters(), 1e-2)
    for _ in range(50):
        found(xs, torch.zeros(30).bool(), 1.0).loss.backward()
        adam.step()
        adam.zero_grad()
    if kind == "batchtopk":
        found.calibrate([xs], len(xs[0]))
    return found, xs


@pytest.mark.parametrize(
    ("kind", "causal"),
    [("batchtopk", True), ("jumprelu", True), ("batchtopk", False), ("topk", False)],
)
def test_the_saved_form_chooses_and_writes_as_the_trained_one_at_its_thresholds(
    kind: str, causal: bool
) -> None:
    trained, xs = blocks(kind, causal)
    tensors, activation = trained.saved()
    with torch.no_grad():
        norms, scaled = trained.norms(), trained.scaled(xs)
        values = trained.values(scaled, norms)
        if kind == "topk":
            kept = values >= values.topk(4, 1).values[:, -1:]
        else:
            kept = values > trained._limit()
        chosen = values.relu() * kept
        made = trained.decode(chosen / norms)
    unit = sum(1 / scale for scale in trained.scales) / 3
    groups = [group.features for group in trained.groups]
    total = [torch.zeros_like(x) for x in xs]
    for tensor, group, expected in zip(
        tensors, trained.groups, chosen.split(groups, 1), strict=True
    ):
        pre = sum(xs[s] @ W.T for s, W in zip(group.reads, tensor.W_enc, strict=True))
        pre = pre + tensor.b_enc
        if activation.kind == "topk":
            acts = pre.relu() * (pre >= pre.topk(4, 1).values[:, -1:])
        else:
            acts = pre.relu() * (pre > tensor.threshold)
        torch.testing.assert_close(acts, expected * unit)
        for s, W, b in zip(group.writes, tensor.W_dec, tensor.b_dec, strict=True):
            total[s] += acts @ W + (0 if b is None else b)
    for s, x in enumerate(total):
        torch.testing.assert_close(x, made[s] / trained.scales[s])


def test_a_crosscoder_is_read_back_to_the_last_bit(tmp_path: Path) -> None:
    trained, xs = blocks("batchtopk")
    tensors, activation = trained.saved()
    hooks = tuple(f"blocks.{layer}.hook_resid_pre" for layer in (1, 2, 4))
    config = CrosscoderConfig("tiny", hooks, True, 8, (10, 10, 10), activation, False, "text")
    write_crosscoder(tmp_path / "cc", config, tensors)
    release = open_release(tmp_path / "cc")
    for x, kept, d in zip(xs, tensors, release.dictionaries, strict=True):
        found = d.read()[0]
        for name in Tensors._fields:
            one, other = getattr(found, name), getattr(kept, name)
            parts = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
            for left, right in parts:
                assert left is right is None or left is right or torch.equal(left, right)
        memory = dataclasses.replace(d, read=lambda kept=kept: (kept, ""))
        first, second = coder(d).encode([x]), coder(memory).encode([x])
        assert torch.equal(first.ids, second.ids)
        assert torch.equal(first.acts, second.acts)
    assert [d.prepend_bos for d in release.dictionaries] == [False] * 3
    assert release.dictionaries[1].trained_on == "text"


def test_a_transcoder_is_scored_as_it_was_written(trained: Any, model: LoadedModel) -> None:
    _, out = trained(recipe("transcoder", layers=[1], epochs=0.5))
    (x,) = vectors(model, Site("mlp_in", 1))
    stored = load_file(out / "layer_1.safetensors")
    pre = x @ stored["W_enc"].T + stored["b_enc"]
    acts = pre * (pre > stored["activation_function.threshold"])
    found = dense(coder(circuit_tracer.read_release(out).dictionaries[0]).encode([x]), 32)
    torch.testing.assert_close(found, acts, rtol=0, atol=0)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "newer version": ({"version": 2}, "version 2"),
    "no version": ({"version": None}, "version is None"),
    "groups": ({"features": [10, 10]}, "2 groups; expected 3"),
    "order": ({"sites": [f"blocks.{i}.hook_resid_pre" for i in (2, 1, 4)]}, "ascending"),
    "activation": ({"activation": {"kind": "topk", "k": None}}, "activation is"),
    "kind": ({"activation": {"kind": "softmax", "k": None}}, "softmax"),
    "causal": ({"causal": "yes"}, "causal is 'yes'"),
    "width": ({"d_model": 9}, r"0\.W_dec\.0 is \(10, 8\); expected \(10, 9\)"),
    "threshold": ({"activation": {"kind": "relu", "k": None}}, "no such tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_crosscoder_that_cannot_be_is_refused_by_key(tmp_path: Path, name: str) -> None:
    changes, message = BROKEN[name]
    folder = tmp_path / "cc"
    tensors, activation = blocks("batchtopk")[0].saved()
    hooks = tuple(f"blocks.{layer}.hook_resid_pre" for layer in (1, 2, 4))
    write_crosscoder(
        folder, CrosscoderConfig("tiny", hooks, True, 8, (10,) * 3, activation), tensors
    )
    cfg = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps({**cfg, **changes}))
    with pytest.raises(DictionaryError, match=message):
        open_release(folder)


def test_a_crosscoder_without_a_tensor_or_cut_short_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cc"
    tensors, activation = blocks("topk", causal=False)[0].saved()
    hooks = tuple(f"blocks.{layer}.hook_resid_pre" for layer in (1, 2, 4))
    write_crosscoder(folder, CrosscoderConfig("tiny", hooks, False, 8, (30,), activation), tensors)
    path = folder / "weights.safetensors"
    whole = {name: part.clone() for name, part in load_file(path).items()}
    save_file({name: part for name, part in whole.items() if name != "b_dec.1"}, path)
    with pytest.raises(DictionaryError, match=r"b_dec\.1 is missing"):
        open_release(folder)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DictionaryError, match=r"weights\.safetensors"):
        open_release(folder)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_hook_name_leads_back_to_its_site(layer: int) -> None:
    kinds = ("resid_pre", "z", "attn_out", "resid_mid", "mlp_normed", "mlp_in", "mlp_out")
    for kind in kinds if layer < 3 else kinds[:1]:
        assert site_of(hook_name_of(Site(kind, layer), 3)) == Site(kind, layer)  # type: ignore[arg-type]


# Seeds and stops ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_weights_and_another_others(trained: Any, kind: str) -> None:
    outs = [
        trained(recipe(kind, epochs=0.3, seed=seed), name)[1]
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert same(outs[0], outs[1])
    assert not same(outs[0], outs[2])


class Killed(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["batchtopk", "jumprelu"])
def test_a_run_that_was_killed_ends_as_one_that_was_not(
    trained: Any, monkeypatch: pytest.MonkeyPatch, kind: str, activation: str
) -> None:
    made = recipe(kind, epochs=1.0, checkpoint_every=7, activation=activation, dead_after=300)
    _, whole = trained(made, "whole")
    monkeypatch.setattr("headattr.training.loop._REPORT_SECONDS", -1.0)

    def kill(said: str) -> None:
        if ": step 17 " in said:
            raise Killed

    with pytest.raises(Killed):
        trained(made, "stopped", say=kill)
    assert not (whole.parent / "stopped").exists()
    assert list((whole.parent / "stopped.part").glob("checkpoint-*.safetensors"))
    heard: list[str] = []
    _, out = trained(made, "stopped", say=heard.append)
    assert "the same command goes on" in heard[0]
    assert ": step 15 of 47," in heard[1]
    assert same(whole, out)
    assert not (whole.parent / "stopped.part").exists()


def test_an_interrupt_leaves_a_checkpoint_and_nothing_half_written(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe("crosscoder", epochs=1.0, checkpoint_every=1000)
    _, whole = trained(made, "whole")
    monkeypatch.setattr("headattr.training.loop._REPORT_SECONDS", -1.0)

    def interrupt(said: str) -> None:
        if ": step 17 " in said:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trained(made, "stopped", say=interrupt)
    part = whole.parent / "stopped.part"
    assert [path.name for path in part.iterdir()] == ["checkpoint-crosscoder.safetensors"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not (whole.parent / "stopped").exists()
    assert same(whole, trained(made, "stopped")[1])


def test_a_checkpoint_of_another_recipe_is_refused(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headattr.training.loop._REPORT_SECONDS", -1.0)

    def kill(said: str) -> None:
        if ": step 2 " in said:
            raise Killed

    with pytest.raises(Killed):
        trained(recipe("sae", checkpoint_every=1), say=kill)
    with pytest.raises(UsageError, match="another recipe"):
        trained(recipe("sae", checkpoint_every=1, learning_rate=1e-2))


def test_a_complete_result_is_left_and_another_is_not_written_over(
    trained: Any, base: Path
) -> None:
    made = recipe("sae", epochs=0.3)
    first, out = trained(made)
    before = (out / "card.json").stat().st_mtime_ns
    heard: list[str] = []
    second, _ = trained(made, say=heard.append)
    assert first == second
    assert "nothing to do" in heard[0]
    assert (out / "card.json").stat().st_mtime_ns == before
    with pytest.raises(UsageError, match=r"another recipe, .* \(epochs 0\.3, here 0\.4\)"):
        trained(recipe("sae", epochs=0.4))
    lines = (base / "tokens.jsonl").read_text().splitlines(keepends=True)
    (base / "reversed.jsonl").write_text("".join(lines[::-1]))
    with pytest.raises(UsageError, match="the same numbers, of another model or other texts"):
        trained(recipe("sae", epochs=0.3, texts=["reversed.jsonl"]))
    assert (out / "card.json").stat().st_mtime_ns == before
    (out / "card.json").unlink()
    with pytest.raises(UsageError, match=r"without the card\.json of `headattr train`"):
        trained(made)


def test_transcoders_that_are_finished_are_not_trained_again(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe("transcoder", epochs=0.5)
    _, whole = trained(made, "whole")
    monkeypatch.setattr("headattr.training.loop._REPORT_SECONDS", -1.0)

    def kill(said: str) -> None:
        if "layer_2: step 2 " in said:
            raise Killed

    with pytest.raises(Killed):
        trained(made, "stopped", say=kill)
    heard: list[str] = []
    _, out = trained(made, "stopped", say=heard.append)
    assert not any("layer_0" in said for said in heard)
    assert same(whole, out)


# Harvest ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_harvest_in_files_gives_the_weights_of_one_in_memory(trained: Any, kind: str) -> None:
    _, memory = trained(recipe(kind, epochs=0.5), "memory")
    _, files = trained(recipe(kind, epochs=0.5, memory_gb=0.0), "files")
    assert same(memory, files)


def test_transcoders_harvested_layer_by_layer_are_the_same(trained: Any) -> None:
    _, together = trained(recipe("transcoder", epochs=0.5), "together")
    few = recipe("transcoder", epochs=0.5, memory_gb=0.0, disk_gb=0.0013)
    _, apart = trained(few, "apart")
    assert same(together, apart)


def test_a_harvest_that_no_disk_holds_is_refused_with_its_size(trained: Any) -> None:
    with pytest.raises(UsageError, match="disk_gb"):
        trained(recipe("crosscoder", memory_gb=0.0, disk_gb=0.001))


def test_a_complete_harvest_in_files_is_not_repeated(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headattr.training.loop._REPORT_SECONDS", -1.0)
    made = recipe("sae", epochs=0.5, memory_gb=0.0)

    def kill(said: str) -> None:
        if "step 2 " in said:
            raise Killed

    with pytest.raises(Killed):
        trained(made, say=kill)
    monkeypatch.setattr("headattr.training.harvest._fill", None)  # a second one would fail
    _, out = trained(made)
    assert same(out, out)


def test_a_harvest_that_fails_leaves_no_file(
    model: LoadedModel, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headattr.training.harvest._REPORT_SECONDS", -1.0)

    def kill(said: str) -> None:
        if said.startswith("harvest: "):
            raise Killed

    made = recipe("sae", memory_gb=0.0)
    with pytest.raises(Killed):
        train_dictionaries(made, tmp_path / "out", base=base, model=model, say=kill)
    assert not (tmp_path / "out.part").exists()


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_activations_kept_in_two_bytes_train_nearly_as_well(trained: Any, storage: str) -> None:
    card, _ = trained(recipe("sae", storage=storage))
    (found,) = card["dictionaries"].values()
    assert found["explained_variance"]["resid_pre 1"] > 0.4


def harvested(model: LoadedModel, base: Path, **changes: Any) -> harvesting.Activations:
    made = recipe("sae", **changes)
    windows = make_windows(made, model, base).train
    counted = counted_positions(windows, made, model)
    wanted = harvesting.Wanted((Site("resid_pre", 1),), "float32", made.norm_limit, 1e9)
    return harvesting.harvest(model, windows, counted, wanted, base, lambda _: None)


def test_the_first_position_is_left_out_or_kept_as_told(model: LoadedModel, base: Path) -> None:
    without = harvested(model, base)
    assert not bool(without.counted[:, 0].any())
    assert len(without.values[0]) == 400 * 15
    assert len(harvested(model, base, leave_out_first=False).values[0]) == 400 * 16


def test_outlying_norms_are_left_out_as_told(model: LoadedModel, base: Path) -> None:
    found = harvested(model, base, norm_limit=1.05)
    (rows,) = found.values
    kept = found.rows_for([Site("resid_pre", 1)])
    assert 0 < len(kept) < len(rows)
    norms = rows.norm(dim=1)
    assert float(norms[kept.kept].max()) <= found.limits[0]
    assert len(kept) == int((norms <= found.limits[0]).sum())
    everything = harvested(model, base, norm_limit=1e6)
    assert len(everything.rows_for([Site("resid_pre", 1)])) == len(rows)


def with_tokenizer(bos: str | None = None) -> LoadedModel:
    tokenizer = tiny.byte_tokenizer(bos=bos)
    return load_model(tiny.gpt2(vocab_size=tiny.BYTES), tokenizer=tokenizer)


TEXT = "The committee on rivers met at noon; the committee on roads met at one. " * 200


def test_special_tokens_are_left_out_as_told(tmp_path: Path) -> None:
    model = with_tokenizer("<bos>")
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"texts": ["text.txt"], "prepend_bos": True, "leave_out_first": False}
    made = recipe("sae", **options)
    windows = make_windows(made, model, tmp_path).train
    assert bool((windows[:, 0] == 256).all())
    assert not bool(counted_positions(windows, made, model)[:, 0].any())
    kept = recipe("sae", **options, leave_out_special=False)
    assert bool(counted_positions(windows, kept, model).all())


def test_bos_is_refused_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(Exception, match="no BOS token"):
        make_windows(
            recipe("sae", texts=["text.txt"], prepend_bos=True), with_tokenizer(), tmp_path
        )


def test_texts_come_from_files_folders_and_the_library_of_python(tmp_path: Path) -> None:
    model = with_tokenizer()
    folder = tmp_path / "some" / "deeper"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT)
    (tmp_path / "some" / "b.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    made = make_windows(recipe("sae", texts=["some"]), model, tmp_path)
    assert (len(made.train), len(made.held_out)) == (400, 40)
    python = list(islice(documents(["stdlib"], tmp_path), 3))
    assert all(isinstance(text, str) and len(text) > 30 for text in python)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["missing.txt"], "no such file"),
        (["empty"], "no .txt or .jsonl"),
        (["bad.jsonl"], "line 2"),
        (["few.txt"], "the recipe asks for 440"),
    ],
)
def test_texts_that_cannot_be_used_are_refused(
    tmp_path: Path, texts: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\nno\n')
    (tmp_path / "few.txt").write_text("few")
    with pytest.raises(UsageError, match=message):
        make_windows(recipe("sae", texts=texts), with_tokenizer(), tmp_path)


# Recipes ------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown key": ("sae", {"learning_rat": 1e-3}, "unknown key learning_rat"),
    "type": ("sae", {"tokens": "many"}, "tokens is 'many'; expected an integer"),
    "fraction": ("sae", {"k": 2.5}, "k is 2.5; expected an integer"),
    "truth": ("sae", {"prepend_bos": 1}, "expected true or false"),
    "activation": ("sae", {"activation": "relu"}, "activation is 'relu'"),
    "site": ("sae", {"site": "resid 3"}, "site is 'resid 3'"),
    "k": ("sae", {"k": 33}, "k is 33; expected at most the 32"),
    "negative": ("sae", {"epochs": 0}, "epochs is 0"),
    "decay": ("sae", {"decay": 1.5}, "decay is 1.5"),
    "no texts": ("sae", {"texts": []}, "texts is empty"),
    "tokens": ("sae", {"tokens": 10}, "a window at least"),
    "other kind": ("sae", {"layers": [1]}, "unknown key layers"),
    "layers": ("transcoder", {"layers": "some"}, "layers is 'some'"),
    "layers twice": ("transcoder", {"layers": [1, 1]}, "ascending"),
    "topk set": ("transcoder", {"activation": "topk"}, "activation is topk"),
    "topk causal": ("crosscoder", {"activation": "topk"}, "topk on a causal crosscoder"),
    "sites": ("crosscoder", {"sites": [2, 1]}, "ascending"),
    "numbers": ("crosscoder", {"sites": ["1"]}, "sites is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_recipe_that_is_off_is_refused_by_key(name: str) -> None:
    kind, changes, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        recipe(kind, **changes)


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('model = "demo"\n')
    with pytest.raises(UsageError, match=r"recipe\.toml: context_size, d_sae, .* is missing"):
        read_recipe(path, "sae")
    path.write_text("model = \n")
    with pytest.raises(UsageError, match="not TOML"):
        read_recipe(path, "sae")


def test_a_site_that_the_model_does_not_have_is_refused(trained: Any) -> None:
    with pytest.raises(DictionaryError, match="no site resid_pre 9"):
        trained(recipe("sae", site="blocks.9.hook_resid_pre"))


ROOT = Path(__file__).parent.parent
RECIPES = sorted(p for p in ROOT.glob("dictionaries/*/*.toml") if p.name != "spec.toml")


def kind_of(path: Path) -> str:
    return {"crosscoder": "crosscoder", "transcoders": "transcoder"}.get(
        path.stem.partition("_")[0], "sae"
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_recipes_that_come_with_headattr_are_read(path: Path) -> None:
    made = read_recipe(path, kind_of(path))
    assert made.texts
    if isinstance(made, SaeRecipe):
        assert str(made.place).replace(" ", "_") == path.stem


def test_every_recipe_that_is_named_is_there() -> None:
    """By its path, in what a reader may copy."""
    files = [ROOT / "README.md", ROOT / "Makefile", ROOT / "headattr" / "commands.py"]
    files += sorted(ROOT.glob("dictionaries/**/*.md"))
    named = {
        name
        for file in files
        for name in re.findall(r"dictionaries/[\w./-]+\.toml", file.read_text())
    }
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


STAND_INS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: tiny.gpt2(n_layer=12),
    "gemma3-270m": lambda: tiny.gemma3(num_hidden_layers=18),
    "llama-3.2-1b": lambda: tiny.llama(num_hidden_layers=16),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_the_recipes_of_a_model_meet_at_its_middle_layer(
    name: str, base: Path, tmp_path: Path
) -> None:
    """On a small random model of the same family and depth."""
    folder, hf = ROOT / "dictionaries" / name, STAND_INS[name]()
    loaded = load_model(hf)
    small = {"tokens": 512, "held_out_tokens": 64, "epochs": 0.5, "d_sae": 24, "k": 5}
    small |= {"context_size": 16, "batch_size": 64, "labels": False, "prepend_bos": False}
    middle = len(loaded.layers) // 2
    for path in sorted(folder.glob("*.toml")):
        made = replace(read_recipe(path, kind_of(path)), texts=("tokens.jsonl",), **small)
        out = tmp_path / path.stem
        train_dictionaries(made, out, base=base, model=loaded)
        assert middle in load_whole(open_release(out), loaded).views
    assert len(list(tmp_path.iterdir())) == 3


def test_the_rate_warms_up_holds_and_falls_to_nothing() -> None:
    schedule = Schedule(100, 10, 30, 1.0)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10:71] == [1.0] * 61
    assert rates[99] == pytest.approx(1 / 30)


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    model = tiny.gpt2(vocab_size=tiny.BYTES)
    model.save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def written(place: Path, kind: str, **changes: Any) -> Path:
    keys = {**COMMON, **SITES[kind], "model": "./model", "texts": ["text.txt"], "epochs": 0.5}
    path = place / f"{kind}.toml"
    keys |= changes
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_trains_labels_and_prints_the_card(
    place: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path, out = written(place, kind, labels=True), place / "results" / kind
    assert main(["train", kind, str(path), "--out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    card = json.loads(said.out)
    assert (card["kind"], card["out"]) == (kind, str(out))
    assert "explained variance" in said.err
    assert json.loads((out / "card.json").read_text())["recipe"]["k"] == 6
    lines = [json.loads(line) for line in (out / "labels.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == list(range(card["features"]))
    assert sum(line["label"] is not None for line in lines) > len(lines) / 4
    assert str(place) not in (out / "card.json").read_text()
    windows = make_windows(read_recipe(path, kind), load_model(str(place / "model")), place)
    kept = [
        json.loads(line)["tokens"] for line in (out / "held_out.jsonl").read_text().splitlines()
    ]
    assert kept == windows.held_out.tolist()


def test_labels_quote_where_the_saved_dictionary_fires(place: Path) -> None:
    path, out = written(place, "sae", labels=True), place / "out"
    assert main(["train", "sae", str(path), "--out", str(out)]) == 0
    model = load_model(str(place / "model"))
    windows = make_windows(read_recipe(path, "sae"), model, place).train
    release = open_release(out)
    assert release.dictionaries[0].labels == str(out / "labels.jsonl")
    found = harvesting.capture(
        model, windows, torch.ones_like(windows).bool(), layers=[], sites=[1]
    )
    x = torch.cat([one.resid[1][1:] for one in found])
    strongest = dense(coder(release.dictionaries[0]).encode([x]), 32).amax(0)
    lines = [json.loads(line) for line in (out / "labels.jsonl").read_text().splitlines()]
    told = torch.tensor([line["max_activation"] for line in lines])
    torch.testing.assert_close(told, strongest, rtol=5e-3, atol=1e-5)


def test_a_recipe_that_is_off_is_one_line_and_exit_code_2(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(place, "sae", learning_rat=1)
    assert main(["train", "sae", str(path), "--out", str(place / "out")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "sae.toml: unknown key learning_rat" in said
    assert main(["train", "sae", str(written(place, "sae"))]) == 2
    assert "--out" in capsys.readouterr().err


def test_too_few_positions_for_a_batch_are_refused(trained: Any) -> None:
    with pytest.raises(UsageError, match="expected a batch of 9000"):
        trained(recipe("sae", batch_size=9000))
