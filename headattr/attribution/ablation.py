"""What removing a feature does to a score, norms responding.

    ablation_f = (s_ij after a_f d_f is subtracted from x) - s_ij

sigma and, with QK-norm, the rms of the query or key are free to respond; the closed form is
`Projected.without`. At the query and at the key these are two interventions; on the diagonal
(i = j) one subtraction changes both, and both lists carry that joint effect.
"""

from jaxtyping import Float, Int
from torch import Tensor

from headattr.attribution.sides import Projected


def ablations(
    query: Projected,
    key: Projected,
    scale: float,
    q_pos: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    *,
    q_slots: Int[Tensor, "edge top"],
    k_slots: Int[Tensor, "edge top"],
) -> tuple[Float[Tensor, "edge top"], Float[Tensor, "edge top"]]:
    """The change of the raw score for each of those query features, and key features.

    In units of the score, before any cap: about minus the marginal. 0 where the slot is -1.
    """
    of_query = _effects(query, key, scale, q_pos, k_pos, q_slots)
    of_key = _effects(key, query, scale, k_pos, q_pos, k_slots)
    return of_query, of_key


def _effects(
    side: Projected,
    other: Projected,
    scale: float,
    pos: Int[Tensor, "edge"],
    other_pos: Int[Tensor, "edge"],
    slots: Int[Tensor, "edge top"],
) -> Float[Tensor, "edge top"]:
    """The features are removed at `side`, and where the positions are one, at `other` as well."""
    kept = slots.clamp(min=0)
    changed = side.without(pos, kept)
    facing = other.whole[other_pos][:, None].expand_as(changed).clone()
    diagonal = pos == other_pos
    facing[diagonal] = other.without(pos[diagonal], kept[diagonal])
    before = (side.whole[pos] * other.whole[other_pos]).sum(-1, keepdim=True)
    return (scale * ((changed * facing).sum(-1) - before)).masked_fill(slots < 0, 0)
