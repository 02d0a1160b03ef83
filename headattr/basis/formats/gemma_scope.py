"""Gemma Scope: params.npz in a folder whose path says what it is.

JumpReLU SAEs of the residual stream, MLP outputs and the heads' outputs, and transcoders; b_dec is
not subtracted from the input. There is no configuration, so that the site comes from the names that
they are published under: gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82/params.npz
(Lieberum et al. 2024, "Gemma Scope").
"""

import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headattr.basis.dictionary import Dictionary, Release, Tensors
from headattr.basis.formats.files import labels_of
from headattr.basis.formats.jumprelu import (
    JUMPRELU,
    Shapes,
    check_keys,
    check_shapes,
    names_of,
    size_of,
)
from headattr.basis.formats.npz import npz_shapes, npz_tensors
from headattr.basis.formats.registry import Format
from headattr.basis.site import site_of
from headattr.errors import DictionaryError
from headattr.model.load import hash_tensors
from headattr.model.sites import Site

PARAMS = "params.npz"
_KEYS = {"W_enc", "W_dec", "b_enc", "b_dec", "threshold"}
_REPOSITORY = re.compile(r"gemma-scope-\w+-(?:pt|it)-(res|mlp|att|transcoders)(?:-canonical)?$")
_LAYER = re.compile(r"^layer_(\d+)$")
_EMBEDDING = re.compile(r"(?:^|/)embedding/width_[^/]+(?:/average_l0_[^/]+)?$")
_HOOKS = {
    "res": "blocks.{}.hook_resid_post",
    "mlp": "blocks.{}.hook_mlp_out",
    "att": "blocks.{}.attn.hook_z",
    "transcoders": "blocks.{}.ln2.hook_normalized",
}
_PUBLISHED = "gemma-scope-2b-pt-res (or -mlp, -att, -transcoders) and layer_N"


class Named(NamedTuple):
    """What a path says."""

    kind: str | None
    """res, mlp, att or transcoders."""
    layer: int | None


def read_release(folder: Path) -> Release:
    """The dictionary of a folder, from the headers of its arrays and its path.

    Raises DictionaryError for a file that is not whole or not of this format, and for an SAE of
    token embeddings.
    """
    path, named = folder / PARAMS, _named(folder)
    features, d_in, d_out = _sizes(path, _renamed(npz_shapes(path), path))
    transcodes = named.kind == "transcoders" or (named.kind is None and d_in != d_out)
    if not transcodes and d_in != d_out:
        raise DictionaryError(
            f"{path} reads vectors of width {d_in} and writes {d_out}; expected an SAE, by its "
            f"name (-{named.kind}), which writes what it reads"
        )
    hook, assumed = None, ("JumpReLU, b_dec not subtracted from the input (as all of Gemma Scope)",)
    if named.kind is not None and named.layer is not None:
        hook = _HOOKS[named.kind].format(named.layer)
    else:
        assumed = (*assumed, f"site = the layer asked for (its path does not hold {_PUBLISHED})")
    site = None if hook is None else site_of(hook)
    kind = "transcoders" if transcodes else "sae"
    dictionary = Dictionary(
        name=folder.name,
        path=str(folder),
        format=FORMAT.name,
        architecture="jumprelu_transcoder" if transcodes else "jumprelu",
        activation=JUMPRELU,
        reads=(site,),
        writes=(Site("mlp_out", site.layer) if transcodes and site is not None else site,),
        d_in=d_in,
        d_out=d_out,
        features=features,
        read=partial(_read, path, kind),
        hook_name=hook,
        assumed=assumed,
        labels=labels_of(folder),
    )
    return Release(kind, folder.name, str(folder), (dictionary,))


def _read(path: Path, kind: str) -> tuple[Tensors, str]:
    """The tensors of a file, and their hash."""
    state = _renamed(npz_tensors(path), path)
    tensors = Tensors(
        W_enc=(state["W_enc"].T,),
        b_enc=state["b_enc"],
        W_dec=(state["W_dec"],),
        b_dec=(state["b_dec"],),
        threshold=state["threshold"],
    )
    return tensors, hash_tensors(state.items(), kind)


def _named(folder: Path) -> Named:
    """What the path of a folder says; refused where it says half, or something that is not read."""
    parts = names_of(folder)
    if _EMBEDDING.search("/".join(parts)):
        raise DictionaryError(
            f"{folder} is an SAE of token embeddings, which reads each divided by sqrt(d_model) "
            "and no site of the stream; expected one of a layer (layer_N/...); the embedding of "
            "each token is a basis by itself: 0=tokens"
        )
    kinds = [match.group(1) for part in parts if (match := _REPOSITORY.search(part))]
    layers = [int(match.group(1)) for part in parts if (match := _LAYER.match(part))]
    named = Named(kinds[-1] if kinds else None, layers[-1] if layers else None)
    if named.kind not in (None, "res") and named.layer is None:
        raise DictionaryError(
            f"{folder} is of Gemma Scope's {named.kind} dictionaries, but no folder of its path is "
            f"named layer_N; expected {_PUBLISHED}"
        )
    return named


def _renamed(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """w_enc and w_dec as W_enc and W_dec."""
    names = {name: f"W{name[1:]}" if name in ("w_enc", "w_dec") else name for name in found}
    if len(set(names.values())) < len(names):
        raise DictionaryError(f"{path} holds {', '.join(sorted(names))}; expected each array once")
    return {names[name]: part for name, part in found.items()}


def _sizes(path: Path, shapes: Shapes) -> tuple[int, int, int]:
    """Features, width in and width out of arrays that belong together."""
    check_keys(path, shapes, _KEYS, set())
    features = size_of(path, shapes, "b_enc", 0, 1)
    d_out = size_of(path, shapes, "b_dec", 0, 1)
    d_in = size_of(path, shapes, "W_enc", 0, 2)
    expected = {
        "W_enc": (d_in, features),
        "W_dec": (features, d_out),
        "b_enc": (features,),
        "b_dec": (d_out,),
        "threshold": (features,),
    }
    check_shapes(path, shapes, expected)
    return features, d_in, d_out


FORMAT = Format(
    "gemma_scope",
    lambda path: (path / PARAMS).is_file(),
    read_release,
    f"a folder with {PARAMS}",
)
