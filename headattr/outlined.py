"""The dictionaries of a run from their configurations alone, as far as an estimate asks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headattr.basis.component import Place, SourceInfo
from headattr.basis.dictionary import Dictionary, Release
from headattr.basis.formats.registry import open_release
from headattr.basis.load import Role, Sources, check_release, in_stream
from headattr.basis.transcoder_checks import layer_of
from headattr.basis.unembed import N_PREDICTED
from headattr.config import SourceSpec
from headattr.errors import DictionaryError
from headattr.model.load import LoadedModel
from headattr.model.sites import Site
from headattr.plan import (
    GUESSED_SLOTS,
)


class OutlinedSource(NamedTuple):
    """What a plan asks of a dictionary, and how many features it has at once."""

    layer: int
    about: SourceInfo
    l0: int
    width: int
    sites: tuple[Site, ...]
    encoder: bool = True
    """Can it be read by its encoder?"""
    reads_nothing: bool = False


class OutlinedView(NamedTuple):
    """A source at one layer, as basis or output."""

    source: OutlinedSource
    place: Place

    def check_read(self, read: str) -> None:
        """As the basis itself: no encoder reads without an encoder."""
        if self.source.reads_nothing:
            raise DictionaryError("transcoders of the MLPs below a layer do not read it")
        if read == "encoder" and not self.source.encoder:
            raise DictionaryError(
                f"{self.source.about.name} has no linear encoder to read with; use --read decoder"
            )

    def reads(self) -> None:
        """A basis may be an output."""


def outlined_sources(
    model: LoadedModel,
    basis: Sequence[SourceSpec],
    output: Sequence[SourceSpec],
    assumed: list[str],
) -> Sources:
    """As the run's own, from configurations alone."""
    shared: dict[Any, OutlinedSource] = {}
    deepest = max((s.layer for s in basis if s.layer < len(model.layers)), default=0)

    def of(spec: SourceSpec, role: Role) -> OutlinedView:
        key = (role if role == "output" else "", *spec[:3])
        release = None
        if isinstance(spec.target, Path):
            release = in_stream(open_release(spec.target), model)
        if release is not None and release.kind != "sae" and role == "basis":
            key = ("", str(spec.target))
        if key not in shared:
            shared[key] = _source(model, spec, release, role, deepest, assumed)
        twin = shared.get(("", *spec[:3])) if role == "output" else None
        found = twin if twin is not None and twin.about.kind == "sae" else shared[key]
        site = found.sites[0]
        stage = {"z": 1, "attn_out": 1}.get(site.kind, 0 if site.kind == "resid_pre" else 2)
        if stage == 2 and model.family.parallel(model.config):
            stage = 0
        layer = spec.layer if spec.kind != "unembed" else len(model.layers) + 1
        return OutlinedView(found, Place(layer, stage if role == "output" else 0))

    bases = {s.layer: of(s, "basis") for s in basis if s.layer < len(model.layers)}
    outputs = [of(spec, "output") for spec in output]
    return Sources(bases, {view.place: view for view in outputs})


def _source(
    model: LoadedModel,
    spec: SourceSpec,
    release: Release | None,
    role: Role,
    deepest: int,
    assumed: list[str],
) -> OutlinedSource:
    """From a configuration alone; what it does not say is assumed aloud."""

    def about(kind: str, layer: int, n: int, name: str, bos: bool | None = None) -> SourceInfo:
        return SourceInfo(kind, layer, name, None, n, "", "", (), bos, None)

    vocabulary, stream = model.vocabulary, (Site("resid_pre", spec.layer),)
    if spec.kind == "tokens":
        return OutlinedSource(0, about("tokens", 0, vocabulary, "tokens"), 1, vocabulary, stream)
    if spec.kind == "unembed" or release is None:
        layer = len(model.layers)
        found = about("unembed", layer, vocabulary, "unembed")
        return OutlinedSource(
            layer, found, N_PREDICTED + 1, vocabulary, (Site("resid_pre", layer),)
        )
    check_release(release, spec.layer, role, model.d_model)
    used, kind, sites = release.dictionaries, release.kind, stream
    if kind == "transcoders" and role == "basis":
        used = tuple(d for d in used if layer_of(d) < deepest)
        sites = (*(Site("mlp_in", layer_of(d)) for d in used), Site("resid_pre", deepest))
    elif kind == "transcoders":
        used, sites = tuple(d for d in used if layer_of(d) == spec.layer), ()
        sites = (Site("mlp_in", spec.layer), Site("resid_pre", spec.layer))
    elif kind == "crosscoder":
        sites = tuple(site for d in used for site in d.reads if site is not None)
    elif used[0].reads[0] is not None and used[0].reads[0].kind != "resid_pre":
        sites = (used[0].reads[0], *stream)
    l0 = sum(_l0(d, assumed) for d in used)
    found = about(kind, spec.layer, release.features, release.name, used[0].prepend_bos)
    linear = all(d.activation.kind != "matching_pursuit" for d in used)
    own = kind == "transcoders" and role == "basis"
    return OutlinedSource(spec.layer, found, l0, release.features, sites, linear, own)


def _l0(dictionary: Dictionary, assumed: list[str]) -> int:
    """Active features a position."""
    found = dictionary.activation.k
    if found is None:
        found = min(GUESSED_SLOTS, dictionary.features)
        assumed.append(
            f"{dictionary.name}: {found} active features a position (its configuration does not "
            "say)"
        )
    return found
