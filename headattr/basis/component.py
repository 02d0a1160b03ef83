"""What every basis gives: components that sum to the residual stream, and directions that read it.

    x_i = sum_f coef_if d_f + (named components of i)          named: bias, error, position, ...

`coef` is the dictionary's own activation times any scale (layer_norm and the like: one a position),
so that the equality holds in the model's own units. The sums are kept in float64, so
that a dictionary whose parts are far larger than x_i (a poor one, or a position that swallows
attention) still adds up.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.active import ACTIVATIONS, ActiveFeatures
from headattr.basis.rows import Matrix
from headattr.errors import DictionaryError
from headattr.model.capture import PromptCapture
from headattr.model.sites import Site

_CHUNK = 1 << 22  # numbers of a temporary over active entries and d_model


class Part(NamedTuple):
    """One named component among several of its kind: the attention output of layer 3, the error of
    an MLP."""

    kind: str
    """One of the named kinds."""
    name: str
    vectors: Float[Tensor, "pos d_model"]


class Components(NamedTuple):
    """One prompt's residual stream at one site, written as a sum."""

    kind: str
    """Kind of the sparse components: feature, or token."""
    active: ActiveFeatures
    scale: Float[Tensor, "pos"]
    """What an activation of 1 writes at each position, in decoder rows."""
    coefs: Float[Tensor, "active"]
    """Activation times scale."""
    sparse_sum: Float[Tensor, "pos d_model"]
    """The sum of all features, float64."""
    named: dict[str, Float[Tensor, "pos d_model"]]
    """float64; bias always, first: what the norm and the head's own biases add is counted with
    it."""
    parts: tuple[Part, ...] = ()
    """Of the named kinds that have several members, the members; they sum to their kind."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds in the order of the totals: the sparse kind, then the named components."""
        return (self.kind, *self.named)


class Reads(NamedTuple):
    """What output features read of the stream, at one site, for one prompt: r_t = scale *
    row[t]."""

    active: ActiveFeatures
    """The output features to consider at each position; their own activations."""
    rows: Matrix
    scale: Float[Tensor, "active"]
    pos_scale: Float[Tensor, "pos"] | None
    """The scale of any feature at a position; None where it depends on the activation (decoder
    reads)."""
    read: str
    """encoder, decoder or unembed."""
    block: Float[Tensor, "pos d"] | None = None
    """None: what is read is what attention adds to the stream. Else the heads' outputs side by side
    [pos, head * d_head], and rows are of that width."""


class Source(Protocol):
    """A dictionary in a run: which of its features are active where."""

    about: "SourceInfo"
    sites: tuple[Site, ...]
    """What it encodes of a prompt; the residual site that says which positions count is the last of
    its kind."""

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """Which features are active where; at most `numbers` activations are there at once."""
        ...


class Basis(Protocol):
    """A way to write the residual stream before one layer as components."""

    layer: int
    """The layer whose resid_pre it decomposes."""
    source: Source
    """What says which features are active; layers of one dictionary share it."""
    sites: tuple[Site, ...]
    """What `components` needs of a prompt."""
    directions: Matrix
    """What each feature writes, in model units."""

    def components(self, prompt: PromptCapture, active: ActiveFeatures) -> Components:
        """The prompt's residual stream as a sum; `active` is the source's, of which those that are
        no part of this layer are left out."""
        ...


class Output(Protocol):
    """What reads what a head writes."""

    place: "Place"
    source: Source
    sites: tuple[Site, ...]
    """What `reads` needs of a prompt."""

    def reads(self, prompt: PromptCapture, active: ActiveFeatures, read: str) -> Reads:
        """What the features read of the stream."""
        ...

    def read_rows(self, read: str) -> Matrix:
        """The rows of `reads`, without their scale."""
        ...

    def check_read(self, read: str) -> None:
        """Raises DictionaryError if its features cannot be read this way."""
        ...


class Place(NamedTuple):
    """Where an output reads, in the order of the stream."""

    layer: int
    stage: int
    """0 before the layer's attention, 1 its attention's output alone, 2 behind it, before the
    MLP."""

    def hears(self, layer: int) -> bool:
        """Does what the heads of a layer write get there?"""
        same = self.layer == layer and self.stage > 0
        return same or (self.layer > layer and self.stage != 1)


class Group(NamedTuple):
    """Features of a source that one site's encoder makes; ids run through the groups in order."""

    layer: int
    site: str
    features: int


class SourceInfo(NamedTuple):
    """Where a basis or an output came from and what was assumed; stored with every run."""

    kind: str
    """sae, crosscoder, transcoders, transcoder, attention, tokens, plain or unembed."""
    layer: int
    """The layer at whose input it decomposes or reads; of crosscoders and transcoder sets the
    last."""
    name: str
    path: str | None
    n_features: int
    activation: str
    hash: str
    assumed: tuple[str, ...]
    prepend_bos: bool | None
    labels: str | None
    """Path of a labels.jsonl, or None."""
    groups: tuple[Group, ...] = ()
    """Where the features of crosscoders and transcoder sets come from."""
    first: int = 0
    """The id, in its set, of the first feature of a transcoder that is an output by itself."""


def sparse_sum(
    active: ActiveFeatures, coefs: Float[Tensor, "active"], directions: Matrix
) -> Float[Tensor, "pos d"]:
    """The sum of all features of each position, float64 where the device has it."""
    length, width = len(active.counts), directions.shape[1]
    exact = sum_dtype(coefs.device)
    total = torch.zeros(length, width, dtype=exact, device=coefs.device)
    most = max(1, int(active.counts.max())) if length else 1
    step = max(1, _CHUNK // (most * width))
    for start in range(0, length, step):
        ptr = active.ptr[start : start + step + 1]
        entries = slice(int(ptr[0]), int(ptr[-1]))
        if entries.start == entries.stop:
            continue
        unique, inverse = active.ids[entries].unique(return_inverse=True)
        total[start : start + step] = torch.nn.functional.embedding_bag(
            inverse,
            directions[unique].to(exact),
            ptr[:-1] - ptr[0],
            mode="sum",
            per_sample_weights=coefs[entries].to(exact),
        )
    return total


def check_numbers(named: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors that are not finite floating-point numbers, naming the first."""
    for name, tensor in sorted(named.items()):
        if not tensor.dtype.is_floating_point:
            raise DictionaryError(
                f"{where}: {name} is packed as {tensor.dtype}; expected floating-point numbers"
            )
        # a threshold of infinity is a feature that never fires
        check = torch.isnan if name == "threshold" else _not_finite
        step = max(1, _CHUNK // max(1, tensor[:1].numel())) if tensor.ndim else 1
        parts = tensor.split(step) if tensor.ndim and len(tensor) else [tensor]
        if any(bool(check(part).any()) for part in parts):
            raise DictionaryError(f"{where}: {name} holds non-finite numbers; expected finite ones")


def _not_finite(part: Tensor) -> Tensor:
    return ~part.isfinite()


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def decompose(
    x: Float[Tensor, "pos d_model"],
    active: ActiveFeatures,
    scale: Float[Tensor, "pos"],
    directions: Matrix,
    bias: Float[Tensor, "pos d_model"],
) -> Components:
    """Features (activation times `scale`), bias and the error that makes their sum x."""
    coefs = active.acts * scale[active.positions]
    total = sparse_sum(active, coefs, directions)
    bias = bias.to(total)
    error = x.to(total) - total - bias
    return Components("feature", active, scale, coefs, total, {"bias": bias, "error": error})
