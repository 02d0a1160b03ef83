"""EleutherAI's sparsify: cfg.json + sae.safetensors in a folder that is named by its hookpoint.

    encoder.weight [F, d], encoder.bias, W_dec [F, d] (before: decoder.weight [d, F]), b_dec,
    W_skip [d_out, d_in] (x @ W_skip.T)          acts: the k largest of relu(pre)

An SAE subtracts b_dec from its input, a transcoder (`transcode`) does not. `layers.N` is the output
of block N; a transcoder of `layers.N.mlp` reads what that module is given and writes its output.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headattr.basis.dictionary import Activation, Dictionary, Frame, Release, Tensors, same_rows
from headattr.basis.formats.files import check_file, json_object, labels_of, shapes_of, tensors_of
from headattr.basis.formats.layout import Shape, as_expected, notes, turned
from headattr.basis.formats.registry import Format
from headattr.errors import DictionaryError
from headattr.model.load import hash_tensors
from headattr.model.sites import Site

CONFIG, WEIGHTS = "cfg.json", "sae.safetensors"
_HOOKPOINT = re.compile(r"(?:\w+\.)*?(?:layers|h|blocks)[._](\d+)(?:\.(.+))?")
_SEED = re.compile(r"seed\d+")
_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_NOT_READ = ("signed", "embed_skip", "gram_lookup")
_FLAGS = ("transcode", "skip_connection", *_NOT_READ)


class _Config(NamedTuple):
    """cfg.json, checked."""

    d_in: int
    features: int | None
    k: int
    transcode: bool
    skip: bool | None
    assumed: tuple[str, ...]


def read_release(folder: Path) -> Release:
    """The dictionary of a folder."""
    path = folder / WEIGHTS
    check_file(path)
    shapes = shapes_of(path)
    config = _config(folder, shapes)
    expected = _expected(config, shapes, path)
    names = turned(shapes, expected, str(path))
    features = expected["encoder.bias"][0]
    if config.k > features:
        raise DictionaryError(
            f"{folder / CONFIG}: k is {config.k}; expected at most its {features} features"
        )
    hookpoint = folder.parent.name if _SEED.fullmatch(folder.name) else folder.name
    reads, writes, assumed = _sites(hookpoint, config.transcode, folder)
    kind = "transcoder" if config.transcode else "sae"
    said = repr((config.k, config.transcode, reads, writes))
    dictionary = Dictionary(
        name=folder.name,
        path=str(folder),
        format=FORMAT.name,
        architecture=("skip " if "W_skip" in shapes else "") + f"{kind} topk",
        activation=Activation("topk", config.k),
        reads=(reads,),
        writes=(writes,),
        d_in=config.d_in,
        d_out=config.d_in,
        features=features,
        read=partial(_read, path, names, said),
        frame=Frame(subtract_b_dec=not config.transcode, undone=not config.transcode),
        hook_name=None if reads is None else hookpoint,
        assumed=(*config.assumed, *assumed, *notes(shapes, names)),
        labels=labels_of(folder),
    )
    return Release(
        "transcoders" if config.transcode else "sae", folder.name, str(folder), (dictionary,)
    )


def _config(folder: Path, shapes: dict[str, Shape]) -> _Config:
    path = folder / CONFIG
    if not path.is_file():
        raise DictionaryError(f"{folder} has {WEIGHTS} but no {CONFIG}; expected d_in and k in it")
    cfg = json_object(path)
    assumed = []
    if (activation := cfg.get("activation", "topk")) != "topk":
        raise DictionaryError(f"{path}: activation is {activation!r}; expected topk")
    for name in _FLAGS:
        if not isinstance(cfg.get(name), bool | None):
            raise DictionaryError(f"{path}: {name} is {cfg[name]!r}; expected true or false")
    for name in _NOT_READ:
        if cfg.get(name):
            raise DictionaryError(f"{path}: {name} is true, which is not read; expected false")
    for name in ("d_in", "k"):
        if type(cfg.get(name)) is not int or cfg[name] < 1:
            raise DictionaryError(f"{path}: {name} is {cfg.get(name)!r}; expected a whole number")
    for name in ("num_latents", "expansion_factor"):
        if type(cfg.get(name, 0)) is not int:
            raise DictionaryError(f"{path}: {name} is {cfg[name]!r}; expected a whole number")
    transcode, skip = cfg.get("transcode"), cfg.get("skip_connection")
    if not transcode and (skip or "W_skip" in shapes):
        raise DictionaryError(
            f"{path}: transcode is {transcode!r}, but there is a skip connection, as transcoders "
            'have; expected "transcode": true, or no W_skip'
        )
    if transcode is None:
        assumed.append(f"transcode = False (not in {CONFIG})")
    features = cfg.get("num_latents") or cfg.get("expansion_factor", 0) * cfg["d_in"] or None
    if features is None:
        assumed.append("the number of features is that of the tensors")
    return _Config(cfg["d_in"], features, cfg["k"], bool(transcode), skip, tuple(assumed))


def _expected(config: _Config, shapes: dict[str, Shape], path: Path) -> dict[str, Shape]:
    """Shapes of the tensors that belong there; without a number of features that of the biases."""
    bias, width = shapes.get("encoder.bias", (0,)), config.d_in
    features = config.features or bias[0]
    old = "decoder.weight" in shapes and "W_dec" not in shapes
    decoder: dict[str, Any] = {"decoder.weight": (width, features)} if old else {}
    if config.skip is False and "W_skip" in shapes:
        raise DictionaryError(f"{path} has W_skip; its {CONFIG} says skip_connection false")
    skip = {"W_skip": (width, width)} if config.skip or "W_skip" in shapes else {}
    return {
        "encoder.weight": (features, width),
        "encoder.bias": (features,),
        **(decoder or {"W_dec": (features, width)}),
        "b_dec": (width,),
        **skip,
    }


def _sites(
    hookpoint: str, transcode: bool, folder: Path
) -> tuple[Site | None, Site | None, tuple[str, ...]]:
    """What the hookpoint's name means: what is read and what is written, with what is assumed."""
    match = _HOOKPOINT.fullmatch(hookpoint)
    inside = match.group(2) if match else None
    if transcode:
        if match and inside == "mlp":
            layer = int(match.group(1))
            return Site("mlp_in", layer), Site("mlp_out", layer), (_added(hookpoint),)
        raise DictionaryError(
            f"{folder}: a transcoder of {hookpoint!r}; expected a folder that is named layers.N.mlp"
        )
    if match is None and hookpoint not in ("embed_tokens", "wte", "embed_in"):
        return None, None, (f"site = the layer asked for ({hookpoint} names no hookpoint)",)
    if match is None or not (inside is None or inside == "mlp" or inside in _ATTENTION):
        raise DictionaryError(
            f"{folder}: the hookpoint is {hookpoint!r}; expected layers.N (a block's output), "
            "layers.N.mlp or layers.N.self_attn"
        )
    layer = int(match.group(1))
    if inside is None:
        site = Site("resid_pre", layer + 1)
        return site, site, ()
    site = Site("mlp_out" if inside == "mlp" else "attn_out", layer)
    return site, site, (_added(hookpoint),)


def _added(hookpoint: str) -> str:
    return f"the output of {hookpoint} is what is added to the stream: no norm lies behind it"


def _read(path: Path, names: tuple[str, ...], said: str) -> tuple[Tensors, str]:
    stored = tensors_of(path)
    state = as_expected(stored, names)
    skip = state.get("W_skip")
    old = state.get("decoder.weight")
    tensors = Tensors(
        W_enc=(state["encoder.weight"],),
        b_enc=state["encoder.bias"],
        W_dec=(state["W_dec"] if old is None else same_rows(old),),
        b_dec=(state["b_dec"],),
        W_skip=None if skip is None else skip.T,
    )
    return tensors, hash_tensors(stored.items(), said)


FORMAT = Format(
    "sparsify",
    lambda path: (path / WEIGHTS).is_file(),
    read_release,
    f"a folder with {CONFIG} and {WEIGHTS}",
)
