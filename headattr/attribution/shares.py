"""How much of a layer's attention features explain: sums over all allowed edges, none stored.

    scores    1 - sum (s_ij - T_ff,ij)^2 / sum s_ij^2            with and without each row's mean
    outputs   1 - sum |o_i - o_i[features]|^2 / sum |o_i|^2      o_i = M_i sum_j A_ij W_O v_j

o_i is what a head adds to the stream at a query, M_i the norm after attention, its scale frozen.
Positions that swallow attention, where no dictionary is trained, are left out of the outputs, as
queries and as keys; scores are summed with and without them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from headattr.attribution.sides import Kinds, project_kinds
from headattr.attribution.task import swallow_attention
from headattr.basis.component import Components
from headattr.errors import PromptError
from headattr.model.capture import LayerCapture
from headattr.model.head import HeadWeights
from headattr.model.proof import layer_errors

_MOST_ROWS = 128


class ShareSums(NamedTuple):
    """Of some heads of one layer; sums of several prompts add up."""

    scores: NDArray[np.float64]
    """[head, 4]: sum s^2, sum (s - T_ff)^2, and both with row means removed."""
    counted: NDArray[np.float64]
    """The same over the edges of positions that do not swallow attention."""
    outputs: NDArray[np.float64]
    """[head, 2]: sum |o|^2, sum |o - o[features]|^2, likewise."""

    def plus(self, more: "ShareSums") -> "ShareSums":
        """Of both together."""
        return ShareSums(*(a + b for a, b in zip(self, more, strict=True)))


def no_shares(heads: int) -> ShareSums:
    """Of no prompt yet."""
    return ShareSums(np.zeros((heads, 4)), np.zeros((heads, 4)), np.zeros((heads, 2)))


class Rows:
    """The queries start to stop of one head, over the keys 0 to stop: scores and pattern of the
    model's own queries and keys, float64."""

    def __init__(
        self,
        weights: HeadWeights,
        scale: float,
        Q: Float[Tensor, "pos d_head"],
        K: Float[Tensor, "pos d_head"],
        start: int,
        stop: int,
    ) -> None:
        """`Q` and `K` are of the whole prompt."""
        self.start, self.stop, self.scale = start, stop, scale
        self.positions = torch.arange(start, stop, device=Q.device)
        self.allowed = weights.allowed(self.positions, stop)
        self.scores = scale * Q[start:stop] @ K[:stop].T
        self.pattern = weights.pattern(self.scores[None], self.allowed)[0]

    def share_sums(
        self, query: Kinds, key: Kinds, counted: Bool[Tensor, "pos"] | None = None
    ) -> Float[Tensor, "4"]:
        """`share_sums` of these rows; `counted`: positions whose edges count, all by default."""
        features = self.scale * query.kinds[self.start : self.stop, 0] @ key.kinds[: self.stop, 0].T
        allowed = self.allowed
        if counted is not None:
            allowed = allowed & counted[self.start : self.stop, None] & counted[: self.stop]
        return share_sums(self.scores, features, allowed)

    def output_sums(
        self,
        value: Kinds,
        written: Float[Tensor, "d_head d_model"],
        scale: Float[Tensor, "pos"],
        counted: Bool[Tensor, "pos"],
    ) -> Float[Tensor, "2"]:
        """sum |o|^2 and sum |o - o[features]|^2 of these rows, over `counted` positions."""
        rest = value.whole - value.kinds[:, 0]
        scale = (scale * counted)[self.start : self.stop, None]
        pattern, found = self.pattern * counted[: self.stop], []
        for vectors in (value.whole, rest):
            out = pattern @ vectors[: self.stop] @ written
            found.append((out * scale).square().sum())
        return torch.stack(found)


def layer_shares(
    weights: HeadWeights,
    kept: LayerCapture,
    components: Components,
    heads: Sequence[int],
    *,
    memory: int = 1 << 28,
    tolerance: float = math.inf,
) -> ShareSums:
    """The sums of some heads over one prompt; `memory`: bytes for temporaries of a block of rows.

    Raises PromptError where the pattern is not the model's.
    """
    checked_pattern(weights, kept, tolerance)
    exact = components.sparse_sum.dtype
    sigma = weights.norm.sigma(kept.resid_pre.to(exact))
    scale = weights.writes.output_scale(kept.attn_out).to(exact)
    length = len(kept.resid_pre)
    step = max(1, min(_MOST_ROWS, memory // (8 * 10 * length)))
    given = components, sigma, kept.rotary
    counted = torch.from_numpy(~swallow_attention(kept.resid_pre)).to(sigma.device)
    sums = no_shares(len(heads))
    for at, head in enumerate(heads):
        group = weights.kv_head(head)
        query = project_kinds(weights, "query", head, *given)
        key = project_kinds(weights, "key", group, *given)
        value = project_kinds(weights, "value", group, *given)
        Q, K = kept.Q[:, head].to(exact), kept.K[:, group].to(exact)
        written = weights.writes.written[head].to(exact)
        for start in range(0, length, step):
            rows = Rows(weights, kept.scale, Q, K, start, min(start + step, length))
            sums.scores[at] += rows.share_sums(query, key).cpu().numpy()
            sums.counted[at] += rows.share_sums(query, key, counted).cpu().numpy()
            sums.outputs[at] += rows.output_sums(value, written, scale, counted).cpu().numpy()
    return sums


def share_sums(
    score: Float[Tensor, "row k_pos"],
    of_features: Float[Tensor, "row k_pos"],
    allowed: Bool[Tensor, "row k_pos"],
) -> Float[Tensor, "4"]:
    """sum s^2, sum (s - T_ff)^2 over the allowed edges of some rows, then both with each row's mean
    removed, in float64; `of_features` is T_ff.

    A head's feature share is 1 - second / first, and 1 - fourth / third (the part that softmax
    sees), from the sums over all rows.
    """
    count = allowed.sum(1, keepdim=True).clamp(min=1)
    sums = []
    for centred in (False, True):
        for table in (score, score - of_features):
            kept = table.masked_fill(~allowed, 0)
            if centred:
                kept = (table - kept.sum(1, keepdim=True) / count).masked_fill(~allowed, 0)
            sums.append(kept.square().sum())
    return torch.stack(sums)


def checked_pattern(weights: HeadWeights, kept: LayerCapture, tolerance: float) -> float:
    """How far the rebuilt pattern is off from the model's own; PromptError above `tolerance`."""
    error = layer_errors(weights, kept).pattern
    if not error <= tolerance:
        raise PromptError(
            f"the pattern of layer {weights.layer} is off by {error:.1e} from the model's "
            f"own; expected at most {tolerance:.0e}"
        )
    return error
