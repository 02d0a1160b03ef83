"""Is a store whole and does it add up? Every problem by name.

Hashes, structure, ranges, and the errors that every edge carries.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.config import canonical_hash
from headattr.errors import StoreError
from headattr.store.columns import EDGE, OV
from headattr.store.format import (
    LABELS,
    SHARDS,
    decode_slots,
    file_hash,
    shard_name,
    split_keys,
)
from headattr.store.manifest import content_hash
from headattr.store.reader import Store
from headattr.store.shard import Shard

TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
_SUMS = (
    ("qk/totals", "score", "completeness"),
    ("qk/q_contrast_totals", "score_contrast", "contrast_completeness"),
    ("qk/k_contrast_totals", "score_contrast", "contrast_completeness"),
)
"""Dataset of parts, what they sum to, and the error that was measured."""
_TOTALS_ROUNDING = 4e-6  # float32 rounding of a sum of totals, relative to the sum of their sizes


class _Found(NamedTuple):
    completeness: list[NDArray[Any]]
    contrast: list[NDArray[Any]]
    ov_completeness: list[NDArray[Any]]
    block: list[NDArray[Any]]
    pattern: list[NDArray[Any]]
    problems: list[str]


def check_store(store: Store) -> dict[str, Any]:
    """{"ok", "shards", "edges", "completeness", "contrast_completeness", "ov", "pattern_error",
    "set_aside", "problems"}.

    Errors are worst and median over all edges; null where there are none. Every problem names its
    file.
    """
    found = _Found([], [], [], [], [], list(store.problems))
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
        "completeness": _worst_and_median(found.completeness),
        "contrast_completeness": _worst_and_median(found.contrast),
        "ov": {
            "completeness": _worst_and_median(found.ov_completeness),
            "block_completeness": {"worst": _worst(found.block)},
        },
        "pattern_error": {"worst": _worst(found.pattern)},
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
    base = f"layer/{plan['layer']}"
    layer: Any = shard.file[base]
    keys, group_ptr = layer["key"][:], layer["group_ptr"][:]
    counts = np.diff(group_ptr)
    heads, lengths = len(plan["heads"]), np.diff(shard.ptr)
    where = f"{name} layer {plan['layer']}"
    if len(counts) != len(shard.ids) * heads or group_ptr[-1] != len(keys) or (counts < 0).any():
        raise StoreError(f"{where}: the edge index does not fit its edges")
    q_pos, k_pos = split_keys(keys)
    group = np.repeat(np.arange(len(counts)), counts)
    masked = (k_pos > q_pos) | (q_pos - k_pos >= (plan["window"] or np.inf))
    if masked.any() or (q_pos >= np.repeat(lengths, heads)[group]).any():
        found.problems.append(f"{where}: an edge is masked or beyond its prompt")
    if ((np.diff(keys.astype(np.int64)) <= 0) & (np.diff(group) == 0)).any():
        found.problems.append(f"{where}: edges are not in order, or one is there twice")
    for path in _float_datasets(layer):
        if not np.isfinite(layer[path][:]).all():
            found.problems.append(f"{where}: {path} has non-finite values")
    for name, total, errors in _SUMS:
        parts = layer[name][:].astype(np.float64)
        axes = tuple(range(1, parts.ndim))
        gap = np.abs(parts.sum(axes) - layer[total][:])
        rounding = _TOTALS_ROUNDING * np.abs(parts).sum(axes)
        if (gap > layer[errors][:].max(initial=0) * 1e3 + rounding).any():
            found.problems.append(f"{where}: {name} does not sum to the {total}")
    if (cap := plan["softcap"]) is not None:
        gap = np.abs(layer["score_capped"][:] - cap * np.tanh(layer["score"][:] / cap))
        if (gap > _TOTALS_ROUNDING * cap).any():
            found.problems.append(f"{where}: score_capped is not the score under the cap of {cap}")
    begin = shard.ptr[:-1].repeat(heads)[group]
    _check_slots(shard, plan, (begin + q_pos, begin + k_pos), where, found)
    found.completeness.append(layer["completeness"][:])
    found.contrast.append(layer["contrast_completeness"][:])
    found.pattern.append(layer["pattern_error"][:])
    if plan["output"] is not None:
        found.ov_completeness.append(layer["ov/completeness"][:])
        found.block.append(layer["ov/block_completeness"][:])
    return len(keys)


def _check_slots(
    shard: Shard,
    plan: dict[str, Any],
    ends: tuple[NDArray[Any], NDArray[Any]],
    where: str,
    found: _Found,
) -> None:
    """Every slot is within the active list of its position; `ends` are the edges' positions in the
    shard."""
    q_at, k_at = ends
    layer = shard.file[f"layer/{plan['layer']}"]

    def longest(source: int, positions: NDArray[Any]) -> NDArray[Any]:
        return np.diff(shard.file[f"source/{source}/ptr"][:])[positions]

    lengths = {"q": longest(plan["basis"], q_at), "k": longest(plan["basis"], k_at)}
    columns = list(EDGE.values())
    if plan["output"] is not None:
        columns += OV.values()
        if not plan["every_output"]:
            lengths["o"] = longest(plan["output"], q_at)
    for name, kind in columns:
        length = lengths.get(kind)
        if length is None:
            continue
        if (decode_slots(layer[name][:]).max(1, initial=-1) >= length).any():
            found.problems.append(f"{where}: {name} points beyond an active list")


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
        worst = _worst(errors)
        if worst is not None and not worst <= tolerance:
            found.problems.append(f"worst {name} is {worst:.1e}; expected at most {tolerance:.0e}")


def _worst(errors: list[NDArray[Any]]) -> float | None:
    sizes = [float(part[np.isfinite(part)].max(initial=0)) for part in errors if part.size]
    return max(sizes, default=None)


def _worst_and_median(errors: list[NDArray[Any]]) -> dict[str, float | None]:
    every = np.concatenate(errors) if errors else np.empty(0)
    every = every[np.isfinite(every)]
    return {"worst": _worst(errors), "median": float(np.median(every)) if every.size else None}


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
