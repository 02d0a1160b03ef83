"""A dictionary is judged by numbers that can be had another way: by hand, or from a stored run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_releases as releases
import torch

import headattr
from headattr.basis.dictionary import Release
from headattr.basis.report import stream_of
from headattr.basis.whole import load_whole
from headattr.cli import main
from headattr.edges import HeadId, layer_ranges, parse_layers
from headattr.errors import UsageError
from headattr.evaluate import Chosen, judge
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.load import LoadedModel, load_model
from headattr.model.sites import Site
from headattr.model.tokens import Prompt
from headattr.passes import counted_of, first_tokens
from headattr.query import head_shares

HERE = Site("resid_pre", 1)
TOKENS = tiny.prompts(13, 6, 17)


def prompts_of(tokens: list[list[int]]) -> list[Prompt]:
    return [
        Prompt(i, tuple(row), tuple(map(str, row)), None, {}, False) for i, row in enumerate(tokens)
    ]


def every_head(model: LoadedModel, **options: Any) -> Chosen:
    heads = [HeadId(i, h) for i in range(len(model.layers)) for h in range(model.n_heads)]
    return Chosen(tuple(heads), **options)


def judged(release: Release, model: LoadedModel, tokens: Any = TOKENS, **options: Any) -> Any:
    whole = load_whole(release, model)
    return judge(model, whole, prompts_of(tokens), every_head(model, **options))


def the_same(found: Any, wanted: Any) -> None:
    """Equal words, close numbers."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            the_same(one, other)
    elif isinstance(wanted, str) or wanted is None:
        assert found == wanted
    else:
        torch.testing.assert_close(found, wanted)


def plain(**changes: Any) -> LoadedModel:
    """A model whose queries, keys and values are its stream and nothing else: RMSNorm, no bias."""
    return load_model(tiny.llama(attention_bias=False, **changes))


def test_an_exact_dictionary_explains_everything() -> None:
    found = judged(releases.exact(HERE), plain())
    assert found["explained_variance"] == {str(HERE): 1}
    assert found["loss"][str(HERE)]["spliced"] == found["loss_clean"]
    assert found["loss"][str(HERE)]["recovered"] == 1
    assert [layer["layer"] for layer in found["layers"]] == [1]
    for row in (*found["layers"], *found["heads"]):
        shares = [row[k] for k in ("feature_share", "feature_share_centred", "output_share")]
        torch.testing.assert_close(torch.tensor(shares), torch.ones(3))


def test_a_dictionary_that_is_never_active_explains_nothing() -> None:
    found = judged(releases.nothing(HERE), plain())
    assert found["explained_variance"][str(HERE)] <= 0
    assert (found["l0"], found["dead"]) == (0, 1)
    for row in (*found["layers"], *found["heads"]):
        assert (row["feature_share"], row["feature_share_centred"]) == (0, 0)
        assert row["output_share"] == 0


# One row ------------------------------------------------------------------------------------------


def mean(numbers: Any) -> float:
    kept = list(numbers)
    return sum(kept) / len(kept)


@pytest.mark.parametrize("kind", ["crosscoder", "acausal", "transcoders"])
def test_a_row_stands_for_several_sites_as_the_footer_says(kind: str) -> None:
    found = judged(releases.RESIDUAL[kind](), load_model(tiny.llama()))
    row, loss = found["row"], found["loss"]
    assert row["sites"] == list(found["explained_variance"])
    assert row["layers"] == [layer["layer"] for layer in found["layers"]]
    assert row["explained_variance"] == mean(found["explained_variance"].values())
    assert row["l0"] == pytest.approx(found["l0"])
    assert row["l0"] == pytest.approx(sum(group["l0"] for group in found["groups"]))
    parts = [loss["together"]] if kind == "transcoders" else list(loss.values())
    assert row["recovered"] == mean(p["recovered"] for p in parts if p["recovered"] is not None)
    assert row["output_share"] == mean(layer["output_share"] for layer in found["layers"])


def test_at_one_layer_a_crosscoder_is_its_site_and_the_features_that_write_it() -> None:
    model, release = load_model(tiny.llama()), releases.RESIDUAL["crosscoder"]()
    whole, rows = load_whole(release, model), prompts_of(TOKENS)
    source = whole.source
    everything = judge(model, whole, rows, every_head(model))
    for layer in whole.views:
        heads = tuple(HeadId(layer, head) for head in range(model.n_heads))
        found = judge(model, whole, rows, Chosen(heads, layers=(layer,)))
        site, row = str(Site("resid_pre", layer)), found["row"]
        writing = [Site("resid_pre", layer) in c.dictionary.writes for c in source.coders]
        groups = [g for g, here in zip(found["groups"], writing, strict=True) if here]
        assert (row["sites"], row["layers"]) == ([site], [layer])
        assert row["l0"] == sum(group["l0"] for group in groups)
        assert row["explained_variance"] == found["explained_variance"][site]
        assert row["recovered"] == found["loss"][site]["recovered"]
        assert found["loss"] == everything["loss"]
    assert len(groups) > 1


def test_at_one_layer_transcoders_are_still_the_whole_set() -> None:
    model, release = load_model(tiny.llama()), releases.RESIDUAL["transcoders"]()
    whole, rows = load_whole(release, model), prompts_of(TOKENS)
    every = judge(model, whole, rows, every_head(model))["row"]
    layer = max(whole.views)
    one = judge(model, whole, rows, every_head(model, layers=(layer,)))["row"]
    for key in ("sites", "l0", "explained_variance", "recovered"):
        assert one[key] == every[key]


@pytest.mark.parametrize("text", ["0", "0-2", "1,3-5,7", "2,4"])
def test_layers_are_written_as_they_are_read(text: str) -> None:
    assert layer_ranges(parse_layers(text, 9)) == text


# Loss ---------------------------------------------------------------------------------------------


def loss_with(model: LoadedModel, changes: dict[Any, Callable[..., Any]], row: list[int]) -> float:
    """The summed loss of one prompt, modules changed by hooks of the test's own."""
    hooks = [module.register_forward_hook(hook) for module, hook in changes.items()]
    model.hf.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits = model.hf(torch.tensor([row]), use_cache=False).logits[0, :-1]
    finally:
        for hook in hooks:
            hook.remove()
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="none")
    return float(losses.double().sum())


def replaced(by: torch.Tensor, counted: torch.Tensor) -> Callable[..., Any]:
    def hook(module: Any, args: Any, output: Any) -> Any:
        found = output[0] if isinstance(output, tuple) else output
        new = torch.where(counted[:, None], by.to(found), found[0])[None]
        return (new, *output[1:]) if isinstance(output, tuple) else new

    return hook


def module_of(model: LoadedModel, site: Site) -> Any:
    """What gives a site, of a Llama."""
    if site.kind == "resid_pre":
        return model.layers[site.layer - 1]
    layer: Any = model.layers[site.layer]
    return layer.mlp if site.kind == "mlp_out" else layer.self_attn


CASES: dict[str, Callable[[], Release]] = {
    **releases.RESIDUAL,
    "last": lambda: releases.sae(Site("resid_pre", 3)),
    "attention": lambda: releases.sae(Site("attn_out", 1)),
}


@pytest.mark.parametrize("kind", CASES)
def test_losses_are_those_of_a_model_changed_by_hand(kind: str) -> None:
    model, release = load_model(tiny.llama()), CASES[kind]()
    source = load_whole(release, model).source
    sites = sorted({*source.sites, *source.writes})
    found = capture(model, *pad(TOKENS), layers=[], sites=sites)
    kept = [one for one in found if isinstance(one, PromptCapture)]
    counted = [counted_of(source, one) for one in kept]
    made = [source.reconstruct(one, source.active(one)) for one in kept]
    predicted = sum(len(row) - 1 for row in TOKENS)
    answer = judged(release, model)
    sets = {str(site): [site] for site in source.writes}
    if release.kind == "transcoders":
        sets["together"] = list(source.writes)
    assert answer["loss"].keys() == sets.keys()
    clean = sum(loss_with(model, {}, row) for row in TOKENS) / predicted
    torch.testing.assert_close(answer["loss_clean"], clean, rtol=1e-6, atol=1e-6)
    for name, some in sets.items():
        spliced = ablated = 0.0
        for row, mask, vectors in zip(TOKENS, counted, made, strict=True):
            put = {site: vectors[site] for site in some}
            mean = {
                site: torch.cat(
                    [one.at(site)[m] for one, m in zip(kept, counted, strict=True)]
                ).mean(0, keepdim=True)
                for site in some
            }
            spliced += loss_with(
                model, {module_of(model, s): replaced(put[s], mask) for s in some}, row
            )
            ablated += loss_with(
                model,
                {module_of(model, s): replaced(mean[s].expand_as(put[s]), mask) for s in some},
                row,
            )
        wanted = {"spliced": spliced / predicted, "ablated": ablated / predicted}
        lost = ablated / predicted - clean
        # where the mean in its place costs next to nothing, a share of that says nothing
        wanted["recovered"] = None
        if lost > 0.01 * clean:
            wanted["recovered"] = (ablated - spliced) / predicted / lost
        torch.testing.assert_close(answer["loss"][name], wanted, rtol=1e-4, atol=1e-5)


def test_prompts_of_one_token_predict_nothing() -> None:
    found = judged(releases.sae(HERE), load_model(tiny.llama()), [[3], [4]])
    assert (found["loss_clean"], found["loss"], found["positions"]) == (None, {}, 0)


# Attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("kind", releases.RESIDUAL)
def test_shares_of_scores_are_those_of_a_stored_run(family: str, kind: str, tmp_path: Path) -> None:
    hf, release = tiny.MODELS[family](), releases.RESIDUAL[kind]()
    found = judged(release, load_model(hf))
    layers = [layer["layer"] for layer in found["layers"]]
    basis: Any = dict.fromkeys(layers, release)
    with headattr.attribute(hf, basis, TOKENS, tmp_path / "out", edges="all", topk=1) as store:
        wanted = head_shares(store)
    assert {HeadId(row["layer"], row["head"]) for row in found["heads"]} == wanted.keys()
    for row in found["heads"]:
        one = wanted[HeadId(row["layer"], row["head"])]
        for key in ("feature_share", "feature_share_centred"):
            torch.testing.assert_close(row[key], one[key], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_shares_of_outputs_are_as_written_down(family: str) -> None:
    """Every head's output rebuilt from the model's own pattern; features through the values by
    hand."""
    model, release = load_model(tiny.MODELS[family]()), releases.sae(HERE)
    source = load_whole(release, model).source
    weights = model.family.head_weights(model.hf, 1)
    whole, rest = torch.zeros(model.n_heads).double(), torch.zeros(model.n_heads).double()
    for one in capture(model, *pad(TOKENS), layers=[1], sites=[1], rows=None):
        assert isinstance(one, PromptCapture)
        kept = one.layers[1]
        x, made = kept.resid_pre.double(), source.components(one, source.active(one)).sparse_sum
        sigma, scale = weights.norm.sigma(x), weights.writes.output_scale(kept.attn_out).double()
        for head in range(model.n_heads):
            group = weights.kv_head(head)
            # the norm's gain and centring on a part, its scale of the whole
            gain = (made - made.mean(1, keepdim=True)) if weights.norm.kind == "layer" else made
            seen = (gain * weights.norm.gain.double() / sigma[:, None]) @ weights.W_V[
                group
            ].double()
            pattern, W = kept.pattern[head].double(), weights.writes.written[head].double()
            pattern = pattern.clone()
            pattern[:, 0] = pattern[0] = 0  # the first position swallows attention
            out, explained = (
                scale[:, None] * (pattern @ v @ W) for v in (kept.V[:, group].double(), seen)
            )
            whole[head] += out.square().sum()
            rest[head] += (out - explained).square().sum()
    found = judged(release, model)
    shares = torch.tensor([row["output_share"] for row in found["heads"]]).double()
    torch.testing.assert_close(shares, 1 - rest / whole, rtol=1e-4, atol=1e-5)
    (layer,) = found["layers"]
    torch.testing.assert_close(
        layer["output_share"], float(1 - rest.sum() / whole.sum()), rtol=1e-4, atol=1e-5
    )


def test_an_output_alone_is_not_judged_as_a_basis() -> None:
    found = judged(releases.sae(Site("attn_out", 1)), load_model(tiny.llama()))
    assert (found["layers"], found["heads"]) == ([], [])
    assert found["layers_without_basis"] == [0, 1, 2]
    assert found["explained_variance"].keys() == {"attn_out 1"}


# Batches, memory, prompts that fail ---------------------------------------------------------------


@pytest.mark.parametrize("kind", releases.RESIDUAL)
@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 2}, {"memory": "20kB"}])
def test_numbers_do_not_depend_on_batches_or_memory(kind: str, options: Any) -> None:
    model = load_model(tiny.llama(), dtype="float64")
    release = releases.RESIDUAL[kind]()
    whole, other = judged(release, model, batch_size=8), judged(release, model, **options)
    the_same(other, whole)


def test_a_prompt_that_cannot_run_is_left_out_of_every_number() -> None:
    model = load_model(tiny.llama())
    with torch.no_grad():
        model.hf.get_input_embeddings().weight[49] = 3e38
    good = [[t % 49 for t in row] for row in TOKENS]
    found = judged(releases.sae(HERE), model, [*good[:1], [3, 49, 4], *good[1:]])
    assert found.pop("failed").keys() == {"1"}
    wanted = judged(releases.sae(HERE), model, good)
    assert wanted.pop("failed") == {}
    the_same(found, wanted)


def test_positions_that_swallow_attention_are_named_by_the_deepest_stream() -> None:
    source = load_whole(releases.transcoders(), load_model(tiny.llama())).source
    assert stream_of(source) == Site("resid_pre", 3)


@pytest.mark.parametrize(("most", "kept"), [(None, 3), (100, 3), (19, 2), (18, 1), (1, 1)])
def test_the_first_tokens_are_whole_prompts(most: int | None, kept: int) -> None:
    assert len(first_tokens(prompts_of(TOKENS), most)) == kept


@pytest.mark.parametrize(
    ("text", "layers"), [("all", [0, 1, 2, 3]), ("1", [1]), ("3,0-1", [0, 1, 3]), ("1-2,2", [1, 2])]
)
def test_layers_are_a_list_of_ranges(text: str, layers: list[int]) -> None:
    assert parse_layers(text, 4) == layers


@pytest.mark.parametrize("text", ["", "x", "4", "2-1", "1-4", "1,,2", "-1"])
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--layers"):
        parse_layers(text, 4)


# The commands -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    tiny.llama(vocab_size=tiny.BYTES).save_pretrained(folder / "model")
    tiny.byte_tokenizer(bos="<s>").save_pretrained(folder / "model")
    for layer in (1, 2):
        tiny.sae(layer=layer, seed=layer).save_model(folder / f"sae{layer}")
    (folder / "texts.txt").write_text("the cat sat on the mat\n\nabcabc")
    return folder


def command(place: Path, *words: str) -> list[str]:
    texts = ["--model", str(place / "model"), "--texts", str(place / "texts.txt")]
    return [*words, *texts, "--no-progress"]


def said(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    capsys.readouterr()
    assert main(argv) == 0
    return capsys.readouterr().out


def test_evaluate_prints_one_row_a_dictionary(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = command(place, "evaluate", str(place / "sae1"), str(place / "sae2"))
    answer = json.loads(said(capsys, [*argv, "--json"]))
    assert [one["name"] for one in answer["dictionaries"]] == ["sae1", "sae2"]
    assert answer["set_aside"] == [{"prompt": 1, "line": 2, "reason": "empty"}]
    assert (answer["prompts"], answer["tokens"]) == (2, 28)
    first, second = answer["dictionaries"]
    assert [layer["layer"] for layer in first["layers"]] == [1]
    assert second["loss"].keys() == second["explained_variance"].keys() == {"resid_pre 2"}
    lines = said(capsys, argv).splitlines()
    rows = [line for line in lines if line.split()[0] in ("dictionary", "sae1", "sae2")]
    assert [len(row.split()) for row in rows] == [11, 12, 12]
    assert rows[1].split()[:5] == ["sae1", "resid_pre", "1", "1", f"{first['l0']:.1f}"]
    assert rows[2].split()[:4] == ["sae2", "resid_pre", "2", "2"]
    assert "not comparable" in "".join(lines)


def test_evaluate_judges_the_heads_that_are_asked_for(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = command(place, "evaluate", str(place / "sae1"), "--json", "--max-tokens", "22")
    found = json.loads(said(capsys, [*argv, "--heads", "L1H2,L2H0"]))
    assert (found["prompts"], found["left"]) == (1, 1)
    (one,) = found["dictionaries"]
    assert [(row["layer"], row["head"]) for row in one["heads"]] == [(1, 2)]
    assert one["layers_without_basis"] == [2]
    (none,) = json.loads(said(capsys, [*argv, "--layers", "0,2"]))["dictionaries"]
    assert (none["heads"], none["layers_without_basis"]) == ([], [0, 2])
    shown = said(capsys, [word for word in argv if word != "--json"] + ["--layers", "0,2"])
    assert "attention is not judged" in shown


def test_inspect_reads_files_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["dictionaries", "inspect", str(place / "sae1")]
    (found,) = json.loads(said(capsys, [*argv, "--json"]))
    (one,) = found["dictionaries"]
    assert (found["report"], one["hash"], found["features"]) == (None, None, 40)
    assert (one["format"], one["activation"]) == ("saelens", {"kind": "topk", "k": 6})
    assert (one["reads"], one["writes"]) == (["resid_pre 1"], ["resid_pre 1"])
    assert one["frame"] == ["b_dec is subtracted"]
    assert "topk k=6" in said(capsys, argv)
    (hashed,) = json.loads(said(capsys, [*argv, "--json", "--hash"]))
    assert len(hashed["dictionaries"][0]["hash"]) == 64


def test_inspect_with_texts_says_how_a_dictionary_fits(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = command(place, "dictionaries", "inspect", str(place / "sae1"))
    (found,) = json.loads(said(capsys, [*argv, "--json"]))
    assert found["report"]["l0"] <= 6
    assert "first 26 positions: L0" in said(capsys, argv)


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["evaluate", "SAE"], "--model"),
        (["evaluate", "SAE", "--model", "demo"], "--texts"),
        (["evaluate", "0=tokens", "--model", "demo", "--texts", "x.txt"], "no dictionary"),
        (["evaluate", "SAE", "--model", "demo", "--texts", "none.txt"], "none.txt"),
        (["evaluate", "SAE", "--max-tokens", "0"], "--max-tokens"),
        (["dictionaries", "inspect", "SAE", "--model", "demo"], "go together"),
        (["dictionaries", "inspect", "nowhere"], "nowhere"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], argv: list[str], what: str
) -> None:
    code = main([word.replace("SAE", str(place / "sae1")) for word in argv])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert what in err
    assert err.count("\n") == 1


def test_a_dictionary_of_another_width_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.sae(d_in=16).save_model(tmp_path / "narrow")
    assert main(command(place, "evaluate", str(tmp_path / "narrow"))) == 1
    assert "width 16" in capsys.readouterr().err
