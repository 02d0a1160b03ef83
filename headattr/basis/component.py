"""What every basis gives: components that sum to the residual stream, and directions that read it.

    x_i = sum_f coef_if d_f + (named components of i)          named: bias, error, position, ...

`coef` is the dictionary's own activation times any scale (layer_norm and the like: one a position),
so that the equality holds in the model's own units. The sums are kept in float64, so
that a dictionary whose parts are far larger than x_i (a poor one, or a position that swallows
attention) still adds up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from headattr.errors import DictionaryError
from headattr.model.capture import PromptCapture

ACTIVATIONS = 1 << 26
"""Activations of a dictionary at once: a quarter of a gigabyte of float32."""
_CHUNK = 1 << 22  # numbers of a temporary over active entries and d_model


@dataclass(frozen=True)
class ActiveFeatures:
    """Which features are active where: CSR by position, ids ascending within a position."""

    ptr: Int[Tensor, "pos_plus_1"]
    ids: Int[Tensor, "active"]
    acts: Float[Tensor, "active"]
    """The dictionary's own activation."""

    @cached_property
    def counts(self) -> Int[Tensor, "pos"]:
        """How many features each position has."""
        return self.ptr.diff()

    @cached_property
    def positions(self) -> Int[Tensor, "active"]:
        """The position of each entry."""
        return torch.arange(len(self.counts), device=self.ids.device).repeat_interleave(self.counts)

    @cached_property
    def slots(self) -> Int[Tensor, "active"]:
        """The index of each entry within its position's list."""
        return torch.arange(len(self.ids), device=self.ids.device) - self.ptr[self.positions]

    def entries(
        self, positions: Int[Tensor, "n"]
    ) -> tuple[Int[Tensor, "n slot"], Bool[Tensor, "n slot"]]:
        """Entries of some positions by slot, one slot at least, and which slots hold one; the
        others are 0."""
        counts = self.counts[positions]
        width = max(1, int(counts.max())) if len(counts) else 1
        slots = torch.arange(width, device=self.ids.device)
        inside = slots < counts[:, None]
        return (self.ptr[positions][:, None] + slots).where(inside, 0), inside

    def padded(self, rows: Shaped[Tensor, "active *rest"]) -> Shaped[Tensor, "pos slot *rest"]:
        """Per-entry rows laid out by position and slot, zeros behind each position's last; one
        slot at least."""
        width = max(1, int(self.counts.max())) if len(self.counts) else 1
        out = rows.new_zeros(len(self.counts), width, *rows.shape[1:])
        out[self.positions, self.slots] = rows
        return out


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

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds in the order of the totals: the sparse kind, then the named components."""
        return (self.kind, *self.named)


class Reads(NamedTuple):
    """What output features read of the stream, at one site, for one prompt: r_t = scale *
    row[t]."""

    active: ActiveFeatures
    """The output features to consider at each position; their own activations."""
    rows: Float[Tensor, "features d_model"]
    scale: Float[Tensor, "active"]
    pos_scale: Float[Tensor, "pos"] | None
    """The scale of any feature at a position; None where it depends on the activation (decoder
    reads)."""
    read: str
    """encoder, decoder or unembed."""


class Basis(Protocol):
    """A way to write the residual stream before one layer as components."""

    layer: int
    """The layer whose resid_pre it decomposes."""
    directions: Float[Tensor, "features d_model"]
    """What each feature writes, in model units."""
    about: "SourceInfo"

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """Which features are active where; at most `numbers` activations are there at once."""
        ...

    def components(self, prompt: PromptCapture, active: ActiveFeatures) -> Components:
        """The prompt's residual stream as a sum."""
        ...

    def reads(self, prompt: PromptCapture, active: ActiveFeatures, read: str) -> Reads:
        """What the features read of the stream, as outputs."""
        ...

    def read_rows(self, read: str) -> Float[Tensor, "features d_model"]:
        """The rows of `reads`, without their scale."""
        ...

    def check_read(self, read: str) -> None:
        """Raises DictionaryError if its features cannot be read this way."""
        ...


class SourceInfo(NamedTuple):
    """Where a basis or an output came from and what was assumed; stored with every run."""

    kind: str
    """sae, tokens, plain or unembed."""
    layer: int
    name: str
    path: str | None
    n_features: int
    activation: str
    hash: str
    assumed: tuple[str, ...]
    prepend_bos: bool | None
    labels: str | None
    """Path of a labels.jsonl, or None."""


def active_by_parts(
    encode: Callable[[slice], Float[Tensor, "some d_sae"]], length: int, width: int, numbers: int
) -> ActiveFeatures:
    """The non-zero activations of all positions, `encode` giving those of some at a time: at most
    `numbers` numbers, one position at least."""
    step = max(1, numbers // max(1, width))
    parts = [active_of(encode(slice(i, i + step))) for i in range(0, length, step)]
    return joined(parts)


def joined(parts: Sequence[ActiveFeatures]) -> ActiveFeatures:
    """Positions of one prompt that were found one part after the other."""
    counts = torch.cat([part.counts for part in parts])
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    ids, acts = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "acts"))
    return ActiveFeatures(ptr, ids, acts)


def active_of(acts: Float[Tensor, "pos d_sae"]) -> ActiveFeatures:
    """The non-zero activations (abstopk has negative ones)."""
    positions, ids = acts.nonzero(as_tuple=True)
    counts = torch.bincount(positions, minlength=len(acts))
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return ActiveFeatures(ptr, ids, acts[positions, ids])


def check_numbers(named: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors that are not finite floating-point numbers, naming the first."""
    for name, tensor in sorted(named.items()):
        if not tensor.dtype.is_floating_point:
            raise DictionaryError(
                f"{where}: {name} is packed as {tensor.dtype}; expected floating-point numbers"
            )
        # a threshold of infinity is a feature that never fires
        broken = tensor.isnan() if name == "threshold" else ~tensor.isfinite()
        if bool(broken.any()):
            raise DictionaryError(f"{where}: {name} holds non-finite numbers; expected finite ones")


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def decompose(
    x: Float[Tensor, "pos d_model"],
    active: ActiveFeatures,
    scale: Float[Tensor, "pos"],
    directions: Float[Tensor, "features d_model"],
    bias: Float[Tensor, "pos d_model"],
) -> Components:
    """Features (activation times `scale`), bias and the error that makes their sum x."""
    exact = sum_dtype(x.device)
    coefs = active.acts * scale[active.positions]
    total = torch.zeros_like(x, dtype=exact)
    most = max(1, int(active.counts.max())) if len(x) else 1
    step = max(1, _CHUNK // (most * x.shape[1]))
    for start in range(0, len(x), step):
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
    bias = bias.to(exact)
    return Components(
        "feature", active, scale, coefs, total, {"bias": bias, "error": x.to(exact) - total - bias}
    )
