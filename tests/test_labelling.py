"""Labels name where a feature fires, how often, how strongly, and what it does to the logits."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_releases as releases
import torch

from headattr.basis.active import ActiveFeatures, active_of
from headattr.basis.whole import load_whole
from headattr.cli import main
from headattr.errors import DictionaryError
from headattr.judging import Label
from headattr.labelling import labels_of_texts
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.load import LoadedModel, load_model
from headattr.model.sites import Site
from headattr.model.tokens import Bos, Prompt, vocabulary_texts
from headattr.passes import Given, counted_of
from headattr.training.collected import QUANTILES, WINDOW, Collected
from headattr.training.given_labels import Part, cantor_pair, given_labels
from headattr.training.labels import FeatureLabel

TOKENS = tiny.prompts(30, 12, 25, seed=3)


def given(model: LoadedModel, tokens: list[list[int]]) -> Given:
    prompts = [
        Prompt(i, tuple(row), tuple(map(str, row)), None, {}, False) for i, row in enumerate(tokens)
    ]
    return Given(model, prompts, [], 0, Bos(False, None, ""))


def labelled(kind: str, model: LoadedModel, **asked: Any) -> list[FeatureLabel]:
    options = Label(dictionary="x", progress=False, **asked)
    whole = load_whole(releases.RESIDUAL[kind](), model)
    labels, failed = labels_of_texts(whole, given(model, TOKENS), options)
    assert failed == {}
    return list(labels)


def activations(kind: str, model: LoadedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All activations [position, feature], 0 where they do not count; prompt and position of
    each."""
    source = load_whole(releases.RESIDUAL[kind](), model).source
    acts, where, counted = [], [], []
    found = capture(model, *pad(TOKENS), layers=[], sites=sorted(source.sites))
    for i, one in enumerate(found):
        assert isinstance(one, PromptCapture)
        active = source.active(one)
        dense = torch.zeros(len(one.tokens), source.about.n_features)
        dense[active.positions, active.ids] = active.acts
        mask = counted_of(source, one)
        acts.append(dense * mask[:, None])
        where += [(i, pos) for pos in range(len(one.tokens))]
        counted.append(mask)
    return torch.cat(acts), torch.tensor(where), torch.cat(counted)


@pytest.mark.parametrize("kind", releases.RESIDUAL)
def test_every_feature_is_labelled_by_its_strongest_places(kind: str) -> None:
    model = load_model(tiny.llama())
    labels, texts = labelled(kind, model), vocabulary_texts(model)
    acts, where, counted = activations(kind, model)
    assert [label.id for label in labels] == list(range(acts.shape[1]))
    for feature, label in enumerate(labels):
        mine = acts[:, feature]
        fired = mine[mine > 0].double().sort().values
        torch.testing.assert_close(label.density, len(fired) / int(counted.sum()))
        torch.testing.assert_close(label.max_activation, float(mine.max()))
        assert (label.label is None) == (len(fired) == 0)
        if not len(fired):
            continue
        late = torch.where(where[:, 1] >= 8, mine, 0)
        prompt, pos = where[int((late if late.any() else mine).argmax())].tolist()
        assert label.contexts[0].token == texts[TOKENS[prompt][pos]]
        assert label.label is not None
        assert f"[{label.contexts[0].token}]" in label.label
        assert label.quantiles is not None
        for quantile in QUANTILES:
            wanted = fired[min(len(fired) - 1, -int(-quantile * len(fired) // 1) - 1)]
            assert label.quantiles[str(quantile)] == pytest.approx(float(wanted), rel=4e-3)


@pytest.mark.parametrize("kind", ["sae", "transcoders"])
def test_labels_do_not_depend_on_batches(kind: str) -> None:
    model = load_model(tiny.llama(), dtype="float64")
    assert labelled(kind, model, dtype="float64", batch_size=1) == labelled(
        kind, model, dtype="float64"
    )


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_logits_are_moved_through_the_gain_of_the_final_norm(family: str) -> None:
    model = load_model(tiny.MODELS[family]())
    labels, texts = labelled("sae", model), vocabulary_texts(model)
    unembedding = model.family.unembedding(model.hf)
    rows = releases.RESIDUAL["sae"]().dictionaries[0].read()[0].W_dec[0]
    if unembedding.norm.kind == "layer":
        rows = rows - rows.mean(-1, keepdim=True)
    moved = (rows * unembedding.norm.gain).double() @ unembedding.W_U.T.double()
    for label, row in zip(labels, moved, strict=True):
        assert label.top_logits is not None
        assert label.bottom_logits is not None
        for effects, largest in ((label.top_logits, True), (label.bottom_logits, False)):
            wanted = row.topk(8, largest=largest)
            assert [e.token for e in effects] == [texts[t] for t in wanted.indices]
            found = torch.tensor([e.effect for e in effects]).double()
            torch.testing.assert_close(found, wanted.values, rtol=1e-5, atol=1e-6)


# Collected ----------------------------------------------------------------------------------------


def everywhere(active: ActiveFeatures) -> torch.Tensor:
    return torch.ones(len(active.counts), dtype=torch.bool)


def test_what_is_collected_does_not_depend_on_when_it_is_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 7, generator=generator).relu() for n in (150, 9, 70, 1)]

    def collect() -> tuple[Any, torch.Tensor]:
        collected = Collected(8, ranks=4)
        for part in parts:
            active = active_of(torch.nn.functional.pad(part, (0, 1)))
            collected.add(active, everywhere(active))
        return collected.top(), collected.quantiles()

    top, quantiles = collect()
    monkeypatch.setattr("headattr.training.collected._PENDING", 1)
    other, again = collect()
    assert torch.equal(again, quantiles)
    for one, two in zip(top, other, strict=True):
        torch.testing.assert_close(one, two)
    assert not quantiles[7].any()  # it never fires
    assert top.positions == 230


def test_a_feature_has_one_place_in_a_window() -> None:
    acts = torch.zeros(2 * WINDOW, 1)
    acts[10:14, 0] = torch.tensor([1.0, 4.0, 3.0, 2.0])
    acts[WINDOW + 5, 0] = 2.5
    collected = Collected(1, ranks=5)
    active = active_of(acts)
    collected.add(active, everywhere(active))
    top = collected.top()
    assert top.activation[:3, 0].tolist() == [4.0, 2.5, 0.0]
    assert top.pos[:2, 0].tolist() == [11, WINDOW + 5]
    assert (int(top.active[0]), float(top.strongest[0])) == (5, 4.0)


def test_early_places_come_after_all_others() -> None:
    acts = torch.zeros(WINDOW, 2)
    acts[2, 0], acts[20, 0], acts[3, 1] = 9.0, 1.0, 5.0
    collected = Collected(2, ranks=2)
    active = active_of(acts)
    collected.add(active, everywhere(active))
    assert collected.top().pos[0].tolist() == [20, 3]


def test_negative_activations_count_by_size() -> None:
    active = active_of(torch.tensor([[-3.0, 0.0], [1.0, 0.0]]))
    collected = Collected(2, early=0)
    collected.add(active, everywhere(active))
    assert float(collected.strongest[0]) == 3
    assert int(collected.active[0]) == 2


# Labels of others ---------------------------------------------------------------------------------

ONE = [Part(5, 4)]
TWO = [Part(1, 4), Part(2, 3)]


def written(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def texts_of(path: Path, parts: list[Part]) -> list[str | None]:
    return [label.label for label in given_labels(path, parts)]


def test_explanations_are_read_by_index_or_feature(tmp_path: Path) -> None:
    records = [
        {"index": "2", "description": "names\nof places", "layer": "5-res-jb"},
        {"feature": 0, "description": "numbers"},
        {"feature": 0, "description": "digits"},
    ]
    wanted = ["numbers; digits", None, "names of places", None]
    assert texts_of(written(tmp_path / "a.json", records), ONE) == wanted
    assert texts_of(written(tmp_path / "b.json", {"explanations": records}), ONE) == wanted
    lines = "\n".join(map(json.dumps, records))
    (tmp_path / "c.jsonl").write_text(lines)
    assert texts_of(tmp_path / "c.jsonl", ONE) == wanted
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert texts_of(tmp_path / "d.jsonl.gz", ONE) == wanted


def test_explanations_of_several_layers_go_to_their_groups(tmp_path: Path) -> None:
    records = [
        {"layer": "2-transcoder", "index": 1, "description": "b"},
        {"layer": "1-transcoder", "index": 1, "description": "a"},
    ]
    found = texts_of(written(tmp_path / "a.json", records), TWO)
    assert found == [None, "a", None, None, None, "b", None]


@pytest.mark.parametrize(
    ("records", "what"),
    [
        ([{"index": 4, "description": "x"}], "feature 4; the dictionary has 4"),
        ([{"index": 0, "description": "x", "layer": "6-res"}], "layer 6"),
        ([{"index": 0, "description": "x", "layer": "res"}], "'res'"),
        ([{"description": "x"}], '"index"'),
        ([{"index": -1, "description": "x"}], "-1"),
        ([{"index": 1}], '"description"'),
        ("text", "JSON str"),
    ],
)
def test_explanations_that_do_not_fit_are_refused(tmp_path: Path, records: Any, what: str) -> None:
    path = written(tmp_path / "a.json", records)
    with pytest.raises(DictionaryError, match=what):
        list(given_labels(path, ONE))


def test_packed_feature_files_are_refused_with_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "layer_0.bin").write_bytes(b"x")
    with pytest.raises(DictionaryError, match=r"not documented.*\.json"):
        list(given_labels(tmp_path / "layer_0.bin", ONE))
    with pytest.raises(DictionaryError, match=r"layer_0\.bin.*\{cantor\}\.json"):
        list(given_labels(tmp_path, ONE))


@pytest.mark.parametrize(("x", "y"), [(0, 0), (0, 1), (1, 0), (25, 16383), (3, 1 << 40)])
def test_feature_files_are_named_by_layer_and_index(x: int, y: int) -> None:
    assert cantor_pair((x + y) * (x + y + 1) // 2 + y) == (x, y)


def test_feature_files_of_circuit_tracer_are_read(tmp_path: Path) -> None:
    def example(act: float) -> dict[str, Any]:
        return {
            "tokens": ["the", " cat", " sat"],
            "tokens_acts_list": [0.0, act, 0.1],
            "train_token_ind": 1,
        }

    record = {
        "index": 2,
        "examples_quantiles": [
            {"quantile_name": "Subsample", "examples": [example(1.5)]},
            {"quantile_name": "Top activations", "examples": [example(3.25)]},
        ],
        "top_logits": [" dog"],
        "bottom_logits": [],
        "act_max": 3.25,
        "activation_frequency": 0.01,
    }
    written(tmp_path / f"{(2 + 2) * (2 + 3) // 2 + 2}.json", record)
    found = list(given_labels(tmp_path, TWO))
    label = found[4 + 2]
    assert [one.label for one in found if one.label] == ["the[ cat]"]
    assert label.contexts[0] == ("the", " cat", " sat", 3.25)
    assert (label.density, label.max_activation) == (0.01, 3.25)
    assert label.top_logits == [(" dog", None)]
    written(tmp_path / "0.json", {"examples_quantiles": [{}]})
    with pytest.raises(DictionaryError, match=r"0\.json"):
        list(given_labels(tmp_path, [Part(0, 1), *TWO]))


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tiny.llama(vocab_size=tiny.BYTES).save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer(bos="<s>").save_pretrained(tmp_path / "model")
    tiny.sae(layer=1).save_model(tmp_path / "sae")
    (tmp_path / "texts.txt").write_text("the cat sat on the mat\nabcabc")
    return tmp_path


def test_labels_are_written_beside_the_dictionary_and_found_there(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["dictionaries", "label", str(place / "sae"), "--model", str(place / "model")]
    argv += ["--texts", str(place / "texts.txt"), "--no-progress"]
    assert main([*argv, "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["written"]
    path = place / "sae" / "labels.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert answer["out"] == str(path)
    assert [record["id"] for record in records] == list(range(40))
    assert answer["labelled"] == sum(record["label"] is not None for record in records)
    assert records[0].keys() == {
        *("id", "label", "density", "max_activation", "contexts"),
        *("quantiles", "top_logits", "bottom_logits"),
    }
    model = load_model(str(place / "model"))
    release = load_whole(_release(place / "sae"), model)
    assert release.source.about.labels == str(path)
    before = path.read_bytes()
    assert main(argv) == 2
    assert "--replace" in capsys.readouterr().err
    assert main([*argv, "--replace", "--no-logits"]) == 0
    assert path.read_bytes() != before
    assert "top_logits" not in json.loads(path.read_text().splitlines()[0])
    assert sorted(p.name for p in (place / "sae").iterdir()) == [
        *("cfg.json", "labels.jsonl", "sae_weights.safetensors")
    ]


def _release(path: Path) -> Any:
    from headattr.basis.formats.registry import open_release

    return open_release(path)


def test_labels_of_others_need_no_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = written(place / "n.json", [{"index": 3, "description": "cats", "layer": "1-res-jb"}])
    argv = ["dictionaries", "label", str(place / "sae"), "--from", str(given)]
    assert main([*argv, "--out", str(place / "out.jsonl")]) == 0
    assert "1 of 40 features have a label" in capsys.readouterr().out
    records = [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]
    assert [record["label"] for record in records[2:5]] == [None, "cats", None]
    assert records[3]["density"] is None


def test_labels_of_others_leave_what_was_measured(place: Path) -> None:
    folder = place / "sae"
    given = written(place / "n.json", [{"index": 3, "description": "cats"}])
    argv = ["dictionaries", "label", str(folder)]
    model = ["--model", str(place / "model"), "--texts", str(place / "texts.txt")]
    assert main([*argv, *model, "--no-progress"]) == 0
    path = folder / "labels.jsonl"
    before = [json.loads(line) for line in path.read_text().splitlines()]
    assert main([*argv, "--from", str(given), "--replace"]) == 0
    after = [json.loads(line) for line in path.read_text().splitlines()]
    assert after == [*before[:3], {**before[3], "label": "cats"}, *before[4:]]
    path.write_text(path.read_text().partition("\n")[2])
    assert main([*argv, "--from", str(given), "--replace"]) == 1
    path.unlink()


def test_a_file_that_does_not_fit_leaves_nothing_behind(place: Path) -> None:
    given = written(place / "n.json", [{"index": 99, "description": "cats"}])
    argv = ["dictionaries", "label", str(place / "sae"), "--from", str(given)]
    assert main(argv) == 1
    assert not list((place / "sae").glob("*labels*"))


def test_labels_of_a_set_lie_beside_the_whole(tmp_path: Path) -> None:
    """Ids run through its dictionaries: those of one folder alone would be off."""
    for layer in (0, 1):
        _transcoder(tmp_path / "set" / f"layer{layer}", layer)
        (tmp_path / "set" / f"layer{layer}" / "labels.jsonl").write_text('{"id":0,"label":"x"}\n')
    model = load_model(tiny.llama())
    assert load_whole(_release(tmp_path / "set"), model).source.about.labels is None
    (tmp_path / "set" / "labels.jsonl").write_text('{"id":0,"label":"x"}\n')
    found = load_whole(_release(tmp_path / "set"), model).source.about.labels
    assert found == str(tmp_path / "set" / "labels.jsonl")


def _transcoder(path: Path, layer: int) -> None:
    from sae_lens.registry import SAE_CLASS_REGISTRY
    from sae_lens.saes.sae import SAEMetadata

    sae_class, config_class = SAE_CLASS_REGISTRY["transcoder"]
    site = Site("mlp_in", layer)
    metadata = SAEMetadata(
        hook_name=f"blocks.{site.layer}.mlp.hook_in",
        hook_name_out=f"blocks.{site.layer}.hook_mlp_out",
    )
    options = {"d_in": 24, "d_sae": 30, "d_out": 24, "apply_b_dec_to_input": False}
    sae_class(config_class(metadata=metadata, **options)).save_model(path)
