"""What to attribute in one layer of one prompt."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from headattr.attribution.blocks import Rank
from headattr.attribution.pushed import Pushed
from headattr.basis.component import Components, Reads
from headattr.basis.rows import Matrix
from headattr.model.capture import LayerCapture
from headattr.model.head import HeadWeights
from headattr.tables import TOP_MARGINALS, EdgePart

SINK_RATIO = 10.0
"""A position whose residual norm is over this many medians swallows attention."""

Selector = Callable[[int, range, NDArray[np.floating]], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""(head, query positions, their pattern [q_pos, k_pos], keys from 0 to the last query) -> query and
key positions of the kept edges of these queries, in order."""

Keep = Callable[[EdgePart], None]
"""What is done with finished edges, in order."""


@dataclass(frozen=True)
class LayerTask:
    """What to attribute in one layer of one prompt."""

    weights: HeadWeights
    kept: LayerCapture
    components: Components
    directions: Matrix
    output: Reads | None
    every_output: bool
    heads: tuple[int, ...]
    """Ascending."""
    select: Selector
    topk: int
    rank: Rank = "value"
    """What pairs and kept features are the strongest by."""
    top_marginals: int = TOP_MARGINALS
    memory: int = 1 << 28
    """Bytes for the temporaries of a block; bounds the memory, never the result."""
    pushed: Pushed | None = None
    """`directions` through `read_maps`, kept from prompt to prompt; by default made for each."""
    pushed_output: Pushed | None = None
    """The output's rows through `written_maps`, likewise."""
    tolerance: float = math.inf
    """How far the rebuilt pattern may be off before the prompt is refused."""


def swallow_attention(resid_pre: Float[Tensor, "pos d_model"]) -> NDArray[np.bool_]:
    """The first position, and any whose residual norm is over 10 times the prompt's median."""
    norms = resid_pre.norm(dim=-1)
    flagged = norms > SINK_RATIO * norms.median()
    flagged[0] = True
    return flagged.cpu().numpy()
