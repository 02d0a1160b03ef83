"""What removing a feature does to a score, norms responding.

    ablation_f = (s_ij after a_f d_f is subtracted from x) - s_ij

sigma and, with QK-norm, the rms of the query or key are free to respond; the closed form is
`Projected.without`. At the query and at the key these are two interventions; on the diagonal
(i = j) one subtraction changes both, and both lists carry that joint effect.
"""

from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headattr.attribution.contrast import Ends
from headattr.attribution.sides import Projected


def ablations(
    query: Projected,
    key: Projected,
    scale: float,
    ends: Ends,
    *,
    q_slots: Int[Tensor, "edge top"],
    k_slots: Int[Tensor, "edge top"],
) -> tuple[Float[Tensor, "edge top"], Float[Tensor, "edge top"]]:
    """The change of the raw score for each of those query features, and key features.

    In units of the score, before any cap: about minus the marginal. 0 where the slot is -1.
    """
    diagonal = ends.q_pos == ends.k_pos
    of_query = _effects(query, key, scale, ends.q_at, ends.k_at, diagonal, q_slots)
    of_key = _effects(key, query, scale, ends.k_at, ends.q_at, diagonal, k_slots)
    return of_query, of_key


def _effects(
    side: Projected,
    other: Projected,
    scale: float,
    at: Int[Tensor, "edge"],
    other_at: Int[Tensor, "edge"],
    diagonal: Bool[Tensor, "edge"],
    slots: Int[Tensor, "edge top"],
) -> Float[Tensor, "edge top"]:
    """The features are removed at `side`, and where the positions are one, at `other` as well."""
    kept = slots.clamp(min=0)
    changed = side.without(at, kept)
    after = einsum(changed, other.whole[other_at], "edge top d, edge d -> edge top")
    also = other.without(other_at[diagonal], kept[diagonal])
    after[diagonal] = (changed[diagonal] * also).sum(-1)
    before = (side.whole[at] * other.whole[other_at]).sum(-1, keepdim=True)
    return (scale * (after - before)).masked_fill(slots < 0, 0)
