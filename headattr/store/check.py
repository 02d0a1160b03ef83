"""Is a store whole and does it add up? Every problem by name.

Hashes, structure, ranges, and the errors that every edge carries.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.config import canonical_hash
from headattr.errors import StoreError
from headattr.store.coding import SUM_BITS
from headattr.store.format import (
    LABELS,
    SHARDS,
    file_hash,
    shard_name,
    split_keys,
)
from headattr.store.manifest import content_hash
from headattr.store.reader import Store
from headattr.store.shard import Shard
from headattr.store.spread import Spread
from headattr.store.view import LayerView

TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
_ROUNDING = 4e-6
"""Of a sum of float32 numbers, relative to the sum of their sizes."""
_KEPT = _ROUNDING + 2.0 ** -(SUM_BITS + 1)
"""The same where the numbers are kept rounded."""
_SUMS = (
    ("qk/totals", "score", "completeness", _ROUNDING),
    ("qk/q_contrast_totals", "score_contrast", "contrast_completeness", _KEPT),
    ("qk/k_contrast_totals", "score_contrast", "contrast_completeness", _KEPT),
)
"""Dataset of parts, what they sum to, the error that was measured, and how parts are rounded."""


_ROWS = 1 << 16
"""Edges that are checked at once."""


class _Found(NamedTuple):
    completeness: Spread
    contrast: Spread
    ov_completeness: Spread
    block: Spread
    pattern: Spread
    problems: list[str]


def check_store(store: Store) -> dict[str, Any]:
    """{"ok", "shards", "edges", "completeness", "contrast_completeness", "ov", "pattern_error",
    "set_aside", "problems"}.

    Errors are worst and median over all edges; null where there are none. Every problem names its
    file.
    """
    found = _Found(Spread(), Spread(), Spread(), Spread(), Spread(), list(store.problems))
    found.problems.extend(_manifest_problems(store))
    edges = 0
    for shard in store.shards:
        name = f"shards/{shard.path.name}"
        if file_hash(shard.path) != shard.sidecar["sha256"]:
            found.problems.append(
                f"{name} does not have the hash of its sidecar: delete it and run again"
            )
            continue
        try:
            with shard.reading():
                found.problems.extend(_sidecar_problems(shard, store.manifest, name))
                edges += sum(
                    _check_layer(shard, plan, name, found) for plan in store.manifest["layers"]
                )
        except StoreError as error:
            found.problems.append(f"{name} is damaged: {error}")
    _check_errors(found, TOLERANCE[store.manifest["config"]["dtype"]])
    return {
        "ok": not found.problems,
        "shards": len(store.shards),
        "edges": edges,
        "completeness": found.completeness.as_dict(),
        "contrast_completeness": found.contrast.as_dict(),
        "ov": {
            "completeness": found.ov_completeness.as_dict(),
            "block_completeness": {"worst": found.block.worst},
        },
        "pattern_error": {"worst": found.pattern.worst},
        "set_aside": len(store.set_aside),
        "problems": found.problems,
    }


def _manifest_problems(store: Store) -> list[str]:
    """A manifest that was changed, shards that are not finished, labels that are gone."""
    manifest = store.manifest
    problems = []
    if (
        manifest["hash"] != canonical_hash(manifest["identity"])
        or manifest.get("content_hash") != content_hash(manifest)
        or manifest["layers"] != manifest["identity"].get("layers")
    ):
        problems.append("manifest.json was changed: its hashes are not those of its content")
    done = {shard.sidecar["shard"] for shard in store.shards}
    named = " ".join(store.problems)
    names = [f"{SHARDS}/{shard_name(e['index'])}.h5" for e in manifest["shards"]]
    missing = [n for i, n in enumerate(names) if i not in done and n not in named]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        problems.append(f"{missing[0]}{more} not finished: run the same command again")
    for source in manifest["sources"]:
        if source["labels"] and not (store.path / LABELS / source["labels"]).is_file():
            problems.append(f"{LABELS}/{source['labels']} is missing: run the same command again")
    return problems


def _sidecar_problems(shard: Shard, manifest: dict[str, Any], name: str) -> list[str]:
    """Does the sidecar say what is in the shard, and is it what the manifest planned?"""
    sidecar, file = shard.sidecar, shard.file
    planned = next(e["prompts"] for e in manifest["shards"] if e["index"] == sidecar["shard"])
    held = file["prompt/id"][:].tolist()
    problems = []
    if (file.attrs["manifest_hash"], file.attrs["shard"]) != (manifest["hash"], sidecar["shard"]):
        problems.append(f"{name} belongs to another run or place: delete it and run again")
    if held != sidecar["prompts"]:
        problems.append(f"{name} holds prompts {held}, its sidecar says {sidecar['prompts']}")
    if sorted(held + [entry["prompt"] for entry in sidecar["set_aside"]]) != sorted(planned):
        problems.append(f"{name} and its sidecar do not account for prompts {planned}")
    edges = sum(len(group["key"]) for group in file.get("layer", {}).values())
    if edges != sidecar["edges"]:
        problems.append(f"{name} holds {edges} edges, its sidecar says {sidecar['edges']}")
    return problems


def _check_layer(shard: Shard, plan: dict[str, Any], name: str, found: _Found) -> int:
    if not shard.ids:
        return 0
    layer: Any = shard.file[f"layer/{plan['layer']}"]
    group_ptr, where = layer["group_ptr"][:], f"{name} layer {plan['layer']}"
    groups, edges = len(shard.ids) * len(plan["heads"]), len(layer["key"])
    counts = np.diff(group_ptr)
    if len(counts) != groups or group_ptr[-1] != edges or (counts < 0).any():
        raise StoreError(f"{where}: the edge index does not fit its edges")
    problems: set[str] = set()
    before = (-1, -1)
    largest = {errors: _largest(layer[errors]) for _, _, errors, _ in _SUMS}
    for start in range(0, edges, _ROWS):
        rows = slice(start, min(start + _ROWS, edges))
        keys = layer["key"][rows]
        group = np.searchsorted(group_ptr, np.arange(rows.start, rows.stop), "right") - 1
        out_of_order = _order_problems(shard, plan, keys, group, before)
        problems |= out_of_order
        before = (int(group[-1]), int(keys[-1]))
        problems |= _value_problems(layer, plan, rows, largest)
        if not out_of_order:
            problems |= _slot_problems(shard.layer(plan["layer"]), rows)
        found.completeness.add(layer["completeness"][rows])
        found.contrast.add(layer["contrast_completeness"][rows])
        if plan["output"] is not None:
            found.ov_completeness.add(layer["ov/completeness"][rows])
    for path in _float_datasets(layer):
        if len(layer[path]) != edges and not np.isfinite(layer[path][:]).all():
            problems.add(f"{path} has non-finite values")
    found.problems.extend(f"{where}: {problem}" for problem in sorted(problems))
    found.pattern.add(layer["pattern_error"][:])
    if plan["output"] is not None:
        found.block.add(layer["ov/block_completeness"][:])
    return edges


def _largest(dataset: Any) -> float:
    parts = range(0, len(dataset), _ROWS)
    return max((float(dataset[i : i + _ROWS].max(initial=0)) for i in parts), default=0.0)


def _order_problems(
    shard: Shard,
    plan: dict[str, Any],
    keys: NDArray[Any],
    group: NDArray[np.int64],
    before: tuple[int, int],
) -> set[str]:
    """Edges outside mask or prompt, out of order or twice; `before`: group and key of the edge
    before these."""
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
    return problems


def _value_problems(
    layer: Any, plan: dict[str, Any], rows: slice, largest: dict[str, float]
) -> set[str]:
    """Numbers that are not finite, sums that do not add up; `largest`: measured errors."""
    problems = set()
    for path in _float_datasets(layer):
        if len(layer[path]) == len(layer["key"]) and not np.isfinite(layer[path][rows]).all():
            problems.add(f"{path} has non-finite values")
    for name, total, errors, kept in _SUMS:
        parts = layer[name][rows].astype(np.float64)
        axes = tuple(range(1, parts.ndim))
        gap = np.abs(parts.sum(axes) - layer[total][rows])
        rounding = kept * np.abs(parts).sum(axes)
        if (gap > largest[errors] * 1e3 + rounding).any():
            problems.add(f"{name} does not sum to the {total}")
    if (cap := plan["softcap"]) is not None:
        gap = np.abs(layer["score_capped"][rows] - cap * np.tanh(layer["score"][rows] / cap))
        if (gap > _ROUNDING * cap).any():
            problems.add(f"score_capped is not the score under the cap of {cap}")
    return problems


def _slot_problems(view: LayerView, rows: slice) -> set[str]:
    """Slots beyond the active list of their position; codes that are none."""
    where = view.where(rows)
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
        found = view.read(column, rows)
        if column.kind in lengths and (found.max(1, initial=-1) >= lengths[column.kind]).any():
            problems.add(f"{column.dataset} points beyond an active list")
        if column.kind == "falling" and not np.isfinite(found).all():
            problems.add(f"{column.dataset} has non-finite values")
    return problems


def _float_datasets(layer: Any) -> list[str]:
    names: list[str] = []
    layer.visititems(
        lambda name, item: (
            names.append(name) if getattr(getattr(item, "dtype", None), "kind", "") == "f" else None
        )
    )
    return names


def _check_errors(found: _Found, tolerance: float) -> None:
    for name, errors in (
        ("completeness", found.completeness),
        ("contrast completeness", found.contrast),
        ("OV completeness", found.ov_completeness),
        ("block completeness", found.block),
        ("pattern error", found.pattern),
    ):
        worst = errors.worst
        if worst is not None and not worst <= tolerance:
            found.problems.append(f"worst {name} is {worst:.1e}; expected at most {tolerance:.0e}")


def render_check(answer: dict[str, Any]) -> str:
    """A check as text for a terminal."""

    def shown(value: float | None) -> str:
        return "none" if value is None else f"{value:.1e}"

    ov = answer["ov"]
    lines = [
        f"{'ok' if answer['ok'] else 'NOT OK'}: {answer['shards']} shards, {answer['edges']:,} "
        "edges, "
        f"{answer['set_aside']} prompts set aside",
        f"  QK completeness: worst {shown(answer['completeness']['worst'])}, "
        f"median {shown(answer['completeness']['median'])}; contrasts: worst "
        f"{shown(answer['contrast_completeness']['worst'])}",
        f"  OV completeness: worst {shown(ov['completeness']['worst'])}, median "
        f"{shown(ov['completeness']['median'])}; "
        f"whole block: worst {shown(ov['block_completeness']['worst'])}",
        f"  pattern against the model: worst {shown(answer['pattern_error']['worst'])}",
    ]
    return "\n".join([*lines, *(f"  problem: {problem}" for problem in answer["problems"])])
