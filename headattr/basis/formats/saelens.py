"""SAELens folders: cfg.json + sae_weights.safetensors, of any version.

The configuration is read here, not by sae_lens, which turns a lost activation function into ReLU
and a missing k into 100; what is missing and harmless is assumed aloud, what is missing and not
harmless is refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from headattr.basis.formats.saelens_config import SCALER, TRANSCODERS, SaeConfig, interpret
from headattr.basis.site import site_of
from headattr.errors import DictionaryError
from headattr.model.load import hash_tensors
from headattr.model.sites import Site

WEIGHTS, CONFIG = "sae_weights.safetensors", "cfg.json"
_EXPECTED = {
    "gated": ("W_enc", "W_dec", "b_dec", "b_gate", "b_mag", "r_mag"),
    "matching_pursuit": ("W_dec", "b_dec"),
    "jumprelu": ("W_enc", "W_dec", "b_dec", "b_enc", "threshold"),
    "jumprelu_transcoder": ("W_enc", "W_dec", "b_dec", "b_enc", "threshold"),
    "skip_transcoder": ("W_enc", "W_dec", "b_dec", "b_enc", "W_skip"),
    "jumprelu_skip_transcoder": ("W_enc", "W_dec", "b_dec", "b_enc", "threshold", "W_skip"),
}
_PLAIN = ("W_enc", "W_dec", "b_dec", "b_enc")


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


def _refuse_unclear(config: SaeConfig, where: str) -> None:
    """Refuse what two libraries mean differently: a scale of a transcoder's input that may or may
    not be one of its output, and a hook's name."""
    if config.architecture in TRANSCODERS and config.input_scale != 1:
        raise DictionaryError(
            f"{where}: a transcoder whose input is scaled by {config.input_scale} does not say in "
            "which units it writes; expected the scale folded into its weights"
        )
    if (config.hook_name or "").endswith("hook_mlp_in"):
        raise DictionaryError(
            f"{where}: {config.hook_name!r} is the stream before the MLP's norm in "
            "TransformerLens, and what lies behind it in sae_lens' Gemma Scope 2; expected "
            "hook_resid_mid or mlp.hook_in"
        )


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
    _refuse_unclear(config, path or name)
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
