"""How a dictionary fits is measured as written down; a wrong scaling shows before any result."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_releases as releases
import torch

import headattr
from headattr.basis.active import ActiveFeatures
from headattr.basis.dictionary import Activation, Frame, Release, Tensors
from headattr.basis.report import SiteSums, Tally
from headattr.basis.whole import load_whole, written_rows
from headattr.config import RunConfig
from headattr.inputs import inputs_from_memory
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.load import LoadedModel, load_model
from headattr.model.sites import Site
from headattr.model.tokens import Prompt
from headattr.passes import counted_of
from headattr.plan import make_run
from headattr.sample import PROMPTS, TOKENS, sample_reports
from headattr.summary import render_run, run
from headattr.viewers.dictionaries import render_report

HERE = Site("resid_pre", 1)


def prompts_of(tokens: list[list[int]]) -> list[Prompt]:
    return [
        Prompt(i, tuple(row), tuple(map(str, row)), None, {}, False) for i, row in enumerate(tokens)
    ]


def captured(model: LoadedModel, tokens: list[list[int]], sites: Any) -> list[PromptCapture]:
    found = capture(model, *pad(tokens), layers=[], sites=sorted(sites))
    return [one for one in found if isinstance(one, PromptCapture)]


def tallied(release: Release, model: LoadedModel, tokens: list[list[int]]) -> Tally:
    source = load_whole(release, model).source
    tally = Tally(source)
    for prompt in captured(model, tokens, tally.needed):
        tally.add(prompt, source.active(prompt), counted_of(source, prompt))
    return tally


def dense(active: ActiveFeatures, features: int) -> torch.Tensor:
    out = torch.zeros(len(active.counts), features)
    out[active.positions, active.ids] = active.acts
    return out


@pytest.mark.parametrize(
    "site",
    [HERE, Site("resid_pre", 0), Site("resid_pre", 3), Site("attn_out", 1), Site("z", 2)],
)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_exact_dictionary_explains_all_of_its_site(site: Site, family: str) -> None:
    model = load_model(tiny.MODELS[family]())
    width = 40 if site.kind == "z" and family == "llama" else 24
    tally = tallied(releases.exact(site, width), model, tiny.prompts(9, 14))
    assert tally.report["explained_variance"] == {str(site): 1.0}
    assert 0 < tally.l0 <= width


def test_a_dictionary_that_is_never_active_explains_nothing() -> None:
    tally = tallied(releases.nothing(HERE), load_model(tiny.llama()), tiny.prompts(9, 14))
    found = tally.report["explained_variance"][str(HERE)]
    assert (tally.l0, tally.dead, tally.dense) == (0, 1, 0)
    assert found < 0  # it is not even the mean


@pytest.mark.parametrize("kind", releases.RESIDUAL)
def test_every_number_of_a_report_is_as_written_down(kind: str) -> None:
    model, tokens = load_model(tiny.gpt2()), tiny.prompts(9, 14, 5)
    release = releases.RESIDUAL[kind]()
    source = load_whole(release, model).source
    tally = tallied(release, model, tokens)
    found = captured(model, tokens, tally.needed)
    counted = [counted_of(source, one) for one in found]
    assert not any(mask[0] for mask in counted)
    acts = torch.cat(
        [
            dense(source.active(one), release.features)[mask]
            for one, mask in zip(found, counted, strict=True)
        ]
    )
    torch.testing.assert_close(tally.l0, float((acts != 0).sum(1).double().mean()))
    fired = (acts != 0).double().mean(0)
    assert tally.dead == float((fired == 0).double().mean())
    assert tally.dense == float((fired > 0.1).double().mean())
    assert sum(group["l0"] for group in tally.groups) == pytest.approx(
        tally.l0 if tally.groups else 0
    )
    for site, sums in tally.sites.items():
        x = torch.cat([one.at(site)[mask] for one, mask in zip(found, counted, strict=True)])
        made = torch.cat(
            [
                source.reconstruct(one, source.active(one))[site][mask]
                for one, mask in zip(found, counted, strict=True)
            ]
        )
        x, made = x.double(), made.double()
        wanted = 1 - (x - made).square().sum() / (x - x.mean(0)).square().sum()
        torch.testing.assert_close(sums.explained_variance, float(wanted))
        torch.testing.assert_close(sums.mean, x.mean(0))


@pytest.mark.parametrize("kind", releases.RESIDUAL)
def test_tallies_of_single_prompts_merge_to_that_of_all(kind: str) -> None:
    model, tokens = load_model(tiny.llama()), tiny.prompts(9, 14, 5)
    release = releases.RESIDUAL[kind]()
    whole, source = tallied(release, model, tokens), load_whole(release, model).source
    merged = Tally(source)
    for row in tokens:
        merged.merge(tallied(release, model, [row]))
    torch.testing.assert_close(merged.report, whole.report)
    assert torch.equal(merged.fired, whole.fired)


def test_positions_that_swallow_attention_are_left_out() -> None:
    model = load_model(tiny.llama())
    with torch.no_grad():
        model.hf.get_input_embeddings().weight[7] *= 1e4
    tally = tallied(releases.sae(HERE), model, [[3, 4, 7, 5, 6, 8, 9]])
    assert (tally.positions, tally.left_out) == (5, 2)


def test_a_site_that_does_not_vary_has_no_explained_variance() -> None:
    sums = SiteSums()
    assert sums.explained_variance is None
    sums.add(torch.full((5, 4), 3.7), torch.zeros(5, 4))
    assert sums.explained_variance is None


# Wrong scalings -----------------------------------------------------------------------------------


def of(tensors: Tensors, **fields: Any) -> Release:
    found = releases.dictionary(tensors, [HERE], [HERE], **fields)
    return Release("sae", "scaled", None, (found,))


def test_a_lost_fold_of_decoder_norms_is_below_zero() -> None:
    """Acts are multiplied by the norm of the decoder row, which is then written at norm 1."""
    model, tokens = load_model(tiny.llama()), tiny.prompts(12, 20)
    found = {}
    for by_norm in (True, False):
        tensors = Tensors(
            (releases.pairs() / 3,), None, (releases.pairs(size=3.0),), (None,), by_norm=by_norm
        )
        given = of(tensors, activation=Activation("topk", 48))
        report = tallied(given, model, tokens).report
        found[by_norm] = report["explained_variance"][str(HERE)]
    assert found[True] == pytest.approx(1)
    assert found[False] == pytest.approx(1)  # x / 3 times 3: reconstruction alone is blind to it
    unfolded = Tensors((releases.pairs(),), None, (releases.pairs(size=3.0),), (None,))
    report = tallied(of(unfolded), model, tokens).report
    assert report["explained_variance"][str(HERE)] < -1
    assert "scaling, or its site, is probably wrong" in render_report(report)[1]


def test_a_lost_activation_scale_is_below_zero() -> None:
    """Thresholds are in the units of training: in others no feature passes, and L0 says so."""
    model, tokens = load_model(tiny.llama()), tiny.prompts(12, 20)
    tensors = Tensors((releases.pairs(),), None, (releases.pairs(),), (None,), torch.tensor(40.0))
    found = {
        scale: tallied(
            of(tensors, activation=Activation("jumprelu"), frame=Frame(scale)), model, tokens
        ).report
        for scale in (1e4, 1.0)
    }
    assert found[1e4]["explained_variance"][str(HERE)] > 0.99
    assert (found[1.0]["l0"], found[1e4]["l0"] > 20) == (0, True)
    assert found[1.0]["explained_variance"][str(HERE)] < 0


def test_a_dictionary_of_another_layer_shows_in_its_report() -> None:
    """Features of one site at another: what is explained falls below zero."""
    model, tokens = load_model(tiny.llama()), tiny.prompts(12, 20)
    x = torch.cat([one.at(HERE) for one in captured(model, tokens, [HERE])])
    bias = x.mean(0) * 30
    wrong = Tensors((releases.pairs(),), None, (0.2 * releases.pairs(),), (bias,))
    assert tallied(of(wrong), model, tokens).report["explained_variance"][str(HERE)] < 0


# In a run -----------------------------------------------------------------------------------------


def options(tmp_path: Path, basis: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": tiny.llama(),
        "basis": {1: basis},
        "texts": tiny.prompts(9, 14, 5),
        "out": tmp_path / "out",
        "output": (),
        "tokenizer": None,
        "options": {"dtype": "float32", **more},
    }


def test_a_run_keeps_the_report_of_every_source(tmp_path: Path) -> None:
    config, inputs = inputs_from_memory(**options(tmp_path, releases.sae(HERE)))
    planned = make_run(config, inputs)
    wanted = tallied(releases.sae(HERE), planned.model, tiny.prompts(9, 14, 5)).report
    (source,) = planned.manifest["sources"]
    torch.testing.assert_close(source["report"], wanted)
    bare = make_run(config, inputs, every_layer=False)
    assert bare.manifest["sources"][0]["report"] is None
    assert bare.manifest["hash"] == planned.manifest["hash"]  # no part of the identity


def test_what_reconstructs_nothing_has_no_report(tmp_path: Path) -> None:
    given = options(tmp_path, releases.sae(HERE))
    given["basis"] = {0: "tokens", 1: given["basis"][1]}
    given["output"] = ("unembed",)
    planned = make_run(*inputs_from_memory(**given))
    found = [source["report"] is None for source in planned.manifest["sources"]]
    assert found == [True, False, True]


def test_a_sample_is_a_few_short_prompts(tmp_path: Path) -> None:
    model = load_model(tiny.llama(max_position_embeddings=400))
    source = load_whole(releases.sae(HERE), model).source
    tokens = tiny.prompts(300, 5, 6, 7, 8, 9)
    (report,) = sample_reports(model, [source], prompts_of(tokens))
    assert report is not None
    assert report["positions"] + report["left_out"] == TOKENS + sum((5, 6, 7))
    assert PROMPTS == 4
    short = [row[:TOKENS] for row in tokens[:PROMPTS]]
    torch.testing.assert_close(report, tallied(releases.sae(HERE), model, short).report)


def test_a_run_prints_how_its_dictionaries_fit(tmp_path: Path) -> None:
    place = tmp_path
    tiny.llama(vocab_size=tiny.BYTES).save_pretrained(place / "model")
    tiny.byte_tokenizer(bos="<s>").save_pretrained(place / "model")
    tiny.sae(layer=1).save_model(place / "sae")
    (place / "texts.txt").write_text("the cat sat on the mat\nabc abc")
    config = RunConfig(
        model=str(place / "model"),
        basis=(f"1={place / 'sae'}",),
        texts=str(place / "texts.txt"),
        out=str(place / "out"),
        progress=False,
    )
    answer = run(config)
    report = answer["sources"][0]["report"]
    lines = render_run(answer).splitlines()
    shown = [line.strip() for line in lines if line.strip().startswith("first ")]
    assert shown == [render_report(report)[0]]
    assert any("below 0" in line for line in lines) == (report["explained_variance"][str(HERE)] < 0)
    headattr.open_store(place / "out").close()


# The whole of a release ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", releases.RESIDUAL)
def test_what_is_written_is_a_row_a_feature(kind: str) -> None:
    model, release = load_model(tiny.llama()), releases.RESIDUAL[kind]()
    whole = load_whole(release, model)
    rows = written_rows(whole, model)[torch.arange(release.features)]
    start = 0
    for d in release.dictionaries:
        W_dec = d.read()[0].W_dec
        wanted = sum(W_dec) if release.kind == "transcoders" else W_dec[-1]
        torch.testing.assert_close(rows[start : start + d.features], wanted)
        start += d.features


def test_heads_side_by_side_write_through_their_output_weights() -> None:
    model = load_model(tiny.llama())
    release = releases.exact(Site("z", 1), 40)
    rows = written_rows(load_whole(release, model), model)
    W_O = model.hf.model.layers[1].self_attn.o_proj.weight.detach().T
    torch.testing.assert_close(rows[torch.arange(40)], W_O)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("sae", [1]), ("crosscoder", [1, 2]), ("acausal", [1, 2]), ("transcoders", [1, 2])],
)
def test_a_release_is_a_basis_of_its_own_layers(kind: str, layers: list[int]) -> None:
    whole = load_whole(releases.RESIDUAL[kind](), load_model(tiny.llama()))
    assert list(whole.views) == layers
    assert all(view.source is whole.source for view in whole.views.values())
