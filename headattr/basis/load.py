"""Dictionaries that were asked for -> bases and outputs, each loaded once.

Whatever does not fit the model is refused before any forward pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headattr.basis.attention import check_attention, load_attention_output
from headattr.basis.component import Place
from headattr.basis.crosscoder import (
    CrosscoderAt,
    check_crosscoder,
    crosscoder_sites,
    load_crosscoder,
)
from headattr.basis.dictionary import Release
from headattr.basis.formats import saelens
from headattr.basis.formats.registry import check_apart, open_release, open_releases
from headattr.basis.hub import local_copy
from headattr.basis.plain import PlainDictionary, plain_basis
from headattr.basis.sae import SaeBasis, check_fit, residual_basis
from headattr.basis.tokens import token_basis
from headattr.basis.transcoder_checks import check_transcoders, layer_of
from headattr.basis.transcoder_output import load_transcoder_output
from headattr.basis.transcoders import TranscodersAt, load_transcoders
from headattr.basis.unembed import unembed_output
from headattr.config import EVERY_LAYER, HubId, SourceSpec
from headattr.errors import DictionaryError, UsageError
from headattr.model.capture import check_sites
from headattr.model.load import LoadedModel
from headattr.model.sites import Site

Role = Literal["basis", "output"]


class Sources(NamedTuple):
    """Everything that decomposes or reads the stream in one run."""

    bases: dict[int, Any]
    """By the layer whose resid_pre each decomposes."""
    outputs: dict[Place, Any]
    """By where each reads; the unembedding comes after all."""


def declared_bos(sources: Iterable[Any]) -> dict[str, bool]:
    """With or without BOS, as each dictionary that says so was trained; named with its layer."""
    return {
        f"{source.about.name} of layer {source.about.layer}": source.about.prepend_bos
        for source in sources
        if source.about.prepend_bos is not None
    }


def check_files(specs: Sequence[SourceSpec], role: Role) -> list[SourceSpec]:
    """Look at every dictionary file before a model is loaded: whole, complete, of the right site.

    Gives the specs, one that names no layer as one for every layer that it has.
    """
    found: list[SourceSpec] = []
    for spec in specs:
        if isinstance(spec.target, HubId):
            spec = spec._replace(target=local_copy(spec.target))
        if spec.kind != "sae" or not isinstance(spec.target, Path):
            found.append(spec)
            continue
        if spec.layer != EVERY_LAYER:
            check_release(in_stream(open_release(spec.target), None), spec.layer, role, None)
            found.append(spec)
            continue
        releases = [in_stream(release, None) for release in open_releases(spec.target)]
        layers = [layers_of(release, role) for release in releases]
        check_apart(spec.target, releases, layers, role)
        for release, some in zip(releases, layers, strict=True):
            at = spec._replace(target=Path(release.path or spec.target), spread=True)
            found += [at._replace(layer=layer) for layer in some]
    return found


def layers_of(release: Release, role: Role) -> list[int]:
    """The layers for which a dictionary is a basis, or an output.

    Raises DictionaryError where it does not say.
    """
    where, first = release.path or release.name, release.dictionaries[0].reads[0]
    if release.kind == "crosscoder":
        check_crosscoder(release, None)
        return [site.layer for site in crosscoder_sites(release)]
    if first is None:
        raise DictionaryError(f"{where} does not name its site; say the layer: LAYER={where}")
    if release.kind == "transcoders":
        check_transcoders(release, None, None)
        return [layer_of(d) + (role == "basis") for d in release.dictionaries]
    check_release(release, first.layer, role, None)
    return [first.layer]


def check_release(release: Release, layer: int, role: Role, d_model: int | None) -> None:
    """Refuse a dictionary that is no basis (or output) of a layer."""
    where = release.path or release.name
    if release.kind == "sae":
        site = release.dictionaries[0].reads[0]
        if role == "output" and site is not None and site.kind in ("z", "attn_out"):
            check_attention(release.dictionaries[0], layer)
        else:
            check_fit(release.dictionaries[0], layer, d_model)
        return
    if release.kind == "crosscoder":
        check_crosscoder(release, d_model)
        layers = [site.layer for site in crosscoder_sites(release)]
    else:
        check_transcoders(release, d_model, None)
        layers = [layer_of(d) for d in release.dictionaries]
        if role == "basis":
            if layer < 1:
                raise DictionaryError(
                    f"{where} are transcoders of MLPs below a layer; there is none below layer 0: "
                    "use 0=tokens"
                )
            return
    if layer not in layers:
        what = "decomposes or reads the stream before" if release.kind == "crosscoder" else "has"
        raise DictionaryError(f"{where} {what} layers {layers}; it was given for layer {layer}")


def in_stream(release: Release, model: LoadedModel | None) -> Release:
    """A module's own output as what is added to the stream, where the model has no norm between.

    Raises DictionaryError where it has one; without a model it is taken to have none.
    """

    def added(site: Site | None) -> Site | None:
        if site is None or site.kind not in ("attn_own", "mlp_own"):
            return site
        found = Site("attn_out" if site.kind == "attn_own" else "mlp_out", site.layer)
        if model is not None:
            check_sites(model, [found])
            block, family = model.layers[site.layer], model.family
            own, last = family.attention(block), family.added(block)
            if site.kind == "mlp_own" and family.mlp is not None:
                own, last = family.mlp(block).module, family.mlp(block).added
            if own is not last:
                raise DictionaryError(
                    f"{release.path or release.name} is of the module's own output ({site}); in "
                    f"{model.name} a norm lies between that and the stream: expected a dictionary "
                    f"of what is added ({found})"
                )
        return found

    moved = [
        replace(d, reads=tuple(map(added, d.reads)), writes=tuple(map(added, d.writes)))
        for d in release.dictionaries
    ]
    return replace(release, dictionaries=tuple(moved))


def load_sources(
    model: LoadedModel,
    basis: list[SourceSpec],
    output: list[SourceSpec],
    *,
    read: str = "encoder",
    heads_apart: bool = False,
) -> Sources:
    """Load all; the same dictionary given as basis and as output, or for several layers, is one
    object. `read`: how outputs will be read. `heads_apart`: for transcoders as basis."""
    loader = _Loader(model, read, heads_apart)
    bases = {}
    loader.depths(basis)
    for spec in basis:
        if not (spec.spread and spec.layer >= len(model.layers)):
            bases[spec.layer] = loader.basis(spec)
    _check_spread(model, basis, bases)
    outputs: dict[Place, Any] = {}
    for spec in output:
        twin = next((bases[s.layer] for s in basis if _same(s, spec) and s.layer in bases), None)
        found = twin if isinstance(twin, SaeBasis) else loader.output(spec)
        place = found.place
        if place in outputs:
            raise UsageError(
                f"--output: {found.about.name} and {outputs[place].about.name} read at the same "
                "place; expected one"
            )
        outputs[place] = found
    return Sources(bases, outputs)


def _check_spread(model: LoadedModel, specs: Iterable[SourceSpec], bases: dict[int, Any]) -> None:
    """Refuse a dictionary that was given for every layer it has, none of which the model has."""
    layers: dict[Any, list[int]] = {}
    for spec in specs:
        if spec.spread:
            layers.setdefault(spec.target, []).append(spec.layer)
    for target, found in layers.items():
        if not any(layer in bases for layer in found):
            raise DictionaryError(
                f"{target} decomposes layers {found}; the model's layers are 0 to "
                f"{len(model.layers) - 1}: it belongs to another model"
            )


class _Loader:
    """Loads what is asked for, a dictionary that several layers share once."""

    def __init__(self, model: LoadedModel, read: str, heads_apart: bool) -> None:
        self.model, self.read, self.heads_apart = model, read, heads_apart
        self.fit: dict[str, Any] = {
            "d_model": model.d_model,
            "dtype": model.dtype,
            "device": model.device,
        }
        self._shared: dict[Any, Any] = {}
        self._deepest: dict[Any, int] = {}

    def depths(self, specs: Iterable[SourceSpec]) -> None:
        """How deep each set of transcoders is asked for."""
        for spec in specs:
            if spec.layer < len(self.model.layers):
                key = _key(spec)
                self._deepest[key] = max(spec.layer, self._deepest.get(key, 0))

    def basis(self, spec: SourceSpec) -> Any:
        """A basis of one layer."""
        self._check_layer(spec, "basis", len(self.model.layers) - 1)
        if spec.kind == "tokens":
            return token_basis(self.model)
        if isinstance(spec.target, PlainDictionary):
            return plain_basis(spec.target, spec.layer, **self.fit)
        release = in_stream(_release(spec, "basis"), self.model)
        check_release(release, spec.layer, "basis", self.model.d_model)
        if release.kind == "crosscoder":
            return self._crosscoder(spec, release)
        if release.kind == "transcoders":
            key = _key(spec)
            if key not in self._shared:
                self._shared[key] = load_transcoders(
                    release, self.model, self._deepest[key], heads_apart=self.heads_apart
                )
            return TranscodersAt(self._shared[key], spec.layer)
        return self._fitting(residual_basis(release, spec.layer, **self.fit))

    def output(self, spec: SourceSpec) -> Any:
        """An output at one layer."""
        self._check_layer(spec, "output", len(self.model.layers))
        if spec.kind == "unembed":
            return unembed_output(self.model)
        if isinstance(spec.target, PlainDictionary):
            return plain_basis(spec.target, spec.layer, **self.fit)
        release = in_stream(_release(spec, "output"), self.model)
        check_release(release, spec.layer, "output", self.model.d_model)
        if release.kind == "crosscoder":
            return self._crosscoder(spec, release).as_output(self.read)
        if release.kind == "transcoders":
            return load_transcoder_output(release, spec.layer, self.model)
        site = release.dictionaries[0].reads[0]
        if site is not None and site.kind in ("z", "attn_out"):
            return load_attention_output(release, spec.layer, self.model)
        return self._fitting(residual_basis(release, spec.layer, **self.fit))

    def _crosscoder(self, spec: SourceSpec, release: Release) -> CrosscoderAt:
        key = _key(spec)
        if key not in self._shared:
            self._shared[key] = load_crosscoder(release, **self.fit)
        return CrosscoderAt(self._shared[key], Site("resid_pre", spec.layer))

    def _check_layer(self, spec: SourceSpec, role: str, highest: int) -> None:
        if spec.layer > highest:
            raise DictionaryError(
                f"--{role} {spec.layer}=...: the model's layers are 0 to {highest}"
            )

    def _fitting(self, basis: SaeBasis) -> SaeBasis:
        """Refuse what only the model shows: a centring that its norm does not have, a normed
        site."""
        model, name, dictionary = self.model, basis.about.name, basis.coder.dictionary
        site = dictionary.hook_name or ""
        norm = model.family.unembedding(model.hf).norm.kind
        if dictionary.frame.centred and norm != "layer":
            raise DictionaryError(
                f"{name} says center_writing_weights, but {model.name} has RMSNorm, whose stream "
                "TransformerLens never centres; expected a dictionary of a LayerNorm model, or "
                "center_writing_weights = false in its configuration"
            )
        if basis.layer == len(model.layers) and site.startswith("hidden_states"):
            raise DictionaryError(
                f"{name}: {site} of a model of {basis.layer} layers lies behind the final norm; "
                "expected the last block's output, "
                f"blocks.{basis.layer - 1}.hook_resid_post"
            )
        return basis


def _release(spec: SourceSpec, role: Role) -> Release:
    """The dictionaries that a spec means, as files or in memory."""
    target = spec.target
    if isinstance(target, Path):
        return open_release(target)
    if isinstance(target, Release):
        return target
    if callable(getattr(getattr(target, "cfg", None), "architecture", None)):
        return saelens.release_of(target)
    raise UsageError(
        f"--{role} at layer {spec.layer}: found a {type(target).__name__}; expected a "
        "folder, a sae_lens.SAE, "
        "a PlainDictionary or 'tokens'"
    )


def _key(spec: SourceSpec) -> Any:
    """Of a dictionary, whatever the layer."""
    return spec.target.resolve() if isinstance(spec.target, Path) else id(spec.target)


def _same(one: SourceSpec, other: SourceSpec) -> bool:
    return one.layer == other.layer and (
        one.target is other.target or (one[:2] == other[:2] and one.target == other.target)
    )
