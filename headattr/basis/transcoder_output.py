"""A transcoder as output: its encoder reads the stream behind a layer's attention."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.about import about_coder, labels_of_release
from headattr.basis.active import ACTIVATIONS, ActiveFeatures
from headattr.basis.coder import Coder
from headattr.basis.component import (
    Group,
    Place,
    Reads,
    SourceInfo,
)
from headattr.basis.dictionary import Release
from headattr.basis.rows import Matrix, mapped
from headattr.basis.sae import check_linear
from headattr.basis.transcoder_checks import check_transcoders, layer_of, read_site
from headattr.errors import DictionaryError
from headattr.model.capture import PromptCapture, check_sites
from headattr.model.head import Norm
from headattr.model.load import LoadedModel
from headattr.model.sites import Site


@dataclass(frozen=True)
class TranscoderOutput:
    """A transcoder whose encoder reads the stream behind a layer's attention, through its norm."""

    coder: Coder
    norm: Norm | None
    """Between the stream and what it reads; None where it reads the stream as it is."""
    stream: Site
    """The stream that its norm reads."""
    about: SourceInfo

    @property
    def layer(self) -> int:
        """Of its MLP."""
        return self.stream.layer

    @property
    def place(self) -> Place:
        """Behind attention; before it, where attention and MLP read the same stream."""
        return Place(self.layer, 2 if self.stream.kind == "resid_mid" else 0)

    @property
    def source(self) -> "TranscoderOutput":
        """Itself."""
        return self

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it needs of a prompt."""
        given = read_site(self.coder)
        return tuple(dict.fromkeys([given, self.stream, Site("resid_pre", self.layer)]))

    @property
    def writes(self) -> tuple[Site, ...]:
        """Nothing: that is the whole set's."""
        return ()

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """The dictionary's own activations."""
        return self.coder.encode([prompt.at(read_site(self.coder))], numbers)

    def reads(self, prompt: PromptCapture, active: ActiveFeatures, read: str) -> Reads:
        """Encoder rows through the norm, its scale frozen."""
        self.check_read(read)
        x = prompt.at(self.stream)
        scale = self.coder.seen(prompt.at(read_site(self.coder))).read_scale
        scale = scale if self.norm is None else scale / self.norm.sigma(x)
        return Reads(active, self.read_rows(read), scale[active.positions], scale, read)

    def read_rows(self, read: str) -> Matrix:
        """Encoder rows with the norm's gain and centring folded in."""
        return self._read_rows

    @cached_property
    def _read_rows(self) -> Matrix:
        rows, norm = self.coder.read_rows(), self.norm
        if norm is None:
            return rows
        return mapped(rows, lambda some: norm.fold(some.T).T)

    def check_read(self, read: str) -> None:
        """Raises DictionaryError for decoder reads: it does not write what it reads."""
        if read == "decoder":
            raise DictionaryError(
                f"{self.about.name} is a transcoder: its decoder writes the MLP's output, not the "
                "stream that it reads; use --read encoder"
            )
        check_linear(self.coder.dictionary, self.about.name)

    def reconstruct(
        self, prompt: PromptCapture, active: ActiveFeatures
    ) -> dict[Site, Float[Tensor, "pos d_model"]]:
        """Nothing: what a set makes of the MLPs is asked of the set."""
        return {}


def load_transcoder_output(release: Release, layer: int, model: LoadedModel) -> TranscoderOutput:
    """The transcoder of one layer's MLP, as output."""
    check_transcoders(release, model.d_model, len(model.layers))
    found = [d for d in release.dictionaries if layer_of(d) == layer]
    where = release.path or release.name
    if not found:
        layers = [layer_of(d) for d in release.dictionaries]
        raise DictionaryError(f"{where} has no transcoder of layer {layer}; it has {layers}")
    if found[0].reads[0] is not None:
        check_sites(model, [found[0].reads[0]])
    coder = Coder(found[0], model.dtype, model.device)
    read = read_site(coder)
    assert model.family.mlp is not None
    norm = None if read.kind == "resid_mid" else model.family.mlp(model.layers[layer]).norm
    if norm is not None and read.kind == "mlp_normed":
        norm = Norm(norm.kind, torch.ones_like(norm.gain), None, norm.eps)
    kind = "resid_pre" if model.family.parallel(model.config) else "resid_mid"
    about = about_coder(coder, "transcoder", layer)
    sizes = [(d, d.features) for d in release.dictionaries]
    about = about._replace(
        groups=tuple(Group(layer_of(d), str(d.reads[0]), size) for d, size in sizes),
        first=sum(size for d, size in sizes if layer_of(d) < layer),
        labels=labels_of_release(release),
    )
    return TranscoderOutput(coder, norm, Site(kind, layer), about._replace(name=release.name))
