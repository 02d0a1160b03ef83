"""OV: what an edge moves, as a table of (value component, output feature) products.

    w_ij,g = A_ij M_i W_O^h W_V^h N_j[g]          (g -> t) = r_t . w_ij,g

M_i is the norm after attention, its scale frozen (Gemma 2 and 3), else the identity.

Two checks: the components of an edge sum to r_t . w_ij with the model's own value vector, and the
whole row - all heads, keys and components, and b_O - to what the block adds to the stream (Elhage
et al. 2021, "A Mathematical Framework for Transformer Circuits"; head loadings: Kamath et al.
2025).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from headattr.attribution.lists import at_slots, read_lists, strongest
from headattr.attribution.qk import lengths, relative
from headattr.attribution.sides import Side
from headattr.basis.component import Reads
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.dispatch import topk_pairs
from headattr.model.head import Writes

_CHUNK = 1 << 22  # numbers of a temporary over output features


@dataclass(frozen=True)
class OutputSide:
    """The output features of a layer's edges, ready to be read by any head."""

    reads: Reads
    used: Int[Tensor, "unique"]
    """The output features that are considered somewhere (all of them with `every`)."""
    columns: Int[Tensor, "active"]
    """Of every active entry."""
    every: bool
    """`--outputs all`: every feature of the output at every position; slots are then feature
    ids."""

    @cached_property
    def norms(self) -> Float[Tensor, "unique"]:
        """Of the rows."""
        return self._by_part(lambda rows: rows.norm(dim=-1))

    def pushed(self, W_O: Float[Tensor, "d_head d_model"]) -> Float[Tensor, "unique d_head"]:
        """The rows through one head's output weights."""
        return self._by_part(lambda rows: rows @ W_O.T)

    def _by_part(self, work: Callable[[Tensor], Tensor]) -> Tensor:
        rows = self.reads.rows
        parts = [work(rows[ids]) for ids in self.used.split(max(1, _CHUNK // rows.shape[1]))]
        return torch.cat(parts) if parts else work(rows[:0])


class OvEdges(NamedTuple):
    """The OV side of some edges of one head, one row an edge."""

    pairs: PairTopK | None
    completeness: Float[Tensor, "edge"]
    v_norms: Float[Tensor, "edge top"]
    v_top: Int[Tensor, "edge top"]
    o_reads: Float[Tensor, "edge top"]
    o_top: Int[Tensor, "edge top"]
    o_totals: Float[Tensor, "edge top kind"]
    v_parts: Int[Tensor, "edge part"]
    """The members of kinds that write most, and the norms of what they write."""
    v_part_norms: Float[Tensor, "edge part"]


def output_side(reads: Reads, *, every: bool) -> OutputSide:
    """What all heads share of the outputs, for a prompt and layer."""
    if every:
        used = torch.arange(len(reads.rows), device=reads.rows.device)
        return OutputSide(reads, used, reads.active.ids, True)
    used, columns = reads.active.ids.unique(return_inverse=True)
    return OutputSide(reads, used, columns, False)


class OvHead(NamedTuple):
    """What all edges of one head share."""

    value: Side
    output: OutputSide
    table: Float[Tensor, "unique d_head"]
    """W r_t of the head's `written` matrix, without the reads' scale."""
    written: Float[Tensor, "active_plus_1"]
    """|W W_V N_j[g]| of every active value feature, and a 0."""
    parts_written: Float[Tensor, "pos part"]
    """The same of the members of kinds."""
    own_written: Float[Tensor, "pos"]
    """|W v_j| of the model's own value vector."""
    missed: Float[Tensor, "pos d_head"]
    """The sum of the value components less the model's own value vector."""
    scale: Float[Tensor, "pos"]
    """What M_i multiplies a row by."""


class _Lists(NamedTuple):
    """The output features of some queries in one head."""

    rows: Float[Tensor, "list slot d_head"]
    sizes: Float[Tensor, "list slot"]
    """|r_t|."""
    counts: Int[Tensor, "list"]
    at: Int[Tensor, "edge"]
    """The list of each edge."""
    scale: Float[Tensor, "edge"]
    """What the list still has to be multiplied by."""


def ov_head(
    writes: Writes,
    head: int,
    value: Side,
    own_value: Float[Tensor, "pos d_head"],
    output: OutputSide,
    scale: Float[Tensor, "pos"],
    table: Float[Tensor, "unique d_head"] | None = None,
) -> OvHead:
    """Project the output features into one head, and measure what its values write; `scale`: what
    the norm after attention multiplies a row by; `table`, if it is there already: the rows through
    the head's weights."""
    triangle, prepared = writes.triangles[head].T, value.prepared
    # values are neither normed nor rotated: a feature writes its direction times its coefficient
    written = (value.table.to(triangle) @ triangle).norm(dim=-1)
    return OvHead(
        value,
        output,
        output.pushed(writes.written[head]) if table is None else table,
        pad(written[prepared.columns] * prepared.coefs.abs().to(written), (0, 1)),
        (value.parts.to(triangle) @ triangle).norm(dim=-1),
        lengths(own_value @ triangle, torch.finfo(own_value.dtype).eps),
        (value.whole - own_value).to(own_value),
        scale,
    )


def _lists(head: OvHead, q_pos: Int[Tensor, "edge"]) -> _Lists:
    output, reads = head.output, head.output.reads
    if output.every:
        assert reads.pos_scale is not None
        rows, counts = head.table[None], q_pos.new_full((1,), len(head.table))
        return _Lists(rows, output.norms[None], counts, q_pos * 0, reads.pos_scale[q_pos])
    queries, at = q_pos.unique(return_inverse=True)
    entries, inside = reads.active.entries(queries)
    ones = torch.ones_like(q_pos, dtype=head.table.dtype)
    if not len(output.columns):
        empty = head.table.new_zeros(*entries.shape, head.table.shape[1])
        return _Lists(empty, empty[..., 0], reads.active.counts[queries], at, ones)
    scale = reads.scale[entries].where(inside, 0)
    rows = head.table[output.columns[entries]] * scale[..., None]
    sizes = output.norms[output.columns[entries]] * scale.abs()
    return _Lists(rows, sizes, reads.active.counts[queries], at, ones)


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
    keys, k_at = k_pos.unique(return_inverse=True)
    value, lists = head.value.at(keys), _lists(head, q_pos)
    pattern = pattern * head.scale[q_pos]
    n_v, n_o = value.counts[k_at], lists.counts[lists.at]
    weight = pattern * lists.scale
    pairs = topk_pairs(
        value.features,
        lists.rows,
        value.counts,
        lists.counts,
        topk,
        left_at=k_at,
        right_at=lists.at,
        scale=weight,
    )
    whole = value.whole.to(lists.rows)
    reads = weight[:, None] * read_lists(lists.rows, lists.at, whole[k_at])
    gap = read_lists(lists.rows, lists.at, head.missed[k_pos]) * lists.scale[:, None]
    size = lists.sizes[lists.at] * lists.scale[:, None].abs()
    worst = relative(gap.abs(), size * head.own_written[k_pos, None])
    entries, inside = head.value.prepared.components.active.entries(keys)
    written = pattern[:, None] * head.written[entries].where(inside, 0)[k_at]
    v_top, o_top = strongest(written, n_v, top_marginals), strongest(reads, n_o, top_marginals)
    kept = lists.rows[lists.at[:, None], o_top.clamp(min=0)]
    kinds = value.kinds[k_at].to(kept)
    o_totals = einsum(weight, kept, kinds, "edge, edge o d, edge kind d -> edge o kind")
    o_totals = o_totals.masked_fill((o_top < 0)[..., None], 0)
    return OvEdges(
        pairs,
        worst.amax(1),
        at_slots(written, v_top),
        v_top,
        at_slots(reads, o_top),
        o_top,
        o_totals,
        *_strongest_parts(head.parts_written[k_pos], pattern, top_marginals),
    )


def _strongest_parts(
    written: Float[Tensor, "edge part"], pattern: Float[Tensor, "edge"], n: int
) -> tuple[Tensor, Tensor]:
    """The members of kinds that write most through each edge, and the norms of that."""
    n = min(n, written.shape[1])
    if not n:
        none = written.new_zeros(len(written), 0)
        return none.long(), none
    counts = torch.full_like(pattern, written.shape[1], dtype=torch.long)
    top = strongest(written, counts, n)
    return top, at_slots(written, top) * pattern[:, None].abs()


def block_completeness(
    rebuilt: Float[Tensor, "pos d_model"], block: Float[Tensor, "pos d_model"], output: OutputSide
) -> Float[Tensor, "pos"]:
    """|r_t . rebuilt - r_t . block| / (|r_t| |block|) of every position, the worst over its output
    features."""
    gap, size, rows = rebuilt - block, block.norm(dim=-1), output.reads.rows
    if output.every:
        found = block.new_zeros(len(block))
        for ids in output.used.split(max(1, _CHUNK // max(len(block), rows.shape[1]))):
            entry = (gap @ rows[ids].T).abs()
            error = relative(entry, size[:, None] * output.norms[ids])
            found = found.maximum(error.amax(1))
        return found
    active, step = output.reads.active, max(1, _CHUNK // rows.shape[1])
    found = block.new_zeros(len(block))
    parts = (part.split(step) for part in (active.ids, active.positions, output.columns))
    for ids, positions, columns in zip(*parts, strict=True):
        entry = (rows[ids] * gap[positions]).sum(-1).abs()
        error = relative(entry, output.norms[columns] * size[positions])
        found.scatter_reduce_(0, positions, error, "amax")
    return found
