"""SAEs of dictionary_learning and sparsify compute what their own libraries compute; what a file
leaves open is refused, and no pickle runs."""

import json
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
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
from safetensors.torch import save_file

import headattr
from headattr.basis.formats.registry import open_release
from headattr.errors import DictionaryError, HeadattrError
from headattr.model.sites import Site
from headattr.store.check import check_store

TYPES = (torch.float32, torch.bfloat16)
LINEAR = {"encoder.weight": (F, D), "encoder.bias": (F,), "decoder.weight": (D, F)}
PLAIN = {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, D), "b_dec": (D,)}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "AutoEncoder": LINEAR | {"bias": (D,)},
    "AutoEncoderNew": LINEAR | {"decoder.bias": (D,)},
    "AutoEncoderTopK": LINEAR | {"b_dec": (D,)},
    "BatchTopKSAE": LINEAR | {"b_dec": (D,)},
    "MatryoshkaBatchTopKSAE": PLAIN,
    "GatedAutoEncoder": {
        "encoder.weight": (F, D),
        "decoder.weight": (D, F),
        "decoder_bias": (D,),
        "r_mag": (F,),
        "gate_bias": (F,),
        "mag_bias": (F,),
    },
    "JumpReluAutoEncoder": PLAIN | {"threshold": (F,)},
}
BUFFERS = {
    "AutoEncoderTopK": {"k": torch.tensor(5, dtype=torch.int), "threshold": torch.tensor(0.2)},
    "BatchTopKSAE": {"k": torch.tensor(5, dtype=torch.int), "threshold": torch.tensor(0.6)},
    "MatryoshkaBatchTopKSAE": {
        "k": torch.tensor(5, dtype=torch.int),
        "threshold": torch.tensor(0.6),
        "group_sizes": torch.tensor([10, 30]),
    },
}


def state_of(name: str, dtype: torch.dtype = torch.float32) -> Tensors:
    state = random_tensors(3, dtype, **SHAPES[name]) | BUFFERS.get(name, {})
    if name == "JumpReluAutoEncoder":
        state["threshold"] = state["threshold"].abs()
    return state


def sae(
    folder: Path, name: str = "AutoEncoder", state: Any = None, **trainer: Any
) -> tuple[Path, Tensors]:
    """An SAE as dictionary_learning's trainSAE saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    state = state_of(name) if state is None else state
    torch.save(OrderedDict(state), folder / "ae.pt")
    sizes = {"activation_dim": D, "dict_size": F}
    found = {"dict_class": name, "layer": 1, "lm_name": "org/tiny", **sizes, **trainer}
    if name == "AutoEncoderTopK":
        found = {"k": 5, **found}
    kept = {key: value for key, value in found.items() if value is not None}
    buffer = {"d_submodule": D, "io": "out", "ctx_len": 128}
    (folder / "config.json").write_text(json.dumps({"trainer": kept, "buffer": buffer}))
    return folder, state


def definition(
    name: str, state: Tensors, x: torch.Tensor, *, subtract: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations and output as dictionary_learning defines them."""
    s = {key: part.float() for key, part in state.items()}
    if name in ("JumpReluAutoEncoder", "MatryoshkaBatchTopKSAE"):
        shifted = x - s["b_dec"] if subtract or name != "JumpReluAutoEncoder" else x
        pre = shifted @ s["W_enc"] + s["b_enc"]
        acts = (pre * (pre > s["threshold"])).relu()
        return acts, acts @ s["W_dec"] + s["b_dec"]
    b_dec = s[next(key for key in ("b_dec", "bias", "decoder_bias", "decoder.bias") if key in s)]
    shifted = x if name == "AutoEncoderNew" else x - b_dec
    if name == "GatedAutoEncoder":
        both = shifted @ s["encoder.weight"].T
        acts = (both + s["gate_bias"] > 0) * (s["r_mag"].exp() * both + s["mag_bias"]).relu()
    else:
        acts = (shifted @ s["encoder.weight"].T + s["encoder.bias"]).relu()
    if name == "AutoEncoderTopK":
        acts = largest(acts, 5)
    if name == "BatchTopKSAE":
        acts = acts * (acts > s["threshold"])
    return acts, acts @ s["decoder.weight"].T + b_dec


# ---- dictionary_learning ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_class_computes_what_dictionary_learning_defines(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder, state = sae(tmp_path / "sae", name, state_of(name, dtype))
    coder, x = coder_of(folder), vectors()
    acts, out = definition(name, state, x)
    torch.testing.assert_close(acts_of(coder, x), acts, **CLOSE)
    torch.testing.assert_close(output_of(coder, x), out, **CLOSE)
    assert 0 < (acts != 0).sum() < acts.numel()
    assert coder.dictionary.shown == name + (" k=5" if name == "AutoEncoderTopK" else "")
    assert coder.dictionary.reads == coder.dictionary.writes == (Site("resid_pre", 2),)
    assert coder.dictionary.trained_on == "contexts of 128 tokens"


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "AutoEncoderNew"])
def test_every_class_is_what_sae_lens_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = sae(tmp_path / "saes" / "layer_1", name)
    loader = "dictionary_learning_sae_huggingface_loader_1"
    theirs = by_sae_lens(loader, folder.parent, folder.name, monkeypatch)
    coder, x = coder_of(folder), vectors()
    with torch.no_grad():
        torch.testing.assert_close(acts_of(coder, x), theirs.encode(x), **CLOSE)
        torch.testing.assert_close(output_of(coder, x), theirs(x), **CLOSE)


@pytest.mark.parametrize("subtract", [True, False, None])
def test_a_jumprelu_subtracts_its_bias_only_where_it_says_so(
    subtract: bool | None, tmp_path: Path
) -> None:
    name = "JumpReluAutoEncoder"
    folder, state = sae(tmp_path / "sae", name, apply_b_dec_to_input=subtract)
    x = vectors()
    acts, out = definition(name, state, x, subtract=bool(subtract))
    torch.testing.assert_close(acts_of(coder_of(folder), x), acts, **CLOSE)
    torch.testing.assert_close(output_of(coder_of(folder), x), out, **CLOSE)
    noted = any("apply_b_dec_to_input" in note for note in dictionaries(folder)[0].assumed)
    assert noted == (subtract is None)


def test_a_threshold_that_was_never_trained_is_a_relu_and_is_noted(tmp_path: Path) -> None:
    state = state_of("BatchTopKSAE") | {"threshold": torch.tensor(-1.0)}
    folder, _ = sae(tmp_path / "sae", "BatchTopKSAE", state)
    x = vectors()
    acts, _ = definition("BatchTopKSAE", state, x)
    torch.testing.assert_close(acts_of(coder_of(folder), x), acts, **CLOSE)
    assert any("threshold is below 0" in note for note in dictionaries(folder)[0].assumed)


def test_the_tensors_may_be_converted_to_safetensors(tmp_path: Path) -> None:
    folder, state = sae(tmp_path / "sae", "BatchTopKSAE")
    (folder / "ae.pt").unlink()
    save_file(dict(state), folder / "ae.safetensors")
    x = vectors()
    torch.testing.assert_close(
        acts_of(coder_of(folder), x), definition("BatchTopKSAE", state, x)[0], **CLOSE
    )
    sae(folder)
    with pytest.raises(DictionaryError, match=r"ae\.pt and ae\.safetensors"):
        open_release(folder)


@pytest.mark.parametrize(
    ("submodule", "site"),
    [
        ("resid_post_layer_1", Site("resid_pre", 2)),
        ("model.layers.1", Site("resid_pre", 2)),
        ("attention_out_layer_1", Site("attn_out", 1)),
        ("mlp_out_layer_1", Site("mlp_out", 1)),
    ],
)
def test_the_site_is_the_submodules(submodule: str, site: Site, tmp_path: Path) -> None:
    folder, _ = sae(tmp_path / "sae", submodule_name=submodule)
    assert dictionaries(folder)[0].reads == (site,)
    sae(folder, submodule_name=submodule, layer=0)
    with pytest.raises(DictionaryError, match="of block 1; layer says 0"):
        open_release(folder)


def test_a_dictionary_without_a_layer_is_taken_at_the_layer_asked_for(tmp_path: Path) -> None:
    folder, _ = sae(tmp_path / "sae", layer=None, activation_dim=None, dict_size=None)
    found = dictionaries(folder)[0]
    assert found.reads == (None,)
    assert (found.d_in, found.features) == (D, F)
    said = " ".join(found.assumed)
    for assumed in ("site = the layer asked for", "activation_dim = 24", "dict_size = 40"):
        assert assumed in said


def test_a_decoder_that_is_stored_the_other_way_round_is_turned_and_noted(tmp_path: Path) -> None:
    """V21: a class says its layout, so that a square matrix is as the class has it."""
    state = state_of("AutoEncoder")
    stored = state | {"decoder.weight": state["decoder.weight"].T.contiguous()}
    folder, _ = sae(tmp_path / "sae", state=stored)
    x = vectors()
    torch.testing.assert_close(
        output_of(coder_of(folder), x), definition("AutoEncoder", state, x)[1], **CLOSE
    )
    assert any("decoder.weight is stored as (40, 24)" in n for n in dictionaries(folder)[0].assumed)
    shapes = {name: tuple(D for _ in shape) for name, shape in SHAPES["AutoEncoder"].items()}
    square = random_tensors(0, torch.float32, **shapes)
    folder, _ = sae(tmp_path / "square", state=square, dict_size=D)
    torch.testing.assert_close(
        output_of(coder_of(folder), x), definition("AutoEncoder", square, x)[1], **CLOSE
    )


def altered(**tensors: Any) -> Tensors:
    found = state_of("AutoEncoder") | tensors
    return {name: tensor for name, tensor in found.items() if tensor is not None}


REFUSED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "no class": ("AutoEncoder", None, {"dict_class": None}, "dict_class is None.*AutoEncoderTopK"),
    "unknown class": ("AutoEncoder", None, {"dict_class": "CrossCoder"}, "'CrossCoder'"),
    "class of other tensors": (
        "AutoEncoder",
        None,
        {"dict_class": "GatedAutoEncoder"},
        "GatedAutoEncoder.*expected.*r_mag 40",
    ),
    "BatchTopK without threshold": (
        "BatchTopKSAE",
        random_tensors(0, torch.float32, **SHAPES["BatchTopKSAE"]),
        {},
        "BatchTopKSAE.*expected.*threshold 40",
    ),
    "missing tensor": ("AutoEncoder", altered(bias=None), {}, "expected.*bias 24"),
    "renamed tensor": (
        "AutoEncoder",
        altered(bias=None, b=torch.ones(D)),
        {},
        "b 24.*expected bias 24",
    ),
    "tensor too many": ("AutoEncoder", altered(scale=torch.ones(F)), {}, "scale 40.*expected"),
    "width of another": ("AutoEncoder", None, {"activation_dim": 16}, "expected bias 16"),
    "features of another": ("AutoEncoder", None, {"dict_size": 48}, "expected.*48x24"),
    "width as text": ("AutoEncoder", None, {"activation_dim": "24"}, "activation_dim is '24'"),
    "two ks": ("AutoEncoderTopK", None, {"k": 4}, "k is 4 and 5"),
    "k as text": ("AutoEncoderTopK", None, {"k": "5"}, "k is '5' and 5"),
    "other submodule": (
        "AutoEncoder",
        None,
        {"submodule_name": "layers.1.mlp.up_proj"},
        r"'layers\.1\.mlp\.up_proj'",
    ),
    "not finite": (
        "AutoEncoder",
        altered(bias=torch.full((D,), float("nan"))),
        {},
        "b_dec holds non-finite",
    ),
    "flag as text": (
        "JumpReluAutoEncoder",
        None,
        {"apply_b_dec_to_input": "yes"},
        "apply_b_dec_to_input is 'yes'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_sae_that_would_give_other_numbers_is_refused(case: str, tmp_path: Path) -> None:
    name, state, trainer, expected = REFUSED[case]
    folder, _ = sae(tmp_path / "sae", name, state, **trainer)
    with pytest.raises(DictionaryError, match=expected) as caught:
        coder_of(folder)
    assert str(folder) in str(caught.value)


def test_a_topk_without_any_k_is_refused(tmp_path: Path) -> None:
    """V22: it is never taken for a ReLU."""
    state = {name: part for name, part in state_of("AutoEncoderTopK").items() if name != "k"}
    folder, _ = sae(tmp_path / "sae", "AutoEncoderTopK", state, k=None)
    with pytest.raises(DictionaryError, match="k is missing"):
        open_release(folder)


def test_the_input_of_a_submodule_and_a_missing_configuration_are_refused(tmp_path: Path) -> None:
    folder, _ = sae(tmp_path / "sae")
    config = json.loads((folder / "config.json").read_text())
    config["buffer"]["io"] = "in"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DictionaryError, match=r"buffer\.io is 'in'"):
        open_release(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(DictionaryError, match="has no 'trainer' object"):
        open_release(folder)
    (folder / "config.json").unlink()
    with pytest.raises(DictionaryError, match=r"has no config\.json"):
        open_release(folder)


# ---- pickles ----------------------------------------------------------------------------------


class Unloadable:
    """Given as a model: whatever looks at it first has to be another check."""


class Touches:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.open, (str(self.marker), os.O_CREAT)


def of_a_missing_module() -> Any:
    module = types.ModuleType("lost_package.models")
    made = type("Autoencoder", (), {"__module__": module.__name__})
    module.Autoencoder = made  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules |= {"lost_package": types.ModuleType("lost_package"), module.__name__: module}
    return made()


def forget() -> None:
    for name in ("lost_package", "lost_package.models"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_tensors_loads_in_either_layout_of_torch(zipped: bool, tmp_path: Path) -> None:
    """V23."""
    folder, state = sae(tmp_path / "sae")
    torch.save(state, folder / "ae.pt", _use_new_zipfile_serialization=zipped)
    x = vectors()
    torch.testing.assert_close(
        acts_of(coder_of(folder), x), definition("AutoEncoder", state, x)[0], **CLOSE
    )


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("held", ["missing module", "marker"])
def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(
    held: str, zipped: bool, tmp_path: Path
) -> None:
    """V23: its module is named, with what to do; nothing is created."""
    folder, _ = sae(tmp_path / "sae")
    marker = tmp_path / "marker"
    thing = of_a_missing_module() if held == "missing module" else Touches(marker)
    torch.save(thing, folder / "ae.pt", _use_new_zipfile_serialization=zipped)
    forget()
    with pytest.raises(DictionaryError) as caught:
        headattr.attribute(Unloadable(), {2: folder}, [[1, 2, 3]], tmp_path / "out")
    said = str(caught.value)
    assert str(folder / "ae.pt") in said
    assert ("lost_package.models" if held == "missing module" else "posix") in said
    assert "state_dict as ae.safetensors" in said
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", [0, 2, 40, -10])
def test_a_cut_file_is_named_with_its_size(kept: int, tmp_path: Path) -> None:
    folder, _ = sae(tmp_path / "sae")
    file = folder / "ae.pt"
    file.write_bytes(whole := file.read_bytes()[:kept])
    with pytest.raises(DictionaryError, match=f"{len(whole)} bytes") as caught:
        open_release(folder)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("held", [torch.ones(3), {}, {"a": {"b": torch.ones(3)}}, {"k": 3}])
def test_a_file_that_holds_no_state_dict_is_refused(held: Any, tmp_path: Path) -> None:
    folder, _ = sae(tmp_path / "sae")
    torch.save(held, folder / "ae.pt")
    with pytest.raises(DictionaryError, match=r"expected.* tensors by name"):
        open_release(folder)


# ---- sparsify ---------------------------------------------------------------------------------


def sparsify(folder: Path, *, old: bool = False, **cfg: Any) -> tuple[Path, Tensors]:
    """An SAE as sparsify saves it, before with decoder.weight."""
    dtype = cfg.pop("dtype", torch.float32)
    shapes = {"encoder.weight": (F, D), "encoder.bias": (F,), "W_dec": (F, D), "b_dec": (D,)}
    tensors = random_tensors(3, dtype, **shapes)
    stored = dict(tensors)
    if old:
        stored["decoder.weight"] = stored.pop("W_dec").T
    save(folder / "sae.safetensors", stored)
    found = {"num_latents": F, "k": 5, "signed": False, "transcode": False, "d_in": D, **cfg}
    kept = {key: value for key, value in found.items() if value is not None}
    (folder / "cfg.json").write_text(json.dumps(kept))
    return folder, tensors


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("old", [True, False])
def test_an_sae_of_sparsify_computes_what_it_defines(
    old: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder, tensors = sparsify(tmp_path / "layers.1", old=old, dtype=dtype)
    coder, x = coder_of(folder), vectors()
    t = {name: part.float() for name, part in tensors.items()}
    pre = (x - t["b_dec"]) @ t["encoder.weight"].T + t["encoder.bias"]
    acts = largest(pre.relu(), 5)
    torch.testing.assert_close(acts_of(coder, x), acts, **CLOSE)
    torch.testing.assert_close(output_of(coder, x), acts @ t["W_dec"] + t["b_dec"], **CLOSE)
    assert coder.dictionary.shown == "sae topk k=5"


def test_an_old_sae_of_sparsify_is_what_sae_lens_reads(tmp_path: Path) -> None:
    """sae_lens turns W_dec, and subtracts b_dec unless normalize_decoder: the old layout alone."""
    from sae_lens import SAE
    from sae_lens.loading.pretrained_sae_loaders import sparsify_disk_loader

    folder, _ = sparsify(tmp_path / "layers.1", old=True, normalize_decoder=False)

    def exactly(path: Any, device: str, **_: Any) -> Any:  # by itself it computes in bfloat16
        return sparsify_disk_loader(path, device, {"dtype": "float32"})

    theirs = SAE.load_from_disk(folder, converter=exactly)
    coder, x = coder_of(folder), vectors()
    with torch.no_grad():
        torch.testing.assert_close(acts_of(coder, x), theirs.encode(x), **CLOSE)
        torch.testing.assert_close(output_of(coder, x), theirs(x), **CLOSE)


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("layers.1", Site("resid_pre", 2)),
        ("layers_1", Site("resid_pre", 2)),
        ("h.1", Site("resid_pre", 2)),
        ("layers.1/seed3", Site("resid_pre", 2)),
        ("layers.1.mlp", Site("mlp_out", 1)),
        ("layers.1.self_attn", Site("attn_out", 1)),
        ("mine", None),
    ],
)
def test_the_folder_names_the_hookpoint(name: str, site: Site | None, tmp_path: Path) -> None:
    folder, _ = sparsify(tmp_path / name)
    found = dictionaries(folder)[0]
    assert found.reads == found.writes == (site,)
    assert any("site = the layer asked for" in note for note in found.assumed) == (site is None)


def test_what_sparsify_leaves_out_is_assumed_aloud_or_refused(tmp_path: Path) -> None:
    """V19: widths and `transcode` are harmless, k is not."""
    folder, _ = sparsify(tmp_path / "layers.1", num_latents=None, transcode=None, wandb="x")
    found = dictionaries(folder)[0]
    assert found.features == F
    assert "transcode = False" in " ".join(found.assumed)
    for name in ("embed_tokens", "layers.1.mlp.up_proj"):
        folder, _ = sparsify(tmp_path / name)
        with pytest.raises(DictionaryError, match=f"hookpoint is '{name}'"):
            open_release(folder)
    folder, _ = sparsify(tmp_path / "layers.2", k=None)
    with pytest.raises(DictionaryError, match=r"cfg\.json: k is None"):
        open_release(folder)
    (folder / "cfg.json").unlink()
    with pytest.raises(DictionaryError, match=r"no cfg\.json"):
        open_release(folder)


def test_a_truncated_file_of_sparsify_is_named_with_both_sizes(tmp_path: Path) -> None:
    folder, _ = sparsify(tmp_path / "layers.1")
    file = folder / "sae.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(HeadattrError, match=str(file)) as caught:
        headattr.attribute(Unloadable(), {2: folder}, [[1, 2, 3]], tmp_path / "out")
    assert f"is {len(whole) - 10} bytes" in str(caught.value)
    assert f"requires {len(whole)}" in str(caught.value)


# ---- whole runs -------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Path], Any]] = {
    "sparsify": lambda path: sparsify(path / "layers.1")[0],
    **{name: lambda path, name=name: sae(path / name, name)[0] for name in SHAPES},
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_adds_up_at_the_layer_behind_its_block(name: str, tmp_path: Path) -> None:
    """V20: the output of block 1 is layer 2; layer 1 is refused, with the suggestion of 2."""
    folder = MAKERS[name](tmp_path)
    out = tmp_path / "out"
    store = headattr.attribute(tiny.llama(), {2: folder}, tiny.prompts(8), out, edges="all")
    found = check_store(store)
    assert found["ok"], found
    with pytest.raises(DictionaryError, match=f"use 2={folder}"):
        headattr.attribute(Unloadable(), {1: folder}, [[1, 2, 3]], tmp_path / "other")


def test_an_sae_of_attentions_output_is_an_output_of_its_layer(tmp_path: Path) -> None:
    folder, _ = sae(tmp_path / "sae", submodule_name="attention_out_layer_1")
    store = headattr.attribute(
        tiny.llama(),
        {1: tiny.sae(layer=1)},
        tiny.prompts(8),
        tmp_path / "out",
        output={1: folder},
        edges="all",
    )
    found = check_store(store)
    assert found["ok"], found


# ---- SAELens folders --------------------------------------------------------------------------


def saelens(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    save(folder / "sae_weights.safetensors", tensors)
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def flat(d_in: int, d_sae: int, **config: Any) -> tuple[dict[str, Any], Tensors]:
    """A configuration without a version, and tensors in sae_lens' layout."""
    shapes = {"W_enc": (d_in, d_sae), "W_dec": (d_sae, d_in), "b_enc": (d_sae,), "b_dec": (d_in,)}
    found = {"d_in": d_in, "d_sae": d_sae, "hook_name": "blocks.1.hook_resid_pre", **config}
    return found, random_tensors(1, torch.float32, **shapes)


def test_the_orientation_of_a_decoder_is_found_noted_or_refused(tmp_path: Path) -> None:
    """V21: d_in 16, d_sae 32 with W_dec stored 16x32; a square one has to say its layout."""
    config, tensors = flat(16, 32, architecture="standard")
    x = vectors(width=16)
    straight = output_of(coder_of(saelens(tmp_path / "a", config, tensors)), x)
    turned = saelens(tmp_path / "b", config, tensors | {"W_dec": tensors["W_dec"].T})
    torch.testing.assert_close(output_of(coder_of(turned), x), straight)
    assert any("W_dec is stored as [d_in, d_sae]" in n for n in dictionaries(turned)[0].assumed)
    config, tensors = flat(16, 16, architecture="standard")
    square = saelens(tmp_path / "c", config, tensors)
    with pytest.raises(DictionaryError, match=r"square.*layout"):
        coder_of(square)
    coder_of(saelens(tmp_path / "d", {**config, "layout": "features_first"}, tensors))


def test_a_width_of_another_model_is_refused_before_any_forward_pass(tmp_path: Path) -> None:
    """V21: d_in 24 on a stream of 16."""
    config, tensors = flat(24, 40, architecture="standard")
    folder, hf = saelens(tmp_path / "sae", config, tensors), tiny.llama(hidden_size=16)
    hf.model.register_forward_pre_hook(lambda *_: pytest.fail("a forward pass ran"))
    with pytest.raises(DictionaryError, match=r"width 24.* 16"):
        headattr.attribute(hf, {1: folder}, tiny.prompts(5), tmp_path / "out")


def test_the_four_names_of_one_site_are_one_dictionary_of_layer_2(tmp_path: Path) -> None:
    """V20."""
    names = ("layers.1", "blocks.1.hook_resid_post", "blocks.2.hook_resid_pre", "hidden_states[2]")
    scores = []
    for index, name in enumerate(names):
        config, tensors = flat(D, F, architecture="standard", hook_name=name)
        folder = saelens(tmp_path / str(index), config, tensors)
        assert dictionaries(folder)[0].reads == (Site("resid_pre", 2),)
        out = tmp_path / f"out{index}"
        store = headattr.attribute(tiny.llama(), {2: folder}, tiny.prompts(6), out, edges="all")
        row = store.edge(0, headattr.Edge(2, 1, 5, 3))
        scores.append((row.score, row.totals.tolist(), row.values.tolist()))
        with pytest.raises(DictionaryError, match=f"use 2={folder}"):
            headattr.attribute(Unloadable(), {1: folder}, [[1, 2, 3]], tmp_path / "other")
    assert scores[1:] == scores[:-1]
