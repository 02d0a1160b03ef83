"""Any dictionary adds up in the model's own units, with its own activations, or is refused."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import headattr
from headattr.basis.active import ActiveFeatures
from headattr.basis.component import Components
from headattr.basis.plain import plain_basis
from headattr.basis.sae import SaeBasis, from_object, load_sae
from headattr.basis.site import site_of
from headattr.errors import DictionaryError, HeadattrError, UsageError
from headattr.model.capture import PromptCapture
from headattr.model.sites import Site
from headattr.store.check import check_store

ARCHITECTURES = ("standard", "gated", "topk", "abstopk", "jumprelu", "matching_pursuit")
NORMS = ("none", "layer_norm", "constant_norm_rescale")
VARIANTS = [
    (architecture, {"normalize_activations": norm, "apply_b_dec_to_input": subtracted} | rescale)
    for architecture, norm, subtracted in product(ARCHITECTURES, NORMS, (True, False))
    for rescale in (
        ({"rescale_acts_by_decoder_norm": True}, {}) if "topk" in architecture else ({},)
    )
]
CPU = torch.device("cpu")


class Unloadable:
    """Given as a model: whatever looks at it first has to be another check."""


def fit(d_model: int = 24, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {"d_model": d_model, "dtype": dtype, "device": CPU}


def stream(positions: int = 9, d_model: int = 24, seed: int = 0) -> torch.Tensor:
    """A residual stream whose mean and size differ from position to position."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(positions, 1, generator=generator, dtype=torch.float64) * 4 + 0.5
    noise = torch.randn(positions, d_model, generator=generator, dtype=torch.float64)
    return size * (noise + torch.randn(positions, 1, generator=generator, dtype=torch.float64))


def prompt_of(x: torch.Tensor, layer: int = 1) -> PromptCapture:
    return PromptCapture(0, torch.zeros(len(x), dtype=torch.long), {}, {layer: x})


def dense(active: ActiveFeatures, values: torch.Tensor, features: int) -> torch.Tensor:
    out = torch.zeros(len(active.counts), features, dtype=values.dtype)
    out[active.positions, active.ids] = values
    return out


def written(basis: Any, x: torch.Tensor) -> tuple[torch.Tensor, Components]:
    """The dense activations and the components of a stream."""
    prompt = prompt_of(x, basis.layer)
    active = basis.active(prompt)
    acts = dense(active, active.acts, len(basis.directions))
    return acts, basis.components(prompt, active)


def hand_made(architecture: str, tensors: dict[str, Any], **fields: Any) -> Any:
    """A sae_lens SAE at layer 1 with tensors that are written down."""
    d_sae, d_in = torch.tensor(tensors["W_dec"]).shape
    sae = tiny.sae(architecture, d_in, d_sae, **{"dtype": "float64", **fields})
    with torch.no_grad():
        for name, parameter in sae.named_parameters():
            parameter.copy_(torch.tensor(tensors.get(name, 0.0), dtype=torch.float64))
    return sae


def saved(
    path: Path,
    sae: Any = None,
    *,
    change: Callable[[dict[str, Any]], Any] | None = None,
    tensors: Callable[[dict[str, Any]], Any] | None = None,
    **files: str,
) -> Path:
    """A folder of `sae` by sae_lens itself, its configuration and tensors then changed."""
    (tiny.sae() if sae is None else sae).save_model(path)
    config = json.loads((path / "cfg.json").read_text())
    if change is not None:
        change(config)
    (path / "cfg.json").write_text(json.dumps(config))
    if tensors is not None:
        state = load_file(path / "sae_weights.safetensors")
        tensors(state)
        save_file(state, path / "sae_weights.safetensors")
    for name, text in files.items():
        (path / f"{name}.json").write_text(text)
    return path


def old_style(**config: Any) -> Callable[[dict[str, Any]], None]:
    """A change of cfg.json to a flat one of before version 6: what is given and no more."""

    def change(found: dict[str, Any]) -> None:
        kept = {"d_in": found["d_in"], "d_sae": found["d_sae"]}
        found.clear()
        found.update({**kept, "hook_name": "blocks.1.hook_resid_pre", **config})

    return change


def both_ways(sae: Any, path: Path) -> list[SaeBasis]:
    return [
        from_object(sae, 1, **fit(sae.cfg.d_in)),
        load_sae(saved(path, sae), 1, **fit(sae.cfg.d_in)),
    ]


# ---- components -------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "fields"), VARIANTS)
def test_components_are_the_dictionarys_own_and_sum_to_the_stream(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    sae, x = tiny.sae(architecture, dtype="float64", **fields), stream()
    for basis in both_ways(sae, tmp_path):
        acts, parts = written(basis, x)
        with torch.no_grad():
            assert torch.equal(acts, sae.encode(x))
            torch.testing.assert_close(parts.named["error"], x - sae(x))
        assert list(parts.named) == ["bias", "error"]
        torch.testing.assert_close(parts.sparse_sum + sum(parts.named.values()), x)
        coefs = dense(parts.active, parts.coefs, len(basis.directions))
        torch.testing.assert_close(parts.sparse_sum, coefs @ basis.directions)
        assert 0 < len(parts.active.ids) < acts.numel()


@pytest.mark.parametrize(("architecture", "fields"), VARIANTS[::3])
def test_float32_components_sum_to_the_stream_to_double_precision(
    architecture: str, fields: dict[str, Any]
) -> None:
    """The error is what is missing to x, so no rounding of the parts is lost."""
    x = stream().float()
    basis = from_object(tiny.sae(architecture, **fields), 1, **fit(dtype=torch.float32))
    _, parts = written(basis, x)
    torch.testing.assert_close(parts.sparse_sum + sum(parts.named.values()), x.double())


def test_a_dictionary_in_memory_is_copied_and_neither_cast_nor_switched() -> None:
    sae = tiny.sae("jumprelu").to(torch.bfloat16).train()
    before = {name: tensor.clone() for name, tensor in sae.state_dict().items()}
    basis = from_object(sae, 1, **fit())
    assert basis.directions.dtype == torch.float64
    assert sae.training
    assert sae.W_dec.dtype == torch.bfloat16
    assert all(torch.equal(before[name], tensor) for name, tensor in sae.state_dict().items())


def test_weights_stored_in_bfloat16_are_read_exactly(tmp_path: Path) -> None:
    x, sae = stream(), tiny.sae("standard").to(torch.bfloat16)
    wanted = from_object(sae, 1, **fit())
    found = load_sae(saved(tmp_path, sae), 1, **fit())
    torch.testing.assert_close(written(found, x)[0], written(wanted, x)[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_training_dictionary_is_read_as_what_it_computes(
    architecture: str, tmp_path: Path
) -> None:
    from sae_lens.registry import SAE_TRAINING_CLASS_REGISTRY
    from sae_lens.saes.sae import SAEMetadata

    sae_class, config_class = SAE_TRAINING_CLASS_REGISTRY[architecture]
    fields = {"k": 5} if "topk" in architecture else {}
    metadata = SAEMetadata(hook_name="blocks.1.hook_resid_pre")
    torch.manual_seed(0)
    config = config_class(d_in=24, d_sae=40, dtype="float64", metadata=metadata, **fields)
    sae, x = sae_class(config).eval(), stream()
    with torch.no_grad():
        sae.W_dec.mul_(torch.rand(40, 1, dtype=torch.float64) + 0.5)
        wanted, error = sae.encode(x), x - sae(x)
    for basis in both_ways(sae, tmp_path):
        acts, parts = written(basis, x)
        torch.testing.assert_close(acts, wanted.to_dense() if wanted.is_sparse else wanted)
        torch.testing.assert_close(parts.named["error"], error)


def test_a_training_topk_with_sparse_activations_is_read_too() -> None:
    from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig

    config = TopKTrainingSAEConfig(24, 40, dtype="float64", k=5, use_sparse_activations=True)
    sae, x = TopKTrainingSAE(config).eval(), stream()
    with torch.no_grad():
        wanted = sae.encode(x)
    acts, _ = written(from_object(sae, 1, **fit()), x)
    torch.testing.assert_close(acts, wanted.to_dense())


def test_negative_activations_are_features_like_any(tmp_path: Path) -> None:
    model = tiny.gpt2()
    basis = {1: tiny.sae("abstopk", layer=1), 2: tiny.sae("abstopk", layer=2, seed=5)}
    store = headattr.attribute(model, basis, tiny.prompts(7), tmp_path / "out", edges="all")
    row = store.edge(0, headattr.Edge(1, 0, 6, 2))
    assert (row.q_active.acts < 0).any()
    assert (row.q_active.acts > 0).any()
    assert row.completeness <= 1e-5


def test_a_stream_trained_without_its_mean_is_centred_before_encoding() -> None:
    """V16: x = [3, 1, 1, 3] becomes [1, -1, -1, 1]; its mean goes back into the bias."""
    rows = {"W_enc": [[1.0], [0.0], [0.0], [0.0]], "W_dec": [[1.0, 0.0, 0.0, 0.0]]}
    x = torch.tensor([[3.0, 1.0, 1.0, 3.0]], dtype=torch.float64)
    centring = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
    for kwargs, act, bias in ((centring, 1.0, 2.0), ({}, 3.0, 0.0)):
        sae = hand_made("standard", rows)
        for name, value in kwargs.items():
            sae.cfg.metadata[name] = value
        acts, parts = written(from_object(sae, 1, **fit(4)), x)
        assert acts.item() == act
        assert torch.equal(parts.named["bias"], torch.full((1, 4), bias, dtype=torch.float64))
        assert torch.equal(parts.sparse_sum + sum(parts.named.values()), x)


@pytest.mark.parametrize(("architecture", "fields"), VARIANTS)
def test_a_centred_stream_is_the_dictionary_on_the_stream_without_its_mean(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    sae, x = tiny.sae(architecture, dtype="float64", **fields), stream()
    sae.cfg.metadata.model_from_pretrained_kwargs = {"center_writing_weights": True}
    mean = x.mean(-1, keepdim=True)
    for basis in both_ways(sae, tmp_path):
        acts, parts = written(basis, x)
        with torch.no_grad():
            assert torch.equal(acts, sae.encode(x - mean))
            torch.testing.assert_close(parts.named["error"], x - mean - sae(x - mean))


@pytest.mark.parametrize("value", [False, None])
def test_a_stream_is_not_centred_unless_it_says_so(value: bool | None) -> None:
    sae, x = tiny.sae("standard", dtype="float64"), stream()
    sae.cfg.metadata.model_from_pretrained_kwargs = {"center_writing_weights": value}
    with torch.no_grad():
        assert torch.equal(written(from_object(sae, 1, **fit()), x)[0], sae.encode(x))


# ---- reads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "fields"), [v for v in VARIANTS if v[0] != "matching_pursuit"]
)
@pytest.mark.parametrize("centred", [False, True])
def test_an_encoder_read_of_a_change_is_the_change_of_the_pre_activation(
    architecture: str, fields: dict[str, Any], centred: bool
) -> None:
    """The change permutes the coordinates of x, so that its deviation and norm stay, and shifts
    all of them where that leaves the dictionary's scale."""
    sae = tiny.sae(architecture, dtype="float64", **fields)
    sae.cfg.metadata.model_from_pretrained_kwargs = {"center_writing_weights": centred}
    x = stream()
    moved = x[:, torch.randperm(24, generator=torch.Generator().manual_seed(3))]
    if centred or fields["normalize_activations"] != "constant_norm_rescale":
        moved = moved + 1.5
    change = _pre_activation(sae, moved, centred) - _pre_activation(sae, x, centred)
    basis = from_object(sae, 1, **fit())
    active = basis.active(prompt_of(x))
    reads = basis.reads(prompt_of(x), active, "encoder")
    read = ((moved - x) @ reads.rows.T) * reads.pos_scale[:, None]
    torch.testing.assert_close(read, change)
    at, ids = active.positions, active.ids
    scaled = reads.scale[:, None] * reads.rows[ids]
    torch.testing.assert_close((scaled * (moved - x)[at]).sum(-1), change[at, ids])


def _pre_activation(sae: Any, x: torch.Tensor, centred: bool) -> torch.Tensor:
    """What sae_lens itself computes before its activation function."""
    found: list[torch.Tensor] = []
    handle = sae.hook_sae_acts_pre.register_forward_hook(lambda *a: found.append(a[2].detach()))
    sae.encode(x - x.mean(-1, keepdim=True) if centred else x)
    handle.remove()
    rescaled = getattr(sae.cfg, "rescale_acts_by_decoder_norm", False)
    return found[0] * sae.W_dec.detach().norm(dim=-1) if rescaled else found[0]


@pytest.mark.parametrize(("architecture", "fields"), VARIANTS)
def test_a_decoder_read_is_what_the_feature_itself_writes(
    architecture: str, fields: dict[str, Any]
) -> None:
    x = stream()
    basis = from_object(tiny.sae(architecture, dtype="float64", **fields), 1, **fit())
    active = basis.active(prompt_of(x))
    reads = basis.reads(prompt_of(x), active, "decoder")
    parts = basis.components(prompt_of(x), active)
    assert reads.read == "decoder"
    torch.testing.assert_close(
        reads.scale[:, None] * reads.rows[active.ids],
        parts.coefs[:, None] * basis.directions[active.ids],
    )
    rows = reads.scale[:, None] * reads.rows[active.ids]
    summed = torch.zeros_like(x).index_add(0, active.positions, rows)
    torch.testing.assert_close(summed, parts.sparse_sum)


def test_matching_pursuit_has_no_encoder_to_read_with() -> None:
    basis = from_object(tiny.sae("matching_pursuit", dtype="float64"), 1, **fit())
    prompt = prompt_of(stream())
    with pytest.raises(DictionaryError, match=r"matching_pursuit.*--read decoder"):
        basis.reads(prompt, basis.active(prompt), "encoder")


def test_a_gated_dictionary_says_which_of_its_rows_reads() -> None:
    basis = from_object(tiny.sae("gated"), 1, **fit())
    assert any("magnitude row" in said for said in basis.about.assumed)


# ---- folding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folded", [False, True])
def test_folding_the_decoder_norm_changes_no_contribution(folded: bool, tmp_path: Path) -> None:
    """V01: threshold 0.3, W_enc = [1, 0], W_dec = [4, 0]: 0.5 fires and writes [2, 0], 0.25 not."""
    rows = {"W_enc": [[1.0], [0.0]], "W_dec": [[4.0, 0.0]], "threshold": [0.3]}
    sae = hand_made("jumprelu", rows)
    if folded:
        sae.fold_W_dec_norm()
    x = torch.tensor([[0.5, 1.0], [0.25, 1.0]], dtype=torch.float64)
    for basis in both_ways(sae, tmp_path):
        acts, parts = written(basis, x)
        assert acts.flatten().tolist() == ([2.0, 0.0] if folded else [0.5, 0.0])
        assert parts.sparse_sum.tolist() == [[2.0, 0.0], [0.0, 0.0]]
        assert parts.active.counts.tolist() == [1, 0]
        said = "norm 1" if folded else "norms 4 to 4 (not folded)"
        assert any(said in line for line in basis.about.assumed)


@pytest.mark.parametrize("architecture", ["standard", "gated", "jumprelu", "topk"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_folded_dictionary_writes_what_it_wrote_unfolded(architecture: str, norm: str) -> None:
    fields: dict[str, Any] = {"normalize_activations": norm, "dtype": "float64"}
    if architecture == "topk":
        fields["rescale_acts_by_decoder_norm"] = True
    x, sae = stream(), tiny.sae(architecture, **fields)
    before = written(from_object(sae, 1, **fit()), x)[1]
    sae.fold_W_dec_norm()
    after = written(from_object(sae, 1, **fit()), x)[1]
    assert torch.equal(before.active.ids, after.active.ids)
    torch.testing.assert_close(before.sparse_sum, after.sparse_sum)
    torch.testing.assert_close(before.named, after.named)


SCALED = {"normalize_activations": "expected_average_only_in"}
IDENTITY = {
    "W_enc": [[1.0, 0.0], [0.0, 1.0]],
    "W_dec": [[1.0, 0.0], [0.0, 1.0]],
    "b_dec": [1.0, -1.0],
}


@pytest.mark.parametrize("where", ["activation_scaler.json", "top", "metadata", "folded"])
def test_the_scale_of_the_input_is_undone_in_the_output(where: str, tmp_path: Path) -> None:
    """V02: s = 0.5, W_enc = W_dec = I, b_dec = [1, -1] subtracted: x = [4, 2] has acts [1, 2]."""
    sae = hand_made("standard", IDENTITY, **({} if where == "folded" else SCALED))

    def change(config: dict[str, Any]) -> None:
        place = config["metadata"] if where == "metadata" else config
        place["norm_scaling_factor"] = 0.5

    if where == "folded":
        sae.fold_activation_norm_scaling_factor(0.5)
        folder = saved(tmp_path, sae)
    elif where == "activation_scaler.json":
        folder = saved(tmp_path, sae, activation_scaler='{"scaling_factor": 0.5}')
    else:
        folder = saved(tmp_path, sae, change=change)
    basis = load_sae(folder, 1, **fit(2))
    x = torch.tensor([[4.0, 2.0]], dtype=torch.float64)
    acts, parts = written(basis, x)
    assert acts.tolist() == [[1.0, 2.0]]
    assert (parts.sparse_sum + parts.named["bias"]).tolist() == [[4.0, 2.0]]
    assert parts.named["error"].tolist() == [[0.0, 0.0]]
    reads = basis.reads(prompt_of(x), parts.active, "encoder")
    assert (reads.scale[:, None] * reads.rows[parts.active.ids]).tolist() == [[0.5, 0], [0, 0.5]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_scaled_dictionary_equals_its_folded_form(architecture: str, tmp_path: Path) -> None:
    x, sae = stream(), tiny.sae(architecture, dtype="float64", **SCALED)
    found = load_sae(
        saved(tmp_path, sae, change=lambda c: c.update(norm_scaling_factor=0.3)), 1, **fit()
    )
    if architecture == "matching_pursuit":
        with torch.no_grad():
            torch.testing.assert_close(written(found, x)[0], sae.encode(0.3 * x))
            torch.testing.assert_close(written(found, x)[1].named["error"], x - sae(0.3 * x) / 0.3)
        return
    sae.fold_activation_norm_scaling_factor(0.3)
    with torch.no_grad():
        torch.testing.assert_close(written(found, x)[0], sae.encode(x))
        torch.testing.assert_close(written(found, x)[1].named["error"], x - sae(x))


def test_a_dictionary_in_memory_tells_its_scale_in_its_metadata() -> None:
    sae = hand_made("standard", IDENTITY, **SCALED)
    sae.cfg.metadata.norm_scaling_factor = 0.5
    basis = from_object(sae, 1, **fit(2))
    assert written(basis, torch.tensor([[4.0, 2.0]], dtype=torch.float64))[0].tolist() == [[1, 2]]
    sae.cfg.metadata.norm_scaling_factor = 0.25
    assert from_object(sae, 1, **fit(2)).about.hash != basis.about.hash


def test_another_scale_beside_the_same_weights_is_another_dictionary(tmp_path: Path) -> None:
    hashes = []
    for factor in (0.5, 0.25):
        sae = hand_made("standard", IDENTITY, **SCALED)
        text = json.dumps({"scaling_factor": factor})
        folder = saved(tmp_path / str(factor), sae, activation_scaler=text)
        hashes.append(load_sae(folder, 1, **fit(2)).about.hash)
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("architecture", ["standard", "gated", "jumprelu"])
@pytest.mark.parametrize("key", ["scaling_factor", "finetuning_scaling_factor"])
def test_finetuned_scaling_factors_are_folded_into_the_decoder(
    architecture: str, key: str, tmp_path: Path
) -> None:
    sae, x = tiny.sae(architecture, dtype="float64"), stream()
    factor = torch.linspace(0.5, 2, 40, dtype=torch.float64)
    folder = saved(tmp_path, sae, tensors=lambda state: state.update({key: factor}))
    acts, parts = written(load_sae(folder, 1, **fit()), x)
    with torch.no_grad():
        assert torch.equal(acts, sae.encode(x))
        torch.testing.assert_close(
            parts.named["error"], x - (acts * factor) @ sae.W_dec - sae.b_dec
        )


def test_finetuned_factors_of_one_are_nothing(tmp_path: Path) -> None:
    ones = {"scaling_factor": torch.ones(40)}
    folder = saved(tmp_path, tiny.sae("topk"), tensors=lambda state: state.update(ones))
    assert load_sae(folder, 1, **fit()).about.activation == "topk k=6"


@pytest.mark.parametrize(
    ("architecture", "shape"), [("topk", (40,)), ("standard", (7,)), ("standard", ())]
)
def test_finetuned_factors_that_cannot_be_folded_are_refused(
    architecture: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    twos = {"scaling_factor": torch.full(shape, 2.0)}
    folder = saved(tmp_path, tiny.sae(architecture), tensors=lambda state: state.update(twos))
    with pytest.raises(DictionaryError, match=f"finetuned scaling factors.*{architecture}"):
        load_sae(folder, 1, **fit())


# ---- configurations ---------------------------------------------------------------------------


def test_missing_training_keys_and_unknown_extras_do_not_matter(tmp_path: Path) -> None:
    """V19 (a): what is missing and harmless is assumed aloud."""
    sae = tiny.sae("standard", dtype="float64")
    change = old_style(activation_fn_str="relu", wandb_project="x", l1_coefficient=None)
    basis = load_sae(saved(tmp_path, sae, change=change), 1, **fit())
    with torch.no_grad():
        assert torch.equal(written(basis, stream())[0], sae.encode(stream()))
    said = " ".join(basis.about.assumed)
    for assumed in ("apply_b_dec_to_input = True", "normalize_activations = none", "'relu'"):
        assert assumed in said


@pytest.mark.parametrize("key", ["hook_point", "hook_point_in", "hf_hook_name"])
def test_the_site_has_had_other_names(key: str, tmp_path: Path) -> None:
    """V19 (b): and a renamed key is checked like the real one."""
    change = old_style(hook_name=None, architecture="standard", **{key: "layers.0"})
    folder = saved(tmp_path, tiny.sae("standard"), change=change)
    assert load_sae(folder, 1, **fit()).coder.dictionary.hook_name == "layers.0"
    with pytest.raises(DictionaryError, match="1="):
        load_sae(folder, 2, **fit())


def test_a_dictionary_without_a_site_is_taken_at_the_layer_asked_for(tmp_path: Path) -> None:
    folder = saved(tmp_path, tiny.sae("standard"), change=lambda c: c["metadata"].clear())
    assert any(
        "site = the layer asked for" in a for a in load_sae(folder, 2, **fit()).about.assumed
    )


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "V19 (c) no activation": ("standard", old_style(), "activation_fn_str"),
    "V19 (d) no factor": ("standard", lambda c: c.update(SCALED), "norm_scaling_factor"),
    "scaled as a flag": (
        "standard",
        old_style(architecture="standard", normalize_activations=True),
        "norm_scaling_factor",
    ),
    "factor 0": (
        "standard",
        lambda c: c.update(SCALED, norm_scaling_factor=0),
        "norm_scaling_factor",
    ),
    "factor infinite": (
        "standard",
        lambda c: c.update(SCALED, norm_scaling_factor=float("inf")),
        "inf",
    ),
    "factor true": (
        "standard",
        lambda c: c.update(SCALED, norm_scaling_factor=True),
        "no positive",
    ),
    "two factors": (
        "standard",
        lambda c: c.update(SCALED, norm_scaling_factor=0.5, activation_scaling_factor=2.0),
        "0.5 and 2.0",
    ),
    "unknown activation": (
        "standard",
        lambda c: c.update(activation_fn_str="tanh-relu"),
        "'tanh-relu'",
    ),
    "unknown activation alone": ("standard", old_style(activation_fn="tanh-relu"), "'tanh-relu'"),
    "gated tanh": ("gated", lambda c: c.update(activation_fn="tanh-relu"), "'tanh-relu'"),
    "jumprelu tanh": ("jumprelu", lambda c: c.update(activation="tanh-relu"), "'tanh-relu'"),
    "topk without k": ("topk", lambda c: c.pop("k"), "without 'k'"),
    "topk by name without k": ("standard", old_style(activation_fn_str="topk"), "without 'k'"),
    "k 0": ("topk", lambda c: c.update(k=0), "without 'k'"),
    "k text": ("topk", lambda c: c.update(k="6"), "'6'"),
    "k true": ("topk", lambda c: c.update(k=True), "True"),
    "k over d_sae": ("topk", lambda c: c.update(k=41), "d_sae = 40"),
    "two ks": ("topk", lambda c: c.update(activation_fn_kwargs={"k": 2}), "6 and 2"),
    "training form": (
        "standard",
        lambda c: c.update(architecture="batchtopk", k=4),
        "save_inference_model",
    ),
    "nested training form": (
        "standard",
        lambda c: c.update(architecture="matryoshka_batchtopk"),
        "save_inference_model",
    ),
    "whitening": (
        "standard",
        lambda c: c.update(normalize_activations="covariance_whitening"),
        "covariance_whitening",
    ),
    "scalar rescale": (
        "standard",
        lambda c: c.update(normalize_activations="constant_scalar_rescale"),
        "constant_scalar_rescale",
    ),
    "temporal": ("standard", lambda c: c.update(architecture="temporal"), "'temporal'"),
    "transcoder": ("standard", lambda c: c.update(architecture="transcoder"), "'d_out'"),
    "unknown architecture": ("standard", lambda c: c.update(architecture="vqvae"), "'vqvae'"),
    "hook_z reshaping": (
        "standard",
        lambda c: c.update(reshape_activations="hook_z"),
        "reshape_activations",
    ),
    "no width": ("standard", lambda c: c.pop("d_in"), "'d_in'"),
    "width as text": ("standard", lambda c: c.update(d_sae="40"), "'d_sae'"),
    "flag as text": (
        "standard",
        lambda c: c.update(apply_b_dec_to_input="no"),
        "apply_b_dec_to_input",
    ),
    "writes elsewhere": (
        "standard",
        lambda c: c["metadata"].update(hook_name_out="blocks.1.hook_mlp_out"),
        "hook_mlp_out",
    ),
    "site a list": ("standard", lambda c: c["metadata"].update(hook_name=["x"]), "hook_name"),
    "metadata text": ("standard", lambda c: c.update(metadata="x"), "metadata"),
    "width of another model": ("standard", lambda c: c.update(d_in=16), "width 16.* 24"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_would_change_a_number_is_refused(case: str, tmp_path: Path) -> None:
    architecture, change, said = REFUSED[case]
    folder = saved(tmp_path / "sae", tiny.sae(architecture), change=change)
    with pytest.raises(DictionaryError, match=said) as caught:
        load_sae(folder, 1, **fit())
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cfg", "{"),
        ("cfg", "[]"),
        ("cfg", "null"),
        ("activation_scaler", "{"),
        ("activation_scaler", "[1]"),
        ("activation_scaler", '{"scaling_factor": "1"}'),
    ],
)
def test_broken_json_is_refused_naming_the_file(name: str, text: str, tmp_path: Path) -> None:
    sae = tiny.sae("standard", **SCALED)
    folder = saved(tmp_path, sae, **{name: text})
    with pytest.raises(DictionaryError, match=f"{name}.json"):
        load_sae(folder, 1, **fit())


@pytest.mark.parametrize(
    "config",
    [
        {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 2}},
        {"activation": "topk", "k": 2},
        {"architecture": "standard", "activation_fn": "topk", "activation_fn_kwargs": {"k": 2}},
        {"architecture": "topk", "k": 2},
        {"architecture": "topk", "k": None, "activation_fn_kwargs": {"k": 2}},
        {"architecture": "topk", "k": 2.0},
    ],
)
def test_topk_keeps_its_k_strongest_however_it_is_said(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """V22: pre-activations [5, 4, 3, 2] with k = 2 leave features 0 and 1."""
    eye = torch.eye(4).tolist()
    sae = hand_made("topk", {"W_enc": eye, "W_dec": eye}, k=2)
    basis = load_sae(saved(tmp_path, sae, change=old_style(**config)), 1, **fit(4))
    acts, _ = written(basis, torch.tensor([[5.0, 4.0, 3.0, 2.0]], dtype=torch.float64))
    assert acts.tolist() == [[5.0, 4.0, 0.0, 0.0]]
    assert basis.about.activation == "topk k=2"


def test_the_store_says_which_activation_ran_and_how_many_were_active(tmp_path: Path) -> None:
    sae = tiny.sae("topk", k=3)
    with torch.no_grad():
        sae.b_enc.add_(100)
    folder = saved(tmp_path / "sae", sae)
    store = headattr.attribute(tiny.llama(), {1: folder}, tiny.prompts(8, 5), tmp_path / "out")
    assert store.manifest["sources"][0]["activation"] == "topk k=3"
    assert store.mean_l0(0) == 3


# ---- tensors and files ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "change", "said"),
    [
        ("standard", lambda s: s.pop("b_enc"), "b_enc 40"),
        ("jumprelu", lambda s: s.pop("threshold"), "threshold 40"),
        ("standard", lambda s: s.update(extra=torch.ones(3)), "extra 3"),
        ("jumprelu", lambda s: s.update(threshold=torch.ones(1)), "threshold 1"),
        ("standard", lambda s: s.update(W_dec=s["W_dec"][:, :23].contiguous()), "W_dec 40x23"),
        ("standard", lambda s: s.update(W_enc=s["W_enc"][:, :39].contiguous()), "W_enc 24x39"),
        ("topk", lambda s: s.update(b_dec=torch.ones(23)), "b_dec 23"),
        ("gated", lambda s: s.pop("r_mag"), "r_mag 40"),
        ("matching_pursuit", lambda s: s.update(W_enc=torch.ones(24, 40)), "W_enc 24x40"),
        ("standard", lambda s: s["W_enc"].view(-1)[5].fill_(float("nan")), "W_enc.*non-finite"),
        ("standard", lambda s: s["b_dec"][0].fill_(float("inf")), "b_dec.*non-finite"),
        ("jumprelu", lambda s: s["threshold"][0].fill_(float("nan")), "threshold.*non-finite"),
        ("standard", lambda s: s.update(W_dec=s["W_dec"].to(torch.int8)), "W_dec.*int8"),
    ],
)
def test_tensors_that_do_not_belong_are_refused_naming_them(
    architecture: str, change: Callable[[Any], Any], said: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "sae", tiny.sae(architecture), tensors=change)
    with pytest.raises(DictionaryError, match=said) as caught:
        load_sae(folder, 1, **fit())
    assert str(folder) in str(caught.value)


def test_broken_numbers_in_memory_are_refused_too() -> None:
    sae = tiny.sae("standard")
    with torch.no_grad():
        sae.W_dec[3, 4] = float("nan")
    with pytest.raises(DictionaryError, match=r"W_dec.*non-finite"):
        from_object(sae, 1, **fit())


def test_a_threshold_of_infinity_is_a_feature_that_never_fires() -> None:
    sae = tiny.sae("jumprelu", dtype="float64")
    with torch.no_grad():
        sae.threshold[5] = float("inf")
    acts, parts = written(from_object(sae, 1, **fit()), stream())
    assert (acts[:, 5] == 0).all()
    assert (acts != 0).any()
    torch.testing.assert_close(parts.sparse_sum + sum(parts.named.values()), stream())


def _refused_before_loading(folders: dict[int, Any], said: str, out: Path, **options: Any) -> str:
    """The model cannot be loaded at all, so the refusal came first; nothing is written."""
    with pytest.raises(HeadattrError, match=said) as caught:
        headattr.attribute(Unloadable(), folders, [[1, 2, 3]], out, **options)
    assert not out.exists()
    return str(caught.value)


def test_a_truncated_file_among_good_ones_is_named_before_the_model_is_loaded(
    tmp_path: Path,
) -> None:
    """V24: the file, its size and the size that its header requires."""
    folders = {layer: saved(tmp_path / str(layer), tiny.sae(layer=layer)) for layer in range(5)}
    path = folders[3] / "sae_weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    said = _refused_before_loading(folders, str(path), tmp_path / "out")
    assert f"is {len(whole) - 10} bytes" in said
    assert f"requires {len(whole)}" in said
    _refused_before_loading({1: folders[1]}, str(path), tmp_path / "out", output={3: folders[3]})


@pytest.mark.parametrize("kept", [0, 4, 8, 40, 300])
def test_a_file_cut_in_its_header_is_named_too(kept: int, tmp_path: Path) -> None:
    folder = saved(tmp_path / "sae")
    path = folder / "sae_weights.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    said = _refused_before_loading({1: folder}, str(path), tmp_path / "out")
    assert f"{kept} bytes" in said


def test_appended_bytes_and_other_formats_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "sae")
    path = folder / "sae_weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole + b"0123456789")
    said = _refused_before_loading({1: folder}, str(path), tmp_path / "out")
    assert f"requires {len(whole)}" in said
    path.write_bytes(b"PK\x03\x04" + bytes(400))
    _refused_before_loading({1: folder}, str(path), tmp_path / "out")
    path.unlink()
    _refused_before_loading({1: folder}, "is no dictionary .found cfg.json", tmp_path / "out")


def test_a_header_that_lies_about_its_tensors_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "sae")
    path = folder / "sae_weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"shape":[24,40]', b'"shape":[24,41]', 1))
    assert path.read_bytes() != whole
    with pytest.raises(DictionaryError, match=str(path)):
        load_sae(folder, 1, **fit())


def test_a_folder_without_a_configuration_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    _refused_before_loading({1: tmp_path / "empty"}, "is no dictionary", tmp_path / "out")
    _refused_before_loading({1: tmp_path / "nowhere"}, "nowhere is not a folder", tmp_path / "out")


# ---- sites ------------------------------------------------------------------------------------

LAYER_2 = (
    "layers.1",
    "blocks.1.hook_resid_post",
    "blocks.2.hook_resid_pre",
    "hidden_states[2]",
    "hidden_states.2",
    "model.layers.1",
    "transformer.h.1",
    "gpt_neox.layers.1",
    "model.layers.1.output",
    "model.layers.2.input",
)


@pytest.mark.parametrize("site", LAYER_2)
def test_the_output_of_a_block_is_the_input_of_the_next(site: str, tmp_path: Path) -> None:
    """V20: all names of one tensor are layer 2; asked for layer 1, layer 2 is suggested."""
    assert site_of(site) == Site("resid_pre", 2)
    folder = saved(
        tmp_path / "sae", tiny.sae(), change=lambda c: c["metadata"].update(hook_name=site)
    )
    assert load_sae(folder, 2, **fit()).layer == 2
    said = _refused_before_loading({1: folder}, "resid_pre of layer 2", tmp_path / "out")
    assert f"2={folder}" in said


def test_the_names_of_one_site_give_the_same_numbers(tmp_path: Path) -> None:
    answers = []
    for index, site in enumerate(LAYER_2[:4]):
        folder = saved(
            tmp_path / f"sae{index}",
            tiny.sae(),
            change=lambda c, site=site: c["metadata"].update(hook_name=site),
        )
        out = tmp_path / f"out{index}"
        store = headattr.attribute(tiny.llama(), {2: folder}, tiny.prompts(6), out, edges="all")
        row = store.edge(0, headattr.Edge(2, 1, 5, 3))
        answers.append((row.score, row.totals.tolist(), row.values.tolist()))
    assert answers[1:] == answers[:-1]


@pytest.mark.parametrize(
    "site",
    [
        "blocks.1.hook_resid_mid",
        "blocks.1.hook_mlp_out",
        "blocks.1.attn.hook_z",
        "",
        "blocks.1.hook_attn_out",
        "blocks.1.ln1.hook_normalized",
        "layers.1.mlp",
        "hook_embed",
        "blocks.x.hook_resid_pre",
        "blocks.-1.hook_resid_pre",
        "blocks.{layer}.hook_resid_pre",
    ],
)
def test_other_sites_are_refused_by_name(site: str, tmp_path: Path) -> None:
    change = lambda c: c["metadata"].update(hook_name=site)  # noqa: E731
    folder = saved(tmp_path / "sae", tiny.sae("standard"), change=change)
    said = _refused_before_loading({1: folder}, "expected the residual stream", tmp_path / "out")
    assert repr(site) in said


def test_a_width_of_another_model_is_refused_before_any_forward_pass(tmp_path: Path) -> None:
    model = tiny.gpt2()
    model.transformer.register_forward_pre_hook(lambda *a: pytest.fail("a forward pass ran"))
    for given in (tiny.sae(d_in=16), saved(tmp_path / "sae", tiny.sae(d_in=16))):
        with pytest.raises(DictionaryError, match=r"width 16.* 24"):
            headattr.attribute(model, {1: given}, [[1, 2, 3]], tmp_path / "out")


def test_a_layer_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    for layer in (3, 7):
        with pytest.raises(DictionaryError, match="layers are 0 to 2"):
            headattr.attribute(
                tiny.gpt2(), {layer: tiny.sae(layer=layer)}, [[1, 2]], tmp_path / "out"
            )


def test_the_last_residual_stream_is_an_output_but_no_basis(tmp_path: Path) -> None:
    last = tiny.sae("standard", layer=3)
    last.cfg.metadata.hook_name = "blocks.2.hook_resid_post"
    store = headattr.attribute(
        tiny.gpt2(),
        {2: tiny.sae(layer=2)},
        tiny.prompts(6),
        tmp_path / "out",
        output={3: last},
        edges="all",
    )
    row = store.edge(0, headattr.Edge(2, 0, 5, 1))
    assert row.ov is not None
    assert row.ov.block_completeness <= 1e-5


@pytest.mark.parametrize(
    ("kind", "said"), [("temporal", "'temporal'"), ("transcoder", "expected the input of an MLP")]
)
def test_a_dictionary_in_memory_of_another_kind_is_refused(
    kind: str, said: str, tmp_path: Path
) -> None:
    from sae_lens.registry import SAE_CLASS_REGISTRY

    sae_class, config_class = SAE_CLASS_REGISTRY[kind]
    fields = (
        {"n_heads": 2, "kval_topk": 4, "bottleneck_factor": 4}
        if kind == "temporal"
        else {"d_out": 24, "apply_b_dec_to_input": False}
    )
    sae = sae_class(config_class(d_in=24, d_sae=40, **fields))
    with pytest.raises(DictionaryError, match=said):
        headattr.attribute(tiny.gpt2(), {1: sae}, [[1, 2, 3]], tmp_path / "out")


def test_an_object_that_is_no_dictionary_is_refused_by_its_class(tmp_path: Path) -> None:
    class Homemade:
        W_dec = torch.ones(3, 24)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x

    for given in (Homemade(), 3, None):
        with pytest.raises(UsageError, match=type(given).__name__):
            headattr.attribute(tiny.gpt2(), {1: given}, [[1, 2, 3]], tmp_path / "out")


# ---- nothing active ---------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["active", "all"])
def test_positions_where_nothing_is_active_are_bias_and_error(outputs: str, tmp_path: Path) -> None:
    """A TopK of k = 1 whose strongest pre-activation is negative has no feature at all."""
    silent = [tiny.sae("topk", k=1, layer=layer, seed=layer) for layer in (1, 2)]
    with torch.no_grad():
        for sae in silent:
            sae.b_enc.fill_(-1e4)
    store = headattr.attribute(
        tiny.gpt2(),
        {1: silent[0]},
        tiny.prompts(6, 1),
        tmp_path / "out",
        output={2: silent[1]},
        outputs=outputs,
        edges="all",
    )
    for prompt, edge in ((0, headattr.Edge(1, 2, 5, 3)), (1, headattr.Edge(1, 0, 0, 0))):
        row = store.edge(prompt, edge)
        assert len(row.q_active.features) == 0
        assert (row.q_slots == -1).all()
        assert row.completeness <= 1e-5
        assert row.totals[0].tolist() == [0, 0, 0]
        assert row.totals.sum() == pytest.approx(row.score, abs=1e-5)
        assert row.ov is not None
        assert row.ov.completeness <= 1e-5


def test_a_position_where_nothing_is_active_stands_beside_others_that_have_features(
    tmp_path: Path,
) -> None:
    sae = tiny.sae("jumprelu")
    with torch.no_grad():
        sae.threshold.fill_(5.0)
    store = headattr.attribute(
        tiny.llama(),
        {1: sae},
        tiny.prompts(30),
        tmp_path / "out",
        output={2: tiny.sae(layer=2)},
        edges="all",
    )
    counts = [len(store.edge(0, headattr.Edge(1, 0, q, 0)).q_active.features) for q in range(30)]
    assert min(counts) == 0 < max(counts)
    for q_pos, count in enumerate(counts):
        row = store.edge(0, headattr.Edge(1, 0, q_pos, 0))
        assert row.completeness <= 1e-5
        assert (row.q_slots >= 0).any() == (count > 0 and counts[0] > 0)


# ---- plain directions -------------------------------------------------------------------------


def plain(*lengths: int, features: int = 5, bias: bool = True) -> Any:
    generator = torch.Generator().manual_seed(7)
    acts = [torch.randn(n, features, generator=generator) for n in lengths]
    acts = [a.masked_fill(a.abs() < 0.5, 0) for a in acts]
    return headattr.PlainDictionary(
        torch.randn(features, 24, generator=generator),
        acts,
        torch.randn(24, generator=generator) if bias else None,
    )


@pytest.mark.parametrize("bias", [True, False])
def test_plain_directions_and_activations_are_a_basis(bias: bool, tmp_path: Path) -> None:
    given = plain(6, 4, bias=bias)
    store = headattr.attribute(
        tiny.llama(), {1: given}, tiny.prompts(6, 4), tmp_path / "out", edges="all"
    )
    for prompt, length in enumerate((6, 4)):
        for q_pos in range(length):
            row = store.edge(prompt, headattr.Edge(1, 3, q_pos, 0))
            acts = given.activations[prompt][q_pos]
            assert row.q_active.features.tolist() == acts.nonzero().flatten().tolist()
            assert row.q_active.acts.tolist() == pytest.approx(acts[acts != 0].tolist())
            assert row.completeness <= 1e-5


def test_plain_activations_belong_to_the_prompts_that_were_handed_in(tmp_path: Path) -> None:
    """Also where a prompt between them cannot be run: no activation moves to another prompt."""
    given, prompts = plain(4, 4, 4), tiny.prompts(4, 4, 4)
    prompts[1] = [1, 2, tiny.VOCABULARY + 5, 3]
    store = headattr.attribute(tiny.llama(), {1: given}, prompts, tmp_path / "out", edges="all")
    assert store.prompt_ids == [0, 2]
    row = store.edge(2, headattr.Edge(1, 0, 3, 1))
    acts = given.activations[2][3]
    assert row.q_active.acts.tolist() == pytest.approx(acts[acts != 0].tolist())


def test_plain_components_sum_to_the_stream() -> None:
    given, x = plain(9), stream()
    basis = plain_basis(given, 1, **fit())
    _, parts = written(basis, x)
    torch.testing.assert_close(parts.sparse_sum, given.activations[0].double() @ basis.directions)
    torch.testing.assert_close(parts.sparse_sum + sum(parts.named.values()), x)


def test_plain_directions_read_with_their_decoder_only(tmp_path: Path) -> None:
    given, basis = plain(6), tiny.sae(layer=1)
    store = headattr.attribute(
        tiny.llama(),
        {1: basis},
        tiny.prompts(6),
        tmp_path / "out",
        output={2: given},
        read="decoder",
        edges="all",
    )
    row = store.edge(0, headattr.Edge(1, 1, 5, 2))
    assert row.ov is not None
    assert row.ov.completeness <= 1e-5
    found = plain_basis(given, 1, **fit())
    prompt = prompt_of(stream(6))
    with pytest.raises(DictionaryError, match="--read decoder"):
        found.reads(prompt, found.active(prompt), "encoder")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"directions": torch.ones(5, 23)}, r"\(5, 23\).*24"),
        ({"directions": torch.ones(24)}, r"\(24,\).*24"),
        ({"directions": torch.full((5, 24), float("nan"))}, "directions.*non-finite"),
        ({"bias": torch.ones(23)}, r"bias.*\(23,\)"),
        ({"bias": torch.full((24,), float("inf"))}, "bias.*non-finite"),
        ({"activations": []}, "no activations for prompt 0"),
        ({"activations": [torch.ones(5, 5)]}, r"\(5, 5\).*\(6, 5\)"),
        ({"activations": [torch.ones(6, 4)]}, r"\(6, 4\).*\(6, 5\)"),
        ({"activations": [torch.full((6, 5), float("nan"))]}, "not finite"),
    ],
)
def test_plain_parts_that_do_not_fit_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = headattr.PlainDictionary(**{**vars(plain(6)), **change})
    with pytest.raises(DictionaryError, match=said):
        headattr.attribute(tiny.llama(), {1: given}, tiny.prompts(6), tmp_path / "out")


@pytest.mark.parametrize("family", tiny.MODELS)
def test_a_centred_dictionary_is_refused_on_a_model_without_centring(
    family: str, tmp_path: Path
) -> None:
    """V16: the score is the same with and without centring, where the model centres at all."""
    centred, plain, hf = tiny.sae(layer=1), tiny.sae(layer=1), tiny.MODELS[family]()
    centred.cfg.metadata.model_from_pretrained_kwargs = {"center_writing_weights": True}
    if family not in ("gpt2", "gpt_neox"):
        with pytest.raises(DictionaryError, match="RMSNorm"):
            headattr.attribute(hf, {1: centred}, tiny.prompts(5), tmp_path / "out")
        return
    stores = [
        headattr.attribute(hf, {1: sae}, tiny.prompts(5), tmp_path / name, edges="all")
        for sae, name in ((centred, "centred"), (plain, "plain"))
    ]
    assert check_store(stores[0])["ok"]
    one, other = (store.edge(0, headattr.Edge(1, 0, 4, 2)) for store in stores)
    assert one.score == other.score
    assert one.q_active.acts.tolist() != other.q_active.acts.tolist()


def test_the_last_hidden_state_is_no_residual_site(tmp_path: Path) -> None:
    """In transformers hidden_states[n_layers] lies behind the final norm."""
    sae, last = tiny.sae(layer=1), tiny.sae(layer=3)
    last.cfg.metadata.hook_name = "hidden_states[3]"
    with pytest.raises(DictionaryError, match=r"blocks\.2\.hook_resid_post"):
        headattr.attribute(
            tiny.llama(), {1: sae}, tiny.prompts(5), tmp_path / "normed", output={3: last}
        )
    last.cfg.metadata.hook_name = "blocks.2.hook_resid_post"
    store = headattr.attribute(
        tiny.llama(), {1: sae}, tiny.prompts(5), tmp_path / "plain", output={3: last}
    )
    assert check_store(store)["ok"]
