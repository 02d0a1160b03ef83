"""Readers while writers publish, and are killed: `soak` raises where any answer is not right.

`python soak.py FOLDER SECONDS` does it; no torch.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import light

from headattr.store.check import check_store
from headattr.store.reader import Store

READERS, WRITERS = 8, 2
SHARDS_A_SECOND = 12


def soak(out: Path, seconds: float, seed: int = 0) -> dict[str, int]:
    """8 readers, 2 writers of the same shards, one of which is killed now and then; how many
    answers, kills and shards there were."""
    manifest = light.manifest_of(out, light.PER_SHARD * max(4, int(seconds * SHARDS_A_SECOND)))
    light.begin(out, manifest, {})
    light.write_shard(out, manifest, 0)
    light.write_shard(out, manifest, 1)
    until = time.monotonic() + seconds
    parent = Store(out)
    light.assert_right(parent, 0)  # its file is open when others are forked
    readers = [light.forked(lambda n=n: _read(out, parent, n, until, seed)) for n in range(READERS)]
    rng, kills = random.Random(seed), 0
    writers: list[int] = []
    while time.monotonic() < until:
        while len(writers) < WRITERS:
            writers.append(light.forked(lambda: _write(out, manifest, until)))
        time.sleep(min(rng.uniform(0.1, 0.9), max(0.0, until - time.monotonic())))
        victim = writers.pop(rng.randrange(WRITERS))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        kills += 1
    for pid in writers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    failed = [n for n, pid in enumerate(readers) if os.waitpid(pid, 0)[1] != 0]
    assert not failed, f"readers {failed} failed"
    light.assert_right(parent, 0)
    light.write(out, len(manifest["shards"]))
    with Store(out) as store:
        assert check_store(store)["problems"] == []
    counts = [json.loads((out / f"reader-{n}").read_text()) for n in range(READERS)]
    assert all(count["answers"] > 0 for count in counts), counts
    assert max(count["prompts"] for count in counts) > 2 * light.PER_SHARD
    return {
        "answers": sum(count["answers"] for count in counts),
        "kills": kills,
        "shards": len(manifest["shards"]),
    }


def _write(out: Path, manifest: dict[str, Any], until: float) -> None:
    """The shards that are not there yet, spread over the time that is left."""
    done = set(light.finished_shards(out, manifest))
    for index in range(len(manifest["shards"])):
        if index not in done:
            light.write_shard(out, manifest, index)
            time.sleep(0.5 / SHARDS_A_SECOND)
    time.sleep(max(0.0, until - time.monotonic()))


def _read(out: Path, inherited: Store, number: int, until: float, seed: int) -> None:
    """Ask until the time is over. Some open the store anew each time, some refresh the one they
    have, some the one that they inherited open."""
    rng = random.Random(seed + number)
    store, answers, before = inherited, 0, set[int]()
    while time.monotonic() < until:
        if number % 3 == 0:
            store = Store(out)
        elif number % 3 == 1 or store is not inherited:
            store.refresh()
        else:
            store = Store(out)
        there = set(store.prompt_ids)
        assert store.problems == [], store.problems
        assert before <= there, before - there
        for shard in store.shards:
            assert there >= set(shard.ids)
            assert len(shard.ids) == light.PER_SHARD
        asked = [*rng.sample(sorted(there), min(10, len(there))), max(there)]
        for prompt in asked:
            light.assert_right(store, prompt)
        positions = sum(light.length_of(prompt) - 1 for prompt in there)
        if number % 4 == 0:
            assert store.mean_l0(0) == 1.0
            third = sum((light.length_of(prompt) + 3) // 7 for prompt in there)
            assert abs((store.density(0, 3) or 0) - third / positions) < 1e-12
        answers += len(asked)
        before = there
        if number % 3 == 0:
            store.close()
    (out / f"reader-{number}").write_text(json.dumps({"answers": answers, "prompts": len(before)}))


if __name__ == "__main__":
    print(json.dumps(soak(Path(sys.argv[1]), float(sys.argv[2]))))
