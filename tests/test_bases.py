"""Crosscoders, transcoder stacks, attention's dictionaries: exact on every family, both types."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from made import FEATURES, D, crosscoder, dictionary, resid, transcoders

import headattr
from headattr.basis.component import Components
from headattr.basis.dictionary import Frame, Release
from headattr.basis.load import load_sources
from headattr.config import SourceSpec
from headattr.errors import DictionaryError, UsageError
from headattr.interventions import AddFeature
from headattr.model.capture import capture, pad
from headattr.model.load import load_model
from headattr.model.sites import Site
from headattr.store.check import check_store

FAMILIES = tuple(tiny.MODELS)


def run(hf: Any, basis: Any, out: Path, **options: Any) -> Any:
    return headattr.attribute(hf, basis, tiny.prompts(9, 5), out, edges="all", **options)


def adds_up(store: Any, tolerance: float = 1e-5) -> dict[str, Any]:
    found = check_store(store)
    assert found["problems"] == []
    assert found["edges"] > 0
    worst = [found["completeness"]["worst"], found["contrast_completeness"]["worst"]]
    worst += [found["ov"]["completeness"]["worst"], found["ov"]["block_completeness"]["worst"]]
    assert all(error is not None and error <= tolerance for error in worst), worst
    return found


BASES = {
    "crosscoder": lambda: crosscoder(1, 2),
    "acausal": lambda: crosscoder(1, 2, causal=False),
    "transcoders": lambda: transcoders(0, 1),
    "skip": lambda: transcoders(0, 1, skip=True),
    "cross-layer": lambda: transcoders(0, 1, across=2),
    "one missing": lambda: transcoders(1),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_basis_adds_up_on_every_family(
    kind: str, family: str, dtype: str, tmp_path: Path
) -> None:
    made = BASES[kind]()
    store = run(
        tiny.MODELS[family](), {1: made, 2: made}, tmp_path / "out", output="unembed", dtype=dtype
    )
    adds_up(store, 1e-5 if dtype == "float32" else 1e-9)


def loaded(hf: Any, release: Release, layer: int, dtype: str = "float64", **options: Any) -> Any:
    model = load_model(hf, dtype=dtype)
    return model, load_sources(model, [SourceSpec("sae", layer, release)], [], **options).bases[
        layer
    ]


def seen(model: Any, basis: Any, tokens: list[int]) -> tuple[Any, Components]:
    prompt = capture(model, *pad([tokens]), layers=[], sites=[*basis.sites, *basis.source.sites])[0]
    return prompt, basis.components(prompt, basis.source.active(prompt))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stack_is_the_sum_of_what_was_added(family: str) -> None:
    """Every named component is what the model's own modules gave, and each MLP's features, bias,
    skip and error are its output."""
    release = transcoders(0, 1, skip=True)
    model, basis = loaded(tiny.MODELS[family](), release, 2)
    tokens = tiny.prompts(8)[0]
    prompt, parts = seen(model, basis, tokens)
    x = prompt.at(Site("resid_pre", 2))
    torch.testing.assert_close(parts.sparse_sum + sum(parts.named.values()), x)
    by_name = {part.name: part.vectors for part in parts.parts}
    embedded = parts.named["embedding"] + parts.named.get("position", 0)
    torch.testing.assert_close(embedded, prompt.at(Site("resid_pre", 0)))
    for layer, given in enumerate(release.dictionaries):
        torch.testing.assert_close(
            by_name[f"attention L{layer}"], prompt.at(Site("attn_out", layer))
        )
        T = given.read()[0]
        u = prompt.at(Site("mlp_in", layer))
        pre = u @ T.W_enc[0].double().T + T.b_enc.double()
        acts = pre.relu() * (pre > T.threshold.double())
        made = acts @ T.W_dec[0].double() + T.b_dec[0].double() + u @ T.W_skip.double()
        torch.testing.assert_close(
            by_name[f"MLP error L{layer}"], prompt.at(Site("mlp_out", layer)) - made
        )
        torch.testing.assert_close(by_name[f"skip L{layer}"], u @ T.W_skip.double())
    kinds: dict[str, Any] = {}
    for part in parts.parts:
        kinds[part.kind] = kinds.get(part.kind, 0) + part.vectors
    for kind, total in kinds.items():
        torch.testing.assert_close(total, parts.named[kind])
    assert by_name["rounding"].abs().max() < 1e-12 * x.abs().max() + 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_apart_sum_to_each_layers_attention(family: str) -> None:
    model, basis = loaded(tiny.MODELS[family](), transcoders(0, 1), 2, heads_apart=True)
    prompt, parts = seen(model, basis, tiny.prompts(8)[0])
    names = [part.name for part in parts.parts]
    for layer in (0, 1):
        mine = [
            part.vectors for part in parts.parts if part.name.startswith(f"attention L{layer}H")
        ]
        assert len(mine) == model.n_heads
        bias = parts.parts[names.index(f"attention bias L{layer}")].vectors
        torch.testing.assert_close(sum(mine) + bias, prompt.at(Site("attn_out", layer)))
        weights = model.family.head_weights(model.hf, layer)
        scale = weights.writes.output_scale(
            sum(
                prompt.at(Site("z", layer)).unflatten(1, (model.n_heads, -1))[:, h] @ weights.W_O[h]
                for h in range(model.n_heads)
            )
            + weights.b_O
        )
        torch.testing.assert_close(bias, weights.writes.block_constant(scale))


def test_a_cross_layer_feature_writes_every_mlp_up_to_the_layer() -> None:
    release = transcoders(0, 1, across=2)
    _, basis = loaded(tiny.llama(), release, 2)
    W = [d.read()[0].W_dec for d in release.dictionaries]
    rows = basis.directions[torch.arange(2 * FEATURES)]
    torch.testing.assert_close(rows[:FEATURES], (W[0][0] + W[0][1]).double())
    torch.testing.assert_close(rows[FEATURES:], W[1][0].double())


def test_a_feature_contributes_exactly_nothing_before_the_site_that_it_reads(
    tmp_path: Path,
) -> None:
    release = crosscoder(1, 2)
    model, early = loaded(tiny.llama(), release, 1)
    late = load_sources(model, [SourceSpec("sae", 2, release)], []).bases[2]
    assert not early.directions[torch.arange(FEATURES, 2 * FEATURES)].any()
    assert late.directions[torch.arange(FEATURES, 2 * FEATURES)].any()
    _, parts = seen(model, early, tiny.prompts(9)[0])
    assert len(parts.active.ids)
    assert int(parts.active.ids.max()) < FEATURES
    store = run(tiny.llama(), {1: release, 2: release}, tmp_path / "out")
    for q_pos in range(9):
        answer = headattr.query_edge(store, 0, "L1H0", q_pos, 0)
        found = [
            f for pair in answer["qk"]["pairs"] for f in (pair["q_feature"], pair["k_feature"])
        ]
        assert all(feature["layer"] == 1 for feature in found)
    answers = [headattr.query_edge(store, 0, "L2H0", q, k) for q in range(9) for k in range(q + 1)]
    layers = {pair["q_feature"]["layer"] for a in answers for pair in a["qk"]["pairs"]}
    assert layers == {1, 2}


def test_a_crosscoder_reads_only_its_own_site_and_all_layers_share_its_lists(
    tmp_path: Path,
) -> None:
    store = run(tiny.llama(), {1: (made := crosscoder(1, 2)), 2: made}, tmp_path / "out")
    sources = store.manifest["sources"]
    assert [source["kind"] for source in sources] == ["crosscoder", "crosscoder"]
    assert [plan["basis"] for plan in store.manifest["layers"]] == [0, 0]
    answer = headattr.query_edge(store, 0, "L1H1", 5, 3)
    outputs = {f["layer"] for f in answer["ov"][0]["o_features"]}
    assert outputs <= {2}


OUTPUTS = {
    "transcoder": lambda: transcoders(0, 1, 2),
    "of the stream": lambda: transcoders(0, 1, 2, site="resid_mid"),
    "of the bare norm": lambda: transcoders(0, 1, 2, site="mlp_normed"),
    "attention": lambda: Release(
        "sae", "attention", None, (dictionary([Site("attn_out", 2)], [Site("attn_out", 2)], 3),)
    ),
    "crosscoder": lambda: crosscoder(1, 3),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", OUTPUTS)
def test_every_output_adds_up_on_every_family(kind: str, family: str, tmp_path: Path) -> None:
    made = OUTPUTS[kind]()
    layer = 3 if kind == "crosscoder" else 2
    hf = tiny.MODELS[family]()
    if family == "gpt_neox" and kind not in ("attention", "crosscoder"):
        said = "side by side" if kind == "of the stream" else "does not read this attention"
        with pytest.raises((DictionaryError, UsageError), match=said):
            run(hf, {2: tiny.sae(layer=2)}, tmp_path / "out", output={layer: made})
        return
    store = run(hf, {2: tiny.sae(layer=2)}, tmp_path / "out", output={layer: made})
    adds_up(store)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("read", ["encoder", "decoder"])
def test_a_hook_z_dictionary_reads_the_heads_before_they_are_mixed(
    family: str, read: str, tmp_path: Path
) -> None:
    hf = tiny.MODELS[family]()
    weights = (model := load_model(hf)).family.head_weights(model.hf, 2)
    width = weights.W_O.shape[0] * weights.W_O.shape[1]
    made = dictionary([Site("z", 2)], [Site("z", 2)], 3, d=width)
    release = Release("sae", "z", None, (made,))
    store = run(
        hf, {2: tiny.sae(layer=2)}, tmp_path / "out", output={2: release}, read=read, topk=4000
    )
    adds_up(store)
    tokens = tiny.prompts(9)[0]
    double = load_model(hf, dtype="float64")
    prompt = capture(double, *pad([tokens]), layers=[2], sites=[Site("z", 2)], rows=None)[0]
    answer = headattr.query_edge(store, 0, "L2H1", 7, 4)["ov"][0]
    z = prompt.at(Site("z", 2))
    T = made.read()[0]
    pre = z @ T.W_enc[0].double().T + T.b_enc.double()
    acts = (pre.relu() * (pre > T.threshold.double()))[7]
    head, d_head = 1, weights.W_O.shape[1]
    kept = prompt.layers[2]
    w = kept.pattern[head, 7, 4] * kept.V[4, double.family.head_weights(double.hf, 2).kv_head(head)]
    rows = T.W_enc[0] if read == "encoder" else acts[:, None] * T.W_dec[0].double()
    for feature in answer["o_features"]:
        expected = rows[feature["id"], head * d_head : (head + 1) * d_head].double() @ w
        assert abs(feature["read"] - float(expected)) <= 1e-5 * float(
            rows[feature["id"]].norm() * w.norm()
        )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_what_a_transcoder_reads_of_all_edges_is_its_row_times_what_attention_added(
    family: str,
) -> None:
    """Through the MLP's norm, its scale frozen; the biases of attention belong to no edge."""
    hf, release, tokens, q_pos = tiny.MODELS[family](), transcoders(2), tiny.prompts(5)[0], 3
    given = (hf, {2: tiny.sae(layer=2)}, tokens)
    options = {"output": {2: release}, "dtype": "float64"}
    rebuilt = torch.zeros(FEATURES, dtype=torch.float64)
    for head in range(load_model(hf).n_heads):
        for k_pos in range(q_pos + 1):
            answer = headattr.explain_edge(*given, f"L2H{head}", q_pos, k_pos, **options)
            for feature in answer["ov"][0]["o_features"]:
                rebuilt[feature["id"]] += feature["read"]
    model = load_model(hf, dtype="float64")
    sites = [Site("resid_mid", 2), Site("attn_out", 2), Site("resid_pre", 2)]
    prompt = capture(model, *pad([tokens]), layers=[2], sites=sites)[0]
    norm = model.family.mlp(model.layers[2]).norm
    mid, added = (prompt.at(site)[q_pos] for site in sites[:2])
    torch.testing.assert_close(mid, prompt.at(sites[2])[q_pos] + added)
    weights = model.family.head_weights(model.hf, 2)
    scale = weights.writes.output_scale(prompt.layers[2].attn_out)
    moved = norm.linear(added - weights.writes.block_constant(scale)[q_pos]) / norm.sigma(mid)
    expected = release.dictionaries[0].read()[0].W_enc[0].double() @ moved
    active = rebuilt != 0
    assert active.any()
    torch.testing.assert_close(rebuilt[active], expected[active])


def test_parts_have_the_marginals_of_what_they_are(tmp_path: Path) -> None:
    """Members of a kind sum to the kind's row of the totals, and to its contrast."""
    hf, release = tiny.MODELS["qwen3"](), transcoders(0, 1, skip=True)
    answer = headattr.explain_edge(hf, {2: release}, tiny.prompts(9)[0], "L2H1", 7, 5)["qk"]
    for side, kinds in (("q", answer["totals"]), ("k", None)):
        for kind in ("attention", "skip", "error"):
            mine = [p for p in answer[f"{side}_parts"] if p["kind"] == kind]
            assert len(mine) >= 2
            if kinds is not None:
                row = sum(kinds[kind].values())
            else:
                row = sum(cells[kind] for cells in answer["totals"].values())
            assert abs(sum(p["marginal"] for p in mine) - row) < 1e-4
            named = answer["contrast_totals"]["query" if side == "q" else "key"][kind]
            assert abs(sum(p["contrast"] for p in mine) - named) < 1e-4


@pytest.mark.parametrize("kind", ["crosscoder", "transcoders", "cross-layer"])
def test_an_ablation_is_what_the_model_does(kind: str) -> None:
    hf, made, tokens = tiny.llama(), BASES[kind](), tiny.prompts(9)[0]
    options = {"dtype": "float64"}
    answer = headattr.explain_edge(hf, {2: made}, tokens, "L2H0", 7, 4, **options)["qk"]
    from headattr.interventions import RemoveFeature

    chosen = answer["q_features"][:4]
    changes = [[], *(RemoveFeature(2, 7, feature["id"]) for feature in chosen)]
    clean, *changed = headattr.intervene(
        hf, tokens, changes, basis={2: made}, heads=["L2H0"], **options
    )
    head = headattr.HeadId(2, 0)
    for feature, outcome in zip(chosen, changed, strict=True):
        moved = outcome.scores[head][7, 4] - clean.scores[head][7, 4]
        assert abs(float(moved) - feature["ablation"]) < 1e-9 * max(1.0, abs(feature["ablation"]))


def test_a_modules_own_output_is_what_is_added_only_without_a_norm_behind_it(
    tmp_path: Path,
) -> None:
    own = dictionary([Site("attn_own", 2)], [Site("attn_own", 2)], 3)
    attention = Release("sae", "attention", None, (own,))
    given = transcoders(0, 1).dictionaries
    mlps = [replace(d, writes=(Site("mlp_own", i),)) for i, d in enumerate(given)]
    stack = Release("transcoders", "stack", None, tuple(mlps))
    adds_up(run(tiny.llama(), {2: stack}, tmp_path / "llama", output={2: attention}))
    for basis, output in (({2: stack}, "unembed"), ({2: tiny.sae(layer=2)}, {2: attention})):
        with pytest.raises(DictionaryError, match="a norm lies between"):
            run(tiny.gemma2(), basis, tmp_path / "gemma2", output=output)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    hf, out = tiny.llama(), tmp_path / "out"
    wrong = replace(crosscoder(1, 2).dictionaries[0], writes=tuple(resid(0, 1)))
    bad = [
        ({2: crosscoder(0, 1)}, "layers \\[0, 1\\]"),
        ({1: Release("crosscoder", "x", None, (wrong,))}, "write no earlier site"),
        ({0: transcoders(0)}, "use 0=tokens"),
        ({1: transcoders(0, 0)}, "two transcoders of layer 0"),
    ]
    for basis, said in bad:
        with pytest.raises(DictionaryError, match=said):
            run(hf, basis, out)
    with pytest.raises(DictionaryError, match="use --read encoder"):
        run(hf, {1: tiny.sae()}, out, output={1: transcoders(1)}, read="decoder")
    assert not out.exists()


def test_a_dictionary_of_the_hub_is_read_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """org/name/folder, offline: the cache as the hub's own client keeps it."""
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--org--dictionaries"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    tiny.sae(layer=1).save_model(repository / "snapshots" / commit / "layer_1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    store = run(tiny.llama(), ["1=org/dictionaries/layer_1"], tmp_path / "out", output="unembed")
    assert store.manifest["sources"][0]["name"] == "layer_1"
    adds_up(store)
    for absent, said in (("org/dictionaries/other", "has no other"), ("org/none/x", "org/none/x")):
        with pytest.raises(DictionaryError, match=said):
            run(tiny.llama(), [f"1={absent}"], tmp_path / "none")


def test_groups_out_of_order_are_refused(tmp_path: Path) -> None:
    """Ids run through the groups by the site that they read, so that a layer's are the first."""
    hf, made = tiny.llama(), crosscoder(1, 2)
    turned = replace(made, dictionaries=made.dictionaries[::-1])
    with pytest.raises(DictionaryError, match="in this order"):
        run(hf, {2: turned}, tmp_path / "out")
    stack = transcoders(0, 1)
    with pytest.raises(DictionaryError, match="out of order"):
        run(hf, {2: replace(stack, dictionaries=stack.dictionaries[::-1])}, tmp_path / "out")


@pytest.mark.parametrize("kind", BASES)
def test_a_large_dictionary_that_stays_on_disk_gives_the_same_numbers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows converted as they are used, encoded some features at a time."""
    made, hf = BASES[kind](), tiny.llama()
    options = {"output": {3: crosscoder(1, 3)}} if "coder" not in kind else {"output": "unembed"}
    whole = run(hf, {2: made}, tmp_path / "whole", **options)
    monkeypatch.setattr("headattr.basis.coder.WHOLE", 7 * D)
    lazy = run(hf, {2: made}, tmp_path / "lazy", **options)
    adds_up(lazy)
    for q_pos, k_pos in ((8, 3), (4, 4)):
        first, second = (
            headattr.query_edge(store, 0, "L2H1", q_pos, k_pos) for store in (whole, lazy)
        )
        assert [p["q_feature"] for p in first["qk"]["pairs"]] == [
            p["q_feature"] for p in second["qk"]["pairs"]
        ]
        values = [[p["value"] for p in found["qk"]["pairs"]] for found in (first, second)]
        torch.testing.assert_close(*map(torch.tensor, values), rtol=2e-3, atol=1e-5)
        norms = [[p["norm"] for p in found["ov"][0]["v_features"]] for found in (first, second)]
        torch.testing.assert_close(*map(torch.tensor, norms), rtol=1e-4, atol=1e-5)


def test_a_transcoder_as_output_has_the_ids_and_labels_of_its_set(tmp_path: Path) -> None:
    """The same feature has one id, as value feature of a later layer and as output feature."""
    release = transcoders(0, 1, 2)
    (tmp_path / "set").mkdir()
    lines = [{"id": i, "label": f"feature {i}"} for i in range(3 * FEATURES)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "set" / "labels.jsonl").write_text(text)
    release = replace(release, path=str(tmp_path / "set"))
    hf, tokens, given = tiny.llama(), tiny.prompts(9)[0], {2: release}
    store = run(hf, given, tmp_path / "out", output=given)
    for answer in (
        headattr.query_edge(store, 0, "L2H1", 7, 4),
        headattr.explain_edge(hf, given, tokens, "L2H1", 7, 4, output=given),
    ):
        found = answer["ov"][0]["o_features"]
        assert found
        for feature in found:
            assert 2 * FEATURES <= feature["id"] < 3 * FEATURES
            assert (feature["layer"], feature["index"]) == (2, feature["id"] - 2 * FEATURES)
            assert feature["label"] == f"feature {feature['id']}"
        for feature in answer["qk"]["q_features"]:
            assert feature["label"] == f"feature {feature['id']}"
            assert feature["layer"] < 2


def test_a_dictionary_of_a_deeper_model_is_refused_by_its_layers(tmp_path: Path) -> None:
    tiny.sae(layer=12).save_model(tmp_path / "deep")
    with pytest.raises(DictionaryError, match=r"decomposes layers \[12\]; the model"):
        run(tiny.llama(), [str(tmp_path / "deep")], tmp_path / "out")


def test_a_name_that_the_list_shows_is_a_dictionary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADATTR_CACHE", str(tmp_path / "cache"))
    tiny.sae(layer=1).save_model(tmp_path / "cache" / "mine" / "resid_pre_1")
    store = run(tiny.llama(), ["mine/resid_pre_1"], tmp_path / "out", output="unembed")
    assert store.manifest["sources"][0]["name"] == "resid_pre_1"


def test_a_feature_of_a_later_site_cannot_be_added_before_it() -> None:
    made = crosscoder(1, 2)
    with pytest.raises(UsageError, match="writes nothing before layer 1"):
        headattr.intervene(
            tiny.llama(), [1, 2, 3], [AddFeature(1, 2, FEATURES + 3, 1.0)], basis={1: made, 2: made}
        )


def test_a_centred_transcoder_is_refused(tmp_path: Path) -> None:
    release = transcoders(0, 1)
    centred = [replace(d, frame=Frame(centred=True, undone=False)) for d in release.dictionaries]
    with pytest.raises(DictionaryError, match="center_writing_weights"):
        run(tiny.gpt2(), {2: replace(release, dictionaries=tuple(centred))}, tmp_path / "out")


@pytest.mark.parametrize(
    ("fields", "hook", "said"),
    [
        ({"normalize_activations": "expected_average_only_in"}, "mlp.hook_in", "in which units"),
        ({}, "hook_mlp_in", "hook_resid_mid or mlp.hook_in"),
    ],
)
def test_what_two_libraries_mean_differently_is_refused(
    fields: dict[str, Any], hook: str, said: str, tmp_path: Path
) -> None:
    from sae_lens.registry import SAE_CLASS_REGISTRY
    from sae_lens.saes.sae import SAEMetadata

    sae_class, config_class = SAE_CLASS_REGISTRY["transcoder"]
    about = SAEMetadata(hook_name=f"blocks.1.{hook}", norm_scaling_factor=0.5)
    shape = {"d_in": D, "d_sae": 30, "d_out": D, "apply_b_dec_to_input": False}
    sae_class(config_class(metadata=about, **shape, **fields)).save_model(tmp_path / "made")
    with pytest.raises(DictionaryError, match=said):
        run(tiny.llama(), {2: tmp_path / "made"}, tmp_path / "out")
