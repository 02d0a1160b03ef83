"""The numpy tables that attribution fills and the store writes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

TOP_MARGINALS = 8
"""How many features a side keep their marginal in the store."""


class OvTable(NamedTuple):
    """What the edges of one layer of one prompt move, one row an edge."""

    values: NDArray[np.floating]
    """[edge, k] pair values, |value| falling; 0 where a slot is -1."""
    v_slots: NDArray[np.integer]
    o_slots: NDArray[np.integer]
    """Slot in the q_pos active list of the output; with `--outputs all` the output feature's id."""
    completeness: NDArray[np.floating]
    """[edge] worst over output features, relative to |r_t| |w_ij|."""
    v_top: NDArray[np.integer]
    """[edge, 8] slots of the value features with the largest |w_ij,g|."""
    v_norms: NDArray[np.floating]
    o_top: NDArray[np.integer]
    """[edge, 8] output features with the largest |read|, slots or ids as o_slots."""
    o_reads: NDArray[np.floating]
    o_totals: NDArray[np.floating]
    """[edge, 8, kind] each read split over the kinds of value component."""
    v_parts: NDArray[np.integer]
    """[edge, part] the members of kinds with the largest |w_ij,part|, at most 8."""
    v_part_norms: NDArray[np.floating]
    block_completeness: NDArray[np.floating]
    """[q_pos] for the whole block, all heads and keys."""


class LayerTable(NamedTuple):
    """Everything kept of one layer of one prompt; edges by head, then q_pos, then k_pos."""

    layer: int
    heads: NDArray[np.int32]
    """The heads asked for."""
    head_ptr: NDArray[np.int64]
    """[head + 1] where the edges of each begin."""
    q_pos: NDArray[np.int64]
    k_pos: NDArray[np.int64]
    score: NDArray[np.floating]
    """The model's own, before any cap and mask."""
    score_capped: NDArray[np.floating]
    """What softmax sees."""
    score_contrast: NDArray[np.floating]
    """score_capped less the row's mean of it under the pattern."""
    pattern: NDArray[np.floating]
    completeness: NDArray[np.floating]
    feature_share: NDArray[np.floating]
    """T_ff / (scale |Q| |K|), signed."""
    kinds: tuple[str, ...]
    totals: NDArray[np.floating]
    """[edge, q_kind, k_kind], sums to the score."""
    contrast_completeness: NDArray[np.floating]
    q_contrast_totals: NDArray[np.floating]
    """[edge, kind], sums to score_contrast."""
    k_contrast_totals: NDArray[np.floating]
    """[edge, kind + 1], the last being `elsewhere`; sums to score_contrast."""
    values: NDArray[np.floating]
    pair_contrasts: NDArray[np.floating]
    q_slots: NDArray[np.integer]
    k_slots: NDArray[np.integer]
    q_top: NDArray[np.integer]
    """[edge, 8] slots of the query features with the largest |marginal| (|contrast|), -1 where
    there are fewer."""
    q_marginals: NDArray[np.floating]
    q_contrasts: NDArray[np.floating]
    q_ablations: NDArray[np.floating]
    k_top: NDArray[np.integer]
    k_marginals: NDArray[np.floating]
    k_contrasts: NDArray[np.floating]
    k_ablations: NDArray[np.floating]
    parts: tuple[tuple[str, str], ...]
    """(kind, name) of the members of kinds that have several: the attention output of layer 3."""
    q_parts: NDArray[np.integer]
    """[edge, part] the strongest of them, at most 8, as the features are."""
    q_part_marginals: NDArray[np.floating]
    q_part_contrasts: NDArray[np.floating]
    k_parts: NDArray[np.integer]
    k_part_marginals: NDArray[np.floating]
    k_part_contrasts: NDArray[np.floating]
    n_nonfinite: int
    flagged: NDArray[np.bool_]
    """[pos] positions that swallow attention: the first, and those of over 10 times the median
    norm."""
    sink_share: NDArray[np.floating]
    """[head, q_pos] pattern mass on flagged positions."""
    share_sums: NDArray[np.float64]
    """[head, 4] over all allowed edges: sum s^2, sum (s - T_ff)^2, and both with row means
    removed."""
    pattern_error: float
    ov: OvTable | None


class EdgePart(NamedTuple):
    """Finished edges of one head of one layer of one prompt, in order; columns by field of
    `LayerTable` and `OvTable`."""

    head: int
    columns: dict[str, NDArray[Any]]
    ov: dict[str, NDArray[Any]] | None


class LayerFacts(NamedTuple):
    """What a layer of a prompt has once; fields as in `LayerTable` and `OvTable`."""

    layer: int
    heads: NDArray[np.int32]
    kinds: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    n_nonfinite: int
    flagged: NDArray[np.bool_]
    sink_share: NDArray[np.floating]
    share_sums: NDArray[np.float64]
    pattern_error: float
    block_completeness: NDArray[np.floating] | None


def table_of(facts: LayerFacts, parts: Sequence[EdgePart]) -> LayerTable:
    """All parts of a layer as one table; there is at least one, which may be empty."""
    counts = [
        sum(len(part.columns["q_pos"]) for part in parts if part.head == head)
        for head in facts.heads
    ]
    ov = None
    if facts.block_completeness is not None:
        moved = [part.ov for part in parts if part.ov is not None]
        ov = OvTable(block_completeness=facts.block_completeness, **_joined(moved))
    given: dict[str, Any] = facts._asdict()
    del given["block_completeness"]
    head_ptr = np.cumsum([0, *counts], dtype=np.int64)
    return LayerTable(
        head_ptr=head_ptr, ov=ov, **given, **_joined([part.columns for part in parts])
    )


def _joined(parts: Sequence[dict[str, NDArray[Any]]]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def non_finite(columns: Mapping[str, Any]) -> str | None:
    """The first column that holds NaN, infinity or a number beyond float32, in which the store
    keeps it."""
    for name, column in columns.items():
        if isinstance(column, np.ndarray) and column.dtype.kind == "f":
            largest = np.finfo(column.dtype if name == "share_sums" else np.float32).max
            if not (np.abs(column) <= largest).all():
                return name
    return None
