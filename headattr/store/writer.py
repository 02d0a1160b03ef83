"""Results of some prompts -> one shard and its sidecar, each published whole or not at all."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import hdf5plugin
import numpy as np
from numpy.typing import NDArray

from headattr.errors import StoreError
from headattr.store.columns import OV, Column, edge_columns
from headattr.store.format import (
    MANTISSA_BITS,
    PAIR_CHUNK,
    SCALAR_CHUNK,
    SHARD_FORMAT,
    VERSION,
    encode_slots,
    file_hash,
    key_type,
    make_keys,
    published,
    round_values,
    shard_name,
    slot_type,
    write_json,
)
from headattr.tables import LayerTable


class ActiveLists(NamedTuple):
    """Which features of a source are active at each position of a prompt."""

    ptr: NDArray[np.int64]
    features: NDArray[np.int64]
    acts: NDArray[np.floating]
    counted: NDArray[np.bool_]
    """[pos] positions that count for densities: those that do not swallow attention."""


class PromptResult(NamedTuple):
    """Everything a shard keeps of one prompt."""

    id: int
    tokens: Sequence[int]
    token_texts: Sequence[str]
    text: str | None
    extra: dict[str, Any]
    truncated: bool
    sources: dict[int, ActiveLists]
    layers: dict[int, LayerTable]


class LayerPlan(NamedTuple):
    """What the manifest says of one layer."""

    layer: int
    heads: list[int]
    basis: int
    """Index of the source that decomposes it."""
    output: int | None
    read: str | None
    every_output: bool
    ov_reason: str | None
    """Why there is no output."""
    window: int | None = None
    """How many keys a query sees, itself included; None is all before it."""
    softcap: float | None = None
    """c of c tanh(s / c), between score and softmax."""


def write_shard(
    folder: Path,
    index: int,
    results: Sequence[PromptResult],
    plans: Sequence[LayerPlan],
    *,
    manifest_hash: str,
    set_aside: Sequence[dict[str, Any]],
) -> None:
    """Publish `NNNNN.h5`, then `NNNNN.json` with its rows and hash.

    Raises StoreError, naming the path and the cause, if the disk refuses; nothing half-written
    keeps a name.
    """
    path = folder / f"{shard_name(index)}.h5"
    try:
        with published(path) as temporary:
            with h5py.File(temporary, "w") as file:
                file.attrs.update(
                    format=SHARD_FORMAT, version=VERSION, manifest_hash=manifest_hash, shard=index
                )
                file.attrs["pair_value_mantissa_bits"] = MANTISSA_BITS
                _write_prompts(file, results)
                for source in sorted({s for result in results for s in result.sources}):
                    _write_source(file, source, results)
                edges = sum(_write_layer(file, plan, results) for plan in plans) if results else 0
            digest, size = file_hash(temporary), temporary.stat().st_size
        sidecar = {
            "format": SHARD_FORMAT,
            "version": VERSION,
            "shard": index,
            "manifest_hash": manifest_hash,
            "sha256": digest,
            "bytes": size,
            "edges": edges,
            "prompts": [result.id for result in results],
            "set_aside": list(set_aside),
        }
        write_json(path.with_suffix(".json"), sidecar)
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error}; free the disk and run the same command again"
        ) from error


def _write_prompts(file: h5py.File, results: Sequence[PromptResult]) -> None:
    group = file.create_group("prompt")
    text = h5py.string_dtype()
    group["id"] = np.array([result.id for result in results], np.int64)
    group["ptr"] = np.cumsum([0, *(len(result.tokens) for result in results)], dtype=np.int64)
    group["token"] = np.array([t for result in results for t in result.tokens], np.int32)
    group.create_dataset(
        "token_text", data=[t for result in results for t in result.token_texts], dtype=text
    )
    group.create_dataset("text", data=[result.text or "" for result in results], dtype=text)
    group.create_dataset("extra", data=[json.dumps(result.extra) for result in results], dtype=text)
    group["truncated"] = np.array([result.truncated for result in results], bool)


def _write_source(file: h5py.File, source: int, results: Sequence[PromptResult]) -> None:
    lists = [result.sources[source] for result in results]
    counts = np.concatenate([np.diff(active.ptr) for active in lists])
    features = np.concatenate([active.features for active in lists])
    counted = np.concatenate([active.counted for active in lists])
    group = file.create_group(f"source/{source}")
    group["ptr"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    _pack(group, "feature", features.astype(np.uint32), SCALAR_CHUNK)
    _pack(
        group,
        "act",
        np.concatenate([active.acts for active in lists]).astype(np.float32),
        SCALAR_CHUNK,
    )
    present, times = np.unique(features[np.repeat(counted, counts)], return_counts=True)
    group["present"], group["present_count"] = present.astype(np.uint32), times.astype(np.int64)
    group.attrs["positions_counted"] = int(counted.sum())


def _write_layer(file: h5py.File, plan: LayerPlan, results: Sequence[PromptResult]) -> int:
    """Tables of one layer over all prompts of the shard; returns its edges."""
    tables = [result.layers[plan.layer] for result in results]
    group = file.create_group(f"layer/{plan.layer}")
    group.attrs.update(
        heads=np.array(plan.heads, np.int32),
        kinds=json.dumps(tables[0].kinds),
        basis=plan.basis,
        output=-1 if plan.output is None else plan.output,
        read=plan.read or "",
        every_output=plan.every_output,
    )
    for name in ("window", "softcap"):
        if getattr(plan, name) is not None:
            group.attrs[name] = getattr(plan, name)
    longest = max(len(result.tokens) for result in results)
    keys = np.concatenate([make_keys(t.q_pos, t.k_pos, key_type(longest)) for t in tables])
    counts = np.concatenate([np.diff(table.head_ptr) for table in tables])
    group["group_ptr"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    group["key"] = keys
    group["flagged"] = np.concatenate([table.flagged for table in tables])
    group["sink_share"] = np.concatenate([table.sink_share.T for table in tables]).astype(
        np.float32
    )
    group["share_sums"] = np.stack([table.share_sums for table in tables])
    group["pattern_error"] = np.array([table.pattern_error for table in tables], np.float32)
    columns = edge_columns(capped=plan.softcap is not None)
    _write_columns(group, columns, tables, plan, results)
    group["qk"].attrs["n_nonfinite"] = sum(table.n_nonfinite for table in tables)
    if plan.output is not None:
        moved = [table.ov for table in tables if table.ov is not None]
        _write_columns(group, OV, moved, plan, results)
        group["ov/block_completeness"] = _column(moved, "block_completeness")
    return len(keys)


def _write_columns(
    group: h5py.Group,
    columns: dict[str, Column],
    tables: Sequence[Any],
    plan: LayerPlan,
    results: Sequence[PromptResult],
) -> None:
    """Every column of the tables, in the type its kind asks for."""
    basis = slot_type(_longest_list(results, plan.basis))
    slots = {"q": basis, "k": basis}
    if plan.output is not None:
        by_id = plan.every_output
        slots["o"] = slot_type(1 << 31 if by_id else _longest_list(results, plan.output))
    for name, column in columns.items():
        data = _column(tables, name, None if column.kind in slots else np.float32)
        if column.kind in slots:
            data = encode_slots(data, slots[column.kind])
        elif column.kind == "rounded":
            data = round_values(data)
        chunk = SCALAR_CHUNK if column.kind == "scalar" else PAIR_CHUNK
        _pack(group, column.dataset, data, chunk)


def _longest_list(results: Sequence[PromptResult], source: int) -> int:
    return max(int(np.diff(result.sources[source].ptr).max()) for result in results)


def _column(tables: Sequence[Any], name: str, dtype: Any = np.float32) -> NDArray[Any]:
    column = np.concatenate([getattr(table, name) for table in tables])
    column = column if dtype is None else column.astype(dtype)
    if column.dtype.kind == "f" and not np.isfinite(column).all():
        raise StoreError(
            f"{name} has non-finite values, which are never written: please report this"
        )
    return column


def _pack(group: h5py.Group, name: str, data: NDArray[Any], rows: int) -> None:
    """A compressed dataset, chunked by rows."""
    if data.size == 0:
        group.create_dataset(name, data=data)
        return
    chunks = (min(rows, len(data)), *data.shape[1:])
    group.create_dataset(name, data=data, chunks=chunks, shuffle=True, **hdf5plugin.Zstd(clevel=3))
