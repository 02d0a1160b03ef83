"""OV: what an edge moves, as a table of (value component, output feature) products.

    w_ij,g = A_ij W_O^h W_V^h N_j[g]          (g -> t) = r_t . w_ij,g

Two checks: the components of an edge sum to r_t . w_ij with the model's own value vector, and the
whole row - all heads, keys and components, and b_O - to what the block adds to the stream (Elhage
et al. 2021, "A Mathematical Framework for Transformer Circuits"; head loadings: Kamath et al.
2025).
"""

from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from headattr.attribution.qk import relative
from headattr.attribution.sides import Projected, strongest
from headattr.basis.component import Reads
from headattr.kernels.pair_topk.batched import PairTopK, pair_topk

_CHUNK = 1 << 24  # numbers of a temporary over all features of an output


class OutputSide(NamedTuple):
    """The output features of a layer's edges, ready to be read by any head."""

    reads: Reads
    rows: Float[Tensor, "unique d_model"]
    """Rows of the output features that are considered somewhere (all of them with `every`)."""
    inverse: Int[Tensor, "active"]
    every: bool
    """`--outputs all`: every feature of the output at every position; slots are then feature
    ids."""


class OvEdges(NamedTuple):
    """The OV side of some edges of one head, one row an edge."""

    pairs: PairTopK
    completeness: Float[Tensor, "edge"]
    v_norms: Float[Tensor, "edge top"]
    v_top: Int[Tensor, "edge top"]
    o_reads: Float[Tensor, "edge top"]
    o_top: Int[Tensor, "edge top"]
    o_totals: Float[Tensor, "edge top kind"]


def output_side(reads: Reads, *, every: bool) -> OutputSide:
    """Gather the output rows once for a prompt and layer."""
    if every:
        return OutputSide(reads, reads.rows, reads.active.ids, True)
    unique, inverse = reads.active.ids.unique(return_inverse=True)
    return OutputSide(reads, reads.rows[unique], inverse, False)


def in_head_space(
    output: OutputSide, W_O: Float[Tensor, "d_head d_model"]
) -> Float[Tensor, "*pos slot d_head"]:
    """W_O r_t: [pos, slot, d_head] over the active ones, or [feature, d_head] unscaled with
    `every`."""
    rows = output.rows @ W_O.T
    if output.every:
        return rows
    return output.reads.active.padded(rows[output.inverse] * output.reads.scale[:, None])


def row_norms(output: OutputSide) -> Float[Tensor, "*pos slot"]:
    """|r_t| in the layout of `in_head_space`."""
    norms = output.rows.norm(dim=-1)
    if output.every:
        return norms
    return output.reads.active.padded(norms[output.inverse] * output.reads.scale.abs())


def ov_edges(
    value: Projected,
    own_value: Float[Tensor, "pos d_head"],
    W_O: Float[Tensor, "d_head d_model"],
    output: OutputSide,
    heads: tuple[Tensor, Tensor],
    pattern: Float[Tensor, "edge"],
    q_pos: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    *,
    topk: int,
    top_marginals: int,
) -> OvEdges:
    """Attribute what the edges (q_pos, k_pos) of one head move.

    `heads` are `in_head_space` and `row_norms` of the output. completeness = |sum_g (g -> t) - r_t
    . w_ij| / (|r_t| |w_ij|), the worst over t, with w_ij from the model's own value vector.
    """
    read_rows, norms = heads
    if output.every:
        assert output.reads.pos_scale is not None
        scale = output.reads.pos_scale[q_pos]
        R = read_rows.expand(len(q_pos), -1, -1)
        n_o, size_r = torch.full_like(q_pos, len(read_rows)), norms * scale[:, None].abs()
    else:
        scale = torch.ones_like(pattern)
        R, n_o, size_r = read_rows[q_pos], output.reads.active.counts[q_pos], norms[q_pos]
    weight = (pattern * scale)[:, None]
    n_v = value.counts[k_pos]
    pairs = pair_topk(weight[:, None] * value.features[k_pos], R, n_v, n_o, topk)
    reads = weight * einsum(R, value.whole[k_pos], "edge o d, edge d -> edge o")
    missed = (value.kinds.sum(1) - own_value).to(R.dtype)
    gap = einsum(R, missed[k_pos], "edge o d, edge d -> edge o")
    size = size_r * (own_value[k_pos] @ W_O).norm(dim=-1)[:, None]
    worst = relative((gap * scale[:, None]).abs(), size)
    v_norms, v_top = strongest(pattern[:, None] * _written(value, W_O, k_pos), n_v, top_marginals)
    o_reads, o_top = strongest(reads, n_o, top_marginals)
    kept = R.gather(1, o_top.clamp(min=0).long()[..., None].expand(-1, -1, R.shape[-1]))
    kinds = value.kinds[k_pos].to(R.dtype)
    o_totals = einsum(weight[:, 0], kept, kinds, "edge, edge o d, edge kind d -> edge o kind")
    return OvEdges(
        pairs,
        worst.amax(1) if worst.shape[1] else worst.new_zeros(len(q_pos)),
        v_norms,
        v_top,
        o_reads,
        o_top,
        o_totals.masked_fill((o_top < 0)[..., None], 0),
    )


def _written(
    value: Projected, W_O: Float[Tensor, "d_head d_model"], k_pos: Int[Tensor, "edge"]
) -> Float[Tensor, "edge slot"]:
    """|W_O W_V N_j[g]| of every value feature of each edge, by the triangle of W_O W_O^T."""
    triangle = torch.linalg.qr(W_O.T, mode="r").R
    return (value.features @ triangle.T).norm(dim=-1)[k_pos]


def block_completeness(
    rebuilt: Float[Tensor, "pos d_model"], block: Float[Tensor, "pos d_model"], output: OutputSide
) -> Float[Tensor, "pos"]:
    """|r_t . rebuilt - r_t . block| / (|r_t| |block|) of every position, the worst over its output
    features."""
    gap, size = rebuilt - block, block.norm(dim=-1)
    norms = output.rows.norm(dim=-1)
    if output.every:
        step = max(1, _CHUNK // max(1, len(output.rows)))
        worst = [
            relative(
                (gap[i : i + step] @ output.rows.T).abs(), size[i : i + step, None] * norms
            ).amax(1)
            for i in range(0, len(gap), step)
        ]
        return torch.cat(worst)
    active = output.reads.active
    positions = active.positions
    entry = (output.rows[output.inverse] * gap[positions]).sum(-1).abs()
    error = relative(entry, norms[output.inverse] * size[positions])
    return block.new_zeros(len(block)).scatter_reduce(0, positions, error, "amax")
