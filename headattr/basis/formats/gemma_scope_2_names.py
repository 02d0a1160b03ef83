"""What config.json and the published names of its folders say of a Gemma Scope 2 dictionary."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from headattr.basis.formats.files import json_object
from headattr.basis.formats.jumprelu import names_of
from headattr.basis.site import site_of
from headattr.errors import DictionaryError
from headattr.model.sites import Site

CONFIG = "config.json"
KINDS = ("sae", "transcoder", "clt", "crosscoder")
_PRE, _POST = "pre_feedforward_layernorm", "post_feedforward_layernorm"
_IN, _OUT = f"model.layers.{{}}.{_PRE}.output", f"model.layers.{{}}.{_POST}.output"
_FOLDERS = {
    "resid_post": ("sae", "model.layers.{}.output", "model.layers.{}.output"),
    "attn_out": (
        "sae",
        "model.layers.{}.self_attn.o_proj.input",
        "model.layers.{}.self_attn.o_proj.input",
    ),
    "mlp_out": ("sae", _OUT, _OUT),
    "transcoder": ("transcoder", _IN, _OUT),
    "clt": ("clt", _IN, _OUT),
    "crosscoder": ("crosscoder", "model.layers.{}.output", "model.layers.{}.output"),
}
_LAYERS = re.compile(r"^layer_(\d+(?:_\d+)*)_width_")
_BRACES = re.compile(r"\{([^{}]*)\}")
_HOOKS = ("hf_hook_point_in", "hf_hook_point_out")


class Said(NamedTuple):
    """What is said of a dictionary; None: nothing."""

    kind: str | None
    reads: str | None
    """A hook's name, with {9,17} or {all} for the layers of several."""
    writes: str | None
    affine: bool | None
    assumed: tuple[str, ...] = ()


def said_of(folder: Path) -> Said:
    """What the configuration of a folder says, and its names where the configuration does not.

    Raises DictionaryError for what is not known, and where the two disagree.
    """
    written, named = _configured(folder / CONFIG), _named(folder)
    for what in ("kind", "reads", "writes"):
        one, other = getattr(written, what), getattr(named, what)
        if one is not None and other is not None and not _agree(one, other):
            raise DictionaryError(
                f"{folder}: {CONFIG} says {one!r}, the names of its folders {other!r}; expected "
                "the same (rename the folder, or give the configuration that belongs to it)"
            )
    found = named if written.reads is None else written
    kind = written.kind if written.kind is not None else named.kind
    affine = written.affine if written.affine is not None else named.affine
    writes, assumed = found.writes, []
    if written.reads is None and named.reads is not None:
        assumed.append(f"site = {named.reads} (from the names of its folders, not in {CONFIG})")
    elif writes is None and found.reads is not None:
        itself = kind in ("sae", "crosscoder")
        writes = found.reads if itself else found.reads.replace(_PRE, _POST)
        assumed.append(f"writes {writes} ({_HOOKS[1]} is not in {CONFIG})")
    return Said(kind, found.reads, writes, affine, tuple(assumed))


def sites_of(folder: Path, said: Said, count: int) -> tuple[tuple[Site, ...], tuple[Site, ...]]:
    """The sites that the `count` files of a folder read, and those that they write.

    Raises DictionaryError where they are not said, not as many as files, or not in order.
    """
    if said.kind not in ("clt", "crosscoder"):
        raise DictionaryError(
            f"{folder} has a file a layer and is {said.kind or 'of a kind that nothing says'}; "
            f"expected 'type': 'clt' or 'crosscoder' in {CONFIG}, or a folder clt/... or "
            "crosscoder/..."
        )
    if said.reads is None or said.writes is None:
        raise DictionaryError(
            f"{folder} names no layers; expected {' and '.join(_HOOKS)} in {CONFIG}, as "
            "'model.layers.{9,17,22,29}.output', or a folder crosscoder/layer_9_17_22_29_width_..."
        )
    reads, writes = (
        tuple(site_of(hook) for hook in _spread(folder, pattern, count))
        for pattern in (said.reads, said.writes)
    )
    layers = [site.layer for site in reads]
    if said.kind == "crosscoder" and reads != writes:
        raise DictionaryError(
            f"{folder} reads {said.reads!r} and writes {said.writes!r}; expected a crosscoder to "
            "write the sites that it reads"
        )
    if layers != sorted(set(layers)) or layers != [site.layer for site in writes]:
        raise DictionaryError(
            f"{folder} reads {said.reads!r} and writes {said.writes!r}; expected the same layers, "
            "ascending"
        )
    return reads, writes


def _configured(path: Path) -> Said:
    """What config.json says; nothing where there is none."""
    raw = json_object(path) if path.is_file() else {}
    architecture, kind = raw.get("architecture", "jump_relu"), raw.get("type")
    affine, hooks = raw.get("affine_connection"), [raw.get(key) for key in _HOOKS]
    if architecture != "jump_relu":
        raise DictionaryError(f"{path}: architecture is {architecture!r}; expected jump_relu")
    if kind not in (None, *KINDS):
        raise DictionaryError(f"{path}: type is {kind!r}; expected one of {', '.join(KINDS)}")
    if not isinstance(affine, bool | None):
        raise DictionaryError(f"{path}: affine_connection is {affine!r}; expected true or false")
    for key, hook in zip(_HOOKS, hooks, strict=True):
        if not isinstance(hook, str | None):
            raise DictionaryError(f"{path}: {key} is {hook!r}; expected the name of a site")
    return Said(kind, hooks[0], hooks[1], affine)


def _named(folder: Path) -> Said:
    """What the last two names of a path say, if they are as published."""
    *_, above, own = ("", "", *names_of(folder))
    kind, reads, writes = _FOLDERS.get(above.removesuffix("_all"), (None, None, None))
    match = _LAYERS.match(own)
    if reads is None or writes is None or not (match or (kind == "clt" and "width_" in own)):
        return Said(None, None, None, None)
    layers = match.group(1).replace("_", ",") if match else "all"
    if ("," in layers) != (kind == "crosscoder") or (layers == "all") != (kind == "clt"):
        return Said(None, None, None, None)
    shown = layers if layers.isdigit() else f"{{{layers}}}"
    affine = True if own.endswith("_affine") else None
    return Said(kind, reads.format(shown), writes.format(shown), affine)


def _agree(one: Any, other: Any) -> bool:
    """Are two hooks' names, or two kinds, the same?"""
    if one in KINDS or other in KINDS or "{" in one or "{" in other:
        return one.replace(" ", "") == other.replace(" ", "")
    return site_of(one) == site_of(other)


def _spread(folder: Path, pattern: str, count: int) -> list[str]:
    """The hooks of a pattern with the layers in braces, one a file."""
    match = _BRACES.search(pattern)
    layers = match.group(1).replace(" ", "") if match else ""
    numbers = [str(i) for i in range(count)] if layers == "all" else layers.split(",")
    if match is None or not all(number.isdigit() for number in numbers):
        raise DictionaryError(
            f"{folder}: its site is {pattern!r}; expected layers in braces, as "
            "'model.layers.{9,17,22,29}.output' or 'model.layers.{all}...'"
        )
    if len(numbers) != count:
        raise DictionaryError(
            f"{folder}: {pattern!r} names {len(numbers)} layers, the folder has {count} files "
            "params_layer_N.safetensors; expected one a layer"
        )
    return [f"{pattern[: match.start()]}{n}{pattern[match.end() :]}" for n in numbers]
