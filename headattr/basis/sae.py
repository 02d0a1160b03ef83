"""A dictionary of one residual site: x_i = scale_i (a_i W_dec + b_dec) + mean_i + e_i.

With the dictionary's own activations. scale_i and mean_i undo what it does to its input: a fixed
factor (expected_average_only_in), the norm of x_i (constant_norm_rescale), its mean and deviation
(layer_norm), its mean (a centred stream).
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.about import about_coder
from headattr.basis.active import ACTIVATIONS, ActiveFeatures
from headattr.basis.coder import Coder
from headattr.basis.component import Components, Place, Reads, SourceInfo, decompose
from headattr.basis.dictionary import Dictionary, Release
from headattr.basis.formats import saelens
from headattr.basis.rows import Matrix
from headattr.errors import DictionaryError
from headattr.model.capture import PromptCapture
from headattr.model.sites import Site


@dataclass(frozen=True)
class SaeBasis:
    """A dictionary of one site: of the residual stream as basis or output, of what one layer's
    attention gives as output of its heads alone."""

    site: Site
    coder: Coder
    about: SourceInfo

    @property
    def layer(self) -> int:
        """The layer before which it decomposes and reads, or whose attention it reads."""
        return self.site.layer

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it needs of a prompt; the stream's norms say which positions count."""
        return tuple(dict.fromkeys([self.site, Site("resid_pre", self.layer)]))

    @property
    def writes(self) -> tuple[Site, ...]:
        """What it reconstructs."""
        return (self.site,)

    @property
    def place(self) -> Place:
        """Where it reads."""
        return Place(self.layer, 0 if self.site.kind == "resid_pre" else 1)

    @property
    def source(self) -> "SaeBasis":
        """Itself."""
        return self

    @property
    def directions(self) -> Matrix:
        """W_dec, unit rows where the activations already carry the decoder norm."""
        return self.coder.directions()

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """The dictionary's own activations."""
        return self.coder.encode([prompt.at(self.site)], numbers)

    def components(self, prompt: PromptCapture, active: ActiveFeatures) -> Components:
        """Features, bias and error of resid_pre; they sum to it."""
        x = prompt.at(self.site)
        scale = self.coder.seen(x).scale
        return decompose(x, active, scale, self.directions, self.coder.bias(0, x))

    def reads(self, prompt: PromptCapture, active: ActiveFeatures, read: str) -> Reads:
        """Directions by which each active feature reads its site: encoder rows, or a_t d_t; of the
        heads' outputs side by side where it is a hook_z SAE."""
        self.check_read(read)
        x = prompt.at(self.site)
        seen, block = self.coder.seen(x), x if self.site.kind == "z" else None
        if read == "decoder":
            scale = active.acts * seen.scale[active.positions]
            return Reads(active, self.read_rows(read), scale, None, read, block)
        scale = seen.read_scale
        return Reads(active, self.read_rows(read), scale[active.positions], scale, read, block)

    def read_rows(self, read: str) -> Matrix:
        """Encoder rows, centred where the dictionary sees a centred stream, or directions."""
        return self.directions if read == "decoder" else self._read_rows

    @cached_property
    def _read_rows(self) -> Matrix:
        return self.coder.read_rows()

    def check_read(self, read: str) -> None:
        """Raises DictionaryError where there is no linear encoder to read with."""
        if read == "encoder":
            check_linear(self.coder.dictionary, self.about.name)

    def reconstruct(
        self, prompt: PromptCapture, active: ActiveFeatures
    ) -> dict[Site, Float[Tensor, "pos d_model"]]:
        """What it makes of its site."""
        parts = self.components(prompt, active)
        made = parts.sparse_sum + parts.named["bias"]
        return {self.site: made.to(prompt.at(self.site))}


def check_linear(dictionary: Dictionary, name: str) -> None:
    """Refuse an encoder read of what has no linear encoder."""
    if dictionary.activation.kind == "matching_pursuit":
        raise DictionaryError(
            f"{name}: a matching_pursuit dictionary has no linear encoder to read "
            "with; use --read decoder"
        )


def load_sae(
    folder: Path, layer: int, *, d_model: int, dtype: torch.dtype, device: torch.device
) -> SaeBasis:
    """An SAE from a SAELens folder; refused if its site is not `layer` or its width not
    `d_model`."""
    fit: dict[str, Any] = {"d_model": d_model, "dtype": dtype, "device": device}
    return residual_basis(saelens.read_release(folder), layer, **fit)


def from_object(
    sae: Any, layer: int, *, d_model: int, dtype: torch.dtype, device: torch.device
) -> SaeBasis:
    """A copy of a `sae_lens.SAE` in memory."""
    fit: dict[str, Any] = {"d_model": d_model, "dtype": dtype, "device": device}
    return residual_basis(saelens.release_of(sae), layer, **fit)


def residual_basis(
    release: Release, layer: int, *, d_model: int, dtype: torch.dtype, device: torch.device
) -> SaeBasis:
    """The dictionary of a residual site at `layer`."""
    dictionary = release.dictionaries[0]
    check_fit(dictionary, layer, d_model)
    coder = Coder(dictionary, dtype, device)
    return SaeBasis(Site("resid_pre", layer), coder, about_coder(coder, "sae", layer))


def check_fit(dictionary: Dictionary, layer: int, d_model: int | None) -> None:
    """Refuse another site or another width, naming both."""
    where, site = dictionary.path or dictionary.name, dictionary.reads[0]
    if site is not None and site.kind != "resid_pre":
        raise DictionaryError(
            f"{where}: the dictionary's site is {dictionary.hook_name or site!r}; expected the "
            "residual stream between blocks: blocks.N.hook_resid_pre, blocks.N.hook_resid_post, "
            "layers.N (a block's output) or hidden_states[N]"
        )
    if site is not None and site.layer != layer:
        raise DictionaryError(
            f"{where} was trained on {dictionary.hook_name!r}, which is resid_pre of layer "
            f"{site.layer}; it was given for layer {layer}: use {site.layer}={where}"
        )
    check_width(dictionary, dictionary.d_in, d_model)


def check_width(dictionary: Dictionary, found: int, d_model: int | None) -> None:
    """Refuse a dictionary of another model's width."""
    if d_model is not None and found != d_model:
        raise DictionaryError(
            f"{dictionary.path or dictionary.name} decomposes vectors of width {found}; the "
            f"model's residual stream has {d_model}: it belongs to another model"
        )
