"""The changes that can be asked for inside a model; `planner.py` makes edits of them.

Every change of the stream adds a vector, so several at one place add up, and one of a single head's
input comes on top of those of the stream. Features are changed by the amounts of the clean run:

    remove f: -a_f d_f      scale f by c: (c - 1) a_f d_f
    add a of f: a d_f       swap f for g: a_f (d_g - d_f)

with a_f the dictionary's own activation on the unchanged stream at that position, times what an
activation of 1 writes there.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class AddVector:
    """Add a vector, in the stream's units, to resid_pre of a layer at a position."""

    layer: int
    pos: int
    vector: Any = field(repr=False)
    """[d_model], a tensor, an array or a list."""
    at: str = "stream"
    """`stream`: for everything that follows. Or one head's input only, L5H1.query, L5H1.key or
    L5H1.value: the head computes that side from the changed stream, through the layer's norm (which
    responds), and nothing else sees the change."""


@dataclass(frozen=True)
class RemoveFeature:
    """Subtract an active feature: its activation times its decoder direction."""

    layer: int
    pos: int
    feature: int
    at: str = "stream"
    """As in AddVector."""


@dataclass(frozen=True)
class ScaleFeature:
    """Multiply the activation of an active feature."""

    layer: int
    pos: int
    feature: int
    factor: float
    """1 changes nothing, 0 removes it."""
    at: str = "stream"
    """As in AddVector."""


@dataclass(frozen=True)
class AddFeature:
    """Add to the activation of a feature, active or not."""

    layer: int
    pos: int
    feature: int
    activation: float
    """In the dictionary's own units; 0 changes nothing."""
    at: str = "stream"
    """As in AddVector."""


@dataclass(frozen=True)
class SwapFeature:
    """Put another feature in the place of an active one, with the same activation."""

    layer: int
    pos: int
    feature: int
    other: int
    """If it is active already, this comes on top."""
    at: str = "stream"
    """As in AddVector."""


@dataclass(frozen=True)
class EditScore:
    """Change the raw score of one edge, scale * Q . K before any cap; the softmax follows.

    A very low score cuts the edge, except where the model caps scores.
    """

    head: str
    """As L5H1."""
    q_pos: int
    k_pos: int
    add: float | None = None
    """Add this; or"""
    set: float | None = None
    """make it this."""


@dataclass(frozen=True, eq=False)
class ForcePattern:
    """Replace a row of one head's pattern, whatever its scores are."""

    head: str
    """As L5H1."""
    q_pos: int
    weights: Any = field(repr=False)
    """One number a position of the prompt, 0 where the mask forbids. They need not sum to 1: zeros
    take the head's output away."""


FeatureChange = RemoveFeature | ScaleFeature | AddFeature | SwapFeature
Change = FeatureChange | AddVector | EditScore | ForcePattern
