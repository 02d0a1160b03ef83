"""Stores of made-up prompts whose every number is known, written and read without torch.

`python light.py` is a nursery: it has imported all that is needed, and forks a writer for each line
`write FOLDER SHARDS` on its standard input; it prints the writer's process id, and how it ended.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from headattr.config import RunConfig
from headattr.edges import Edge
from headattr.store.columns import EDGE
from headattr.store.manifest import begin, build_manifest
from headattr.store.published import finished_shards
from headattr.store.reader import Store
from headattr.store.sources import ActiveLists
from headattr.store.writer import LayerPlan, PromptRecord, new_shard
from headattr.tables import EdgePart, LayerFacts

PER_SHARD = 2
PLANS = [LayerPlan(0, [0], 0, None, None, False, "none given")]


def length_of(prompt: int) -> int:
    return 7 + prompt % 50


def scores_of(prompt: int) -> list[float]:
    """Of the edges (0, 0), (5, 3) and (last, last)."""
    return [prompt + 0.25 * n for n in (1, 2, 3)]


def long_prompt(
    length: int, prompt: int, scores: list[float]
) -> tuple[PromptRecord, EdgePart, LayerFacts]:
    """A prompt with one head and three edges, the last at its end."""
    slots, score = np.array([[0, -1]] * 3), np.array(scores)
    columns: dict[str, Any] = {
        name: slots if column.kind in "qk" else np.zeros((3, 2) if column.kind != "scalar" else 3)
        for name, column in EDGE.items()
    }
    columns["q_pos"], columns["k_pos"] = np.array([0, 5, length - 1]), np.array([0, 3, length - 1])
    columns["score"], columns["pattern"] = score, np.ones(3)
    columns["feature_share"] = np.full(3, 0.5)
    columns["totals"] = score[:, None, None] * np.array([[1, 0], [0, 0]])
    columns["k_contrast_totals"] = np.zeros((3, 3))
    columns["values"] = np.stack([score, np.zeros(3)], axis=1)
    columns["q_parts"] = np.zeros((3, 0), np.int64)
    facts = LayerFacts(
        layer=0,
        heads=np.array([0], np.int32),
        kinds=("token", "bias"),
        parts=(),
        n_nonfinite=0,
        flagged=np.arange(length) == 0,
        sink_share=(np.arange(length) == 0)[None].astype(float),
        share_sums=np.full((1, 4), (score**2).sum()),
        pattern_error=0.0,
        block_completeness=None,
    )
    lists = ActiveLists(
        np.arange(length + 1), np.arange(length) % 7, np.ones(length), np.arange(length) > 0
    )
    tokens = (np.arange(length) % 7).tolist()
    shown = [f"<{token}>" for token in tokens]
    record = PromptRecord(prompt, tokens, shown, None, {}, False, {0: lists})
    return record, EdgePart(0, columns, None), facts


def manifest_of(out: Path, prompts: int, per_shard: int = PER_SHARD) -> dict[str, Any]:
    source = {
        "kind": "tokens",
        "layer": 0,
        "name": "tokens",
        "hash": "tokens",
        "labels": None,
        "groups": [],
        "n_features": 7,
        "first": 0,
    }
    return build_manifest(
        RunConfig("m", ("0=tokens",), "t", str(out), prompts_per_shard=per_shard),
        model={"hash": "m", "notes": []},
        sources=[source],
        plans=PLANS,
        prompts=range(prompts),
        set_aside=[],
        bos={"prepend": False},
        texts_hash="t",
        layers_without_basis=[],
        listed_hash=None,
        labelled=[],
    )


def write_shard(out: Path, manifest: dict[str, Any], index: int) -> None:
    prompts = manifest["shards"][index]["prompts"]
    longest = max(map(length_of, prompts))
    with new_shard(
        out / "shards", index, PLANS, manifest_hash=manifest["hash"], longest=longest
    ) as shard:
        for prompt in prompts:
            record, edges, facts = long_prompt(length_of(prompt), prompt, scores_of(prompt))
            shard.add_prompt(record)
            shard.add_edges(0, edges)
            shard.add_layer(facts)


def write(out: Path, shards: int) -> None:
    """What `run` does: go on where it was left."""
    manifest = manifest_of(out, shards * PER_SHARD)
    begin(out, manifest, {})
    done = set(finished_shards(out, manifest))
    for index in range(shards):
        if index not in done:
            write_shard(out, manifest, index)


def assert_right(store: Store, prompt: int) -> None:
    """The three edges of a prompt are what they were made to be."""
    last = length_of(prompt) - 1
    for (q_pos, k_pos), wanted in zip(
        ((0, 0), (5, 3), (last, last)), scores_of(prompt), strict=True
    ):
        row = store.edge(prompt, Edge(0, 0, q_pos, k_pos))
        found = row.score, row.totals[0, 0], row.q_active.features.tolist(), row.tokens
        assert found == (wanted, wanted, [q_pos % 7], (f"<{q_pos % 7}>", f"<{k_pos % 7}>")), found
        assert abs(row.values[0] - wanted) <= 2**-11 * wanted
    assert len(store.tokens(prompt)) == last + 1
    assert store.edges(prompt, "L0H0")["score"].tolist() == scores_of(prompt)


def forked(work: Any) -> int:
    """Do something in a forked process, whose exit status says whether it went well."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  the test that forked must not go on here
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
    return pid


if __name__ == "__main__":
    for line in sys.stdin:
        _, folder, count = line.split()
        child = forked(lambda out=Path(folder), n=int(count): write(out, n))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
