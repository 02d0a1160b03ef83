"""The facts of one attention layer, and the frozen linear maps that follow from them.

    sigma_i = sqrt(var(x_i) + eps)   or   sqrt(mean(x_i^2) + eps)
    Qlin_i(v) = R_i W_Q (gamma * (v - mean v)) / sigma_i          Q_i = Qlin_i(x_i) + Qconst_i

and likewise for keys (rotated) and values (not rotated); with QK-norm queries and keys are divided
by their own rms before they are rotated. The norm's gain and centring are folded into the weights
once, so that a map is one matrix product and one division. Then

    s_ij = scale * Q_i . K_j      s'_ij = c tanh(s_ij / c)      A_i. = softmax over allowed j of s'
    block_i = M_i(sum over h, j of A_ij W_O^h v_j + b_O)        M_i: the norm after attention

Source: Elhage et al. 2021; Kamath et al. 2025, "Tracing Attention Computation Through Feature
Interactions".
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

Side = Literal["query", "key", "value"]


@dataclass(frozen=True)
class Norm:
    """A norm that is linear once its scale is frozen."""

    kind: Literal["layer", "rms"]
    """`layer` subtracts the mean; `rms` does not."""
    gain: Float[Tensor, "d"]
    """What the normalised vector is multiplied by (for Gemma, 1 + weight)."""
    bias: Float[Tensor, "d"] | None
    """Added at the end; None is zero."""
    eps: float

    def __call__(self, x: Float[Tensor, "*pos d"]) -> Float[Tensor, "*pos d"]:
        """The whole norm, bias included."""
        normed = self.linear(x) / self.sigma(x)[..., None]
        return normed if self.bias is None else normed + self.bias

    def sigma(self, x: Float[Tensor, "*pos d"]) -> Float[Tensor, "*pos"]:
        """The scale that the norm divides by, in the units of `x`."""
        if self.kind == "layer":
            return (x.var(-1, correction=0) + self.eps).sqrt()
        return (x.square().mean(-1) + self.eps).sqrt()

    def linear(self, x: Float[Tensor, "*pos d"]) -> Float[Tensor, "*pos d"]:
        """Gain and centring, without the division: norm(x) = linear(x) / sigma + bias."""
        return self.gain * (x - x.mean(-1, keepdim=True) if self.kind == "layer" else x)

    def fold(self, W: Float[Tensor, "*head d d_out"]) -> Float[Tensor, "*head d d_out"]:
        """`W` with gain and centring folded in: norm(x) @ W = x @ fold(W) / sigma + bias @ W."""
        folded = self.gain[:, None] * W
        return folded - folded.mean(-2, keepdim=True) if self.kind == "layer" else folded

    def constant(self, W: Float[Tensor, "*head d d_out"]) -> Float[Tensor, "*head d_out"]:
        """What the norm's bias adds after `W`."""
        bias = torch.zeros_like(self.gain) if self.bias is None else self.bias
        return bias @ W


class Rotary(NamedTuple):
    """Rotary embedding of each position of a prompt, as the model itself computed it.

    The first `cos.shape[-1]` dimensions of a head are rotated, dimension d paired with d + rot / 2;
    the rest pass. Any magnitude factor (YaRN, longrope) is already in cos and sin.
    """

    cos: Float[Tensor, "pos rot"]
    sin: Float[Tensor, "pos rot"]

    def rotate(self, x: Float[Tensor, "pos *rest d_head"]) -> Float[Tensor, "pos *rest d_head"]:
        """R_i x_i for every position i, the first axis."""
        rot = self.cos.shape[-1]
        shape = (len(self.cos), *(1,) * (x.ndim - 2), rot)
        cos, sin = self.cos.view(shape), self.sin.view(shape)
        head, rest = x[..., :rot], x[..., rot:]
        first, second = head.chunk(2, -1)
        turned = head * cos + torch.cat([-second, first], -1) * sin
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    def at(self, pos: Int[Tensor, "n"]) -> "Rotary":
        """The rotary of some positions only."""
        return Rotary(self.cos[pos], self.sin[pos])


@dataclass(frozen=True)
class Writes:
    """What becomes of the heads' outputs: the matrix of each, a constant, and a norm behind their
    sum."""

    W_O: Float[Tensor, "head d_head width"]
    b_O: Float[Tensor, "width"]
    post_norm: Norm | None

    @cached_property
    def written(self) -> Float[Tensor, "head d_head width"]:
        """W_O with the gain and centring of the norm after attention folded in."""
        return self.W_O if self.post_norm is None else self.post_norm.linear(self.W_O)

    def output_scale(self, attn_out: Float[Tensor, "pos d"]) -> Float[Tensor, "pos"]:
        """What the norm after attention multiplies row i by, frozen: v @ written * scale_i."""
        if self.post_norm is None:
            return torch.ones_like(attn_out[:, 0])
        return 1 / self.post_norm.sigma(attn_out)

    def block_constant(self, scale: Float[Tensor, "pos"]) -> Float[Tensor, "pos width"]:
        """What attention adds to the stream that belongs to no edge: M_i(b_O)."""
        if self.post_norm is None:
            return self.b_O.expand(len(scale), -1)
        constant = scale[:, None] * self.post_norm.linear(self.b_O)
        return constant if self.post_norm.bias is None else constant + self.post_norm.bias

    @cached_property
    def triangles(self) -> Float[Tensor, "head d_head d_head"]:
        """T with T^T T = W W^T of each head's `written`: |v W| = |T v|, without going through
        d_model."""
        exact = torch.float32 if self.W_O.device.type == "mps" else torch.float64
        W_O = self.written.to(exact)
        gram = torch.linalg.eigh(W_O @ W_O.transpose(1, 2))
        roots = gram.eigenvalues.clamp(min=0).sqrt()
        return (roots[..., None] * gram.eigenvectors.transpose(1, 2)).to(self.W_O.dtype)


@dataclass(frozen=True)
class HeadWeights:
    """One attention layer of a model, in headattr's own layout, float32 or float64."""

    layer: int
    norm: Norm
    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "kv_head d_model d_head"]
    W_V: Float[Tensor, "kv_head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_Q: Float[Tensor, "head d_head"]
    b_K: Float[Tensor, "kv_head d_head"]
    b_V: Float[Tensor, "kv_head d_head"]
    b_O: Float[Tensor, "d_model"]
    scale: float
    """What Q . K is multiplied by: read from the model, not always d_head^-1/2."""
    q_norm: Norm | None = None
    """QK-norm: over each head's query, before rotary; without a bias."""
    k_norm: Norm | None = None
    softcap: float | None = None
    """c of c tanh(s / c), between score and softmax."""
    window: int | None = None
    """How many keys a query sees, itself included; None is all before it."""
    post_norm: Norm | None = None
    """The norm between the heads' summed output and the stream."""

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return len(self.W_Q)

    def kv_head(self, head: int) -> int:
        """The key and value head that query head `head` reads (grouped-query attention)."""
        return head // (len(self.W_Q) // len(self.W_K))

    @cached_property
    def folded(self) -> dict[Side, Float[Tensor, "heads d_model d_head"]]:
        """W_Q, W_K, W_V with the norm's gain and centring folded in, float64 (where the device has
        it)."""
        exact = torch.float32 if self.W_Q.device.type == "mps" else torch.float64
        return {
            "query": self.norm.fold(self.W_Q.to(exact)),
            "key": self.norm.fold(self.W_K.to(exact)),
            "value": self.norm.fold(self.W_V.to(exact)),
        }

    @cached_property
    def constants(self) -> dict[Side, Float[Tensor, "heads d_head"]]:
        """Qconst, Kconst and the value's constant, before rotary: the norm's bias and b_Q, b_K,
        b_V."""
        constant = self.norm.constant
        return {
            "query": constant(self.W_Q) + self.b_Q,
            "key": constant(self.W_K) + self.b_K,
            "value": constant(self.W_V) + self.b_V,
        }

    def head_norm(self, side: Side) -> Norm | None:
        """The norm over each head's vector, if this side has one."""
        return {"query": self.q_norm, "key": self.k_norm, "value": None}[side]

    @cached_property
    def writes(self) -> "Writes":
        """How values reach the stream."""
        return Writes(self.W_O, self.b_O, self.post_norm)

    @cached_property
    def side_by_side(self) -> "Writes":
        """How values reach the heads' outputs side by side, each head in its own slot."""
        n_heads, d_head = self.W_O.shape[:2]
        slots = torch.eye(n_heads * d_head, dtype=self.W_O.dtype, device=self.W_O.device)
        return Writes(slots.unflatten(0, (n_heads, d_head)), torch.zeros_like(slots[0]), None)

    def vectors(
        self,
        side: Side,
        resid_pre: Float[Tensor, "pos d_model"],
        rotary: Rotary | None,
    ) -> Float[Tensor, "pos heads d_head"]:
        """Q_i, K_j (rotated) or v_j of every position and head, rebuilt from the residual
        stream."""
        sigma = self.norm.sigma(resid_pre)
        linear = einsum(
            resid_pre,
            self.folded[side].to(resid_pre),
            "pos d_model, heads d_model d_head -> pos heads d_head",
        )
        whole = linear / sigma[:, None, None] + self.constants[side]
        head_norm = self.head_norm(side)
        whole = whole if head_norm is None else head_norm(whole)
        return whole if rotary is None or side == "value" else rotary.rotate(whole)

    def scores(
        self, Q: Float[Tensor, "q_pos head d_head"], K: Float[Tensor, "k_pos kv_head d_head"]
    ) -> Float[Tensor, "head q_pos k_pos"]:
        """scale * Q_i . K_j for every pair, before any mask."""
        K = K.repeat_interleave(len(self.W_Q) // len(self.W_K), dim=1)
        return self.scale * einsum(Q, K, "q_pos head d, k_pos head d -> head q_pos k_pos")

    def capped(self, scores: Float[Tensor, "*edge"]) -> Float[Tensor, "*edge"]:
        """What softmax sees of the scores: c tanh(s / c) where the model caps them."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    def pattern(
        self,
        scores: Float[Tensor, "head q_pos k_pos"],
        allowed: Bool[Tensor, "q_pos k_pos"],
    ) -> Float[Tensor, "head q_pos k_pos"]:
        """Softmax of the (capped) scores over the keys that the mask allows; exactly 0
        elsewhere."""
        return self.capped(scores).masked_fill(~allowed, -torch.inf).softmax(-1)

    def allowed(self, q_pos: Int[Tensor, "q_pos"], length: int) -> Bool[Tensor, "q_pos k_pos"]:
        """Which keys each query may see: those at or before it, within the window."""
        back = q_pos[:, None] - torch.arange(length, device=q_pos.device)[None]
        return back >= 0 if self.window is None else (back >= 0) & (back < self.window)
