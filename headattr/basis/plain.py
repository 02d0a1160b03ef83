"""Plain directions and activations: a dictionary of any origin."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.active import ACTIVATIONS, ActiveFeatures, active_by_parts
from headattr.basis.component import Components, Place, Reads, SourceInfo, check_numbers, decompose
from headattr.errors import DictionaryError
from headattr.model.capture import PromptCapture
from headattr.model.load import hash_tensors
from headattr.model.sites import Site


@dataclass(frozen=True)
class PlainDictionary:
    """What a user hands in: directions, a bias, and the activations of every prompt of the run."""

    directions: Tensor
    """[features, d_model]"""
    activations: Sequence[Tensor]
    """One tensor [pos, features] a prompt, at the prompt's id: its place in the list of prompts, or
    its line in the file."""
    bias: Tensor | None = None
    """[d_model]; None is zero."""


@dataclass(frozen=True)
class PlainBasis:
    """A PlainDictionary at one layer: x_i = a_i D + b + e_i."""

    layer: int
    directions: Float[Tensor, "features d_model"]
    bias: Float[Tensor, "d_model"]
    activations: Sequence[Tensor]
    about: SourceInfo

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it needs of a prompt."""
        return (Site("resid_pre", self.layer),)

    @property
    def place(self) -> Place:
        """Where it reads."""
        return Place(self.layer, 0)

    @property
    def source(self) -> "PlainBasis":
        """Itself."""
        return self

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """The activations that were handed in for this prompt."""
        given = self._activations(prompt.resid[self.layer], prompt.id)
        return active_by_parts(lambda some: given[some], len(given), given.shape[1], numbers)

    def components(self, prompt: PromptCapture, active: ActiveFeatures) -> Components:
        """Features, bias and error of resid_pre; they sum to it."""
        x = prompt.resid[self.layer]
        ones = torch.ones_like(x[:, 0])
        return decompose(x, active, ones, self.directions, self.bias.expand_as(x))

    def reads(self, prompt: PromptCapture, active: ActiveFeatures, read: str) -> Reads:
        """Decoder reads a_t d_t; there is no encoder."""
        self.check_read(read)
        return Reads(active, self.directions, active.acts, None, read)

    def read_rows(self, read: str) -> Float[Tensor, "features d_model"]:
        """The directions."""
        return self.directions

    def check_read(self, read: str) -> None:
        """Raises DictionaryError for encoder reads: there is no encoder."""
        if read != "decoder":
            raise DictionaryError(
                f"{self.about.name} has no encoder to read with; use --read decoder"
            )

    def _activations(self, x: Tensor, index: int) -> Tensor:
        if index >= len(self.activations):
            raise DictionaryError(f"{self.about.name} has no activations for prompt {index}")
        given = self.activations[index].to(x)
        if given.shape != (len(x), len(self.directions)):
            raise DictionaryError(
                f"{self.about.name}: activations of prompt {index} are {tuple(given.shape)}; "
                "expected "
                f"{(len(x), len(self.directions))} (positions, features)"
            )
        if not given.isfinite().all():
            raise DictionaryError(
                f"{self.about.name}: activations of prompt {index} are not finite"
            )
        return given


def plain_basis(
    plain: PlainDictionary, layer: int, *, d_model: int, dtype: torch.dtype, device: torch.device
) -> PlainBasis:
    """A basis at `layer`, in the model's type and on its device."""
    given = plain.activations
    if not isinstance(given, list | tuple) or not all(isinstance(a, Tensor) for a in given):
        found = type(given).__name__
        if isinstance(given, list | tuple):
            odd = next(item for item in given if not isinstance(item, Tensor))
            found = f"{found} with a {type(odd).__name__}"
        raise DictionaryError(
            f"plain activations are a {found}; expected a list with one torch.Tensor "
            "[positions, features] a prompt"
        )
    if plain.directions.ndim != 2 or plain.directions.shape[1] != d_model:
        raise DictionaryError(
            f"plain directions are {tuple(plain.directions.shape)}; expected (features, {d_model})"
        )
    if plain.bias is not None and plain.bias.shape != (d_model,):
        raise DictionaryError(f"the plain bias is {tuple(plain.bias.shape)}; expected ({d_model},)")
    directions = plain.directions.to(device, dtype)
    bias = (
        torch.zeros(d_model, dtype=dtype, device=device)
        if plain.bias is None
        else plain.bias.to(directions)
    )
    check_numbers({"directions": directions, "bias": bias}, "plain directions")
    named = {"directions": plain.directions, "bias": bias}
    named |= {f"activations.{i:06d}": a for i, a in enumerate(plain.activations)}
    about = SourceInfo(
        "plain",
        layer,
        f"plain directions at layer {layer}",
        None,
        len(directions),
        "given",
        hash_tensors(named.items()),
        (),
        None,
        None,
    )
    return PlainBasis(layer, directions, bias, plain.activations, about)
