"""What removing a feature does to a score, norms responding.

    ablation_f = (s_ij after a_f d_f is subtracted from x) - s_ij

sigma and, with QK-norm, the rms of the query or key are free to respond: with rho = sigma / sigma'
and h = rms(q) / rms(q'), 1 without QK-norm,

    q' = h (rho (q_lin - q_f) + q_const)
    q' . K = h (rho (q_lin . K - q_f . K) + q_const . K)

so an effect follows from the feature's marginal and two products an edge. At the query and at the
key these are two interventions; on the diagonal (i = j) one subtraction changes both, and both
lists carry that joint effect.
"""

from jaxtyping import Float, Int
from torch import Tensor

from headattr.attribution.contrast import Ends
from headattr.attribution.sides import Projected

Kept = tuple[Int[Tensor, "edge top"], Float[Tensor, "edge top"]]
"""Slots of features, -1 for none, and their marginals."""


def ablations(
    query: Projected, key: Projected, scale: float, ends: Ends, of_query: Kept, of_key: Kept
) -> tuple[Float[Tensor, "edge top"], Float[Tensor, "edge top"]]:
    """The change of the raw score for each of those query features, and key features.

    In units of the score, before any cap: about minus the marginal. 0 where the slot is -1.
    """
    sides = (query, ends.q_at), (key, ends.k_at)
    diagonal = (ends.q_pos == ends.k_pos).nonzero().flatten()
    found = []
    for (side, at), (other, other_at), (slots, marginals) in (
        (*sides, of_query),
        (*sides[::-1], of_key),
    ):
        effects = _effects(side, at, other.whole[other_at], scale, slots, marginals)
        if len(diagonal):
            both = at[diagonal], other_at[diagonal], slots[diagonal].clamp(min=0)
            effects[diagonal] = _joint(side, other, *both) * scale
        found.append(effects.masked_fill(slots < 0, 0))
    return found[0], found[1]


def _effects(
    side: Projected,
    at: Int[Tensor, "edge"],
    facing: Float[Tensor, "edge d_head"],
    scale: float,
    slots: Int[Tensor, "edge top"],
    marginals: Float[Tensor, "edge top"],
) -> Float[Tensor, "edge top"]:
    """Features removed at one side, the other as it was: `facing`."""
    entry = at[:, None], slots.clamp(min=0)
    whole, constant = (
        scale * (part[at] * facing).sum(-1, keepdim=True) for part in (side.whole, side.constant)
    )
    after = side.regrow[entry] * (whole - constant - marginals) + constant
    if side.head_regrow is not None:
        after = side.head_regrow[entry] * after
    return after - whole


def _joint(
    side: Projected,
    other: Projected,
    at: Int[Tensor, "edge"],
    other_at: Int[Tensor, "edge"],
    slots: Int[Tensor, "edge top"],
) -> Float[Tensor, "edge top"]:
    """Features removed at both sides, which are one position."""
    changed = (side.without(at, slots) * other.without(other_at, slots)).sum(-1)
    return changed - (side.whole[at] * other.whole[other_at]).sum(-1, keepdim=True)
