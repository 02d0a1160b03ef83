"""Gemma Scope 2: params.safetensors of one site, or params_layer_0.safetensors and on of several.

JumpReLU, b_dec not subtracted from the input, no normalisation. SAEs of the residual stream, of MLP
outputs and of the heads' outputs; transcoders, with and without a skip path; cross-layer
transcoders (a file a layer) and weakly causal crosscoders (a file a site). config.json says which
sites; where it is missing or partial, the names that they are published under do:
resid_post/layer_17_width_16k_l0_big, clt/width_262k_l0_big, crosscoder/layer_9_17_22_29_width_65k_
(McDougall et al. 2025, "Gemma Scope 2").
"""

import re
from pathlib import Path
from typing import Any

from headattr.basis.dictionary import Dictionary, Release, Tensors
from headattr.basis.formats.files import labels_of, shapes_of, tensors_of
from headattr.basis.formats.gemma_scope_2_names import Said, said_of, sites_of
from headattr.basis.formats.jumprelu import (
    JUMPRELU,
    Shapes,
    check_keys,
    check_shapes,
    listed,
    size_of,
)
from headattr.basis.formats.registry import Format
from headattr.basis.site import site_of
from headattr.errors import DictionaryError
from headattr.model.load import hash_tensors
from headattr.model.sites import Site

SINGLE = "params.safetensors"
_OF_LAYER = re.compile(r"^params_layer_(\d+)\.safetensors$")
_KEYS = {"w_enc", "w_dec", "b_enc", "b_dec", "threshold"}
_SKIP = "affine_skip_connection"
_FOLDED = "JumpReLU, b_dec not subtracted from the input (as all of Gemma Scope 2)"


def read_release(folder: Path) -> Release:
    """The dictionaries of a folder, from its configuration, its names and the headers of its files.

    Raises DictionaryError for files that are missing, not whole or not of this format, and where
    the configuration and the names of the folders disagree.
    """
    files = _layer_files(folder)
    if not files:
        return _single(folder)
    if (folder / SINGLE).is_file():
        raise DictionaryError(
            f"{folder} has {SINGLE} and {files[0].name}; expected one of one site, or one a layer"
        )
    return _several(folder, files)


def _single(folder: Path) -> Release:
    """An SAE or a transcoder of one site."""
    path, said = folder / SINGLE, said_of(folder)
    shapes = shapes_of(path)
    _, d_in, d_out = _sizes(path, shapes, None)
    if said.kind in ("clt", "crosscoder"):
        raise DictionaryError(
            f"{folder} is a {said.kind}, by its configuration or name, in one file {SINGLE} with "
            f"{listed(shapes)}; expected params_layer_0.safetensors and on, one a layer"
        )
    transcodes = _transcodes(said, _SKIP in shapes or d_in != d_out)
    _check_skip(path, said, transcodes, shapes)
    if not transcodes and d_in != d_out:
        raise DictionaryError(
            f"{path} reads vectors of width {d_in} and writes {d_out}; expected an SAE, by its "
            "configuration or name, which writes what it reads"
        )
    site = None if said.reads is None else site_of(said.reads)
    out = None if said.writes is None else site_of(said.writes)
    if not transcodes and out != site:
        raise DictionaryError(
            f"{folder} reads {said.reads!r} and writes {said.writes!r}; expected an SAE, by its "
            "configuration or name, which writes what it reads"
        )
    assumed = (*said.assumed, _FOLDED)
    if site is None:
        note = "neither config.json nor the names of its folders say"
        assumed = (*assumed, f"site = the layer asked for, of an SAE ({note})")
    group = _dictionary(path, folder.name, said, 0, (site,), (out,), shapes, assumed, transcodes)
    kind = "transcoders" if transcodes else "sae"
    return Release(kind, folder.name, str(folder), (group,))


def _several(folder: Path, files: list[Path]) -> Release:
    """A cross-layer transcoder or a weakly causal crosscoder: features in one file a site that they
    read, b_dec of a site in the file of the features that read it."""
    said = said_of(folder)
    reads, writes = sites_of(folder, said, len(files))
    widths, groups = {}, []
    for i, path in enumerate(files):
        shapes = shapes_of(path)
        widths[path.name] = _sizes(path, shapes, len(files))[1:]
        _check_skip(path, said, said.kind == "clt", shapes)
        assumed = (*said.assumed, _FOLDED)
        groups.append(
            _dictionary(
                path,
                f"{folder.name} layer {reads[i].layer}",
                said._replace(reads=None),
                i,
                (reads[i],),
                writes[i:],
                shapes,
                assumed,
                said.kind == "clt",
            )
        )
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{name} {d_in} and {d_out}" for name, (d_in, d_out) in widths.items())
        raise DictionaryError(
            f"{folder}: its files read and write vectors of widths {found}; expected one model's"
        )
    kind = "transcoders" if said.kind == "clt" else "crosscoder"
    return Release(kind, folder.name, str(folder), tuple(groups))


def _dictionary(
    path: Path,
    name: str,
    said: Said,
    index: int,
    reads: tuple[Site | None, ...],
    writes: tuple[Site | None, ...],
    shapes: Shapes,
    assumed: tuple[str, ...],
    transcodes: bool,
) -> Dictionary:
    """One file."""
    sites = ", ".join(f"{site}" for site in (*reads, *writes))

    def read() -> tuple[Tensors, str]:
        state = tensors_of(path)
        return _arranged(path, state, index), hash_tensors(state.items(), sites)

    skips = "skip_" if _SKIP in shapes else ""
    return Dictionary(
        name=name,
        path=str(path.parent if path.name == SINGLE else path),
        format=FORMAT.name,
        architecture=f"jumprelu_{skips}transcoder" if transcodes else "jumprelu",
        activation=JUMPRELU,
        reads=reads,
        writes=writes,
        d_in=shapes["w_enc"][0],
        d_out=shapes["b_dec"][0],
        features=shapes["b_enc"][0],
        read=read,
        hook_name=said.reads,
        assumed=assumed,
        labels=labels_of(path.parent) if index == 0 else None,
    )


def _arranged(path: Path, state: dict[str, Any], index: int) -> Tensors:
    """The tensors of one file; `index`: which of the sites its features read."""
    w_dec = state["w_dec"]
    if w_dec.ndim == 2:
        W_dec, b_dec = (w_dec,), (state["b_dec"],)
    else:
        # [feature, site, d]: entries of the sites before its own are in the file and must be zero,
        # or the file means its axis otherwise; they are not used
        early = w_dec[:, :index]
        if index and bool(early.any()):
            raise DictionaryError(
                f"{path}: w_dec is not zero at the {index} sites before the one that its features "
                f"read (up to {float(early.abs().max()):.3g}); expected zeros there: a feature "
                "writes no earlier site"
            )
        W_dec = tuple(w_dec[:, j] for j in range(index, w_dec.shape[1]))
        b_dec = (state["b_dec"], *[None] * (len(W_dec) - 1))
    return Tensors(
        W_enc=(state["w_enc"].T,),
        b_enc=state["b_enc"],
        W_dec=W_dec,
        b_dec=b_dec,
        threshold=state["threshold"],
        W_skip=state.get(_SKIP),
    )


def _layer_files(folder: Path) -> list[Path]:
    """params_layer_0.safetensors and on; refused where one is missing between."""
    found = {
        int(match.group(1)): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _OF_LAYER.match(path.name))
    }
    missing = [i for i in range(max(found, default=-1) + 1) if i not in found]
    if missing:
        names = ", ".join(f"params_layer_{i}.safetensors" for i in missing)
        raise DictionaryError(
            f"{folder} lacks {names} (it has params_layer_{min(found)} to {max(found)}); expected "
            "all, from 0"
        )
    return [found[i] for i in sorted(found)]


def _sizes(path: Path, shapes: Shapes, n_sites: int | None) -> tuple[int, int, int]:
    """Features, width in and width out; `n_sites`: how many sites w_dec has, None for one without
    an axis."""
    check_keys(path, shapes, _KEYS, {_SKIP})
    features = size_of(path, shapes, "b_enc", 0, 1)
    d_out = size_of(path, shapes, "b_dec", 0, 1)
    d_in = size_of(path, shapes, "w_enc", 0, 2)
    expected = {
        "w_enc": (d_in, features),
        "w_dec": (features, d_out) if n_sites is None else (features, n_sites, d_out),
        "b_enc": (features,),
        "b_dec": (d_out,),
        "threshold": (features,),
    }
    if _SKIP in shapes:
        expected[_SKIP] = (d_in, d_out)
    check_shapes(path, shapes, expected)
    return features, d_in, d_out


def _transcodes(said: Said, by_tensors: bool) -> bool:
    """Is it a transcoder?"""
    if said.kind is not None:
        return said.kind == "transcoder"
    return by_tensors or said.reads != said.writes


def _check_skip(path: Path, said: Said, may: bool, shapes: Shapes) -> None:
    """Refuse a skip path that the configuration denies, and one that it promises and is not
    there."""
    has = _SKIP in shapes
    if said.affine is not None and said.affine != has:
        raise DictionaryError(
            f"{path} has {'a' if has else 'no'} tensor {_SKIP}; expected "
            f"{'one' if said.affine else 'none'}, by affine_connection or its name"
        )
    if has and not may:
        raise DictionaryError(f"{path} has a tensor {_SKIP}; expected it on a transcoder alone")


FORMAT = Format(
    "gemma_scope_2",
    lambda path: (path / SINGLE).is_file() or any(path.glob("params_layer_*.safetensors")),
    read_release,
    f"a folder with {SINGLE} (or params_layer_0.safetensors and on) and config.json",
)
