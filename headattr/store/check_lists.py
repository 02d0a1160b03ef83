"""What a shard has beside its edges: prompts, active lists, and the indexes of both."""

import json
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from headattr.store.index import write_role
from headattr.store.shard import Shard
from headattr.store.sources import inverse_of
from headattr.store.tallies import write_tallies
from headattr.store.view import LayerView

_ROWS = 1 << 20
"""Entries that are compared at once."""


def list_problems(shard: Shard, manifest: dict[str, Any]) -> list[str]:
    """What is wrong with the prompts and the active lists of a shard."""
    problems = _prompt_problems(shard.file["prompt"])
    lengths = shard.file["prompt/token"].shape[0]
    plans = manifest["layers"] if shard.ids else []
    for index in sorted({i for p in plans for i in (p["basis"], p["output"]) if i is not None}):
        group, source = shard.file[f"source/{index}"], manifest["sources"][index]
        found = _source_problems(group, source, shard, lengths)
        found = found or _count_problems(group, _counted(shard, plans, index, source), lengths)
        problems += [f"source {index}: {problem}" for problem in found]
    return problems


def _prompt_problems(group: Any) -> list[str]:
    ptr, tokens = group["ptr"][:], group["token"][:]
    prompts, problems = len(group["id"]), []
    if not _leads_to(ptr, prompts, len(tokens)) or (np.diff(ptr) < 1).any():
        problems.append("prompt/ptr does not fit its prompts")
    if len(set(group["id"][:].tolist())) != prompts:
        problems.append("prompt/id has a prompt twice")
    for name in ("text", "extra", "truncated"):
        if len(group[name]) != prompts:
            problems.append(f"prompt/{name} has {len(group[name])} rows, expected {prompts}")
    if len(group["token_text"]) != len(tokens):
        problems.append(f"prompt/token_text has {len(group['token_text'])} rows, not one a token")
    if (tokens < 0).any():
        problems.append("prompt/token has ids below 0")
    for name in ("token_text", "text", "extra"):
        for text in group[name][:]:
            text.decode("utf-8")
    if not all(isinstance(json.loads(text), dict) for text in group["extra"][:]):
        problems.append("prompt/extra is not an object a prompt")
    return problems


def _leads_to(ptr: NDArray[np.int64], groups: int, entries: int) -> bool:
    """It begins at 0, never falls, and ends at the last entry."""
    whole = len(ptr) == groups + 1 and ptr[0] == 0 and ptr[-1] == entries
    return bool(whole and (np.diff(ptr) >= 0).all())


def _source_problems(group: Any, source: dict[str, Any], shard: Shard, positions: int) -> list[str]:
    ptr, feature, act = group["ptr"][:], group["feature"][:], group["act"][:]
    if not _leads_to(ptr, positions, len(feature)) or len(act) != len(feature):
        return ["ptr does not fit its lists"]
    problems = []
    first = np.zeros(len(feature), bool)
    first[ptr[:-1][np.diff(ptr) > 0]] = True
    if (np.diff(feature.astype(np.int64), prepend=-1) <= 0)[~first].any():
        problems.append("feature is not ascending within a position")
    if len(feature) and int(feature.max()) >= source.get("n_features", np.inf):
        problems.append(f"feature has ids beyond {source['n_features']} features")
    if not np.isfinite(act).all():
        problems.append("act has non-finite values")
    if source["kind"] == "tokens" and not (
        np.array_equal(feature, shard.file["prompt/token"][:]) and (act == 1).all()
    ):
        problems.append("its features are not the tokens, each 1")
    for name, wanted in zip(("feature", "ptr", "position"), inverse_of(feature, ptr), strict=True):
        if not np.array_equal(group[f"inverse/{name}"][:], wanted):
            problems.append(f"inverse/{name} does not agree with the lists")
    return problems


def _counted(
    shard: Shard, plans: list[dict[str, Any]], index: int, source: dict[str, Any]
) -> NDArray[np.bool_] | None:
    """Positions that count for the densities of a source, where a layer says so."""
    for plan in plans:
        if plan["basis"] == index and plan["layer"] == source["layer"]:
            return ~shard.layer(plan["layer"]).dataset("flagged")[:]
    return None


def _count_problems(group: Any, counted: NDArray[np.bool_] | None, positions: int) -> list[str]:
    """Counts that are not those of the lists; at most those, where it is not known which positions
    count."""
    present, count = group["present"][:], group["present_count"][:]
    number = int(group.attrs["positions_counted"])
    feature, lengths = group["feature"][:], np.diff(group["ptr"][:])
    some = np.ones(positions, bool) if counted is None else counted
    every, times = np.unique(feature[np.repeat(some, lengths)], return_counts=True)
    if len(present) != len(count):
        return ["present and present_count have different lengths"]
    if counted is not None:
        if number != counted.sum():
            return [f"positions_counted is {number}, flagged says {counted.sum()}"]
        wrong = not np.array_equal(present, every), not np.array_equal(count, times)
    else:
        rising = (np.diff(present.astype(np.int64)) > 0).all()
        known = np.isin(present, every)
        most = times[np.searchsorted(every, present[known])]
        wrong = (
            not (rising and known.all()),
            bool((count < 1).any() or (count[known] > most).any() or number > positions),
        )
    names = ("present", "present_count")
    return [f"{n} does not agree with the lists" for n, w in zip(names, wrong, strict=True) if w]


def index_problems(view: LayerView) -> list[str]:
    """Indexes and tallies that are not those that the columns have: they are made again, and
    compared."""
    problems = []
    with h5py.File("check.h5", "w", driver="core", backing_store=False) as scratch:
        for role in view.roles:
            write_role(view, role, scratch.create_group(f"index/{role.name}"), "zstd")
        write_tallies(view, scratch.create_group("tally"), "zstd")
        for name, dataset in _datasets(scratch):
            if name not in view.group:
                problems.append(f"{name} is missing")
            elif not _same(view.group[name], dataset):
                whose = "kept pairs" if name.startswith("tally") else "strongest features"
                problems.append(f"{name} does not agree with the {whose}")
    return problems


def _datasets(group: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    group.visititems(
        lambda name, item: found.append((name, item)) if isinstance(item, h5py.Dataset) else None
    )
    return found


def _same(one: Any, other: Any) -> bool:
    if one.shape != other.shape:
        return False
    parts = (slice(start, start + _ROWS) for start in range(0, len(one), _ROWS))
    return all(np.array_equal(one[part], other[part]) for part in parts)
