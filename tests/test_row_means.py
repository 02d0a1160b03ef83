"""row_means: the fast paths give what the loops give, whatever is active where."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headattr.kernels.row_means import batched, compiled, dispatch, naive
from headattr.kernels.row_means.batched import Keys, Rows

PROFILE = settings(max_examples=80, deadline=None, derandomize=True)
FAST = {"batched": batched, "compiled": compiled, "dispatch": dispatch}


@st.composite
def cases(draw: Callable[[Any], Any]) -> dict[str, Any]:
    """A few rows over keys with lists of odd lengths, empty ones too, whose features repeat."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    positions, d, features = draw(st.integers(1, 7)), draw(st.integers(1, 9)), 5
    counts = torch.randint(0, features + 1, (positions,), generator=generator)
    columns = torch.cat(
        [torch.randperm(features, generator=generator)[: int(n)].sort().values for n in counts]
    )
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    where = torch.arange(positions).repeat_interleave(counts)
    order = columns.argsort(stable=True)
    vectors = torch.randn(len(columns), d, generator=generator, dtype=torch.float64)
    keys = Keys(vectors, ptr, columns, order, columns[order] * positions + where[order])
    start = draw(st.integers(0, positions - 1))
    shape = (positions - start, positions)
    weight, ratio = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
    seen = torch.arange(positions) <= torch.arange(start, positions)[:, None]
    edges = seen.nonzero()[torch.rand(int(seen.sum()), generator=generator) < 0.7]
    q_at, k_pos = edges.T.contiguous()
    slots = torch.randint(-1, features, (2, len(q_at), 4), generator=generator)
    k_slots = torch.minimum(slots[1], counts[k_pos][:, None] - 1)
    left = torch.randn(len(weight), features, d, generator=generator, dtype=torch.float64)
    return {
        "left": left,
        "keys": keys,
        "rows": Rows(start, weight * seen, ratio),
        "edges": (q_at, k_pos),
        "q_slots": slots[0].where(k_slots >= 0, -1).clamp(min=-1),
        "k_slots": k_slots.where(slots[0] >= 0, -1),
    }


@PROFILE
@given(cases(), st.sampled_from([1, 3, 1 << 21]))
def test_fast_and_naive_are_equal_to_rounding(case: dict[str, Any], chunk: int) -> None:
    keys, rows, edges = case["keys"], case["rows"], case["edges"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_CHUNK", chunk)
        wanted = naive.differences(keys, rows, *edges, case["k_slots"])
        slots = case["q_slots"], case["k_slots"]
        contrasts = naive.pair_contrasts(case["left"], keys, rows, *edges, *slots)
        for name, path in FAST.items():
            found = path.differences(keys, rows, *edges, case["k_slots"])
            torch.testing.assert_close(found, wanted, atol=1e-13, rtol=1e-13, msg=name)
            found = path.pair_contrasts(case["left"], keys, rows, *edges, *slots)
            torch.testing.assert_close(found, contrasts, atol=1e-12, rtol=1e-12, msg=name)


@PROFILE
@given(cases(), st.sampled_from([1, 3, 1 << 17]))
def test_sums_by_feature_are_equal_to_rounding(case: dict[str, Any], chunk: int) -> None:
    keys, rows, Q = case["keys"], case["rows"], case["left"][:, 0]
    wanted = naive.by_feature(keys, rows.weight, Q, 6)
    with pytest.MonkeyPatch.context() as patch:
        for name, path in FAST.items():
            if path is not dispatch:
                patch.setattr(path, "_CHUNK", chunk)
            found = path.by_feature(keys, rows.weight, Q, 6)
            torch.testing.assert_close(found, wanted, atol=1e-13, rtol=1e-13, msg=name)


@PROFILE
@given(cases())
def test_the_order_of_the_edges_does_not_matter(case: dict[str, Any]) -> None:
    keys, rows, (q_at, k_pos) = case["keys"], case["rows"], case["edges"]
    order = torch.randperm(len(q_at), generator=torch.Generator().manual_seed(1))
    slots = case["q_slots"], case["k_slots"]
    whole = compiled.pair_contrasts(case["left"], keys, rows, q_at, k_pos, *slots)
    mixed = q_at[order], k_pos[order], *(part[order] for part in slots)
    found = compiled.pair_contrasts(case["left"], keys, rows, *mixed)
    assert torch.equal(found, whole[order])
