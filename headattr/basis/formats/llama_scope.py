"""Llama Scope: hyperparams.json + checkpoints/final.safetensors, and the layout of its later
releases, config.json + sae_weights.safetensors.

    pre_i = W_enc (s_in x_i - [b_dec]) + b_enc       s = sqrt(d_model) / mean norm of the site
    a_if = pre_if   where pre_if * |d_f| > threshold (|d_f|: sparsity_include_decoder_norm)
    y_i = (a_i W_dec + b_dec) / s_out

The scales come from dataset_average_activation_norm, and are refused where that is missing. Numbers
of hyperparams.json are of a dictionary whose scales were multiplied into it: its threshold is
compared with pre_if |d_f| / s_out, or with pre_if / s_in where the norm does not count (He et al.
2024, "Llama Scope").
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headattr.basis.dictionary import Dictionary, Frame, Release, Tensors
from headattr.basis.formats.files import (
    check_file,
    json_object,
    labels_of,
    shapes_of,
    tensors_of,
)
from headattr.basis.formats.jumprelu import (
    JUMPRELU,
    Shapes,
    check_keys,
    check_shapes,
    size_of,
)
from headattr.basis.formats.registry import Format
from headattr.basis.site import site_of
from headattr.errors import DictionaryError
from headattr.model.load import hash_tensors

HYPERPARAMS, FINAL = "hyperparams.json", "checkpoints/final.safetensors"
CONFIG, WEIGHTS = "config.json", "sae_weights.safetensors"
NORM, LOG_THRESHOLD = "dataset_average_activation_norm", "log_jumprelu_threshold"
_FIXED = {"act_fn": "jumprelu", "use_glu_encoder": False}
_DATASET = "dataset-wise"
_ROWS = 1 << 12  # decoder rows that are there as float64 at once
_FLAGS = {
    "apply_decoder_bias_to_pre_encoder": False,
    "sparsity_include_decoder_norm": False,
    "use_decoder_bias": True,
}


class Settings(NamedTuple):
    """A configuration with everything that changes a number made explicit."""

    reads: str
    writes: str
    s_in: float
    """What the input is multiplied by."""
    s_out: float
    """What the output is divided by."""
    subtracts: bool
    """Is b_dec subtracted from the scaled input?"""
    by_norm: bool
    """Is the pre-activation times the norm of the decoder row compared with the threshold?"""
    biased: bool
    threshold: float | None
    """One for all features, of hyperparams.json; None: one a feature, in the weights."""
    assumed: tuple[str, ...]

    @property
    def transcodes(self) -> bool:
        """Does it write another site than it reads?"""
        return site_of(self.reads) != site_of(self.writes)


def read_release(folder: Path) -> Release:
    """The dictionary of a folder, from its configuration and the header of its weights.

    Raises DictionaryError for files that are missing or not whole, keys that are not there, and
    settings that are not read.
    """
    old = (folder / HYPERPARAMS).is_file()
    config = folder / (HYPERPARAMS if old else CONFIG)
    weights = folder / (FINAL if old else WEIGHTS)
    check_file(weights)
    raw, shapes = json_object(config), shapes_of(weights)
    rest = {name: shape for name, shape in shapes.items() if not name.startswith(NORM)}
    norms = _norms(weights) if len(rest) < len(shapes) else {}
    settings = _settings(raw, config, norms, old)
    features, d_model = _sizes(weights, rest, settings)
    _check_sizes(raw, config, features, d_model)
    transcodes = settings.transcodes
    dictionary = Dictionary(
        name=folder.name,
        path=str(folder),
        format=FORMAT.name,
        architecture="jumprelu_transcoder" if transcodes else "jumprelu",
        activation=JUMPRELU,
        reads=(site_of(settings.reads),),
        writes=(site_of(settings.writes),),
        d_in=d_model,
        d_out=d_model,
        features=features,
        read=partial(_read, weights, settings),
        frame=Frame(settings.s_in, subtract_b_dec=settings.subtracts, undone=not transcodes),
        hook_name=settings.reads,
        assumed=settings.assumed,
        labels=labels_of(folder),
    )
    kind = "transcoders" if transcodes else "sae"
    return Release(kind, folder.name, str(folder), (dictionary,))


def _read(weights: Path, settings: Settings) -> tuple[Tensors, str]:
    """The tensors of a file, and a hash of them and of the settings."""
    state = tensors_of(weights)
    return _arranged(state, settings), hash_tensors(state.items(), repr(settings))


def _arranged(state: dict[str, Any], settings: Settings) -> Tensors:
    """The tensors of a file, with what the scales of input and output differ by multiplied in."""
    import torch

    W_dec, b_dec = state["decoder.weight"].T, state.get("decoder.bias")
    if settings.threshold is None:
        threshold = state[LOG_THRESHOLD].double().exp()
    else:
        unit = settings.s_out if settings.by_norm else settings.s_in
        threshold = torch.tensor(settings.threshold * unit, dtype=torch.float64)
    if settings.by_norm:
        norms = [rows.double().norm(dim=-1) for rows in W_dec.split(_ROWS)]
        threshold = threshold / torch.cat(norms)
    undone = 1.0 if settings.transcodes else settings.s_in
    if settings.s_out != undone:
        factor = undone / settings.s_out
        W_dec = W_dec.float() * factor
        b_dec = None if b_dec is None else b_dec.float() * factor
    return Tensors(
        W_enc=(state["encoder.weight"],),
        b_enc=state["encoder.bias"],
        W_dec=(W_dec,),
        b_dec=(b_dec,),
        threshold=threshold,
    )


def _settings(raw: dict[str, Any], where: Path, norms: dict[str, float], old: bool) -> Settings:
    """The meaning of a configuration; `norms`: those found with the weights."""
    known = _FIXED | _FLAGS | {"norm_activation": _DATASET}
    assumed = [f"{k} = {_shown(v)} (not in {where.name})" for k, v in known.items() if k not in raw]
    for key, value in _FIXED.items():
        if raw.get(key, value) != value:
            raise DictionaryError(f"{where}: {key} is {raw[key]!r}; expected {_shown(value)}")
    flags = {key: raw.get(key, value) for key, value in _FLAGS.items()}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise DictionaryError(f"{where}: {key} is {value!r}; expected true or false")
    reads = _hook(raw, "hook_point_in", where)
    writes = reads if raw.get("hook_point_out") is None else _hook(raw, "hook_point_out", where)
    s_in, s_out = _scales(raw, where, norms, (reads, writes))
    subtracts = flags["apply_decoder_bias_to_pre_encoder"]
    if subtracts and (site_of(reads) != site_of(writes) or s_in != s_out):
        raise DictionaryError(
            f"{where}: apply_decoder_bias_to_pre_encoder is true on a dictionary that reads "
            f"{reads} (scale {s_in:.6g}) and writes {writes} (scale {s_out:.6g}); expected false: "
            "its bias is of its output"
        )
    by_norm, biased = flags["sparsity_include_decoder_norm"], flags["use_decoder_bias"]
    threshold = _number(raw, "jump_relu_threshold", where) if old else None
    return Settings(
        reads, writes, s_in, s_out, subtracts, by_norm, biased, threshold, tuple(assumed)
    )


def _hook(raw: dict[str, Any], key: str, where: Path) -> str:
    hook = raw.get(key)
    if not isinstance(hook, str):
        raise DictionaryError(f"{where}: {key} is {hook!r}; expected the name of a site")
    return hook


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scales(
    raw: dict[str, Any], where: Path, norms: dict[str, float], hooks: tuple[str, str]
) -> tuple[float, float]:
    """What the input is multiplied by, and what the output is divided by."""
    kind, given = raw.get("norm_activation", _DATASET), raw.get(NORM)
    if kind == "inference":  # multiplied into the weights already
        return 1.0, 1.0
    if kind != _DATASET:
        raise DictionaryError(
            f"{where}: norm_activation is {kind!r}; expected {_DATASET!r} or 'inference'"
        )
    if given is not None and not isinstance(given, dict):
        raise DictionaryError(
            f"{where}: {NORM} is {given!r}; expected an object with 'in' and 'out'"
        )
    width, sources = _number(raw, "d_model", where), (given or {}, norms)
    norm_in = _norm(sources, where, ("in", hooks[0]))
    same = hooks[0] == hooks[1] and not any("out" in source for source in sources)
    norm_out = norm_in if same else _norm(sources, where, ("out", hooks[1]))
    return math.sqrt(width) / norm_in, math.sqrt(width) / norm_out


def _norm(sources: Sequence[Mapping[str, Any]], where: Path, keys: tuple[str, str]) -> float:
    """The mean norm of a site, in the configuration or with the weights."""
    given = [source[key] for source in sources for key in keys if key in source]
    found = [norm for norm in given if type(norm) in (int, float) and 0 < norm < math.inf]
    if not found or len(found) < len(given):
        raise DictionaryError(
            f"{where} needs {NORM} with {keys[0]!r} or {keys[1]!r}, the mean norm of what the "
            f"dictionary was trained on there, in it or with its weights; found {given or 'none'}"
        )
    if len(set(found)) > 1:
        raise DictionaryError(
            f"{where}: {NORM} of {keys[0]!r} is given as {' and '.join(map(str, found))}, in it "
            "and with its weights; expected one"
        )
    return float(found[0])


def _norms(weights: Path) -> dict[str, float]:
    """The norms that stand with the weights: `in` and `out`, or by the site's name."""
    found = {}
    for name, tensor in tensors_of(weights).items():
        if name.startswith(f"{NORM}."):
            if tensor.numel() != 1:
                raise DictionaryError(
                    f"{weights}: {name} has {tensor.numel()} numbers; expected one"
                )
            found[name.removeprefix(f"{NORM}.")] = float(tensor)
    return found


def _number(raw: dict[str, Any], key: str, where: Path) -> float:
    value = raw.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise DictionaryError(f"{where}: {key!r} is {value!r}; expected a number from 0 on")
    return float(value)


def _sizes(weights: Path, shapes: Shapes, settings: Settings) -> tuple[int, int]:
    """Features and width of tensors that belong together."""
    needed = {"encoder.weight", "encoder.bias", "decoder.weight"}
    needed |= {"decoder.bias"} if settings.biased else set()
    needed |= {LOG_THRESHOLD} if settings.threshold is None else set()
    check_keys(weights, shapes, needed, set())
    features = size_of(weights, shapes, "encoder.bias", 0, 1)
    width = size_of(weights, shapes, "encoder.weight", 1, 2)
    expected = {
        "encoder.weight": (features, width),
        "encoder.bias": (features,),
        "decoder.weight": (width, features),
        "decoder.bias": (width,),
        LOG_THRESHOLD: (features,),
    }
    check_shapes(weights, shapes, {name: expected[name] for name in needed})
    return features, width


def _check_sizes(raw: dict[str, Any], where: Path, features: int, width: int) -> None:
    """Refuse a configuration of other widths than its weights have."""
    said = {"d_model": width, "d_sae": features}
    if raw.get("d_sae") is None:
        said = {"d_model": width, "expansion_factor": features / width}
    for key, value in said.items():
        if raw.get(key, value) != value:
            raise DictionaryError(
                f"{where}: {key} is {raw[key]!r}, its weights have {value:g}; expected the "
                "configuration of these weights"
            )


def matches(path: Path) -> bool:
    """Is it Llama Scope's? sae_weights.safetensors beside cfg.json is SAELens'."""
    if (path / "cfg.json").is_file():
        return False
    return (path / HYPERPARAMS).is_file() or (
        (path / CONFIG).is_file() and (path / WEIGHTS).is_file()
    )


FORMAT = Format(
    "llama_scope",
    matches,
    read_release,
    f"a folder with {HYPERPARAMS} and {FINAL}, or with {CONFIG} and {WEIGHTS}",
)
