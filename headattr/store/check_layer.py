"""A layer of a shard: is it what the manifest planned, are its edges in order, do they add up?"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.errors import StoreError
from headattr.store.check_lists import index_problems
from headattr.store.check_rows import SUMS, Block, block_problems, columns_of
from headattr.store.format import split_keys
from headattr.store.shard import Shard
from headattr.store.spread import Spread
from headattr.store.view import LayerView

_ROWS = 1 << 16
"""Edges that are checked at once."""


class Errors(NamedTuple):
    """The errors that edges carry, and how many edges were read of each layer."""

    completeness: Spread
    contrast: Spread
    ov_completeness: Spread
    block: Spread
    pattern: Spread
    edges: list[int]


def no_errors() -> Errors:
    """Of no edges yet."""
    return Errors(Spread(), Spread(), Spread(), Spread(), Spread(), [])


def layer_problems(
    shard: Shard, plan: dict[str, Any], rank: str, where: str, errors: Errors
) -> list[str]:
    """What is wrong with a layer; its errors are added to `errors`. Raises StoreError where its
    edges cannot be told apart."""
    view = shard.layer(plan["layer"])
    groups, edges = len(shard.ids) * len(plan["heads"]), len(view)
    ptr = view.group_ptr
    if len(ptr) != groups + 1 or ptr[0] or ptr[-1] != edges or (np.diff(ptr) < 0).any():
        raise StoreError(f"{where}: the edge index does not fit its edges")
    problems = _plan_problems(view, plan, rank) | _once_problems(view, len(shard.ids), shard.ptr)
    for column in columns_of(view):
        if len(view.dataset(column.dataset)) != edges:
            problems.add(f"{column.dataset} does not have {edges} rows")
    if problems:
        return sorted(problems)
    before = (-1, -1)
    largest = {name: _largest(view.dataset(name)) for _, _, name, _ in SUMS}
    for start in range(0, edges, _ROWS):
        rows = slice(start, min(start + _ROWS, edges))
        out_of_order, before = _order_problems(shard, view, plan, rows, before)
        problems |= out_of_order
        if not out_of_order:
            problems |= block_problems(Block(view, plan, rows, view.where(rows)), largest)
    if not problems:
        problems |= set(index_problems(view))
    errors.edges.append(edges)
    _add_errors(view, plan, errors)
    return sorted(problems)


def _plan_problems(view: LayerView, plan: dict[str, Any], rank: str) -> set[str]:
    """Attributes that are not what the manifest says of the layer."""
    wanted = {
        **{name: plan[name] for name in ("heads", "basis", "every_output", "window", "softcap")},
        "output": -1 if plan["output"] is None else plan["output"],
        "read": plan["read"] or "",
        "rank": rank,
    }
    held = {name: view.attrs.get(name) for name in wanted} | {"heads": view.heads}
    wrong = {n for n, value in wanted.items() if value != held[n]}
    if view.dataset("qk/totals").shape[1:] != (len(view.kinds),) * 2:
        wrong.add("kinds")
    return {f"its {name} is not that of the manifest" for name in wrong}


def _once_problems(view: LayerView, prompts: int, ptr: NDArray[np.int64]) -> set[str]:
    """What a prompt or a position has once: lengths, ranges, and that a first position is
    flagged."""
    positions, heads = int(ptr[-1]), len(view.heads)
    shapes = {
        "flagged": (positions,),
        "sink_share": (positions, heads),
        "share_sums": (prompts, heads, 4),
        "pattern_error": (prompts,),
    }
    if view.output is not None:
        shapes["ov/block_completeness"] = (positions,)
    problems = set()
    for name, shape in shapes.items():
        values = view.dataset(name)[:]
        if values.shape != shape:
            problems.add(f"{name} has the shape {list(values.shape)}, expected {list(shape)}")
        elif values.dtype.kind == "f" and not np.isfinite(values).all():
            problems.add(f"{name} has non-finite values")
        elif values.dtype.kind == "f" and (values < 0).any():
            problems.add(f"{name} is below 0")
        elif name == "flagged" and not values[ptr[:-1]].all():
            problems.add("the first position of a prompt is not flagged")
    return problems


def _largest(dataset: Any) -> float:
    parts = range(0, len(dataset), _ROWS)
    return max((float(dataset[i : i + _ROWS].max(initial=0)) for i in parts), default=0.0)


def _order_problems(
    shard: Shard, view: LayerView, plan: dict[str, Any], rows: slice, before: tuple[int, int]
) -> tuple[set[str], tuple[int, int]]:
    """Edges outside mask or prompt, out of order or twice; `before`: group and key of the edge
    before these. Returns those of the last one as well."""
    keys = view.dataset("key")[rows]
    group = np.searchsorted(view.group_ptr, np.arange(rows.start, rows.stop), "right") - 1
    q_pos, k_pos = split_keys(keys)
    lengths, heads = np.diff(shard.ptr), len(plan["heads"])
    masked = (k_pos > q_pos) | (q_pos - k_pos >= (plan["window"] or np.inf))
    problems = set()
    if masked.any() or (q_pos >= np.repeat(lengths, heads)[group]).any():
        problems.add("an edge is masked or beyond its prompt")
    with_before = np.concatenate([[before[1]], keys.astype(np.int64)])
    same = np.diff(np.concatenate([[before[0]], group])) == 0
    if ((np.diff(with_before) <= 0) & same).any():
        problems.add("edges are not in order, or one is there twice")
    return problems, (int(group[-1]), int(keys[-1]))


def _add_errors(view: LayerView, plan: dict[str, Any], found: Errors) -> None:
    for start in range(0, len(view), _ROWS):
        rows = slice(start, start + _ROWS)
        found.completeness.add(view.dataset("completeness")[rows])
        found.contrast.add(view.dataset("contrast_completeness")[rows])
        if plan["output"] is not None:
            found.ov_completeness.add(view.dataset("ov/completeness")[rows])
    found.pattern.add(view.dataset("pattern_error")[:])
    if plan["output"] is not None:
        found.block.add(view.dataset("ov/block_completeness")[:])
