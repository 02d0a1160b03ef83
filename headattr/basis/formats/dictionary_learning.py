"""dictionary_learning: ae.pt (a state dict; or ae.safetensors) + config.json.

What a file means follows from its dict_class. Activations are those that the class gives by
default; some versions multiply them by the norm of the decoder row and divide the row by it, which
changes no contribution. BatchTopK is a threshold at inference: relu(pre) where it is larger.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from headattr.basis.dictionary import Activation, Dictionary, Frame, Release, Tensors, same_rows
from headattr.basis.formats.files import json_object, labels_of, tensors_of
from headattr.basis.formats.layout import Shape, as_expected, notes, turned
from headattr.basis.formats.registry import Format
from headattr.basis.formats.torch_file import torch_tensors
from headattr.basis.site import site_of
from headattr.errors import DictionaryError
from headattr.model.load import hash_tensors
from headattr.model.sites import Site, SiteKind

CONFIG, WEIGHTS = "config.json", ("ae.pt", "ae.safetensors")
_SUBMODULE = re.compile(r"(resid_post|attention_out|attn_out|mlp_out)_layer_(\d+)")
_KINDS: dict[str, SiteKind] = {
    "attention_out": "attn_out",
    "attn_out": "attn_out",
    "mlp_out": "mlp_out",
}


class _Class(NamedTuple):
    """A dict_class: its activation and its tensors."""

    kind: Any
    names: dict[str, str]
    """By the names of `Tensors`."""
    subtracts: bool = True
    """Is b_dec subtracted from the input?"""
    also: tuple[str, ...] = ()
    """Tensors that may be there and change nothing."""


_LINEAR = {"W_enc": "encoder.weight", "b_enc": "encoder.bias", "W_dec": "decoder.weight"}
_PLAIN = {name: name for name in ("W_enc", "b_enc", "W_dec", "b_dec", "threshold")}
_CLASSES = {
    "AutoEncoder": _Class("relu", {**_LINEAR, "b_dec": "bias"}),
    "AutoEncoderNew": _Class("relu", {**_LINEAR, "b_dec": "decoder.bias"}, subtracts=False),
    "AutoEncoderTopK": _Class("topk", {**_LINEAR, "b_dec": "b_dec"}, also=("k", "threshold")),
    "BatchTopKSAE": _Class(
        "jumprelu", {**_LINEAR, "b_dec": "b_dec", "threshold": "threshold"}, also=("k",)
    ),
    "MatryoshkaBatchTopKSAE": _Class("jumprelu", _PLAIN, also=("k", "group_sizes")),
    "GatedAutoEncoder": _Class(
        "gated",
        {
            "W_enc": "encoder.weight",
            "W_dec": "decoder.weight",
            "b_enc": "mag_bias",
            "b_gate": "gate_bias",
            "r_mag": "r_mag",
            "b_dec": "decoder_bias",
        },
    ),
    "JumpReluAutoEncoder": _Class("jumprelu", _PLAIN, subtracts=False),
}


class _Said(NamedTuple):
    """config.json, checked."""

    dict_class: str
    k: int | None
    d_in: int
    features: int
    site: Site | None
    submodule: str | None
    subtracts: bool
    trained_on: str | None
    assumed: tuple[str, ...]


def read_release(folder: Path) -> Release:
    """The SAE of a folder."""
    path = _weights(folder)
    state = _state(path)
    shapes = {name: tuple(part.shape) for name, part in state.items()}
    said = _config(folder / CONFIG, shapes)
    known = _CLASSES[said.dict_class]
    expected = _expected(known, said.d_in, said.features, shapes)
    used = {name: shape for name, shape in shapes.items() if name not in known.also}
    names = turned(used, expected, f"{path}, a {said.dict_class},")
    k = _k(said.k, state.get("k"), said.features, path) if known.kind == "topk" else None
    told = repr((said.dict_class, k, said.site, said.subtracts))
    dictionary = Dictionary(
        name=folder.name,
        path=str(folder),
        format=FORMAT.name,
        architecture=said.dict_class,
        activation=Activation(known.kind, k),
        reads=(said.site,),
        writes=(said.site,),
        d_in=said.d_in,
        d_out=said.d_in,
        features=said.features,
        read=partial(_read, path, known, names, told),
        frame=Frame(subtract_b_dec=said.subtracts),
        hook_name=None if said.site is None else said.submodule or f"layers.{said.site.layer - 1}",
        trained_on=said.trained_on,
        assumed=(*said.assumed, *_untrained(known, state), *notes(shapes, names)),
        labels=labels_of(folder),
    )
    return Release("sae", folder.name, str(folder), (dictionary,))


def _weights(folder: Path) -> Path:
    found = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    if len(found) != 1:
        raise DictionaryError(f"{folder} has {' and '.join(WEIGHTS)}; expected one of them")
    return found[0]


def _state(path: Path) -> dict[str, Tensor]:
    return torch_tensors(path) if path.suffix == ".pt" else tensors_of(path)


def _config(path: Path, shapes: dict[str, Shape]) -> _Said:
    if not path.is_file():
        raise DictionaryError(f"{path.parent} has no {CONFIG}; expected trainer.dict_class in it")
    raw = json_object(path)
    trainer, buffer = raw.get("trainer"), raw.get("buffer") or {}
    if not isinstance(trainer, dict) or not isinstance(buffer, dict):
        raise DictionaryError(
            f"{path} has no 'trainer' object; expected dict_class and layer in it"
        )
    name, assumed = trainer.get("dict_class"), []
    if not isinstance(name, str) or name not in _CLASSES:
        raise DictionaryError(
            f"{path}: trainer.dict_class is {name!r}; expected one of {', '.join(_CLASSES)}"
        )
    sizes = _sizes(name, shapes)
    for key in ("activation_dim", "dict_size"):
        if trainer.get(key) is None:
            assumed.append(f"{key} = {sizes[key]} (from the tensors)")
        elif type(trainer[key]) is not int or trainer[key] < 1:
            raise DictionaryError(f"{path}: {key} is {trainer[key]!r}; expected a whole number")
    sizes |= {key: trainer[key] for key in sizes if trainer.get(key) is not None}
    subtracts, flag = _CLASSES[name].subtracts, trainer.get("apply_b_dec_to_input")
    if name == "JumpReluAutoEncoder":
        if not isinstance(flag, bool | None):
            raise DictionaryError(f"{path}: apply_b_dec_to_input is {flag!r}; expected a boolean")
        subtracts = bool(flag)
        assumed += [] if flag is not None else [f"apply_b_dec_to_input = False (as {name} has it)"]
    site, noted = _site(path, trainer, buffer)
    return _Said(
        name,
        trainer.get("k"),
        sizes["activation_dim"],
        sizes["dict_size"],
        site,
        trainer.get("submodule_name"),
        subtracts,
        _trained_on(buffer),
        (*assumed, *noted),
    )


def _sizes(name: str, shapes: dict[str, Shape]) -> dict[str, int]:
    """Widths by the biases, 0 where there are none."""
    names = _CLASSES[name].names
    d_in, features = shapes.get(names["b_dec"], (0,)), shapes.get(names["b_enc"], (0,))
    return {"activation_dim": (*d_in, 0)[0], "dict_size": (*features, 0)[0]}


def _site(
    path: Path, trainer: dict[str, Any], buffer: dict[str, Any]
) -> tuple[Site | None, tuple[str, ...]]:
    """The site of a submodule's output, with what is assumed."""
    layer, name = trainer.get("layer"), trainer.get("submodule_name")
    if buffer.get("io", "out") != "out":
        raise DictionaryError(f"{path}: buffer.io is {buffer['io']!r}; expected 'out'")
    if not isinstance(layer, int | None) or not isinstance(name, str | None):
        raise DictionaryError(f"{path}: layer is {layer!r}, submodule_name {name!r}")
    match = _SUBMODULE.fullmatch(name or "")
    if name is None:
        said = f"site = the output of block {layer} ({CONFIG} names no submodule)"
        if layer is None:
            return None, (f"site = the layer asked for ({CONFIG} names none)",)
        return Site("resid_pre", layer + 1), (said,)
    if match and match.group(1) != "resid_post":
        site, noted = Site(_KINDS[match.group(1)], int(match.group(2))), (_added(name),)
    else:
        known = f"layers.{match.group(2)}" if match else name
        site, noted = site_of(known, str(path)), ()
    of_block = site.layer - 1 if site.kind == "resid_pre" else site.layer
    if layer is not None and layer != of_block:
        raise DictionaryError(
            f"{path}: submodule_name is {name!r}, of block {of_block}; layer says {layer}"
        )
    return site, noted


def _added(name: str) -> str:
    return f"{name} is what is added to the stream: no norm lies behind it"


def _trained_on(buffer: dict[str, Any]) -> str | None:
    said = ["without the first token"] if buffer.get("remove_bos") is True else []
    if buffer.get("ctx_len"):
        said.append(f"contexts of {buffer['ctx_len']} tokens")
    return ", ".join(said) or None


def _expected(
    known: _Class, d_in: int, features: int, shapes: dict[str, Shape]
) -> dict[str, Shape]:
    """Shapes by the names of the file; a threshold is one number or one a feature."""
    sizes: dict[str, Shape] = {
        "encoder.weight": (features, d_in),
        "decoder.weight": (d_in, features),
        "W_enc": (d_in, features),
        "W_dec": (features, d_in),
    }
    expected: dict[str, Shape] = {}
    for ours, stored in known.names.items():
        expected[stored] = sizes.get(stored, (d_in,) if ours == "b_dec" else (features,))
    if "threshold" in expected and shapes.get("threshold") == ():
        expected["threshold"] = ()
    return expected


def _k(said: Any, stored: Tensor | None, features: int, path: Path) -> int:
    """The k of a top-k, of the configuration and of the file."""
    found = [k for k in (said, None if stored is None else stored.tolist()) if k is not None]
    if len(set(map(repr, found))) != 1 or type(found[0]) is not int:
        raise DictionaryError(
            f"{path}: k is {' and '.join(map(repr, found)) or 'missing'} in {CONFIG} and the "
            "tensors; expected one number of active features"
        )
    if not 0 < found[0] <= features:
        raise DictionaryError(f"{path}: k is {found[0]}; expected 1 to its {features} features")
    return found[0]


def _untrained(known: _Class, state: dict[str, Tensor]) -> tuple[str, ...]:
    """BatchTopK begins with a threshold of -1, which a short training never replaces."""
    threshold = state.get("threshold") if known.kind == "jumprelu" else None
    if threshold is None or not bool((threshold < 0).any()):
        return ()
    return ("a threshold is below 0: every positive pre-activation is active, as in a ReLU",)


def _read(path: Path, known: _Class, names: tuple[str, ...], said: str) -> tuple[Tensors, str]:
    stored = _state(path)
    state = as_expected(stored, names)
    parts: dict[str, Any] = {ours: state[name] for ours, name in known.names.items()}
    W_enc, W_dec, b_dec = (parts.pop(name) for name in ("W_enc", "W_dec", "b_dec"))
    if known.names["W_enc"] == "W_enc":
        W_enc = same_rows(W_enc)
    if known.names["W_dec"] == "decoder.weight":
        W_dec = same_rows(W_dec)
    tensors = Tensors(W_enc=(W_enc,), W_dec=(W_dec,), b_dec=(b_dec,), **parts)
    return tensors, hash_tensors(stored.items(), said)


FORMAT = Format(
    "dictionary_learning",
    lambda path: any((path / name).is_file() for name in WEIGHTS),
    read_release,
    f"a folder with {CONFIG} and {' or '.join(WEIGHTS)}",
)
