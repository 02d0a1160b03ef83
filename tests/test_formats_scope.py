"""Gemma Scope, Gemma Scope 2 and Llama Scope: files written to the letter are read with the
activations and reconstructions that they are of, or refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headattr.basis.coder import Coder
from headattr.basis.crosscoder import load_crosscoder
from headattr.basis.dictionary import Dictionary, Release
from headattr.basis.formats.npz import npz_tensors
from headattr.basis.formats.registry import formats, open_release
from headattr.basis.sae import residual_basis
from headattr.basis.transcoder_checks import check_transcoders
from headattr.errors import DictionaryError
from headattr.model.sites import Site

CPU = torch.device("cpu")
D, F = 24, 40
Written = dict[str, torch.Tensor]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.4 * torch.randn(shape, generator=generator)).to(dtype)


def stream(width: int = D, seed: int = 90) -> torch.Tensor:
    return 3 * random(seed, 7, width)


def parts(dtype: torch.dtype, d_in: int = D, d_out: int = D, seed: int = 0) -> Written:
    """A JumpReLU dictionary as Gemma Scope keeps it."""
    return {
        "w_enc": random(seed, d_in, F, dtype=dtype),
        "w_dec": random(seed + 1, F, d_out, dtype=dtype),
        "b_enc": random(seed + 2, F, dtype=dtype),
        "b_dec": random(seed + 3, d_out, dtype=dtype),
        "threshold": random(seed + 4, F, dtype=dtype).abs(),
    }


def capital(written: Written) -> Written:
    return {f"W{k[1:]}" if k in ("w_enc", "w_dec") else k: part for k, part in written.items()}


def npz(folder: Path, written: Written) -> Path:
    """params.npz as numpy saves it: bfloat16 is opaque to it, 2 bytes a number."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        name: part.view(torch.int16).numpy().view("V2")
        if part.dtype == torch.bfloat16
        else part.numpy()
        for name, part in written.items()
    }
    np.savez(folder / "params.npz", **arrays)  # type: ignore[arg-type]
    return folder


def saved(path: Path, written: Written, config: dict[str, Any] | None = None) -> Path:
    """A safetensors file, and config.json beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: part.contiguous() for name, part in written.items()}, path)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path.parent


def floats(written: Written) -> Written:
    return {name: part.float() for name, part in written.items()}


def jumprelu(pre: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return pre.relu() * (pre > threshold)


def coder_of(dictionary: Dictionary) -> Coder:
    return Coder(dictionary, torch.float32, CPU)


def acts_of(coder: Coder, x: torch.Tensor) -> torch.Tensor:
    active = coder.encode([x])
    found = torch.zeros(len(x), coder.dictionary.features)
    found[active.positions, active.ids] = active.acts
    return found


def made_by(coder: Coder, x: torch.Tensor, write: int = 0) -> torch.Tensor:
    """What a dictionary makes of a site, in the model's units."""
    features = acts_of(coder, x) @ coder.directions(write)
    made = coder.seen(x).scale[:, None] * features + coder.bias(write, x)
    skip = coder.skip(x) if write == 0 else None
    return made if skip is None else made + skip


def only(release: Release) -> Dictionary:
    (dictionary,) = release.dictionaries
    return dictionary


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


Reference = Callable[..., Any]


@pytest.fixture
def sae_lens_of(monkeypatch: pytest.MonkeyPatch) -> Reference:
    """sae_lens' own reading of a repository's folder on this disk."""
    import sae_lens.loading.pretrained_sae_loaders as loaders
    from huggingface_hub.utils import EntryNotFoundError
    from sae_lens import SAE

    def load(loader: str, root: Path, folder: str, **overrides: Any) -> Any:
        def local(_: str, filename: str, subfolder: str | None = None, **__: Any) -> str:
            path = root / (subfolder or "") / filename
            if not path.exists():
                raise EntryNotFoundError(str(path))
            return str(path)

        def shapes(repo_id: str, filename: str) -> dict[str, list[int]]:
            with safe_open(local(repo_id, filename), "pt") as file:
                return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

        def converter(path: Path, device: str = "cpu", cfg_overrides: Any = None) -> Any:
            del cfg_overrides
            found = getattr(loaders, loader)(root.name, str(path), device, False, overrides)
            return found[:2]

        monkeypatch.setattr(
            loaders, "hf_hub_download", lambda repo_id, filename, **k: local(repo_id, filename, **k)
        )
        monkeypatch.setattr(loaders, "get_safetensors_tensor_shapes", shapes)
        return SAE.load_from_disk(folder, converter=converter, dtype="float32")

    return load


HALVES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

# --- Gemma Scope

SCOPE = {
    "res": (Site("resid_pre", 13), Site("resid_pre", 13)),
    "mlp": (Site("mlp_out", 12), Site("mlp_out", 12)),
    "att": (Site("z", 12), Site("z", 12)),
    "transcoders": (Site("mlp_normed", 12), Site("mlp_out", 12)),
}
OWN = "layer_12/width_16k/average_l0_82"


@HALVES
@pytest.mark.parametrize("kind", SCOPE)
def test_gemma_scope_is_read_with_sae_lens_own_activations_at_the_site_of_its_path(
    tmp_path: Path, kind: str, dtype: torch.dtype, sae_lens_of: Reference
) -> None:
    name, written = f"gemma-scope-2b-pt-{kind}", capital(parts(dtype))
    npz(tmp_path / "floats" / name / OWN, floats(written))
    release = open_release(npz(tmp_path / name / OWN, written))
    dictionary, x = only(release), stream()
    assert (dictionary.reads, dictionary.writes) == tuple((site,) for site in SCOPE[kind])
    assert release.kind == ("transcoders" if kind == "transcoders" else "sae")
    transcoder = {"d_out": D} if kind == "transcoders" else {}
    loader = f"gemma_2_{'transcoder' if transcoder else 'sae'}_huggingface_loader"
    sae = sae_lens_of(loader, tmp_path / "floats" / name, OWN, d_in=D, d_sae=F, **transcoder)
    assert dictionary.hook_name == sae.cfg.metadata.hook_name
    coder = coder_of(dictionary)
    with torch.no_grad():
        given = x.unflatten(1, (4, 6)) if kind == "att" else x  # sae_lens takes heads apart
        close(acts_of(coder, x), sae.encode(given))
        close(made_by(coder, x), sae.decode(sae.encode(given)).reshape(x.shape))


def test_gemma_scope_names_its_arrays_in_either_case(tmp_path: Path) -> None:
    written = parts(torch.float32)
    one = coder_of(only(open_release(npz(tmp_path / "one", written))))
    other = coder_of(only(open_release(npz(tmp_path / "other", capital(written)))))
    assert one.hash == other.hash
    close(made_by(one, stream()), made_by(other, stream()))


def test_bfloat16_that_numpy_only_knows_as_two_bytes_is_read_as_what_it_is(tmp_path: Path) -> None:
    threshold = torch.tensor([1.0, 0.1, 3.0], dtype=torch.bfloat16)
    folder = npz(tmp_path, {"threshold": threshold})
    with np.load(folder / "params.npz") as raw:
        assert raw["threshold"].dtype == np.dtype("V2")
    found = npz_tensors(folder / "params.npz")["threshold"]
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [1.0, 0.10009765625, 3.0]


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_bfloat16_of_a_dictionary_comes_back_as_written(tmp_path: Path, kind: str) -> None:
    written = parts(torch.bfloat16)
    written["b_enc"][:3] = torch.tensor([1.0, 0.1, 3.0])
    if kind == "npz":
        folder = npz(tmp_path, written)
    else:
        folder = saved(tmp_path / "params.safetensors", written)
    tensors, _ = only(open_release(folder)).read()
    assert tensors.b_enc is not None
    assert tensors.b_enc[:3].tolist() == [1.0, 0.10009765625, 3.0]
    for stored in (tensors.W_enc[0], tensors.W_dec[0], tensors.b_dec[0], tensors.threshold):
        assert stored is not None
        assert stored.dtype == torch.bfloat16
    torch.testing.assert_close(tensors.W_enc[0], written["w_enc"].T, rtol=0, atol=0)


def test_big_endian_and_half_arrays_are_read_by_value(tmp_path: Path) -> None:
    written = {name: part.numpy() for name, part in parts(torch.float32).items()}
    written["b_dec"] = written["b_dec"].astype(">f4")
    written["b_enc"] = written["b_enc"].astype(np.float16)
    np.savez_compressed(tmp_path / "params.npz", **written)  # type: ignore[arg-type]
    tensors, _ = only(open_release(tmp_path)).read()
    assert tensors.b_dec[0] is not None
    assert tensors.b_enc is not None
    assert tensors.b_dec[0].tolist() == written["b_dec"].tolist()
    assert tensors.b_enc.dtype == torch.float16


@pytest.mark.parametrize("path", ["somewhere", "layer_12/width_16k/average_l0_82", "res/layer_3"])
def test_gemma_scope_under_another_name_takes_the_layer_that_it_is_asked_for(
    tmp_path: Path, path: str
) -> None:
    dictionary = only(open_release(npz(tmp_path / path, parts(torch.float32))))
    assert dictionary.reads == (None,)
    assert dictionary.hook_name is None
    assert any("site = the layer asked for" in note for note in dictionary.assumed)


def test_a_gemma_scope_path_in_the_hub_cache_names_its_site(tmp_path: Path) -> None:
    cached = tmp_path / "models--google--gemma-scope-9b-it-res" / "snapshots" / ("ab" * 20)
    dictionary = only(open_release(npz(cached / "layer_20/width_131k/x", parts(torch.float32))))
    assert dictionary.reads == (Site("resid_pre", 21),)


def test_gemma_scope_decomposes_the_stream_behind_its_layer_and_no_other(tmp_path: Path) -> None:
    folder = npz(tmp_path / "gemma-scope-2b-pt-res" / OWN, parts(torch.float32))
    fit: dict[str, Any] = {"d_model": D, "dtype": torch.float64, "device": CPU}
    assert residual_basis(open_release(folder), 13, **fit).site == Site("resid_pre", 13)
    with pytest.raises(DictionaryError, match="use 13="):
        residual_basis(open_release(folder), 12, **fit)


def test_an_sae_of_token_embeddings_is_refused_with_its_reason(tmp_path: Path) -> None:
    embedding = tmp_path / "gemma-scope-2b-pt-res" / "embedding/width_4k/average_l0_44"
    with pytest.raises(DictionaryError, match="token embeddings, which reads each divided by"):
        open_release(npz(embedding, parts(torch.float32)))


def test_a_path_that_says_the_kind_without_the_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DictionaryError, match=r"mlp dictionaries.*layer_N"):
        open_release(npz(tmp_path / "gemma-scope-2b-pt-mlp/mine", parts(torch.float32)))


@pytest.mark.parametrize("left", [10, 2000, -10, -400])
def test_a_truncated_npz_names_itself_and_both_sizes(tmp_path: Path, left: int) -> None:
    path = npz(tmp_path, parts(torch.float32)) / "params.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    actual = len(whole[:left])
    said = rf"params.npz (is {actual} bytes, .* (requires|end at) \d+|cannot be read)"
    with pytest.raises(DictionaryError, match=said):
        open_release(tmp_path)
    if left != 10:
        with pytest.raises(DictionaryError, match=f"is {actual} bytes, .*truncated; copy it again"):
            open_release(tmp_path)


def test_an_npz_whose_bytes_changed_is_refused_when_it_is_read(tmp_path: Path) -> None:
    path = npz(tmp_path, parts(torch.float32)) / "params.npz"
    broken = bytearray(path.read_bytes())
    broken[1000] ^= 0x40
    path.write_bytes(bytes(broken))
    with pytest.raises(DictionaryError, match=r"params.npz cannot be read: .*CRC"):
        only(open_release(tmp_path)).read()


class Marked:
    """Unpickling it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_objects_in_an_npz_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    written: dict[str, Any] = {k: part.numpy() for k, part in parts(torch.float32).items()}
    written["b_enc"] = np.array([Marked(tmp_path / "marker")], dtype=object)
    np.savez(tmp_path / "params.npz", **written)
    with pytest.raises(DictionaryError, match=r"b_enc is of type object.*never unpickled"):
        open_release(tmp_path)
    assert not (tmp_path / "marker").exists()


def transposed(written: Written) -> Written:
    return {k: part.T.contiguous() if part.ndim == 2 else part for k, part in written.items()}


WRONG = {
    "a missing array": (lambda w: {k: w[k] for k in w if k != "threshold"}, "lacks threshold"),
    "an unknown array": (lambda w: w | {"scaling_factor": torch.ones(F)}, "has scaling_factor"),
    "another width": (lambda w: w | {"w_dec": torch.ones(F, D + 1)}, rf"{F}x{D + 1}.*{F}x{D}"),
    "other features": (lambda w: w | {"threshold": torch.ones(F + 1)}, rf"threshold {F + 1}"),
    "the other way around": (transposed, f"{F}x{D}"),
    "a flat encoder": (lambda w: w | {"w_enc": torch.ones(F)}, f"is {F}; expected 2 axes"),
    "integers": (lambda w: w | {"b_enc": torch.ones(F, dtype=torch.int32)}, "int32"),
}


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize("wrong", WRONG)
def test_arrays_that_are_no_such_dictionary_are_refused(
    tmp_path: Path, wrong: str, kind: str
) -> None:
    change, said = WRONG[wrong]
    written = change(parts(torch.float32))
    if kind == "npz":
        folder = npz(tmp_path, written)
    else:
        folder = saved(tmp_path / "params.safetensors", written)
    with pytest.raises(DictionaryError, match=f"(?i){said}"):
        coder_of(only(open_release(folder)))


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_square_matrices_are_read_as_the_format_declares(tmp_path: Path, kind: str) -> None:
    written = {name: part[..., :D] for name, part in parts(torch.float32).items()}
    written["w_dec"] = written["w_dec"][:D]
    if kind == "npz":
        folder = npz(tmp_path, {k: part.contiguous() for k, part in written.items()})
    else:
        folder = saved(tmp_path / "params.safetensors", written)
    x = stream()
    acts = jumprelu(x @ written["w_enc"] + written["b_enc"], written["threshold"])
    close(
        made_by(coder_of(only(open_release(folder))), x), acts @ written["w_dec"] + written["b_dec"]
    )


# --- Gemma Scope 2

PRE, POST = "pre_feedforward_layernorm.output", "post_feedforward_layernorm.output"
SITES_2 = {
    "resid_post": ("sae", "output", "output", Site("resid_pre", 18), Site("resid_pre", 18)),
    "attn_out": (
        "sae",
        "self_attn.o_proj.input",
        "self_attn.o_proj.input",
        Site("z", 17),
        Site("z", 17),
    ),
    "mlp_out": ("sae", POST, POST, Site("mlp_out", 17), Site("mlp_out", 17)),
    "transcoder": ("transcoder", PRE, POST, Site("mlp_in", 17), Site("mlp_out", 17)),
}


def config_2(kind: str, *, layers: str = "17", affine: bool = False) -> dict[str, Any]:
    """config.json as it is published."""
    name, read, write, *_ = SITES_2[kind]
    return {
        "hf_hook_point_in": f"model.layers.{layers}.{read}",
        "hf_hook_point_out": f"model.layers.{layers}.{write}",
        "width": F,
        "model_name": "google/gemma-3-4b-pt",
        "architecture": "jump_relu",
        "l0": 150,
        "affine_connection": affine,
        "type": name,
    }


@HALVES
@pytest.mark.parametrize("said", ["config", "partial", "names"])
@pytest.mark.parametrize("kind", [*SITES_2, "transcoder affine"])
def test_gemma_scope_2_is_read_with_sae_lens_own_activations_at_its_site(
    tmp_path: Path, kind: str, said: str, dtype: torch.dtype, sae_lens_of: Reference
) -> None:
    kind, affine = kind.split(" ")[0], kind.endswith("affine")
    written = parts(dtype)
    if affine:
        written["affine_skip_connection"] = random(9, D, D, dtype=dtype)
    config = config_2(kind, affine=affine)
    if said == "partial":
        config = {k: config[k] for k in ("architecture", "model_name", "affine_connection")}
    root = tmp_path / "gemma-scope-2-4b-pt"
    own = f"{kind}/layer_17_width_16k_l0_big{'_affine' if affine else ''}"
    given = None if said == "names" else config
    release = open_release(saved(root / own / "params.safetensors", written, given))
    dictionary, x = only(release), stream()
    assert (*dictionary.reads, *dictionary.writes) == SITES_2[kind][3:]
    assert release.kind == ("transcoders" if kind == "transcoder" else "sae")
    assert any("names of its folders" in note for note in dictionary.assumed) == (said != "config")
    sae = sae_lens_of("gemma_3_sae_huggingface_loader", root, own)
    coder = coder_of(dictionary)
    with torch.no_grad():
        close(acts_of(coder, x), sae.encode(x))
        close(made_by(coder, x), sae(x))


def test_gemma_scope_2_in_a_folder_of_its_own_is_placed_by_its_configuration(
    tmp_path: Path,
) -> None:
    config = config_2("resid_post")
    folder = saved(tmp_path / "mine" / "params.safetensors", parts(torch.float32), config)
    dictionary = only(open_release(folder))
    assert dictionary.reads == (Site("resid_pre", 18),)
    assert not any("site" in note for note in dictionary.assumed)
    for key in ("hf_hook_point_out", "type"):
        del config[key]
        saved(tmp_path / "mine" / "params.safetensors", parts(torch.float32), config)
        assert only(open_release(folder)).writes == (Site("resid_pre", 18),)


def test_gemma_scope_2_without_configuration_or_names_takes_the_layer_asked_for(
    tmp_path: Path,
) -> None:
    folder = saved(tmp_path / "mine" / "params.safetensors", parts(torch.float32))
    release = open_release(folder)
    assert release.kind == "sae"
    assert only(release).reads == (None,)
    assert any("site = the layer asked for" in note for note in only(release).assumed)


CLT = {**config_2("transcoder", layers="{all}"), "type": "clt"}
CROSS = {**config_2("resid_post", layers="{5,9,12,15}"), "type": "crosscoder"}


def layered(count: int, dtype: torch.dtype, *, skip: bool = False) -> list[Written]:
    """A file a site: what a site's features write to it and to those behind it."""
    files = []
    for i in range(count):
        written = parts(dtype, seed=20 * i)
        written["w_dec"] = random(20 * i + 1, F, count, D, dtype=dtype)
        written["w_dec"][:, :i] = 0
        if skip:
            written["affine_skip_connection"] = random(20 * i + 9, D, D, dtype=dtype)
        files.append(written)
    return files


def folder_of(folder: Path, files: list[Written], config: dict[str, Any] | None) -> Path:
    for i, written in enumerate(files):
        saved(folder / f"params_layer_{i}.safetensors", written, config)
    return folder


def defined(files: list[Written], xs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [site read, pos, feature] and outputs [site written, pos, d] of several sites, as
    Gemma Scope 2 writes them out."""
    w = {name: torch.stack([file[name].float() for file in files]) for name in files[0]}
    x = torch.stack(xs)
    pre = torch.einsum("ipd,idf->ipf", x, w["w_enc"]) + w["b_enc"][:, None]
    acts = jumprelu(pre, w["threshold"][:, None])
    out = torch.einsum("ipf,ifjd->jpd", acts, w["w_dec"]) + w["b_dec"][:, None]
    if "affine_skip_connection" in w:
        out = out + torch.einsum("ipd,ide->ipe", x, w["affine_skip_connection"])
    return acts, out


def read_of(release: Release, xs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, by the dictionaries of a release."""
    coders = [coder_of(dictionary) for dictionary in release.dictionaries]
    acts = [acts_of(coder, x) for coder, x in zip(coders, xs, strict=True)]
    out = torch.zeros(len(xs), *xs[0].shape)
    for i, (coder, x) in enumerate(zip(coders, xs, strict=True)):
        for j in range(len(xs) - i):
            out[i + j] += acts[i] @ coder.directions(j)
            bias = coder.b_dec[j]
            out[i + j] += 0 if bias is None else bias
        skip = coder.skip(x)
        out[i] += 0 if skip is None else skip
    return torch.stack(acts), out


@HALVES
@pytest.mark.parametrize("said", ["config", "names"])
@pytest.mark.parametrize("skip", [False, True])
def test_a_gemma_scope_2_clt_writes_the_layers_from_its_own_on(
    tmp_path: Path, skip: bool, said: str, dtype: torch.dtype, sae_lens_of: Reference
) -> None:
    files, xs = layered(3, dtype, skip=skip), [stream(seed=90 + i) for i in range(3)]
    root, own = tmp_path / "gemma-scope-2-270m-pt", f"clt/width_262k_l0_big{'_affine' * skip}"
    config = {**CLT, "affine_connection": skip} if said == "config" else None
    release = open_release(folder_of(root / own, files, config))
    assert release.kind == "transcoders"
    check_transcoders(release, D, 3)
    for layer, dictionary in enumerate(release.dictionaries):
        assert dictionary.reads == (Site("mlp_in", layer),)
        assert dictionary.writes == tuple(Site("mlp_out", later) for later in range(layer, 3))
    for found, expected in zip(read_of(release, xs), defined(files, xs), strict=True):
        close(found, expected)
    for layer, dictionary in enumerate(release.dictionaries):
        # sae_lens sums what a feature writes over all layers: its activations are right
        name = f"{own}/params_layer_{layer}"
        sae = sae_lens_of("gemma_3_sae_huggingface_loader", root, name)
        with torch.no_grad():
            close(acts_of(coder_of(dictionary), xs[layer]), sae.encode(xs[layer]))


@HALVES
@pytest.mark.parametrize("said", ["config", "names", "config elsewhere"])
def test_a_gemma_scope_2_crosscoder_reads_one_site_a_group_and_writes_those_from_it_on(
    tmp_path: Path, said: str, dtype: torch.dtype
) -> None:
    files, xs = layered(4, dtype), [stream(seed=90 + i) for i in range(4)]
    own = "mine" if said == "config elsewhere" else "crosscoder/layer_5_9_12_15_width_1m_l0_big"
    release = open_release(folder_of(tmp_path / own, files, None if said == "names" else CROSS))
    sites = tuple(Site("resid_pre", layer) for layer in (6, 10, 13, 16))
    assert release.kind == "crosscoder"
    assert release.features == 4 * F
    for i, dictionary in enumerate(release.dictionaries):
        assert (dictionary.reads, dictionary.writes) == ((sites[i],), sites[i:])
    for found, expected in zip(read_of(release, xs), defined(files, xs), strict=True):
        close(found, expected)
    crosscoder = load_crosscoder(release, d_model=D, dtype=torch.float32, device=CPU)
    assert crosscoder.residual == sites
    assert [[b is not None for b in c.b_dec] for c in crosscoder.coders] == [
        [True, *[False] * (3 - i)] for i in range(4)
    ]


def cross(tmp_path: Path, config: dict[str, Any] | None = CROSS, count: int = 4) -> Path:
    return folder_of(tmp_path / "mine", layered(count, torch.float32), config)


def test_what_a_feature_would_write_before_the_site_that_it_reads_is_refused(
    tmp_path: Path,
) -> None:
    files = layered(4, torch.float32)
    files[2]["w_dec"][7, 1, 3] = 0.25
    release = open_release(folder_of(tmp_path / "mine", files, CROSS))
    coder_of(release.dictionaries[1])
    with pytest.raises(DictionaryError, match=r"params_layer_2.*not zero at the 2 sites.*0\.25"):
        coder_of(release.dictionaries[2])


REFUSED: dict[str, tuple[dict[str, Any] | None, str]] = {
    "no configuration": (None, "of a kind that nothing says.*'type'"),
    "no sites": ({"type": "crosscoder"}, r"names no layers.*\{9,17,22,29\}"),
    "too few layers": ({**CROSS, **config_2("resid_post", layers="{5,9}")}, "is sae"),
    "another count": (
        {**CROSS, "hf_hook_point_in": "model.layers.{5,9}.output", "hf_hook_point_out": None},
        "names 2 layers, the folder has 4 files",
    ),
    "one layer": (
        {"type": "crosscoder", "hf_hook_point_in": "model.layers.5.output"},
        "expected layers in braces",
    ),
    "descending": (
        {"type": "crosscoder", "hf_hook_point_in": "model.layers.{9,5,12,15}.output"},
        "expected the same layers, ascending",
    ),
    "another site written": (
        {**CROSS, "hf_hook_point_out": f"model.layers.{{5,9,12,15}}.{POST}"},
        "write the sites that it reads",
    ),
    "another architecture": ({**CROSS, "architecture": "topk"}, "'topk'; expected jump_relu"),
    "another type": ({**CROSS, "type": "lorsa"}, "'lorsa'; expected one of sae, transcoder"),
    "a promised skip": ({**CROSS, "affine_connection": True}, "has no tensor affine_skip"),
    "a hook that is no name": ({**CROSS, "hf_hook_point_in": 5}, "is 5; expected the name"),
    "a site that is not known": (
        {"type": "crosscoder", "hf_hook_point_in": "model.layers.{5,9,12,15}.mlp.act"},
        "model.layers.5.mlp.act",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_crosscoder_whose_configuration_is_not_its_files_is_refused(
    tmp_path: Path, wrong: str
) -> None:
    config, said = REFUSED[wrong]
    with pytest.raises(DictionaryError, match=said):
        open_release(cross(tmp_path, config))


def test_a_layer_that_is_missing_among_the_files_is_named(tmp_path: Path) -> None:
    folder = cross(tmp_path)
    (folder / "params_layer_1.safetensors").unlink()
    with pytest.raises(DictionaryError, match=r"lacks params_layer_1.safetensors"):
        open_release(folder)


def test_files_of_several_models_are_refused(tmp_path: Path) -> None:
    folder, other = cross(tmp_path), layered(4, torch.float32)[2]
    other |= {"w_enc": random(0, D + 1, F)}
    saved(folder / "params_layer_2.safetensors", other)
    with pytest.raises(DictionaryError, match=r"params_layer_2.safetensors 25 and 24"):
        open_release(folder)


def test_a_decoder_whose_sites_are_not_as_many_as_its_files_is_refused(tmp_path: Path) -> None:
    files = layered(4, torch.float32)[:3]
    config = {**CROSS, **dict.fromkeys(list(CROSS)[:2], "model.layers.{5,9,12}.output")}
    with pytest.raises(DictionaryError, match=r"w_dec 40x4x24.*expected.*w_dec 40x3x24"):
        open_release(folder_of(tmp_path / "mine", files, config))


def test_one_file_for_several_sites_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "params.safetensors"
    with pytest.raises(DictionaryError, match=r"crosscoder.*one file.*w_dec 40x24.*params_layer_0"):
        open_release(saved(path, parts(torch.float32), CROSS))
    stacked = {
        k: torch.stack([file[k] for file in layered(4, torch.float32)])
        for k in parts(torch.float32)
    }
    with pytest.raises(DictionaryError, match="b_enc is 4x40; expected 1 axes"):
        open_release(saved(path, stacked, CROSS))


def test_a_configuration_and_names_that_disagree_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "resid_post" / "layer_16_width_16k_l0_big" / "params.safetensors"
    with pytest.raises(DictionaryError, match=r"says 'model.layers.17.output', the names .*16"):
        open_release(saved(path, parts(torch.float32), config_2("resid_post")))
    path = tmp_path / "mlp_out" / "layer_17_width_16k_l0_big" / "params.safetensors"
    with pytest.raises(DictionaryError, match="says 'transcoder', the names of its folders 'sae'"):
        open_release(saved(path, parts(torch.float32), config_2("transcoder")))


def test_a_skip_path_that_is_denied_or_not_a_transcoders_is_refused(tmp_path: Path) -> None:
    written = parts(torch.float32) | {"affine_skip_connection": random(9, D, D)}
    path = tmp_path / "mine" / "params.safetensors"
    with pytest.raises(DictionaryError, match=r"has a tensor affine_skip.*expected none"):
        open_release(saved(path, written, config_2("transcoder")))
    with pytest.raises(DictionaryError, match="expected it on a transcoder alone"):
        open_release(saved(path, written, {"type": "sae"}))
    path = tmp_path / "transcoder" / "layer_17_width_16k_l0_big_affine" / "params.safetensors"
    with pytest.raises(DictionaryError, match=r"has no tensor affine_skip.*expected one"):
        open_release(saved(path, parts(torch.float32)))


@pytest.mark.parametrize("name", ["params.safetensors", "params_layer_2.safetensors"])
def test_a_truncated_file_of_gemma_scope_2_names_itself_and_both_sizes(
    tmp_path: Path, name: str
) -> None:
    if name == "params.safetensors":
        folder = saved(tmp_path / name, parts(torch.float32))
    else:
        folder = cross(tmp_path)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-10])
    said = f"{name} is {len(whole) - 10} bytes, its header requires {len(whole)}"
    with pytest.raises(DictionaryError, match=said):
        open_release(folder)


# --- Llama Scope

NORM = "dataset_average_activation_norm"


def hyperparams(**changes: Any) -> dict[str, Any]:
    """hyperparams.json as it is published."""
    return {
        "d_model": D,
        "d_sae": F,
        "expansion_factor": F / D,
        "hook_point_in": "blocks.7.hook_resid_post",
        "hook_point_out": "blocks.7.hook_resid_post",
        "act_fn": "jumprelu",
        "jump_relu_threshold": 0.2021484375,
        "norm_activation": "dataset-wise",
        NORM: {"in": 3.3125, "out": 3.3125},
        "use_decoder_bias": True,
        "apply_decoder_bias_to_pre_encoder": False,
        "sparsity_include_decoder_norm": True,
        "use_glu_encoder": False,
        "top_k": 50,
        **changes,
    }


def linear(dtype: torch.dtype, *, unit: bool = False) -> Written:
    """Encoder and decoder as linear layers keep them; `unit`: decoder norms are 1, exactly."""
    written = {
        "encoder.weight": random(0, F, D, dtype=dtype),
        "encoder.bias": random(1, F, dtype=dtype),
        "decoder.weight": random(2, D, F, dtype=dtype),
        "decoder.bias": random(3, D, dtype=dtype),
    }
    if unit:
        rows = torch.zeros(F, D)
        for f in range(F):
            rows[f, [(f + 5 * i) % D for i in range(4)]] = 0.5 * random(f, 4).sign()
        written["decoder.weight"] = rows.T.to(dtype)
    return written


def old_layout(folder: Path, written: Written, config: dict[str, Any]) -> Path:
    saved(folder / "checkpoints" / "final.safetensors", written)
    (folder / "hyperparams.json").write_text(json.dumps(config))
    return folder


def new_layout(folder: Path, written: Written, config: dict[str, Any]) -> Path:
    return saved(folder / "sae_weights.safetensors", written, config)


def r1(**changes: Any) -> dict[str, Any]:
    """config.json of the later layout."""
    config = {"sae_type": "sae", **hyperparams(**changes)}
    for key in ("jump_relu_threshold", "d_sae", NORM):
        config.pop(key)
    return config


@HALVES
@pytest.mark.parametrize("hook", ["hook_resid_post", "hook_mlp_out", "hook_attn_out"])
def test_llama_scope_is_read_as_sae_lens_folds_it(
    tmp_path: Path, hook: str, dtype: torch.dtype, sae_lens_of: Reference
) -> None:
    both = dict.fromkeys(("hook_point_in", "hook_point_out"), f"blocks.7.{hook}")
    own = "Llama3_1-8B-Base-L7X-8x"
    root, written = tmp_path / "Llama3_1-8B-Base-LXX-8x", linear(dtype, unit=True)
    dictionary = only(open_release(old_layout(root / own, written, hyperparams(**both))))
    sae = sae_lens_of("llama_scope_sae_huggingface_loader", root, own, dtype="float32")
    sae.fold_activation_norm_scaling_factor(math.sqrt(D) / 3.3125)
    coder, x = coder_of(dictionary), stream()
    with torch.no_grad():
        close(acts_of(coder, x), sae.encode(x))
        close(made_by(coder, x), sae.decode(sae.encode(x)))
    assert dictionary.hook_name == sae.cfg.metadata.hook_name
    assert dictionary.assumed == ()


@HALVES
@pytest.mark.parametrize("place", ["in the weights", "by its site", "in the configuration"])
def test_the_later_llama_scope_is_read_as_sae_lens_folds_it(
    tmp_path: Path, place: str, dtype: torch.dtype, sae_lens_of: Reference
) -> None:
    written, config = linear(dtype, unit=True), r1()
    written["log_jumprelu_threshold"] = random(4, F, dtype=dtype)
    if place == "in the configuration":
        config[NORM] = {"in": 3.3125}
    elif place == "by its site":
        written[f"{NORM}.blocks.7.hook_resid_post"] = torch.tensor(3.3125, dtype=dtype)
    else:
        written[f"{NORM}.in"] = torch.tensor(3.3125, dtype=dtype)
        written[f"{NORM}.out"] = torch.tensor(3.3125, dtype=dtype)
    root, own = tmp_path / "Llama-Scope-R1-Distill", "800M-Slimpajama/L7R"
    dictionary = only(open_release(new_layout(root / own, written, config)))
    loader = "llama_scope_r1_distill_sae_huggingface_loader"
    sae = sae_lens_of(loader, root, own, d_sae=F)
    sae.fold_activation_norm_scaling_factor(math.sqrt(D) / 3.3125)
    coder, x = coder_of(dictionary), stream()
    with torch.no_grad():
        close(acts_of(coder, x), sae.encode(x))
        close(made_by(coder, x), sae.decode(sae.encode(x)))
    assert dictionary.reads == (Site("resid_pre", 8),)


@HALVES
@pytest.mark.parametrize("by_norm", [False, True])
@pytest.mark.parametrize("transcodes", [False, True])
def test_llama_scope_with_two_scales_and_decoder_norms_is_read_as_it_is_defined(
    tmp_path: Path, transcodes: bool, by_norm: bool, dtype: torch.dtype
) -> None:
    hooks = {
        "hook_point_in": "blocks.7.ln2.hook_normalized",
        "hook_point_out": "blocks.7.hook_mlp_out",
    }
    config = hyperparams(
        **(hooks if transcodes else {}),
        **{NORM: {"in": 3.3125, "out": 1.390625}},
        sparsity_include_decoder_norm=by_norm,
    )
    written, x = linear(dtype), stream()
    release = open_release(old_layout(tmp_path / "L7", written, config))
    assert release.kind == ("transcoders" if transcodes else "sae")
    w = {name: part.double() for name, part in written.items()}
    s_in, s_out = math.sqrt(D) / 3.3125, math.sqrt(D) / 1.390625
    # the scales multiplied into the weights, as its own library does before it is used
    pre = x.double() @ w["encoder.weight"].T + w["encoder.bias"] / s_in
    W_dec = w["decoder.weight"].T * s_in / s_out
    score = pre * W_dec.norm(dim=-1) if by_norm else pre
    acts = pre * (score > config["jump_relu_threshold"])
    coder = coder_of(only(release))
    close(acts_of(coder, x), (acts * s_in).float())
    close(made_by(coder, x), (acts @ W_dec + w["decoder.bias"] / s_out).float())
    assert 0 < (acts > 0).float().mean() < 0.9


def test_the_threshold_of_the_later_layout_counts_the_decoder_norm_where_it_says_so(
    tmp_path: Path,
) -> None:
    written, x = linear(torch.float32), stream()
    written["log_jumprelu_threshold"] = random(4, F) - 0.5
    written[f"{NORM}.in"] = torch.tensor(3.3125)
    coder = coder_of(only(open_release(new_layout(tmp_path / "L7R", written, r1()))))
    pre = x * (math.sqrt(D) / 3.3125) @ written["encoder.weight"].T + written["encoder.bias"]
    score = pre * written["decoder.weight"].norm(dim=0)
    close(acts_of(coder, x), pre * (score > written["log_jumprelu_threshold"].exp()))


def test_an_input_scale_and_a_subtracted_bias_give_the_activations_that_were_trained(
    tmp_path: Path,
) -> None:
    eye, config = (
        torch.eye(2),
        {
            **hyperparams(d_model=2, d_sae=2, jump_relu_threshold=0.0),
            "apply_decoder_bias_to_pre_encoder": True,
            NORM: {"in": math.sqrt(2) / 0.5, "out": math.sqrt(2) / 0.5},
        },
    )
    written = {"encoder.weight": eye, "encoder.bias": torch.zeros(2), "decoder.weight": eye.clone()}
    written["decoder.bias"] = torch.tensor([1.0, -1.0])
    coder = coder_of(only(open_release(old_layout(tmp_path / "L7", written, config))))
    x = torch.tensor([[4.0, 2.0]])
    close(acts_of(coder, x), torch.tensor([[1.0, 2.0]]))
    close(made_by(coder, x), x)


def test_a_llama_scope_whose_scales_are_in_its_weights_has_none(tmp_path: Path) -> None:
    config = hyperparams(norm_activation="inference")
    del config[NORM]
    written, x = linear(torch.float32, unit=True), stream()
    coder = coder_of(only(open_release(old_layout(tmp_path / "L7", written, config))))
    pre = x @ written["encoder.weight"].T + written["encoder.bias"]
    close(acts_of(coder, x), jumprelu(pre, torch.tensor(config["jump_relu_threshold"])))


def test_a_llama_scope_without_a_decoder_bias_has_none(tmp_path: Path) -> None:
    written = linear(torch.float32)
    del written["decoder.bias"]
    folder = old_layout(tmp_path / "L7", written, hyperparams(use_decoder_bias=False))
    assert coder_of(only(open_release(folder))).b_dec == (None,)


def test_what_a_llama_scope_configuration_leaves_out_is_assumed_aloud(tmp_path: Path) -> None:
    said = ("d_model", "d_sae", "hook_point_in", "jump_relu_threshold", NORM)
    config = {key: hyperparams()[key] for key in said}
    folder = old_layout(tmp_path / "L7", linear(torch.float32), config)
    assumed = " ".join(only(open_release(folder)).assumed)
    for key in ("act_fn", "norm_activation", "sparsity_include_decoder_norm", "use_decoder_bias"):
        assert f"{key} = " in assumed


LLAMA_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no norm": ({NORM: None}, f"needs {NORM} with 'in'"),
    "half a norm": (
        {NORM: {"in": 3.0}, "hook_point_out": "blocks.7.hook_mlp_out"},
        f"needs {NORM} with 'out' or 'blocks.7.hook_mlp_out'",
    ),
    "a norm of 0": ({NORM: {"in": 0.0, "out": 3.0}}, f"needs {NORM} with 'in'.*found \\[0.0\\]"),
    "a norm by itself": ({NORM: 3.0}, f"{NORM} is 3.0; expected an object"),
    "norms by token": ({"norm_activation": "token-wise"}, "'token-wise'; expected 'dataset-wise'"),
    "another activation": ({"act_fn": "topk"}, "act_fn is 'topk'; expected jumprelu"),
    "a gated encoder": ({"use_glu_encoder": True}, "use_glu_encoder is True; expected false"),
    "no threshold": ({"jump_relu_threshold": None}, "'jump_relu_threshold' is None"),
    "no site": ({"hook_point_in": None}, "hook_point_in is None"),
    "another width": ({"d_model": 32}, "d_model is 32, its weights have 24"),
    "other features": ({"d_sae": 48}, "d_sae is 48, its weights have 40"),
    "another flag": ({"use_decoder_bias": "yes"}, "is 'yes'; expected true or false"),
    "an unknown bias": ({"use_decoder_bias": False}, "has decoder.bias, which"),
    "a bias of the output": (
        {"apply_decoder_bias_to_pre_encoder": True, "hook_point_out": "blocks.7.hook_mlp_out"},
        "expected false: its bias is of its output",
    ),
}


@pytest.mark.parametrize("wrong", LLAMA_REFUSED)
def test_a_llama_scope_that_does_not_say_what_changes_a_number_is_refused(
    tmp_path: Path, wrong: str
) -> None:
    changes, said = LLAMA_REFUSED[wrong]
    folder = old_layout(tmp_path / "L7", linear(torch.float32), hyperparams(**changes))
    with pytest.raises(DictionaryError, match=said):
        open_release(folder)


def test_the_later_llama_scope_without_its_norm_or_with_two_is_refused(tmp_path: Path) -> None:
    written = linear(torch.float32) | {"log_jumprelu_threshold": random(4, F)}
    folder = new_layout(tmp_path / "L7R", written, r1())
    with pytest.raises(DictionaryError, match=f"config.json needs {NORM} with 'in'.*found none"):
        open_release(folder)
    written[f"{NORM}.in"] = torch.tensor(3.5)
    new_layout(folder, written, r1() | {NORM: {"in": 3.0}})
    with pytest.raises(DictionaryError, match=r"given as 3.0 and 3.5"):
        open_release(folder)


def test_llama_scope_tensors_of_another_layout_are_named(tmp_path: Path) -> None:
    other = {"W_E": random(0, D, F), "W_D": random(1, F, D)}
    with pytest.raises(DictionaryError, match=f"lacks decoder.bias.*found W_D {F}x{D}"):
        open_release(new_layout(tmp_path / "L7R", other, r1() | {NORM: {"in": 3.0}}))
    turned = transposed(linear(torch.float32))
    with pytest.raises(DictionaryError, match=f"decoder.weight {F}x{D}.*the other way around"):
        open_release(old_layout(tmp_path / "L7", turned, hyperparams()))


def test_llama_scope_weights_that_are_missing_or_truncated_are_named(tmp_path: Path) -> None:
    folder = old_layout(tmp_path / "L7", linear(torch.float32), hyperparams())
    path = folder / "checkpoints" / "final.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    said = f"final.safetensors is {len(whole) - 10} bytes, its header requires {len(whole)}"
    with pytest.raises(DictionaryError, match=said):
        open_release(folder)
    path.unlink()
    with pytest.raises(DictionaryError, match=r"checkpoints has no final.safetensors"):
        open_release(folder)


# --- which format, and several together


def test_transcoders_of_several_layers_side_by_side_are_one_set(tmp_path: Path) -> None:
    scope, scope_2 = tmp_path / "gemma-scope-2b-pt-transcoders", tmp_path / "transcoder_all"
    for layer in (10, 2):
        written = parts(torch.float32, seed=layer)
        npz(scope / f"layer_{layer}", written)
        saved(scope_2 / f"layer_{layer}_width_16k_l0_big" / "params.safetensors", written)
    for folder, kind in ((scope, "mlp_normed"), (scope_2, "mlp_in")):
        release = open_release(folder)
        check_transcoders(release, D, 26)
        assert [d.reads for d in release.dictionaries] == [(Site(kind, 2),), (Site(kind, 10),)]


FOLDERS = {
    "gemma_scope": ["params.npz"],
    "gemma_scope_2": ["params.safetensors", "config.json"],
    "gemma_scope_2 without configuration": ["params.safetensors"],
    "gemma_scope_2 by layer": ["params_layer_0.safetensors", "config.json"],
    "llama_scope": ["hyperparams.json", "checkpoints/final.safetensors"],
    "llama_scope without weights": ["hyperparams.json"],
    "llama_scope later": ["config.json", "sae_weights.safetensors"],
    "llama_scope of both": ["hyperparams.json", "sae_weights.safetensors"],
    "saelens": ["cfg.json", "sae_weights.safetensors"],
    "saelens without configuration": ["sae_weights.safetensors"],
    "saelens with another configuration": ["cfg.json", "config.json", "sae_weights.safetensors"],
    "saelens with hyperparameters": ["cfg.json", "hyperparams.json", "sae_weights.safetensors"],
}


@pytest.mark.parametrize("name", FOLDERS)
def test_exactly_one_format_says_that_a_folder_is_its_own(tmp_path: Path, name: str) -> None:
    for file in FOLDERS[name]:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert [known.name for known in formats() if known.matches(tmp_path)] == [name.split(" ")[0]]
