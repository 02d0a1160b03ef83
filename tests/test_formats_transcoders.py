"""Transcoders of circuit-tracer and sparsify compute what their own libraries compute."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from format_files import (
    CLOSE,
    D,
    F,
    Tensors,
    acts_of,
    by_sae_lens,
    coder_of,
    dictionaries,
    largest,
    output_of,
    random_tensors,
    save,
    vectors,
)

import headattr
import headattr.basis.coder
from headattr.basis.formats.registry import open_release
from headattr.errors import DictionaryError, HeadattrError
from headattr.model.sites import Site
from headattr.store.check import check_store

THRESHOLD = "activation_function.threshold"
TYPES = (torch.float32, torch.bfloat16)
SHAPES = {"W_enc": (F, D), "W_dec": (F, D), "b_enc": (F,), "b_dec": (D,)}
HOOKS = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}


def config(folder: Path, kind: str | None = "transcoder_set", **said: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    found = {"model_name": "tiny", "model_kind": kind, **HOOKS, "scan": "tiny", **said}
    kept = {key: value for key, value in found.items() if value is not None}
    (folder / "config.yaml").write_text(yaml.safe_dump(kept))
    return folder


def layer_tensors(
    layer: int, *extra: str, dtype: torch.dtype = torch.float32, k: int = 5
) -> Tensors:
    shapes = SHAPES | ({"W_skip": (D, D)} if "W_skip" in extra else {})
    found = random_tensors(layer, dtype, **shapes)
    if THRESHOLD in extra:
        found[THRESHOLD] = random_tensors(layer + 50, dtype, t=(F,))["t"].abs()
    if "k" in extra:
        found["k"] = torch.tensor(k)
    return found


def layer_set(
    folder: Path, *extra: str, layers: tuple[int, ...] = (0, 1, 2), **said: Any
) -> tuple[Path, list[Tensors]]:
    """A per-layer set as circuit-tracer saves it."""
    dtype = said.pop("dtype", torch.float32)
    config(folder, **said)
    stored = [layer_tensors(layer, *extra, dtype=dtype) for layer in layers]
    for layer, tensors in zip(layers, stored, strict=True):
        save(folder / f"layer_{layer}.safetensors", tensors)
    return folder, stored


def definition(tensors: Tensors, x: torch.Tensor, k: int | None = None) -> tuple[Any, Any]:
    """Activations and output as circuit-tracer defines them."""
    t = {name: tensor.float() for name, tensor in tensors.items()}
    pre = x @ t["W_enc"].T + t["b_enc"]
    if k is not None:
        acts = largest(pre, k)
    elif THRESHOLD in t:
        acts = pre * (pre > t[THRESHOLD])
    else:
        acts = pre.relu()
    out = acts @ t["W_dec"] + t["b_dec"]
    return acts, out + x @ t["W_skip"].T if "W_skip" in t else out


# ---- circuit-tracer, per layer ----------------------------------------------------------------

VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any], str, int | None]] = {
    "relu": ((), {}, "relu", None),
    "relu by name": ((), {"activation": "relu"}, "relu", None),
    "skip": (("W_skip",), {}, "relu", None),
    "jumprelu": ((THRESHOLD,), {}, "jumprelu", None),
    "jumprelu skip": ((THRESHOLD, "W_skip"), {}, "jumprelu", None),
    "topk": ((), {"activation": "topk", "k": 5}, "topk k=5", 5),
    "topk by its file": (("k", "W_skip"), {}, "topk k=5", 5),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_of_a_set_computes_what_circuit_tracer_defines(
    variant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    extra, said, shown, k = VARIANTS[variant]
    folder, stored = layer_set(tmp_path / "set", *extra, dtype=dtype, **said)
    x = vectors()
    for layer, tensors in enumerate(stored):
        coder = coder_of(folder, layer)
        acts, out = definition(tensors, x, k)
        torch.testing.assert_close(acts_of(coder, x), acts, **CLOSE)
        torch.testing.assert_close(output_of(coder, x), out, **CLOSE)
        assert 0 < (acts != 0).sum() < acts.numel()
        found = coder.dictionary
        assert found.shown.endswith(f"transcoder_set {shown}")
        assert found.reads == (Site("mlp_in", layer),)
        assert found.writes == (Site("mlp_out", layer),)
        assert not found.frame.subtract_b_dec


@pytest.mark.parametrize("numbers", [1 << 28, 4])
def test_its_topk_keeps_negative_ones_where_too_few_are_positive(
    numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V22: pre-activations [5, 4, 3, 2] with k = 2; and [-1, 3, -2, -4] with k = 2; also where the
    encoder is so large that it is read one feature at a time."""
    monkeypatch.setattr(headattr.basis.coder, "WHOLE", numbers)
    eye = torch.eye(4)
    tensors = {"W_enc": eye, "W_dec": eye, "b_enc": torch.zeros(4), "b_dec": torch.zeros(4)}
    folder = config(tmp_path, activation="topk", k=2)
    save(folder / "layer_0.safetensors", tensors)
    coder = coder_of(folder)
    x = torch.tensor([[5.0, 4, 3, 2], [-1, 3, -2, -4]])
    assert acts_of(coder, x).tolist() == [[5, 4, 0, 0], [-1, 3, 0, 0]]


def test_a_transcoders_bias_is_at_its_output_alone(tmp_path: Path) -> None:
    """V15: W_enc = I, b_dec = [1, 1], x = [1, 0] has activations [1, 0]."""
    eye = torch.eye(2)
    tensors = {"W_enc": eye, "W_dec": eye, "b_enc": torch.zeros(2), "b_dec": torch.ones(2)}
    save(config(tmp_path) / "layer_0.safetensors", tensors)
    x = torch.tensor([[1.0, 0]])
    assert acts_of(coder_of(tmp_path), x).tolist() == [[1, 0]]
    assert output_of(coder_of(tmp_path), x).tolist() == [[2, 1]]


@pytest.mark.parametrize("run", ["wandb-config.yaml", "wanb-config.yaml"])
@pytest.mark.parametrize("configured", [True, False])
def test_files_with_a_run_beside_them_are_what_sae_lens_reads(
    run: str, configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = layer_set(tmp_path / "qwen3-0.6b-transcoders", kind=None)
    hookless = {"model_name": "tiny"}
    (folder / "config.yaml").write_text(yaml.safe_dump(hookless))
    if not configured:
        (folder / "config.yaml").unlink()
    sizes = {"d_model": {"value": D}, "d_feature": {"value": F}, "batch_size": {"value": 8}}
    (folder / run).write_text(yaml.safe_dump(sizes))
    x = vectors()
    for layer in range(3):
        name = f"layer_{layer}.safetensors"
        sae = by_sae_lens("mwhanna_transcoder_huggingface_loader", folder, name, monkeypatch)
        coder = coder_of(folder, layer)
        with torch.no_grad():
            torch.testing.assert_close(acts_of(coder, x), sae.encode(x), **CLOSE)
            torch.testing.assert_close(output_of(coder, x), sae(x), **CLOSE)
        assert coder.dictionary.hook_name == sae.cfg.metadata.hook_name
        assert any("feature_input_hook" in note for note in coder.dictionary.assumed)


@pytest.mark.parametrize(
    ("hook", "kind"),
    [
        ("mlp.hook_in", "mlp_in"),
        ("hook_resid_mid", "resid_mid"),
        ("hook_mlp_in", "resid_mid"),
        ("ln2.hook_normalized", "mlp_normed"),
    ],
)
def test_hooks_are_completed_with_the_layer(hook: str, kind: str, tmp_path: Path) -> None:
    folder, _ = layer_set(tmp_path / "set", feature_input_hook=hook)
    found = dictionaries(folder)
    assert [d.reads for d in found] == [(Site(kind, layer),) for layer in range(3)]
    assert [d.hook_name for d in found] == [f"blocks.{layer}.{hook}" for layer in range(3)]


def test_a_set_may_have_some_layers_only_and_a_file_is_one_layer(tmp_path: Path) -> None:
    folder, stored = layer_set(tmp_path / "set", layers=(1, 10, 2))
    assert [d.reads[0] for d in dictionaries(folder)] == [Site("mlp_in", n) for n in (1, 2, 10)]
    file = folder / "layer_10.safetensors"
    release = open_release(file)
    assert (release.kind, release.name, release.path) == ("transcoders", "set/layer_10", str(file))
    x = vectors()
    torch.testing.assert_close(acts_of(coder_of(file), x), definition(stored[1], x)[0], **CLOSE)


def test_a_decoder_that_is_stored_the_other_way_round_is_turned_and_noted(tmp_path: Path) -> None:
    """V21: d_in 16, 32 features, W_dec stored 16x32; a square one is as the format has it."""
    shapes = {"W_enc": (32, 16), "W_dec": (32, 16), "b_enc": (32,), "b_dec": (16,)}
    tensors = random_tensors(0, torch.float32, **shapes)
    stored = tensors | {"W_dec": tensors["W_dec"].T}
    save(config(tmp_path / "set") / "layer_0.safetensors", stored)
    coder, x = coder_of(tmp_path / "set"), vectors(width=16)
    torch.testing.assert_close(output_of(coder, x), definition(tensors, x)[1], **CLOSE)
    assert any("W_dec is stored as (16, 32)" in note for note in coder.dictionary.assumed)
    square = random_tensors(
        0, torch.float32, W_enc=(16, 16), W_dec=(16, 16), b_enc=(16,), b_dec=(16,)
    )
    save(config(tmp_path / "square") / "layer_0.safetensors", square)
    coder = coder_of(tmp_path / "square")
    torch.testing.assert_close(output_of(coder, x), definition(square, x)[1], **CLOSE)


def changed(**tensors: Any) -> Callable[[Path], Any]:
    """A change of layer 1's tensors: None takes one away."""

    def change(folder: Path) -> None:
        found = layer_tensors(1) | tensors
        kept = {name: tensor for name, tensor in found.items() if tensor is not None}
        save(folder / "layer_1.safetensors", kept)

    return change


def said(**keys: Any) -> Callable[[Path], Any]:
    return lambda folder: config(folder, **keys)


def text(name: str, written: str | None) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if written is not None:
            (folder / name).write_text(written)

    return change


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing tensor": (changed(b_enc=None), r"layer_1.*b_enc None.*expected"),
    "renamed tensor": (
        changed(W_dec=None, decoder=torch.ones(F, D)),
        r"layer_1.*decoder 40x24.*expected.*W_dec 40x24",
    ),
    "tensor too many": (changed(scale=torch.ones(F)), "layer_1.*scale 40.*expected"),
    "narrow encoder": (changed(W_enc=torch.ones(F, D - 1)), "layer_1.*W_enc 40x23"),
    "skip of another width": (changed(W_skip=torch.ones(D, 3)), "layer_1.*W_skip 24x3"),
    "negative threshold": (
        changed(**{THRESHOLD: torch.full((F,), -0.25)}),
        "layer_1.*threshold is -0.25.*no ReLU",
    ),
    "not finite": (changed(W_dec=torch.full((F, D), float("nan"))), "W_dec holds non-finite"),
    "k without activation": (said(k=5), "k = 5 with activation None"),
    "relu with k": (said(activation="relu", k=5), "k = 5 with activation 'relu'"),
    "topk without k": (said(activation="topk"), "topk with k = missing"),
    "k over the features": (said(activation="topk", k=F + 1), r"\[41\].*40 features"),
    "k 0": (said(activation="topk", k=0), "k is 0"),
    "jumprelu without threshold": (said(activation="jumprelu"), "jumprelu with no threshold"),
    "unknown activation": (said(activation="gelu"), "activation is 'gelu'"),
    "unknown kind": (said(kind="crosscoder"), "model_kind is 'crosscoder'"),
    "kind of other files": (said(kind="cross_layer_transcoder"), "W_enc|encoders of layers none"),
    "no input hook": (said(feature_input_hook=None), "feature_input_hook is None"),
    "no output hook": (said(feature_output_hook=None), "feature_output_hook is None"),
    "hook a list": (said(feature_input_hook=["x"]), r"feature_input_hook is \['x'\]"),
    "unknown hook": (said(feature_input_hook="attn.hook_q"), r"blocks\.0\.attn\.hook_q"),
    "no configuration": (text("config.yaml", None), "has no config.yaml"),
    "broken configuration": (text("config.yaml", "a: ["), "config.yaml is not YAML"),
    "a list": (text("config.yaml", "- model_kind"), "config.yaml holds a list"),
    "python in YAML": (
        text("config.yaml", "model_kind: !!python/object/apply:os.getcwd []"),
        "config.yaml is not YAML",
    ),
    "width of the run": (text("wandb-config.yaml", "d_model: {value: 16}"), "d_model 24.* 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_set_that_would_give_other_numbers_is_refused(case: str, tmp_path: Path) -> None:
    change, expected = REFUSED[case]
    folder, _ = layer_set(tmp_path / "set")
    change(folder)
    with pytest.raises(DictionaryError, match=expected) as caught:
        coder_of(folder, 1)
    assert str(folder) in str(caught.value)


def test_two_ks_are_refused(tmp_path: Path) -> None:
    folder, _ = layer_set(tmp_path / "set", "k", activation="topk", k=4)
    with pytest.raises(DictionaryError, match=r"k = \[4, 5\]"):
        open_release(folder)


class Unloadable:
    """Given as a model: whatever looks at it first has to be another check."""


@pytest.mark.parametrize(
    "name", ["layer_1.safetensors", "W_enc_1.safetensors", "W_dec_1.safetensors"]
)
def test_a_truncated_file_is_named_with_both_sizes_before_the_model_is_loaded(
    name: str, tmp_path: Path
) -> None:
    """V24."""
    folder = layer_set(tmp_path / "a")[0] if "layer" in name else cross_layer(tmp_path / "a")[0]
    file = folder / name
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(HeadattrError, match=str(file)) as caught:
        headattr.attribute(Unloadable(), {2: folder}, [[1, 2, 3]], tmp_path / "out")
    assert f"is {len(whole) - 10} bytes" in str(caught.value)
    assert f"requires {len(whole)}" in str(caught.value)


# ---- circuit-tracer, cross-layer --------------------------------------------------------------


def cross_layer(
    folder: Path, *extra: str, n_layers: int = 3, dtype: torch.dtype = torch.float32, **keys: Any
) -> tuple[Path, list[Tensors]]:
    """A cross-layer transcoder as circuit-tracer saves it."""
    config(folder, "cross_layer_transcoder", **keys)
    stored = []
    for i in range(n_layers):
        tensors = layer_tensors(i, *extra, dtype=dtype)
        tensors["W_dec"] = random_tensors(i + 9, dtype, W=(F, n_layers - i, D))["W"]
        named = {name.replace(THRESHOLD, "threshold"): t for name, t in tensors.items()}
        decoder = named.pop("W_dec")
        save(folder / f"W_enc_{i}.safetensors", {f"{name}_{i}": t for name, t in named.items()})
        save(folder / f"W_dec_{i}.safetensors", {f"W_dec_{i}": decoder})
        stored.append(tensors)
    return folder, stored


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("extra", [(), (THRESHOLD,), ("W_skip",), (THRESHOLD, "W_skip")])
def test_a_cross_layer_transcoder_writes_every_later_mlp(
    extra: tuple[str, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    folder, stored = cross_layer(tmp_path / "clt", *extra, dtype=dtype)
    x = vectors()
    for i, tensors in enumerate(stored):
        coder = coder_of(folder, i)
        found, t = coder.dictionary, {name: part.float() for name, part in tensors.items()}
        assert found.reads == (Site("mlp_in", i),)
        assert found.writes == tuple(Site("mlp_out", j) for j in range(i, 3))
        assert [b is None for b in coder.b_dec] == [False, True, True][: 3 - i]
        pre = x @ t["W_enc"].T + t["b_enc"]
        acts = pre * (pre > t[THRESHOLD]) if extra[:1] == (THRESHOLD,) else pre.relu()
        torch.testing.assert_close(acts_of(coder, x), acts, **CLOSE)
        for target in range(3 - i):
            out = acts @ t["W_dec"][:, target]
            if target == 0:
                out = out + t["b_dec"] + (x @ t["W_skip"] if "W_skip" in t else 0)
            torch.testing.assert_close(output_of(coder, x, target), out, **CLOSE)


def test_its_decoder_stays_one_tensor_of_the_file(tmp_path: Path) -> None:
    folder, stored = cross_layer(tmp_path / "clt")
    tensors, _ = dictionaries(folder)[0].read()
    assert len({W.untyped_storage().data_ptr() for W in tensors.W_dec}) == 1
    assert tensors.W_dec[0].untyped_storage().nbytes() >= stored[0]["W_dec"].nbytes
    assert [W.stride() for W in tensors.W_dec] == [(3 * D, 1)] * 3


def test_its_activations_are_those_of_sae_lens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sae_lens sums the decoders, so that it is right about activations alone."""
    folder, _ = cross_layer(tmp_path / "clt", feature_input_hook="hook_resid_mid")
    x = vectors()
    for i in range(3):
        with pytest.warns(UserWarning, match="summing all decoders"):
            sae = by_sae_lens("mntss_clt_layer_huggingface_loader", folder, str(i), monkeypatch)
        with torch.no_grad():
            torch.testing.assert_close(acts_of(coder_of(folder, i), x), sae.encode(x), **CLOSE)
        assert dictionaries(folder)[i].hook_name == sae.cfg.metadata.hook_name


def without(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink() for name in names]


def decoder(i: int, *shape: int) -> Callable[[Path], Any]:
    return lambda folder: save(folder / f"W_dec_{i}.safetensors", {f"W_dec_{i}": torch.ones(shape)})


CROSS_REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no decoder": (without("W_dec_1.safetensors"), "has no W_dec_1.safetensors"),
    "a layer missing": (
        without("W_enc_1.safetensors", "W_dec_1.safetensors"),
        r"encoders of layers \[0, 2\]",
    ),
    "the last missing": (
        without("W_enc_2.safetensors", "W_dec_2.safetensors"),
        r"encoders of layers \[0, 1\].*\[2\]",
    ),
    "decoder of two layers": (decoder(0, F, 2, D), r"end at layers \[1, 2\]"),
    "decoder too narrow": (decoder(1, F, 2, D - 1), r"W_dec_1 of shape \(40, n_layers - 1, 24\)"),
    "decoder without targets": (decoder(1, F, D), "W_dec_1 of shape"),
    "threshold of some layers": (
        lambda folder: save(
            folder / "W_enc_1.safetensors",
            {
                f"{name.replace(THRESHOLD, 'threshold')}_1": t
                for name, t in layer_tensors(1, THRESHOLD).items()
                if name != "W_dec"
            },
        ),
        "only some layers have a threshold",
    ),
    "topk": (lambda f: config(f, "cross_layer_transcoder", activation="topk", k=5), "topk with k"),
    "kind of a set": (lambda f: config(f), "model_kind transcoder_set"),
}


@pytest.mark.parametrize("case", CROSS_REFUSED)
def test_a_cross_layer_transcoder_that_is_not_whole_is_refused(case: str, tmp_path: Path) -> None:
    change, expected = CROSS_REFUSED[case]
    folder, _ = cross_layer(tmp_path / "clt")
    change(folder)
    with pytest.raises(DictionaryError, match=expected) as caught:
        open_release(folder)
    assert str(folder) in str(caught.value)


def test_a_kind_that_is_not_said_is_that_of_the_files(tmp_path: Path) -> None:
    folder, _ = cross_layer(tmp_path / "clt")
    config(folder, None)
    assert [len(d.writes) for d in dictionaries(folder)] == [3, 2, 1]
    assert any("model_kind = cross_layer" in note for note in dictionaries(folder)[0].assumed)
    save(folder / "layer_0.safetensors", layer_tensors(0))
    with pytest.raises(DictionaryError, match="has no model_kind"):
        open_release(folder)


# ---- sparsify ---------------------------------------------------------------------------------


def sparsify(folder: Path, *, skip: bool = True, seed: int = 0, **cfg: Any) -> tuple[Path, Tensors]:
    """A transcoder as sparsify saves it."""
    dtype = cfg.pop("dtype", torch.float32)
    shapes = {"encoder.weight": (F, D), "encoder.bias": (F,), "W_dec": (F, D), "b_dec": (D,)}
    shapes |= {"W_skip": (D, D)} if skip else {}
    tensors = random_tensors(seed, dtype, **shapes)
    save(folder / "sae.safetensors", tensors)
    found = {
        "activation": "topk",
        "expansion_factor": 32,
        "normalize_decoder": True,
        "num_latents": F,
        "k": 5,
        "multi_topk": False,
        "skip_connection": skip,
        "transcode": True,
        "d_in": D,
        **cfg,
    }
    kept = {key: value for key, value in found.items() if value is not None}
    (folder / "cfg.json").write_text(json.dumps(kept))
    return folder, tensors


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("skip", [True, False])
def test_a_transcoder_of_sparsify_computes_what_it_defines(
    skip: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder, tensors = sparsify(tmp_path / "layers.1.mlp", skip=skip, dtype=dtype)
    coder, x = coder_of(folder), vectors()
    t = {name: part.float() for name, part in tensors.items()}
    acts = largest((x @ t["encoder.weight"].T + t["encoder.bias"]).relu(), 5)
    out = acts @ t["W_dec"] + t["b_dec"] + (x @ t["W_skip"].mT if skip else 0)
    torch.testing.assert_close(acts_of(coder, x), acts, **CLOSE)
    torch.testing.assert_close(output_of(coder, x), out, **CLOSE)
    assert coder.dictionary.reads == (Site("mlp_in", 1),)
    assert coder.dictionary.writes == (Site("mlp_out", 1),)


def test_transcoders_of_sparsify_side_by_side_are_a_set(tmp_path: Path) -> None:
    for layer in (2, 0, 10):
        sparsify(tmp_path / "set" / f"layers.{layer}.mlp", seed=layer)
    release = open_release(tmp_path / "set")
    assert release.kind == "transcoders"
    assert [d.reads[0] for d in release.dictionaries] == [Site("mlp_in", n) for n in (0, 2, 10)]


SPARSIFY_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no hookpoint": ("transcoder", {}, "a transcoder of 'transcoder'"),
    "a block": ("layers.1", {}, "a transcoder of 'layers.1'"),
    "attention": ("layers.1.self_attn", {}, r"a transcoder of 'layers\.1\.self_attn'"),
    "signed": ("layers.1.mlp", {"signed": True}, "signed is true"),
    "groupmax": ("layers.1.mlp", {"activation": "groupmax"}, "activation is 'groupmax'"),
    "embedding skip": ("layers.1.mlp", {"embed_skip": True}, "embed_skip is true"),
    "no k": ("layers.1.mlp", {"k": None}, "k is None"),
    "k over the features": ("layers.1.mlp", {"k": 41}, "k is 41.*40"),
    "no width": ("layers.1.mlp", {"d_in": None}, "d_in is None"),
    "width of another": ("layers.1.mlp", {"d_in": 16}, "W_dec 40x24.*expected.*W_dec 40x16"),
    "features of another": ("layers.1.mlp", {"num_latents": 48}, "expected.*W_dec 48x24"),
    "not said to be one": ("layers.1.mlp", {"transcode": None}, "transcode is None"),
    "skip denied": ("layers.1.mlp", {"skip_connection": False}, "skip_connection false"),
    "flag as text": ("layers.1.mlp", {"transcode": "yes"}, "transcode is 'yes'"),
}


@pytest.mark.parametrize("case", SPARSIFY_REFUSED)
def test_a_transcoder_of_sparsify_that_would_give_other_numbers_is_refused(
    case: str, tmp_path: Path
) -> None:
    name, cfg, expected = SPARSIFY_REFUSED[case]
    folder, _ = sparsify(tmp_path / name, **cfg)
    with pytest.raises(DictionaryError, match=expected) as caught:
        open_release(folder)
    assert str(folder) in str(caught.value)


def test_a_skip_that_is_declared_and_not_there_is_refused(tmp_path: Path) -> None:
    folder, _ = sparsify(tmp_path / "layers.1.mlp", skip=False, skip_connection=True)
    with pytest.raises(DictionaryError, match=r"expected.*W_skip 24x24"):
        open_release(folder)


# ---- whole runs -------------------------------------------------------------------------------


def made(kind: str, folder: Path) -> Path:
    if kind == "set":
        return layer_set(folder, "W_skip", THRESHOLD)[0]
    if kind == "file":
        return layer_set(folder)[0] / "layer_1.safetensors"
    if kind == "cross-layer":
        return cross_layer(folder, THRESHOLD)[0]
    if kind == "topk":
        return layer_set(folder, activation="topk", k=30)[0]
    for layer in range(3):
        sparsify(folder / f"layers.{layer}.mlp", seed=layer)
    return folder


@pytest.mark.parametrize("kind", ["set", "file", "cross-layer", "topk", "sparsify"])
def test_a_run_on_transcoders_adds_up(kind: str, tmp_path: Path) -> None:
    folder, hf = made(kind, tmp_path / "tc"), tiny.llama()
    store = headattr.attribute(hf, {2: folder}, tiny.prompts(8), tmp_path / "out", edges="all")
    found = check_store(store)
    assert found["ok"], found
    row = store.edge(0, headattr.Edge(2, 1, 7, 3))
    assert row.completeness <= 1e-5
    assert len(row.q_active.features)


@pytest.mark.parametrize("kind", ["set", "cross-layer", "topk", "sparsify"])
@pytest.mark.parametrize("hook", ["mlp.hook_in", "hook_resid_mid", "ln2.hook_normalized"])
def test_a_run_with_transcoders_as_output_adds_up(kind: str, hook: str, tmp_path: Path) -> None:
    folder, hf = made(kind, tmp_path / "tc"), tiny.llama()
    if kind != "sparsify":
        keys = yaml.safe_load((folder / "config.yaml").read_text()) | {"feature_input_hook": hook}
        (folder / "config.yaml").write_text(yaml.safe_dump(keys))
    store = headattr.attribute(
        hf,
        {2: folder},
        tiny.prompts(8),
        tmp_path / "out",
        output={2: folder},
        outputs="all",
        edges="all",
    )
    found = check_store(store)
    assert found["ok"], found
    row = store.edge(0, headattr.Edge(2, 1, 7, 3))
    assert row.ov is not None
    assert row.ov.completeness <= 1e-5
