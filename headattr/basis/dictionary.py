"""What a dictionary is, whatever file it came from: which sites it reads, how it makes activations
of them, and what each feature writes where.

    a_i = act(sum over sites r read by it  u_i,r @ W_enc[r] + b_enc)        u: the site's vector in
    y_i,w = scale_i (a_i @ W_dec[w] + b_dec[w]) + mean_i + x_i @ W_skip     the dictionary's Frame

A `Dictionary` is a description, from configurations and headers alone; `read` fetches its tensors.
Some of them that belong together are a `Release`: the transcoders of all layers, or the groups of a
crosscoder by the site that they read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxtyping import Float, Shaped
from torch import Tensor

from headattr.model.sites import Site


class Activation(NamedTuple):
    """What makes activations of pre-activations."""

    kind: Literal["relu", "jumprelu", "topk", "rawtopk", "abstopk", "gated", "matching_pursuit"]
    """jumprelu: relu(pre) where pre > threshold. topk: the k largest, negative ones as 0. rawtopk:
    the k largest as they are, should there be fewer than k positive ones. abstopk: the k of largest
    size, with their sign. gated: two rows a feature. matching_pursuit: no linear encoder, sae_lens'
    own."""
    k: int | None = None


class Frame(NamedTuple):
    """What a dictionary does to its input before it encodes, and what undoes it in its output."""

    scale: float = 1.0
    """The input is multiplied by it, the output divided (expected_average_only_in)."""
    normalize: Literal["none", "layer_norm", "constant_norm_rescale"] = "none"
    """By position, as sae_lens does it."""
    centred: bool = False
    """Trained on a stream whose mean was removed."""
    subtract_b_dec: bool = False
    """b_dec is subtracted from the input: an SAE may, a transcoder never does."""
    undone: bool = True
    """Is the output brought back to the units of the input? False: the output is of another site
    and is taken as it is."""


class Tensors(NamedTuple):
    """The tensors of a dictionary in one layout, in the type of the file (mapped where it can
    be)."""

    W_enc: tuple[Shaped[Tensor, "features d_in"], ...]
    """A row a feature, one matrix a site that is read."""
    b_enc: Shaped[Tensor, "features"] | None
    """With `gated` the magnitude's."""
    W_dec: tuple[Shaped[Tensor, "features d_out"], ...]
    """One matrix a site that is written."""
    b_dec: tuple[Shaped[Tensor, "d_out"] | None, ...]
    threshold: Shaped[Tensor, "*features"] | None = None
    """A number a feature, or one for all."""
    b_gate: Shaped[Tensor, "features"] | None = None
    r_mag: Shaped[Tensor, "features"] | None = None
    factor: Shaped[Tensor, "features"] | None = None
    """Finetuned scaling factors: decoder rows are multiplied by them."""
    by_norm: bool = False
    """Pre-activations are multiplied by the norm of the decoder row, which is written at norm 1
    (rescale_acts_by_decoder_norm)."""
    W_skip: Shaped[Tensor, "d_in d_out"] | None = None
    """The skip path: x @ W_skip, of the input as it is."""
    pursuit: Any = None
    """sae_lens' own object, for matching_pursuit alone."""


@dataclass(frozen=True)
class Dictionary:
    """One group of features: what is known of it before its tensors are read."""

    name: str
    path: str | None
    format: str
    """The format of its files, as `dictionaries inspect` names it."""
    architecture: str
    """As its format calls it."""
    activation: Activation
    reads: tuple[Site | None, ...]
    """None: the file does not say; the site it is asked for."""
    writes: tuple[Site | None, ...]
    d_in: int
    d_out: int
    features: int
    read: Callable[[], tuple[Tensors, str]]
    """Its tensors, and a hash of them and of all that changes a number. Raises DictionaryError."""
    frame: Frame = Frame()  # noqa: RUF009 - a constant
    hook_name: str | None = None
    """The site it reads, as its file writes it."""
    prepend_bos: bool | None = None
    trained_on: str | None = None
    """Positions it was trained on, in words, if the file says."""
    assumed: tuple[str, ...] = ()
    labels: str | None = None
    """Path of a labels.jsonl."""

    @property
    def numbers(self) -> int:
        """Of its matrices."""
        return self.features * (self.d_in * len(self.reads) + self.d_out * len(self.writes))

    @property
    def shown(self) -> str:
        """Architecture and k."""
        k = self.activation.k
        return self.architecture if k is None else f"{self.architecture} k={k}"


@dataclass(frozen=True)
class Release:
    """Dictionaries that belong together."""

    kind: Literal["sae", "crosscoder", "transcoders"]
    """sae: one dictionary that writes what it reads. crosscoder: groups by the residual site they
    read. transcoders: of one MLP each, or of the MLPs from one on (cross-layer)."""
    name: str
    path: str | None
    dictionaries: tuple[Dictionary, ...]
    """By the site that they read."""

    @property
    def numbers(self) -> int:
        """Of all matrices."""
        return sum(d.numbers for d in self.dictionaries)

    @property
    def features(self) -> int:
        """Features of all together; ids run through the dictionaries in their order."""
        return sum(d.features for d in self.dictionaries)


def same_rows(W: Float[Tensor, "d_in features"]) -> Float[Tensor, "features d_in"]:
    """A matrix that is stored with a column a feature, as rows (no copy)."""
    return W.T
