"""OV: what an edge moves, as a table of (value component, output feature) products.

    w_ij,g = A_ij M_i W_O^h W_V^h N_j[g]          (g -> t) = r_t . w_ij,g

M_i is the norm after attention, its scale frozen (Gemma 2 and 3), else the identity.

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

from headattr.attribution.qk import lengths, relative
from headattr.attribution.sides import Projected, at_slots, strongest
from headattr.basis.component import Reads
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.dispatch import topk_pairs
from headattr.model.head import HeadWeights

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


class OvHead(NamedTuple):
    """What all edges of one head share."""

    value: Projected
    output: OutputSide
    rows: Float[Tensor, "*pos slot d_head"]
    """W r_t of the head's `written` matrix: [pos, slot, d_head] over the active ones; with `every`
    [feature, d_head], without their scale."""
    norms: Float[Tensor, "*pos slot"]
    """|r_t|, laid out as `rows`."""
    written: Float[Tensor, "pos slot"]
    """|W W_V N_j[g]| of every value feature."""
    own_written: Float[Tensor, "pos"]
    """|W v_j| of the model's own value vector."""
    missed: Float[Tensor, "pos d_head"]
    """The sum of the value components less the model's own value vector."""
    scale: Float[Tensor, "pos"]
    """What M_i multiplies a row by."""


def ov_head(
    weights: HeadWeights,
    head: int,
    value: Projected,
    own_value: Float[Tensor, "pos d_head"],
    output: OutputSide,
    scale: Float[Tensor, "pos"],
) -> OvHead:
    """Project the output features into one head, and measure what its values write; `scale`: what
    the norm after attention multiplies a row by."""
    rows, norms = output.rows @ weights.written[head].T, output.rows.norm(dim=-1)
    if not output.every:
        reads, inverse = output.reads, output.inverse
        rows = reads.active.padded(rows[inverse] * reads.scale[:, None])
        norms = reads.active.padded(norms[inverse] * reads.scale.abs())
    triangle = weights.triangles[head].T
    return OvHead(
        value,
        output,
        rows,
        norms,
        (value.features @ triangle).norm(dim=-1),
        lengths(own_value @ triangle, torch.finfo(own_value.dtype).eps),
        (value.whole - own_value).to(rows),
        scale,
    )


def ov_edges(
    head: OvHead,
    pattern: Float[Tensor, "edge"],
    q_pos: Int[Tensor, "edge"],
    k_pos: Int[Tensor, "edge"],
    *,
    topk: int,
    top_marginals: int,
) -> OvEdges:
    """Attribute what the edges (q_pos, k_pos) of one head move; `pattern` is A_ij.

    completeness = |sum_g (g -> t) - r_t . w_ij| / (|r_t| |w_ij|), the worst over t, with w_ij from
    the model's own value vector.
    """
    value, output, pattern = head.value, head.output, pattern * head.scale[q_pos]
    if output.every:
        assert output.reads.pos_scale is not None
        scale = output.reads.pos_scale[q_pos]
        lists, lengths, at = head.rows[None], q_pos.new_full((1,), len(head.rows)), q_pos * 0
        R, size_r = head.rows.expand(len(q_pos), -1, -1), head.norms * scale[:, None].abs()
    else:
        scale = torch.ones_like(pattern)
        lists, lengths, at = head.rows, output.reads.active.counts, q_pos
        R, size_r = head.rows[q_pos], head.norms[q_pos]
    n_o = lengths[at]
    weight = (pattern * scale)[:, None]
    n_v = value.counts[k_pos]
    pairs = topk_pairs(
        value.features,
        lists,
        value.counts,
        lengths,
        topk,
        left_at=k_pos,
        right_at=at,
        scale=weight[:, 0],
    )
    reads = weight * einsum(R, value.whole[k_pos].to(R), "edge o d, edge d -> edge o")
    gap = einsum(R, head.missed[k_pos], "edge o d, edge d -> edge o") * scale[:, None]
    worst = relative(gap.abs(), size_r * head.own_written[k_pos, None])
    written = pattern[:, None] * head.written[k_pos]
    v_top, o_top = strongest(written, n_v, top_marginals), strongest(reads, n_o, top_marginals)
    kept = R.gather(1, o_top.clamp(min=0)[..., None].expand(-1, -1, R.shape[-1]))
    kinds = value.kinds[k_pos].to(R.dtype)
    o_totals = einsum(weight[:, 0], kept, kinds, "edge, edge o d, edge kind d -> edge o kind")
    o_totals = o_totals.masked_fill((o_top < 0)[..., None], 0)
    return OvEdges(
        pairs,
        worst.amax(1),
        at_slots(written, v_top),
        v_top,
        at_slots(reads, o_top),
        o_top,
        o_totals,
    )


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
