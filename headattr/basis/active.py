"""Which features are active where, as lists by position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

ACTIVATIONS = 1 << 26
"""Activations of a dictionary at once: a quarter of a gigabyte of float32."""


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


def merged(parts: Sequence[ActiveFeatures], counts: Sequence[int]) -> ActiveFeatures:
    """The features of several dictionaries at the same positions; `counts`: features of each, ids
    of the later ones begin behind those of the earlier."""
    if len(parts) == 1:
        return parts[0]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    positions = torch.cat([part.positions for part in parts])
    ids = torch.cat([part.ids + start for part, start in zip(parts, starts, strict=True)])
    order = positions.argsort(stable=True)
    ptr = torch.stack([part.ptr for part in parts]).sum(0)
    return ActiveFeatures(ptr, ids[order], torch.cat([part.acts for part in parts])[order])


def within(active: ActiveFeatures, start: int, stop: int) -> ActiveFeatures:
    """The features whose ids are from `start` to `stop` - 1; ids stay as they are."""
    inside = (active.ids >= start) & (active.ids < stop)
    if bool(inside.all()):
        return active
    counts = torch.bincount(active.positions[inside], minlength=len(active.counts))
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return ActiveFeatures(ptr, active.ids[inside], active.acts[inside])


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
