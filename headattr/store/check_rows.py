"""Edges of a layer, block by block: in order, in range, and what of their numbers hangs together.

What a number alone cannot tell, its neighbours can: parts add up to their sum, the weights of a row
are the softmax of its scores, contrasts differ as scores do, strengths fall, rounded numbers are
round.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.store.coding import SUM_BITS, decode_slots, falling_problem, round_values
from headattr.store.columns import Column
from headattr.store.view import LayerView, Where

ROUNDING = 4e-6
"""Of a sum of float32 numbers, relative to the sum of their sizes."""
_KEPT = ROUNDING + 2.0 ** -(SUM_BITS + 1)
"""The same where the numbers are kept rounded."""
_LOOSE, _OF_SIZE = 1e-2, 1e-5
"""Of scores that were computed twice: what they may differ by, and in parts of scale |Q| |K|."""
_SHARE = 1e-3
"""What weights that should sum to 1 may lack or have."""
SUMS = (
    ("qk/totals", "score", "completeness", ROUNDING),
    ("qk/q_contrast_totals", "score_contrast", "contrast_completeness", _KEPT),
    ("qk/k_contrast_totals", "score_contrast", "contrast_completeness", _KEPT),
)
"""Dataset of parts, what they sum to, the error that was measured, and how parts are rounded."""


class Block(NamedTuple):
    """Some edges of a layer."""

    view: LayerView
    plan: dict[str, Any]
    rows: slice
    where: Where

    def read(self, name: str) -> NDArray[Any]:
        """These rows of a dataset."""
        return self.view.dataset(name)[self.rows]


def block_problems(block: Block, largest: dict[str, float]) -> set[str]:
    """All that is wrong with some edges whose order is right; `largest`: measured errors."""
    return (
        _value_problems(block)
        | _sum_problems(block, largest)
        | _slot_problems(block)
        | _top_problems(block)
        | _row_problems(block)
    )


def columns_of(view: LayerView) -> list[Column]:
    """All columns of a layer's edges but the keys."""
    every = (*view.edge_columns.values(), *view.ov_columns.values())
    return [*every, *(column.first for column in every if column.kind == "falling")]


def _value_problems(block: Block) -> set[str]:
    """Numbers that are not finite, or not rounded as they should be; errors below 0."""
    problems = set()
    for column in columns_of(block.view):
        found = block.read(column.dataset)
        if found.dtype.kind != "f":
            continue
        if not np.isfinite(found).all():
            problems.add(f"{column.dataset} has non-finite values")
        elif column.bits is not None and (round_values(found, column.bits) != found).any():
            problems.add(f"{column.dataset} is not rounded to {column.bits} bits")
        if column.dataset.endswith("completeness") and (found < 0).any():
            problems.add(f"{column.dataset} is below 0")
    return problems


def _sum_problems(block: Block, largest: dict[str, float]) -> set[str]:
    """Sums that do not add up."""
    problems = set()
    for name, total, errors, kept in SUMS:
        parts = block.read(name).astype(np.float64)
        axes = tuple(range(1, parts.ndim))
        gap = np.abs(parts.sum(axes) - block.read(total))
        rounding = kept * np.abs(parts).sum(axes)
        if (gap > largest[errors] * 1e3 + rounding).any():
            problems.add(f"{name} does not sum to the {total}")
    if (cap := block.plan["softcap"]) is not None:
        gap = np.abs(block.read("score_capped") - cap * np.tanh(block.read("score") / cap))
        if (gap > ROUNDING * cap).any():
            problems.add(f"score_capped is not the score under the cap of {cap}")
    features, share = block.read("qk/totals")[:, 0, 0], block.read("feature_share")
    if (np.sign(features) * np.sign(share) < 0).any():
        problems.add("feature_share has another sign than its totals")
    return problems


def _slot_problems(block: Block) -> set[str]:
    """Slots beyond the active list of their position; codes that are none."""
    view, where = block.view, block.where
    basis, output = (
        None if index is None else np.diff(view.source(index).ptr)
        for index in (view.basis, view.output)
    )
    at = {"q": where.begin + where.q_pos, "k": where.begin + where.k_pos}
    lengths = {side: basis[positions] for side, positions in at.items() if basis is not None}
    lengths["part"] = np.full(len(where.q_pos), len(view.parts))
    if output is not None and not view.attrs["every_output"]:
        lengths["o"] = output[at["q"]]
    problems = set()
    for column in (*view.edge_columns.values(), *view.ov_columns.values()):
        if column.kind in lengths:
            found = decode_slots(block.read(column.dataset))
            if (found.max(1, initial=-1) >= lengths[column.kind]).any():
                problems.add(f"{column.dataset} points beyond an active list")
        if column.kind == "falling":
            problems |= _code_problems(block, column)
    return problems


def _code_problems(block: Block, column: Column) -> set[str]:
    """Codes that no writer writes, and pairs that have a value but no features."""
    table, codes = column.dataset.split("/")[0], block.read(column.dataset)
    first = block.read(column.first.dataset)
    if found := falling_problem(first, codes):
        return {f"{column.dataset} {found}"}
    sides = ("q_slots", "k_slots") if table == "qk" else ("v_slots", "o_slots")
    one, other = (decode_slots(block.read(f"{table}/{side}")) for side in sides)
    if ((one < 0) != (other < 0)).any():
        return {f"{table}: a pair has one feature"}
    if (np.diff((one >= 0).astype(int)) > 0).any():
        return {f"{table}: there are pairs behind the last one"}
    if ((one < 0) & (codes >> 1 != 0x7FFF)).any():
        return {f"{column.dataset} has a value where there is no pair"}
    order = np.sort(np.where(one < 0, -1 - np.arange(one.shape[1]), (one << 32) | other), axis=1)
    return {f"{table}: a pair is there twice"} if (np.diff(order) == 0).any() else set()


def _top_problems(block: Block) -> set[str]:
    """Strongest features that are there twice, out of order, or strong without being there."""
    problems = set()
    for role in block.view.roles:
        columns = block.view.edge_columns if role.table == "qk" else block.view.ov_columns
        name = columns[role.top].dataset
        slots = decode_slots(block.read(name))
        if (np.diff((slots >= 0).astype(int)) > 0).any():
            problems.add(f"{name} has features behind the last one")
        order = np.sort(np.where(slots < 0, -1 - np.arange(slots.shape[1]), slots), axis=1)
        if (np.diff(order) == 0).any():
            problems.add(f"{name} has a feature twice")
        if role.strength == "o_reads":
            continue
        strong = columns[role.strength].dataset
        sizes = np.abs(block.read(strong))
        if (sizes[slots < 0] != 0).any():
            problems.add(f"{strong} has a number where there is no feature")
        if (np.diff(np.where(slots < 0, 0, sizes)) > 0).any():
            problems.add(f"{strong} does not fall")
    return problems


def _row_problems(block: Block) -> set[str]:
    """Weights that are not the softmax of their scores, or are more than the whole; contrasts that
    differ otherwise than the scores."""
    view, where = block.view, block.where
    capped = "score_capped" if "softcap" in view.attrs else "score"
    score, pattern = (block.read(name).astype(np.float64) for name in (capped, "pattern"))
    contrast = block.read("score_contrast").astype(np.float64)
    at = np.stack([where.prompt, where.head, where.q_pos])
    starts = np.flatnonzero((np.diff(at, prepend=-1) != 0).any(0))
    if not np.isfinite(np.stack([score, pattern, contrast])).all():
        return set()  # said already
    problems = set()
    allowed = np.maximum.reduceat(_LOOSE + _OF_SIZE * _sizes(block), starts)
    weighed = pattern > 1e-20
    level = np.log(np.where(weighed, pattern, 1.0)) - score
    if (_gap(level, weighed, starts) > allowed).any():
        problems.add("pattern is not the softmax of the scores")
    if (_gap(score - contrast, np.ones(len(score), bool), starts) > allowed).any():
        problems.add("score_contrast does not differ as the scores do")
    query = (where.begin + where.q_pos)[starts]
    sinks = view.dataset("sink_share")[:][query, where.head[starts]]
    on_sink = view.dataset("flagged")[:][where.begin + where.k_pos]
    swallowed = np.add.reduceat(np.where(on_sink, pattern, 0), starts)
    rest = np.add.reduceat(np.where(on_sink, 0, pattern), starts)
    if (pattern < 0).any() or (swallowed + rest > 1 + _SHARE).any():
        problems.add("pattern is below 0, or more than 1 in a row")
    if (swallowed > sinks + _SHARE).any() or (rest + sinks > 1 + _SHARE).any():
        problems.add("sink_share is not what the pattern and flagged say")
    return problems


def _sizes(block: Block) -> NDArray[np.float64]:
    """scale |Q| |K| of each edge, as far as its numbers say."""
    totals, share = block.read("qk/totals").astype(np.float64), block.read("feature_share")
    known = np.abs(share) > 1e-6
    whole = np.abs(totals).sum((1, 2))
    return np.where(known, np.abs(totals[:, 0, 0] / np.where(known, share, 1)), whole) + whole


def _gap(
    values: NDArray[np.float64], counted: NDArray[np.bool_], starts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """How far apart the values of each row are; 0 where fewer than two count."""
    high = np.maximum.reduceat(np.where(counted, values, -np.inf), starts)
    low = np.minimum.reduceat(np.where(counted, values, np.inf), starts)
    return np.where(np.isfinite(high), high - low, 0.0)
