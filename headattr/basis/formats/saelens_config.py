"""What a SAELens configuration of any version means; what it leaves out is assumed aloud, or
refused."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headattr.errors import DictionaryError

SCALER = "activation_scaler.json"
SAES = ("standard", "gated", "topk", "abstopk", "jumprelu", "matching_pursuit")
TRANSCODERS = ("transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder")
PER_TOKEN = SAES + TRANSCODERS
_RENAMED = {
    "hook_point": "hook_name",
    "hook_point_in": "hook_name",
    "hf_hook_name": "hook_name",
    "hook_point_out": "hook_name_out",
    "activation_fn_str": "activation_fn",
    "activation": "activation_fn",
}
_DEFAULTS = {
    "apply_b_dec_to_input": True,
    "normalize_activations": "none",
    "reshape_activations": "none",
}
_SCALE_KEYS = ("norm_scaling_factor", "activation_scaling_factor", "scaling_factor")
_ACTIVATIONS = {
    "standard": ("relu",),
    "gated": ("relu",),
    "jumprelu": ("relu", "jumprelu"),
    "topk": ("relu", "topk"),
    "abstopk": ("abstopk",),
    "matching_pursuit": (),
    "transcoder": ("relu",),
    "skip_transcoder": ("relu",),
    "jumprelu_transcoder": ("relu", "jumprelu"),
    "jumprelu_skip_transcoder": ("relu", "jumprelu"),
}


class SaeConfig(NamedTuple):
    """A configuration with everything that changes a number made explicit."""

    architecture: str
    fields: dict[str, Any]
    """What sae_lens' config class takes."""
    hook_name: str | None
    hook_name_out: str | None
    prepend_bos: bool | None
    input_scale: float
    """What the input is multiplied by before encoding (expected_average_only_in), else 1."""
    centred: bool
    """Trained on a stream whose mean was removed."""
    has_layout: bool
    """Does the file say, by a version or a key, that W_dec is [d_sae, d_in]?"""
    trained_on: str | None
    assumed: tuple[str, ...]


def interpret(raw: dict[str, Any], where: Path, scaler: float | None = None) -> SaeConfig:
    """The meaning of a raw configuration of any version; `scaler` is a factor found beside it."""
    metadata = raw.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise DictionaryError(f"{where}: metadata is {metadata!r}; expected an object")
    cfg = {**metadata, **{k: v for k, v in raw.items() if k != "metadata"}}
    for old, new in _RENAMED.items():
        if old in cfg and cfg.get(new) is None:
            cfg[new] = cfg.pop(old)
    assumed = []
    architecture = _architecture(cfg, where)
    defaults = _DEFAULTS | {"apply_b_dec_to_input": architecture not in TRANSCODERS}
    for key, value in defaults.items():
        if cfg.get(key) is None:
            cfg[key] = value
            assumed.append(f"{key} = {value} (not in {where.name})")
    if cfg.get("architecture") is None:
        assumed.append(
            f"architecture = {architecture} (from the activation {cfg['activation_fn']!r})"
        )
    _refuse_other_maps(cfg, architecture, where)
    if cfg.get("hook_name") is None:
        assumed.append(f"site = the layer asked for ({where.name} names none)")
    fields = {key: cfg[key] for key in ("d_in", "d_sae", "apply_b_dec_to_input")}
    scale, fields["normalize_activations"] = _normalisation(cfg, where, scaler)
    if architecture in ("topk", "abstopk"):
        fields["k"] = _k(cfg, where)
        fields["rescale_acts_by_decoder_norm"] = bool(
            cfg.get("rescale_acts_by_decoder_norm", False)
        )
    if architecture in TRANSCODERS:
        fields["d_out"] = cfg["d_out"]
    if architecture == "matching_pursuit":
        keys = ("residual_threshold", "max_iterations", "stop_on_duplicate_support")
        fields |= {key: cfg[key] for key in keys if key in cfg}
    centred = bool(
        (cfg.get("model_from_pretrained_kwargs") or {}).get("center_writing_weights", False)
    )
    bos = cfg.get("prepend_bos")
    return SaeConfig(
        architecture,
        fields,
        cfg.get("hook_name"),
        cfg.get("hook_name_out"),
        bos if isinstance(bos, bool) else None,
        scale,
        centred,
        cfg.get("sae_lens_version") is not None or cfg.get("layout") == "features_first",
        trained_positions(cfg),
        tuple(assumed),
    )


def trained_positions(cfg: Mapping[str, Any]) -> str | None:
    """Which positions a dictionary was trained on, in words, if its configuration says."""
    said = []
    if (part := cfg.get("seqpos_slice")) and any(bound is not None for bound in part):
        said.append(f"positions {part}")
    if (left_out := cfg.get("exclude_special_tokens")) and left_out is not False:
        said.append(f"without special tokens ({left_out})")
    if cfg.get("context_size"):
        said.append(f"contexts of {cfg['context_size']} tokens")
    return ", ".join(said) or None


def _architecture(cfg: dict[str, Any], where: Path) -> str:
    architecture, activation = cfg.get("architecture"), cfg.get("activation_fn")
    if architecture is None and activation is None:
        raise DictionaryError(
            f"{where} names neither 'architecture' nor an activation function "
            "('activation_fn_str'); expected "
            f"one of {', '.join(PER_TOKEN)}: add the key"
        )
    if activation == "topk" and architecture in (None, "standard", "topk"):
        return "topk"
    if architecture is None and activation in ("relu", "jumprelu"):
        return "standard" if activation == "relu" else "jumprelu"
    if architecture in ("batchtopk", "matryoshka", "matryoshka_batchtopk"):
        raise DictionaryError(
            f"{where} is the training form of a {architecture} dictionary; expected its "
            "inference form, written "
            "by sae_lens' save_inference_model"
        )
    if architecture not in PER_TOKEN:
        raise DictionaryError(
            f"{where}: architecture {architecture or activation!r} has no encoder for one "
            "token of the residual "
            f"stream; expected one of {', '.join(PER_TOKEN)}"
        )
    if activation is not None and activation not in _ACTIVATIONS[architecture]:
        raise DictionaryError(
            f"{where}: activation {activation!r} of a {architecture} dictionary is not known; "
            f"expected {' or '.join(_ACTIVATIONS[architecture]) or 'none'}"
        )
    return architecture


def _refuse_other_maps(cfg: dict[str, Any], architecture: str, where: Path) -> None:
    """Refuse widths, sites and reshapings that are not one dictionary of one site."""
    is_transcoder = architecture in TRANSCODERS
    for key in ("d_in", "d_sae", *(["d_out"] if is_transcoder else [])):
        if not _is_count(cfg.get(key)):
            raise DictionaryError(
                f"{where} has no integer {key!r}; expected the dictionary's width"
            )
    if not isinstance(cfg["apply_b_dec_to_input"], bool):
        raise DictionaryError(
            f"{where}: apply_b_dec_to_input is {cfg['apply_b_dec_to_input']!r}; expected true or "
            "false"
        )
    if is_transcoder and cfg["apply_b_dec_to_input"]:
        raise DictionaryError(
            f"{where}: apply_b_dec_to_input is true on a transcoder, whose b_dec lives at its "
            "output; expected false"
        )
    if cfg["reshape_activations"] == "hook_z" and str(cfg.get("hook_name")).endswith("hook_z"):
        cfg["reshape_activations"] = "none"  # heads side by side, as headattr keeps them
    if cfg["reshape_activations"] not in ("none", None):
        raise DictionaryError(
            f"{where}: reshape_activations is {cfg['reshape_activations']!r}; expected none"
        )
    if not isinstance(cfg.get("hook_name"), str | None):
        raise DictionaryError(f"{where}: hook_name is {cfg['hook_name']!r}; expected a string")
    if not is_transcoder and cfg.get("hook_name_out") not in (None, cfg.get("hook_name")):
        raise DictionaryError(
            f"{where} reads {cfg.get('hook_name')!r} and writes {cfg['hook_name_out']!r}; "
            "expected a dictionary that reconstructs what it reads"
        )


def _k(cfg: dict[str, Any], where: Path) -> int:
    options = cfg.get("activation_fn_kwargs")
    given = [cfg.get("k"), options.get("k") if isinstance(options, dict) else None]
    found: list[Any] = [int(k) if isinstance(k, float) and k == int(k) else k for k in given if k]
    if not found or not all(map(_is_count, found)):
        raise DictionaryError(
            f"{where} is a TopK dictionary without 'k' (found {found or None}); expected the "
            "number of active features"
        )
    if len(set(found)) > 1 or found[0] > cfg["d_sae"]:
        raise DictionaryError(
            f"{where}: k is {' and '.join(map(str, found))}; expected one number up to d_sae = "
            f"{cfg['d_sae']}"
        )
    return found[0]


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _normalisation(cfg: dict[str, Any], where: Path, scaler: float | None) -> tuple[float, str]:
    """Input scale and the normalisation that sae_lens does at run time."""
    kind = cfg["normalize_activations"]
    if isinstance(kind, bool):
        kind = "expected_average_only_in" if kind else "none"
    if kind == "expected_average_only_in":
        given = [scaler, *(cfg.get(key) for key in _SCALE_KEYS)]
        found = [factor for factor in given if type(factor) in (int, float)]
        if not found or not all(factor > 0 and math.isfinite(factor) for factor in found):
            raise DictionaryError(
                f"{where}: normalize_activations is expected_average_only_in, but no positive "
                f"factor is given in {SCALER} or under {', '.join(_SCALE_KEYS)} (found "
                f"{found or None}); expected sqrt(d_in) / mean norm of the training data"
            )
        if len(set(found)) > 1:
            raise DictionaryError(
                f"{where}: the factor of expected_average_only_in is given as "
                f"{' and '.join(map(str, found))}; expected one"
            )
        return float(found[0]), "none"
    if kind not in ("none", "layer_norm", "constant_norm_rescale"):
        raise DictionaryError(
            f"{where}: normalize_activations {kind!r} is not folded into the weights; expected "
            "none, layer_norm, "
            "constant_norm_rescale or expected_average_only_in with its factor"
        )
    return 1.0, kind
