"""One edge as it is kept: numpy rows, in slots of its positions' active lists."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.edges import Edge


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


class EdgeRow(NamedTuple):
    """All that is kept of one edge, in slots of its positions' active lists."""

    edge: Edge
    tokens: tuple[str, str]
    score: float
    pattern: float
    completeness: float
    feature_share: float
    flagged: bool
    """The key swallows attention."""
    kinds: tuple[str, ...]
    totals: NDArray[np.floating]
    values: NDArray[np.floating]
    q_slots: NDArray[np.integer]
    k_slots: NDArray[np.integer]
    q_top: NDArray[np.integer]
    q_marginals: NDArray[np.floating]
    k_top: NDArray[np.integer]
    k_marginals: NDArray[np.floating]
    q_active: Active
    k_active: Active
    o_active: Active | None
    """Output features at the query; None where slots are ids already."""
    ov: OvRow | None
