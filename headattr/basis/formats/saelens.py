"""SAELens folders: cfg.json + sae_weights.safetensors, of any version.

The configuration is read here, not by sae_lens, which turns a lost activation function into ReLU
and a missing k into 100; what is missing and harmless is assumed aloud, what is missing and not
harmless is refused.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headattr.basis.dictionary import Activation, Dictionary, Frame, Release, Tensors
from headattr.basis.formats.files import (
    check_file,
    json_object,
    labels_of,
    oriented,
    shapes_of,
    tensors_of,
)
from headattr.basis.formats.registry import Format
from headattr.basis.site import site_of
from headattr.errors import DictionaryError
from headattr.model.load import hash_tensors
from headattr.model.sites import Site

SAES = ("standard", "gated", "topk", "abstopk", "jumprelu", "matching_pursuit")
TRANSCODERS = ("transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder")
PER_TOKEN = SAES + TRANSCODERS
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
    "transcoder": ("relu",),
    "skip_transcoder": ("relu",),
    "jumprelu_transcoder": ("relu", "jumprelu"),
    "jumprelu_skip_transcoder": ("relu", "jumprelu"),
}
_EXPECTED = {
    "gated": ("W_enc", "W_dec", "b_dec", "b_gate", "b_mag", "r_mag"),
    "matching_pursuit": ("W_dec", "b_dec"),
    "jumprelu": ("W_enc", "W_dec", "b_dec", "b_enc", "threshold"),
    "jumprelu_transcoder": ("W_enc", "W_dec", "b_dec", "b_enc", "threshold"),
    "skip_transcoder": ("W_enc", "W_dec", "b_dec", "b_enc", "W_skip"),
    "jumprelu_skip_transcoder": ("W_enc", "W_dec", "b_dec", "b_enc", "threshold", "W_skip"),
}
_PLAIN = ("W_enc", "W_dec", "b_dec", "b_enc")


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


def read_config(folder: Path) -> SaeConfig:
    """cfg.json and the header of the weights, checked; DictionaryError names the key or file."""
    path = folder / CONFIG
    if not path.is_file():
        raise DictionaryError(f"{folder} is not a SAELens folder: it has no {CONFIG}")
    check_file(folder / WEIGHTS)
    return interpret(json_object(path), path, _scaler(folder))


def read_release(folder: Path) -> Release:
    """The dictionary of a folder."""
    config = read_config(folder)
    fields, stored = config.fields, shapes_of(folder / WEIGHTS).get("W_dec")
    if stored == (fields["d_in"], fields["d_sae"]) and fields["d_in"] != fields["d_sae"]:
        note = f"W_dec is stored as [d_in, d_sae] = {stored} and is turned"
        config = config._replace(assumed=(*config.assumed, note))

    def read() -> tuple[Tensors, str]:
        state = tensors_of(folder / WEIGHTS)
        said = (folder / CONFIG).read_text(encoding="utf-8"), repr(config.input_scale)
        digest = hash_tensors(state.items(), *said)
        return arranged(config, state, str(folder)), digest

    return _release(config, read, folder.name, str(folder), labels_of(folder))


def release_of(sae: Any) -> Release:
    """A `sae_lens.SAE` in memory, as it is now: a copy."""
    raw = sae.cfg.to_dict() if hasattr(sae.cfg, "to_dict") else dict(vars(sae.cfg))
    metadata = raw.get("metadata")
    raw["metadata"] = (
        metadata if isinstance(metadata, dict) else dict(vars(metadata) if metadata else {})
    )
    raw["architecture"] = sae.cfg.architecture()
    name = type(sae).__name__
    config = interpret(raw, Path(name))._replace(has_layout=True)
    state = {key: tensor.detach().clone() for key, tensor in sae.state_dict().items()}
    settings = (sorted(config.fields.items()), config.input_scale, config.centred)
    digest = hash_tensors(state.items(), repr(settings))
    return _release(config, lambda: (arranged(config, state, name), digest), name, None, None)


def _release(
    config: SaeConfig,
    read: Callable[[], tuple[Tensors, str]],
    name: str,
    path: str | None,
    labels: str | None,
) -> Release:
    fields, hook = config.fields, config.hook_name
    site = None if hook is None else site_of(hook)
    is_transcoder = config.architecture in TRANSCODERS
    out = site
    if is_transcoder and config.hook_name_out is not None:
        out = site_of(config.hook_name_out)
    elif is_transcoder and site is not None:
        out = Site("mlp_out", site.layer)
    dictionary = Dictionary(
        name=name,
        path=path,
        format=FORMAT.name,
        architecture=config.architecture,
        activation=Activation(_KINDS[config.architecture], fields.get("k")),
        reads=(site,),
        writes=(out,),
        d_in=fields["d_in"],
        d_out=fields.get("d_out", fields["d_in"]),
        features=fields["d_sae"],
        read=read,
        frame=Frame(
            config.input_scale,
            fields["normalize_activations"],
            config.centred,
            fields["apply_b_dec_to_input"],
            undone=not is_transcoder,
        ),
        hook_name=hook,
        prepend_bos=config.prepend_bos,
        trained_on=config.trained_on,
        assumed=config.assumed,
        labels=labels,
    )
    return Release("transcoders" if is_transcoder else "sae", name, path, (dictionary,))


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


def arranged(config: SaeConfig, state: dict[str, Any], where: str) -> Tensors:
    """The tensors of a file in headattr's layout; `where` names it in errors."""
    import torch

    state = dict(state)
    factor = state.pop("scaling_factor", state.pop("finetuning_scaling_factor", None))
    if factor is not None and torch.equal(factor, torch.ones_like(factor)):
        factor = None
    fields, kind = config.fields, config.architecture
    d_in, features, d_out = fields["d_in"], fields["d_sae"], fields.get("d_out", fields["d_in"])
    if factor is not None and (
        tuple(factor.shape) != (features,) or kind not in ("standard", "gated", "jumprelu")
    ):
        raise DictionaryError(
            f"{where} has finetuned scaling factors of shape {tuple(factor.shape)} on a "
            f"{kind} dictionary; expected none, or one a feature on a "
            "standard, gated or jumprelu dictionary"
        )
    shapes = {
        "W_enc": (d_in, features),
        "W_dec": (features, d_out),
        "b_dec": (d_out,),
        "W_skip": (d_out, d_in),
    }
    expected = {key: shapes.get(key, (features,)) for key in _EXPECTED.get(kind, _PLAIN)}
    for key in {"W_enc", "W_dec"} & state.keys() & expected.keys():
        state[key] = oriented(state[key], expected[key], f"{where}: {key}", config.has_layout)
    found = {key: tuple(tensor.shape) for key, tensor in state.items()}
    scalar = {"threshold": ()} if found.get("threshold") == () else {}
    if found != expected | scalar:
        raise DictionaryError(
            f"{where}: a {kind} dictionary has tensors {_listed(expected)}; found {_listed(found)}"
        )
    pursued = kind == "matching_pursuit"
    used = not pursued or fields["apply_b_dec_to_input"]
    return Tensors(
        W_enc=() if pursued else (state["W_enc"].T,),
        b_enc=state.get("b_mag", state.get("b_enc")),
        W_dec=(state["W_dec"],),
        b_dec=(state["b_dec"] if used else None,),
        threshold=state.get("threshold"),
        b_gate=state.get("b_gate"),
        r_mag=state.get("r_mag"),
        factor=factor,
        by_norm=bool(fields.get("rescale_acts_by_decoder_norm", False)),
        W_skip=state["W_skip"].T if "W_skip" in state else None,
        pursuit=_pursuit(fields, state) if pursued else None,
    )


def _pursuit(fields: dict[str, Any], state: dict[str, Any]) -> Any:
    """sae_lens' own matching pursuit."""
    from sae_lens.registry import SAE_CLASS_REGISTRY

    sae_class, config_class = SAE_CLASS_REGISTRY["matching_pursuit"]
    dtype = str(state["W_dec"].dtype).removeprefix("torch.")
    sae = sae_class(config_class(**fields, dtype=dtype, device="cpu"))
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


def _scaler(folder: Path) -> float | None:
    path = folder / SCALER
    if not path.is_file():
        return None
    factor = json_object(path).get("scaling_factor")
    if factor is not None and type(factor) not in (int, float):
        raise DictionaryError(f"{path}: scaling_factor is {factor!r}; expected a number")
    return factor


_KINDS: dict[str, Any] = {
    "standard": "relu",
    "gated": "gated",
    "topk": "topk",
    "abstopk": "abstopk",
    "jumprelu": "jumprelu",
    "matching_pursuit": "matching_pursuit",
    "transcoder": "relu",
    "skip_transcoder": "relu",
    "jumprelu_transcoder": "jumprelu",
    "jumprelu_skip_transcoder": "jumprelu",
}


def matches(path: Path) -> bool:
    """Is it SAELens'? Without cfg.json, sae_weights.safetensors may be another library's, whose
    configuration is then beside it."""
    others = ("config.json", "hyperparams.json")
    return (path / WEIGHTS).is_file() and (
        (path / CONFIG).is_file() or not any((path / other).is_file() for other in others)
    )


FORMAT = Format(
    "saelens",
    matches,
    read_release,
    f"a folder with {CONFIG} and {WEIGHTS}",
)
