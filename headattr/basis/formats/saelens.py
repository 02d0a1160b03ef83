"""SAELens folders: cfg.json + sae_weights.safetensors, of any version.

The configuration is read here, not by sae_lens, which turns a lost activation function into ReLU
and a missing k into 100; what is missing and harmless is assumed aloud, what is missing and not
harmless is refused.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from headattr.basis.component import check_numbers
from headattr.errors import DictionaryError, HeadattrError
from headattr.model.load import hash_tensors
from headattr.model.weights_file import check_safetensors

PER_TOKEN = ("standard", "gated", "topk", "abstopk", "jumprelu", "matching_pursuit")
WEIGHTS, CONFIG, SCALER = "sae_weights.safetensors", "cfg.json", "activation_scaler.json"
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
}


class SaeConfig(NamedTuple):
    """A configuration with everything that changes a number made explicit."""

    architecture: str
    fields: dict[str, Any]
    """What sae_lens' config class takes."""
    hook_name: str | None
    prepend_bos: bool | None
    input_scale: float
    """What the input is multiplied by before encoding (expected_average_only_in), else 1."""
    centred: bool
    """Trained on a stream whose mean was removed."""
    assumed: tuple[str, ...]


def read_config(folder: Path) -> SaeConfig:
    """cfg.json and the header of the weights, checked; DictionaryError names the key or file."""
    path = folder / CONFIG
    if not path.is_file():
        raise DictionaryError(f"{folder} is not a SAELens folder: it has no {CONFIG}")
    if not (folder / WEIGHTS).is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir()))
        raise DictionaryError(f"{folder} has no {WEIGHTS} (found: {found})")
    raw = _json_object(path)
    try:
        check_safetensors(folder / WEIGHTS)
    except HeadattrError as error:
        raise DictionaryError(str(error)) from error
    return interpret(raw, path, _scaler(folder))


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
    for key, value in _DEFAULTS.items():
        if cfg.get(key) is None:
            cfg[key] = value
            assumed.append(f"{key} = {value} (not in {where.name})")
    architecture = _architecture(cfg, where)
    if cfg.get("architecture") is None:
        assumed.append(
            f"architecture = {architecture} (from the activation {cfg['activation_fn']!r})"
        )
    _refuse_other_maps(cfg, where)
    if cfg.get("hook_name") is None:
        assumed.append(f"site = the layer asked for ({where.name} names none)")
    fields = {key: cfg[key] for key in ("d_in", "d_sae", "apply_b_dec_to_input")}
    scale, fields["normalize_activations"] = _normalisation(cfg, where, scaler)
    if architecture in ("topk", "abstopk"):
        fields["k"] = _k(cfg, where)
        fields["rescale_acts_by_decoder_norm"] = bool(
            cfg.get("rescale_acts_by_decoder_norm", False)
        )
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
        bos if isinstance(bos, bool) else None,
        scale,
        centred,
        tuple(assumed),
    )


def load_weights(folder: Path, config: SaeConfig, dtype: Any, device: Any) -> tuple[Any, str]:
    """The sae_lens SAE of a folder, in `dtype`, and the hash of its tensors and configuration."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise DictionaryError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    digest = hash_tensors(
        state.items(), (folder / CONFIG).read_text(encoding="utf-8"), repr(config.input_scale)
    )
    check_numbers(state, str(folder))
    state = {name: tensor.to(device, dtype) for name, tensor in state.items()}
    factor = state.pop("scaling_factor", state.pop("finetuning_scaling_factor", None))
    if factor is not None and not torch.equal(factor, torch.ones_like(factor)):
        fits = "W_dec" in state and factor.shape == state["W_dec"].shape[:1]
        if not fits or config.architecture not in ("standard", "gated", "jumprelu"):
            raise DictionaryError(
                f"{folder} has finetuned scaling factors of shape {tuple(factor.shape)} on a "
                f"{config.architecture} dictionary; expected none, or one a feature on a "
                "standard, gated or jumprelu dictionary"
            )
        state["W_dec"] = state["W_dec"] * factor[:, None]
    return build(config, state, folder, dtype, device), digest


def build(config: SaeConfig, state: dict[str, Any], where: Path, dtype: Any, device: Any) -> Any:
    """A sae_lens SAE from its meaning and its tensors."""
    from sae_lens.registry import SAE_CLASS_REGISTRY

    sae_class, config_class = SAE_CLASS_REGISTRY[config.architecture]
    fields = {**config.fields, "dtype": str(dtype).removeprefix("torch."), "device": str(device)}
    sae = sae_class(config_class(**fields))
    sae.process_state_dict_for_loading(state)
    expected = {name: tuple(tensor.shape) for name, tensor in sae.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if found != expected:
        raise DictionaryError(
            f"{where}: a {config.architecture} dictionary has tensors {_listed(expected)}; "
            f"found {_listed(found)}"
        )
    sae.load_state_dict(state)
    return sae.eval()


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(
        f"{name} {'x'.join(map(str, shape))}" for name, shape in sorted(shapes.items())
    )


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


def _refuse_other_maps(cfg: dict[str, Any], where: Path) -> None:
    """Refuse widths, sites and reshapings that are not one dictionary on one residual stream."""
    for key in ("d_in", "d_sae"):
        if not _is_count(cfg.get(key)):
            raise DictionaryError(
                f"{where} has no integer {key!r}; expected the dictionary's width"
            )
    if not isinstance(cfg["apply_b_dec_to_input"], bool):
        raise DictionaryError(
            f"{where}: apply_b_dec_to_input is {cfg['apply_b_dec_to_input']!r}; expected true or "
            "false"
        )
    if cfg["reshape_activations"] not in ("none", None):
        raise DictionaryError(
            f"{where}: reshape_activations is {cfg['reshape_activations']!r}; expected none"
        )
    if not isinstance(cfg.get("hook_name"), str | None):
        raise DictionaryError(f"{where}: hook_name is {cfg['hook_name']!r}; expected a string")
    if cfg.get("hook_name_out") not in (None, cfg.get("hook_name")):
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


def _scaler(folder: Path) -> float | None:
    path = folder / SCALER
    if not path.is_file():
        return None
    factor = _json_object(path).get("scaling_factor")
    if factor is not None and type(factor) not in (int, float):
        raise DictionaryError(f"{path}: scaling_factor is {factor!r}; expected a number")
    return factor


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DictionaryError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DictionaryError(f"{path} holds a JSON {type(found).__name__}; expected an object")
    return found
