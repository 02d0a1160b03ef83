"""Whatever is kept of equal numbers is the lower id, on every path and in any chunks (V14)."""

import numpy as np
import pytest
import torch

from headattr.attribution.lists import strongest
from headattr.basis.unembed import _largest
from headattr.edges import parse_edge_rule, select_edges

TIED = [3.0, 2, 3, 2, 1, 1]
KEPT = {1: [0], 2: [0, 2], 3: [0, 1, 2], 4: [0, 1, 2, 3], 5: [0, 1, 2, 3, 4]}
"""The ids of the k largest of TIED, ascending."""


@pytest.mark.parametrize("k", KEPT)
@pytest.mark.parametrize("rows", [1, 2, 300])
def test_predictions_marginals_and_keys_of_equal_size_go_to_the_lower_id(k: int, rows: int) -> None:
    numbers = torch.tensor([TIED] * rows, dtype=torch.float64)
    assert [sorted(row) for row in _largest(numbers, k).tolist()] == [KEPT[k]] * rows
    signs = torch.tensor([1.0, -1, -1, 1, -1, 1])
    counts = torch.full((rows,), len(TIED))
    ordered = sorted(KEPT[k], key=lambda i: (-TIED[i], i))
    assert strongest(signs * numbers, counts, k).tolist() == [ordered] * rows
    q_pos, k_pos = select_edges(
        numbers.numpy(),
        parse_edge_rule(f"top:{k}"),
        flagged=np.zeros(6, bool),
        keep_sinks=False,
        q_allowed=np.ones(rows, bool),
        k_allowed=np.ones(6, bool),
        mask=np.ones((rows, 6), bool),
    )
    assert k_pos.tolist() == KEPT[k] * rows
    assert q_pos.tolist() == np.repeat(np.arange(rows), k).tolist()


def test_numbers_that_are_all_equal_keep_the_first() -> None:
    zeros, counts = torch.zeros(3, 40), torch.tensor([40, 5, 0])
    assert strongest(zeros, counts, 8).tolist() == [
        [*range(8)],
        [0, 1, 2, 3, 4, -1, -1, -1],
        [-1] * 8,
    ]
    assert _largest(zeros, 16).tolist() == [[*range(16)]] * 3
