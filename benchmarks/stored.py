"""A store of many synthetic edges: how fast it is written and asked, and how much memory a reader
takes.

    python benchmarks/stored.py --shards 500 --folder /path/with/space

Some shards are written by the package itself, the others are copies of these with prompts of their
own, each with its sidecar, so that the whole is a store like any other. Features are Zipf
distributed over positions, edges draw them independently. Prints a table; nothing is kept unless
--keep.
"""

import argparse
import json
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from headattr import questions
from headattr.config import canonical_hash
from headattr.edges import Edge, HeadId
from headattr.store.format import MANIFEST, SHARDS, VERSION, file_hash, shard_name, write_json
from headattr.store.manifest import content_hash
from headattr.store.merge import make_index
from headattr.store.reader import Store
from headattr.store.sources import ActiveLists
from headattr.store.writer import LayerPlan, PromptRecord, new_shard
from headattr.tables import EdgePart, LayerFacts

HEADS, TOKENS, KEYS, PROMPTS = 12, 128, 4, 32
FEATURES, ACTIVE, TOPK, TOP, KINDS = 24_576, 64, 4, 8, 3
PLAN = LayerPlan(0, list(range(HEADS)), 0, None, None, False, "synthetic")


def prompt_of(number: int, generator: np.random.Generator) -> PromptRecord:
    """A prompt whose positions have Zipf features."""
    ids = np.unique(
        np.arange(TOKENS)[:, None] * FEATURES
        + np.minimum(generator.zipf(1.25, (TOKENS, ACTIVE)) - 1, FEATURES - 1)
    )
    lengths = np.bincount(ids // FEATURES, minlength=TOKENS)
    ptr = np.concatenate([[0], np.cumsum(lengths)])
    acts = generator.exponential(1.0, len(ids)).astype(np.float32)
    lists = ActiveLists(ptr, ids % FEATURES, acts, np.arange(TOKENS) > 0)
    tokens = generator.integers(0, 50_000, TOKENS).tolist()
    return PromptRecord(number, tokens, [f"t{t}" for t in tokens], None, {}, False, {0: lists})


def edges_of(record: PromptRecord, head: int, generator: np.random.Generator) -> EdgePart:
    """Some keys of every query, with made-up numbers of the right shapes."""
    lengths = np.diff(record.sources[0].ptr)
    q_pos = np.repeat(np.arange(TOKENS), KEYS)
    k_pos = np.floor(generator.random(len(q_pos)) * (q_pos + 1)).astype(np.int64)
    pairs = np.unique(np.stack([q_pos, k_pos], 1), axis=0)
    q_pos, k_pos = pairs[:, 0], pairs[:, 1]
    n = len(q_pos)

    def slots(at: np.ndarray, count: int) -> np.ndarray:
        return np.floor(generator.random((n, count)) * lengths[at][:, None]).astype(np.int64)

    def tops(at: np.ndarray) -> np.ndarray:
        found = np.sort((slots(at, 1) + np.arange(TOP)) % lengths[at][:, None], 1)
        twice = np.diff(found, axis=1, prepend=-1) == 0
        return np.where(twice, -1, found)

    def floats(*shape: int) -> np.ndarray:
        return generator.standard_normal((n, *shape)).astype(np.float32)

    values = floats(TOPK)
    values = np.take_along_axis(values, np.argsort(-np.abs(values), 1), 1)
    totals = floats(KINDS, KINDS)
    columns = {
        "q_pos": q_pos,
        "k_pos": k_pos,
        "score": totals.sum((1, 2)),
        "pattern": generator.random(n).astype(np.float32),
        "completeness": np.abs(floats()) * 1e-7,
        "feature_share": floats(),
        "score_contrast": np.zeros(n, np.float32),
        "contrast_completeness": np.zeros(n, np.float32),
        "totals": totals,
        "values": values,
        "pair_contrasts": floats(TOPK),
        "q_slots": slots(q_pos, TOPK),
        "k_slots": slots(k_pos, TOPK),
        "q_contrast_totals": np.zeros((n, KINDS), np.float32),
        "k_contrast_totals": np.zeros((n, KINDS + 1), np.float32),
        "q_parts": np.zeros((n, 0), np.int64),
    }
    for side, at in (("q", q_pos), ("k", k_pos)):
        columns[f"{side}_top"] = tops(at)
        for name in ("marginals", "contrasts", "ablations"):
            columns[f"{side}_{name}"] = floats(TOP)
    return EdgePart(head, columns, None)


def facts_of() -> LayerFacts:
    """What a layer has once a prompt."""
    return LayerFacts(
        layer=0,
        heads=np.arange(HEADS, dtype=np.int32),
        kinds=("feature", "bias", "error"),
        parts=(),
        n_nonfinite=0,
        flagged=np.arange(TOKENS) == 0,
        sink_share=np.zeros((HEADS, TOKENS)),
        share_sums=np.ones((HEADS, 4)),
        pattern_error=0.0,
        block_completeness=None,
    )


def write_shard(folder: Path, index: int, manifest_hash: str) -> tuple[int, float]:
    """One shard through the package's writer; its edges and the processor seconds that took,
    without those of making the numbers up."""
    generator = np.random.default_rng(index)
    prompts = [prompt_of(index * PROMPTS + i, generator) for i in range(PROMPTS)]
    parts = [[edges_of(prompt, head, generator) for head in range(HEADS)] for prompt in prompts]
    began = time.process_time()
    with new_shard(folder, index, [PLAN], manifest_hash=manifest_hash, longest=TOKENS) as shard:
        for prompt, edges in zip(prompts, parts, strict=True):
            shard.add_prompt(prompt)
            for part in edges:
                shard.add_edges(0, part)
            shard.add_layer(facts_of())
    spent = time.process_time() - began
    return sum(len(part.columns["q_pos"]) for edges in parts for part in edges), spent


def copy_shard(folder: Path, of: int, index: int) -> None:
    """Another shard with the same edges, of prompts of its own."""
    path = folder / f"{shard_name(index)}.h5"
    shutil.copyfile(folder / f"{shard_name(of)}.h5", path)
    ids = list(range(index * PROMPTS, (index + 1) * PROMPTS))
    with h5py.File(path, "r+") as file:
        file["prompt/id"][:] = ids
        file.attrs["shard"] = index
    sidecar = json.loads((folder / f"{shard_name(of)}.json").read_text())
    told = {"shard": index, "prompts": ids, "sha256": file_hash(path), "bytes": path.stat().st_size}
    write_json(path.with_suffix(".json"), sidecar | told)


def manifest_of(shards: int) -> dict[str, Any]:
    """A manifest like a run's."""
    identity = {
        "format": VERSION,
        "config": {},
        "layers": [PLAN._asdict()],
        "texts": "",
        "bos": False,
    }
    source = {
        "index": 0,
        "kind": "sae",
        "layer": 0,
        "name": "synthetic",
        "first": 0,
        "n_features": FEATURES,
        "groups": [],
        "labels": None,
    }
    manifest = {
        "format": "headattr-store",
        "version": VERSION,
        "hash": canonical_hash(identity),
        "identity": identity,
        "config": {"rank": "value", "dtype": "float32", "edges": f"top:{KEYS}"},
        "model": {"notes": []},
        "bos": {},
        "sources": [source],
        "layers": [PLAN._asdict()],
        "shards": [
            {"index": i, "prompts": list(range(i * PROMPTS, (i + 1) * PROMPTS))}
            for i in range(shards)
        ],
        "set_aside": [],
    }
    return manifest | {"content_hash": content_hash(manifest)}


def make_store(folder: Path, shards: int, distinct: int) -> tuple[int, float]:
    """A store of synthetic shards; its edges and the edges written a processor second."""
    manifest = manifest_of(shards)
    (folder / SHARDS).mkdir(parents=True)
    write_json(folder / MANIFEST, manifest)
    counts, seconds = [], 0.0
    for index in range(min(distinct, shards)):
        edges, spent = write_shard(folder / SHARDS, index, manifest["hash"])
        counts.append(edges)
        seconds += spent
    for index in range(len(counts), shards):
        copy_shard(folder / SHARDS, index % len(counts), index)
    return sum(counts[i % len(counts)] for i in range(shards)), sum(counts) / seconds


def timed(ask: Callable[[Any], Any], asked: list[Any]) -> list[float]:
    """Milliseconds of each."""
    found = []
    for one in asked:
        began = time.perf_counter()
        ask(one)
        found.append(1e3 * (time.perf_counter() - began))
    return found


def rows_of(name: str, times: list[float], wanted: str) -> tuple[str, str, str, str]:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return name, f"{statistics.median(times):.2f}", f"{p99:.2f}", wanted


def measure(folder: Path, edges: int) -> Iterator[tuple[str, str, str, str]]:
    """Questions of every kind, each asked twice; the second time counts."""
    generator = np.random.default_rng(1)
    with Store(folder) as store:
        asked = list(edges_asked(store, 10_000, generator))
        one = [(p, e) for p, e in asked if p < PROMPTS] or asked[:200]
        for name, some, wanted in (
            ("edge, its shard open", one, "1 (p99 10)"),
            ("edge, random shards", asked, "2 (p99 10)"),
        ):
            timed(lambda pair: store.edge(*pair), some)
            yield rows_of(name, timed(lambda pair: store.edge(*pair), some), wanted)
        typical = generator.integers(200, 4_000, 50).tolist()
        for name, features, wanted in (
            ("feature, typical", typical, "10"),
            ("feature, hottest", list(range(10)), "50"),
        ):
            for role in ("query", "key"):

                def ask(feature: int, role: Any = role) -> Any:
                    return questions.feature(store, feature, role=role)

                timed(ask, features)
                yield rows_of(f"{name}, as {role}", timed(ask, features), wanted)
        heads = [HeadId(0, head) for head in range(HEADS)]
        timed(lambda head: questions.head(store, head), heads)
        yield rows_of("head", timed(lambda head: questions.head(store, head), heads), "100")


def edges_asked(
    store: Store, count: int, generator: np.random.Generator
) -> Iterator[tuple[int, Edge]]:
    """Random edges that are kept."""
    groups = [
        (int(prompt), HeadId(0, int(head)))
        for prompt, head in zip(
            generator.choice(store.prompt_ids, count // 20),
            generator.integers(0, HEADS, count // 20),
            strict=True,
        )
    ]
    for prompt, head in groups:
        kept = store.edges(prompt, head)
        for at in generator.integers(0, len(kept["q_pos"]), 20).tolist():
            yield prompt, Edge(0, head.head, int(kept["q_pos"][at]), int(kept["k_pos"][at]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=50, help="about 190,000 edges each")
    parser.add_argument("--distinct", type=int, default=8, help="shards that are no copies")
    parser.add_argument("--folder", type=Path, help="where, instead of the temporary folder")
    parser.add_argument("--keep", action="store_true", help="leave the store there")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        edges, rate = make_store(base / "store", options.shards, options.distinct)
        size = sum(path.stat().st_size for path in (base / "store" / SHARDS).iterdir())
        shards = f"{edges:,} edges in {options.shards} shards"
        print(f"{shards}, {size / edges:.0f} bytes an edge at k = {TOPK}")
        print(f"written: {rate:,.0f} edges a second of one core, with both indexes")
        with Store(base / "store") as store:
            began = time.perf_counter()
            path = make_index(store)
            took = time.perf_counter() - began
        print(f"one index over all: {took:.1f} s, {path.stat().st_size / edges:.1f} bytes an edge")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print("| question | median ms | p99 ms | wanted |\n|---|---|---|---|")
        for row in measure(base / "store", edges):
            print("| " + " | ".join(row) + " |", flush=True)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(f"memory at its peak grew by {grown / 1024:.0f} MiB while asking")
    finally:
        if options.keep:
            print(base)
        else:
            shutil.rmtree(base)


if __name__ == "__main__":
    main()
