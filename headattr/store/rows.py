"""One edge as it is kept: numpy rows, in slots of its positions' active lists."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.edges import Edge
from headattr.store.columns import edge_columns, ov_columns


class Active(NamedTuple):
    """The active features of one position."""

    features: NDArray[np.uint32]
    acts: NDArray[np.float32]


class OvRow(NamedTuple):
    """The OV columns of one edge."""

    values: NDArray[np.float32]
    v_slots: NDArray[np.int64]
    o_slots: NDArray[np.int64]
    completeness: float
    block_completeness: float
    v_top: NDArray[np.int64]
    v_norms: NDArray[np.float32]
    o_top: NDArray[np.int64]
    o_reads: NDArray[np.float32]
    o_totals: NDArray[np.float32]
    v_parts: NDArray[np.integer]
    v_part_norms: NDArray[np.floating]


class EdgeRow(NamedTuple):
    """All that is kept of one edge, in slots of its positions' active lists."""

    edge: Edge
    tokens: tuple[str, str]
    flagged: bool
    """The key swallows attention."""
    kinds: tuple[str, ...]
    q_active: Active
    k_active: Active
    o_active: Active | None
    """Output features at the query; None where slots are ids already."""
    ov: OvRow | None
    score: float
    score_capped: float
    score_contrast: float
    pattern: float
    completeness: float
    contrast_completeness: float
    feature_share: float
    totals: NDArray[np.floating]
    q_contrast_totals: NDArray[np.floating]
    k_contrast_totals: NDArray[np.floating]
    values: NDArray[np.floating]
    pair_contrasts: NDArray[np.floating]
    q_slots: NDArray[np.integer]
    k_slots: NDArray[np.integer]
    q_top: NDArray[np.integer]
    q_marginals: NDArray[np.floating]
    q_contrasts: NDArray[np.floating]
    q_ablations: NDArray[np.floating]
    k_top: NDArray[np.integer]
    k_marginals: NDArray[np.floating]
    k_contrasts: NDArray[np.floating]
    k_ablations: NDArray[np.floating]
    parts: tuple[tuple[str, str], ...]
    """(kind, name) of the members of kinds that have several."""
    q_parts: NDArray[np.integer]
    q_part_marginals: NDArray[np.floating]
    q_part_contrasts: NDArray[np.floating]
    k_parts: NDArray[np.integer]
    k_part_marginals: NDArray[np.floating]
    k_part_contrasts: NDArray[np.floating]


def fault(row: EdgeRow) -> str | None:
    """What no writer writes: the first column that is not finite, or points beyond an active
    list."""
    q, k, o = (
        active and len(active.features) for active in (row.q_active, row.k_active, row.o_active)
    )
    lengths = {"q": q, "k": k, "o": o, "part": len(row.parts)}
    for table, columns in (
        (row, edge_columns(capped=True, parts=True, rank="value")),
        (row.ov, ov_columns(parts=True)),
    ):
        for name, column in columns.items() if table is not None else ():
            value, longest = getattr(table, name), lengths.get(column.kind)
            if not np.isfinite(value).all():
                return f"{name} is not finite"
            if longest is not None and np.max(value, initial=-1) >= longest:
                return f"{name} points beyond an active list"
    return None
