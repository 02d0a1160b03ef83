"""A release as a whole: all that it encodes and writes, and every layer for which it is a basis."""

from typing import Any, NamedTuple

from headattr.basis.crosscoder import Crosscoder, CrosscoderAt, load_crosscoder
from headattr.basis.dictionary import Release
from headattr.basis.load import check_release, in_stream, layers_of, load_sources
from headattr.basis.rows import Matrix, ThroughRows
from headattr.basis.sae import SaeBasis
from headattr.basis.transcoders import Transcoders, TranscodersAt, load_transcoders
from headattr.config import SourceSpec
from headattr.errors import DictionaryError
from headattr.model.load import LoadedModel


class Whole(NamedTuple):
    """A release at work."""

    source: Any
    """What says which features are active, and reconstructs what it writes."""
    views: dict[int, Any]
    """By the layer for which it is a basis, ascending; none where it is an output alone."""


def check_whole(release: Release, model: LoadedModel, layer: int | None = None) -> None:
    """Refuse, with DictionaryError, a release whose files say that it is of another model; `layer`
    as in `load_whole`."""
    release = in_stream(release, model)
    check_release(release, _layer(release, layer), "output", model.d_model)


def load_whole(release: Release, model: LoadedModel, layer: int | None = None) -> Whole:
    """All of a release; `layer`: of a dictionary that does not name its site.

    Raises DictionaryError for what does not fit the model.
    """
    n_layers, release = len(model.layers), in_stream(release, model)
    if release.kind == "crosscoder":
        fit: dict[str, Any] = {
            "d_model": model.d_model,
            "dtype": model.dtype,
            "device": model.device,
        }
        crosscoder = load_crosscoder(release, **fit)
        sites = [site for site in crosscoder.residual if site.layer < n_layers]
        return Whole(crosscoder, {site.layer: CrosscoderAt(crosscoder, site) for site in sites})
    if release.kind == "transcoders":
        layers = [found for found in layers_of(release, "basis") if found < n_layers]
        stack = load_transcoders(release, model, n_layers)
        return Whole(stack, {found: TranscodersAt(stack, found) for found in layers})
    found = _layer(release, layer)
    spec = SourceSpec("sae", found if layer is None else layer, release)
    source = next(iter(load_sources(model, [], [spec]).outputs.values())).source
    residual = isinstance(source, SaeBasis) and source.site.kind == "resid_pre"
    here = residual and source.layer < n_layers
    return Whole(source, {source.layer: source} if here else {})


def _layer(release: Release, layer: int | None) -> int:
    """That of its first site."""
    site = release.dictionaries[0].reads[0]
    found = layer if site is None else site.layer
    if found is None:
        where = release.path or release.name
        raise DictionaryError(f"{where} does not name its site; say the layer: LAYER={where}")
    return found


def written_rows(whole: Whole, model: LoadedModel) -> Matrix:
    """What a feature of activation 1 adds to the stream, in the dictionary's own units: of a
    crosscoder at its last site, of transcoders over all MLPs that they write, of heads' outputs
    side by side through W_O."""
    source = whole.source
    if isinstance(source, Crosscoder):
        return CrosscoderAt(source, source.residual[-1]).directions
    if isinstance(source, Transcoders):
        return TranscodersAt(source, len(model.layers)).directions
    if isinstance(source, SaeBasis) and source.site.kind == "z":
        written = model.family.head_weights(model.hf, source.layer).writes.written.flatten(0, 1)
        return ThroughRows(source.coder.directions(), written)
    return source.coder.directions()
