"""What is damaged is found, named and set aside; what is open is let go of, and found again."""

import hashlib
import json
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import light
import made
import numpy as np
import pytest
import tiny
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st
from test_store import assert_same_content, files

import headattr
from headattr.cli import main
from headattr.edges import Edge
from headattr.errors import StoreError
from headattr.store import index, opened
from headattr.store.check import check_store
from headattr.store.index import Postings, RoleIndex
from headattr.store.published import finished_shards
from headattr.store.reader import Store, open_store
from headattr.store.receipt import compare, created, receipt
from headattr.store.repair import repair_store

HERE = Path(__file__).parent


# A bit of every dataset ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard with every dataset that there can be but wide keys: windows, caps, parts."""
    out = tmp_path_factory.mktemp("planted") / "results"
    texts = [{"tokens": tokens, "note": 3} for tokens in tiny.prompts(6, 5)]
    listed = out.parent / "texts.jsonl"
    listed.write_text("".join(json.dumps(line) + "\n" for line in texts))
    options = {"output": "unembed", "edges": "all", "heads": "L2H1,L2H2", "topk": 6}
    headattr.attribute(tiny.gemma2(), {2: made.transcoders(0, 1)}, listed, out, **options).close()
    return out


def datasets_of(folder: Path) -> list[str]:
    found: list[str] = []
    with h5py.File(folder / "shards" / "00000.h5") as file:
        file.visititems(
            lambda name, item: found.append(name) if isinstance(item, h5py.Dataset) else None
        )
    return found


def flip(folder: Path, name: str, bit: int, *, cover: bool) -> None:
    """Flip a bit in the middle of a dataset, 0 the lowest, -1 the highest; its sidecar says the
    size that it has then, and with `cover` the hash."""
    path = folder / "shards" / "00000.h5"
    with h5py.File(path, "r+") as file:
        dataset = file[name]
        values = dataset[:]
        if values.dtype.kind == "O":
            text = bytearray(values.flat[len(values) // 2] or b"x")
            text[len(text) // 2] ^= 1 << (bit % 3)
            values[len(values) // 2] = bytes(text)
        else:
            at = values.size // 2
            size = 1 if values.dtype.kind == "b" else 8 * values.dtype.itemsize
            raw = bytearray(values.tobytes())
            place = at * values.dtype.itemsize * 8 + bit % size
            raw[place // 8] ^= 1 << place % 8
            values = np.frombuffer(bytes(raw), values.dtype).reshape(values.shape)
        dataset[...] = values
    sidecar = json.loads(path.with_suffix(".json").read_text())
    sidecar["bytes"] = path.stat().st_size
    if cover:
        sidecar["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_suffix(".json").write_text(json.dumps(sidecar))


def problems_of(folder: Path) -> list[str]:
    with open_store(folder) as store:
        return check_store(store)["problems"]


LOW = {
    *("prompt/id", "prompt/ptr"),
    *(f"source/{s}/{part}" for s in (0, 1) for part in ("ptr", "feature", "present")),
    *(f"source/{s}/{part}" for s in (0, 1) for part in ("present_count", "inverse/feature")),
    *(f"source/{s}/inverse/{part}" for s in (0, 1) for part in ("ptr", "position")),
    *(f"layer/2/index/{role}/{part}" for role in "qkvo" for part in ("feature", "ptr", "step")),
    *(f"layer/2/index/{r}/best_{part}" for r in "qkvo" for part in ("ptr", "row", "strength")),
    *(f"layer/2/tally/{table}/{part}" for table in ("qk", "ov") for part in ("ptr", "edges")),
    *(f"layer/2/tally/{table}/{part}" for table in ("qk", "ov") for part in ("left", "right")),
    *(f"layer/2/tally/{table}/{part}" for table in ("qk", "ov") for part in ("total", "size")),
    *(
        f"layer/2/tally/{table}/missed_{part}"
        for table in ("qk", "ov")
        for part in ("count", "size")
    ),
    *(f"layer/2/{name}" for name in ("group_ptr", "key", "flagged", "completeness", "score")),
    *("layer/2/contrast_completeness", "layer/2/ov/completeness", "layer/2/tally/score_size"),
    *(f"layer/2/ov/{name}" for name in ("v_top", "v_norms", "o_top", "o_reads")),
    *(f"layer/2/ov/{name}" for name in ("value", "value_first", "v_slots", "o_slots")),
    *(f"layer/2/qk/{side}_{name}" for side in "qk" for name in ("top", "marginals", "slots")),
    *("layer/2/qk/contrast", "layer/2/qk/value", "layer/2/qk/value_first"),
}
"""The lowest bit of a number in the middle is contradicted by something else."""
HIGH = {
    *("prompt/token", "layer/2/score_capped", "layer/2/score_contrast"),
    *("layer/2/pattern", "layer/2/feature_share", "layer/2/pattern_error", "layer/2/share_sums"),
    *("layer/2/qk/totals", "layer/2/qk/q_contrast_totals", "layer/2/qk/k_contrast_totals"),
    *("layer/2/qk/q_parts", "layer/2/qk/k_parts", "layer/2/ov/v_parts"),
    "layer/2/ov/block_completeness",
}
"""The highest bit is: what is computed cannot be told to the last bit."""
HASH = {
    *("prompt/token_text", "prompt/text", "prompt/extra", "prompt/truncated"),
    *("source/0/act", "source/1/act", "layer/2/sink_share"),
    *("layer/2/ov/o_totals", "layer/2/ov/v_part_norms"),
    *(f"layer/2/qk/{side}_{name}" for side in "qk" for name in ("contrasts", "ablations")),
    *(f"layer/2/qk/{side}_part_{name}" for side in "qk" for name in ("marginals", "contrasts")),
}
"""Nothing else says these numbers and texts: only the hash tells."""


def test_every_dataset_of_a_shard_is_among_those_whose_bits_are_flipped(planted: Path) -> None:
    names = datasets_of(planted)
    assert set(names) == LOW | HIGH | HASH
    assert len(LOW) + len(HIGH) + len(HASH) == len(names)


@pytest.mark.parametrize("name", sorted(LOW | HIGH | HASH))
def test_a_flipped_bit_is_found_by_the_hash_and_by_what_contradicts_it(
    planted: Path, tmp_path: Path, name: str
) -> None:
    bit = 0 if name in LOW else -1
    folder = Path(shutil.copytree(planted, tmp_path / "copy"))
    flip(folder, name, bit, cover=False)
    assert problems_of(folder) == [
        "shards/00000.h5 does not have the hash of its sidecar: delete it and run again"
    ]
    path = folder / "shards" / "00000.json"
    digest = hashlib.sha256(path.with_suffix(".h5").read_bytes()).hexdigest()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sha256": digest}))
    found = problems_of(folder)
    assert (found == []) == (name in HASH), found
    assert all("shards/00000.h5" in p or p.startswith("worst ") for p in found), found


def test_an_index_has_the_rows_and_the_strongest_of_every_feature_of_every_role(
    planted: Path,
) -> None:
    with open_store(planted) as store:
        view = store.shards[0].layer(2)
        rows = slice(0, len(view))
        for role in view.roles:
            found = RoleIndex(view, role)
            ids, strengths = view.strongest(role, rows, view.where(rows))
            seen = sorted(set(ids[ids >= 0].tolist()))
            assert view.dataset(f"index/{role.name}/feature")[:].tolist() == seen
            for feature in seen:
                at = [(row, column) for row, column in np.argwhere(ids == feature).tolist()]
                assert found.rows(feature).tolist() == [row for row, _ in at]
                order = sorted(at, key=lambda place: (-abs(strengths[*place]), place[0]))[:8]
                best = found.best(feature)
                assert best.rows.tolist() == [row for row, _ in order]
                assert best.strengths.tolist() == [strengths[*place] for place in order]


POSTINGS = st.lists(
    st.tuples(st.sampled_from([0, 1, 2, 70_000, 5_000_000]), st.floats(-4, 4, width=16)),
    max_size=80,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@examples(POSTINGS)
def test_postings_are_sorted_as_a_plain_sort_does(given: list[tuple[int, float]]) -> None:
    features, strengths = (np.array([one[i] for one in given]) for i in (0, 1))
    found = Postings(features.astype(np.int64), np.arange(len(given)), strengths.astype(np.float32))
    by_feature = index._sorted(found)
    wanted = sorted(range(len(given)), key=lambda row: (given[row][0], row))
    assert by_feature.rows.tolist() == wanted
    strongest = sorted(wanted, key=lambda row: (given[row][0], -abs(given[row][1]), row))
    kept = [
        r for n, r in enumerate(strongest) if n < 8 or given[strongest[n - 8]][0] != given[r][0]
    ]
    assert index._best(by_feature).rows.tolist() == kept


# Repair -------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Five shards of two prompts."""
    light.write(tmp_path / "results", 5)
    return tmp_path / "results"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _foreign(path: Path) -> None:
    """The shard of another place, with a sidecar that does not say so."""
    shutil.copy(path.with_name("00001.h5"), path)
    sidecar = json.loads(path.with_name("00001.json").read_text())
    path.with_suffix(".json").write_text(json.dumps(sidecar | {"shard": 2, "prompts": [4, 5]}))


def _twice(path: Path) -> None:
    """A whole shard whose prompts are those of another."""
    with h5py.File(path, "r+") as file:
        file["prompt/id"][...] = [2, 3]
    sidecar = json.loads(path.with_suffix(".json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sidecar |= {"prompts": [2, 3], "bytes": path.stat().st_size, "sha256": digest}
    path.with_suffix(".json").write_text(json.dumps(sidecar))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (_cut, "bytes, expected"),
    "empty": (lambda path: path.write_bytes(b""), "is 0 bytes, expected"),
    "a stub": (lambda path: path.write_text("version https://example.org/spec"), "bytes, expected"),
    "zeros of its size": (_zeros, "hash of its sidecar"),
    "a bit": (_bit, "hash of its sidecar"),
    "missing": (lambda path: path.unlink(), "is missing"),
    "another's": (_foreign, "another run or place"),
    "a prompt twice": (_twice, "prompt 2 is in shards/00001.h5 and in shards/00002.h5"),
    "a broken sidecar": (lambda p: p.with_suffix(".json").write_text("{"), "is broken"),
    "a foreign sidecar": (lambda p: p.with_suffix(".json").write_text("{}"), "is broken"),
}


@pytest.mark.parametrize(("damage", "found"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_shard_is_named_set_aside_and_made_again(
    results: Path, tmp_path: Path, damage: Callable[[Path], Any], found: str
) -> None:
    """V33, whole kind: the others are served before, meanwhile and after, byte for byte."""
    light.write(tmp_path / "whole", 5)
    path = results / "shards" / "00002.h5"
    damage(path)
    others = {name: f for name, f in files(results).items() if not name.startswith("00002")}
    bad = {p.name: p.read_bytes() for p in path.parent.glob("00002.*")}
    with Store(results) as store:
        for prompt in (0, 1, 6, 9):
            light.assert_right(store, prompt)
        before = files(results)
        planned = repair_store(store, dry_run=True)
        assert files(results) == before
        answer = repair_store(store)
        assert {**planned, "dry_run": False} == answer
        assert (answer["ok"], answer["to_make"], answer["problems"]) == (True, 1, [])
        (entry,) = answer["set_aside"]
        assert entry["shard"] == 2
        assert any(found in problem for problem in entry["problems"]), entry
        assert all("00002" in problem for problem in entry["problems"])
        assert store.prompt_ids == [0, 1, 2, 3, 6, 7, 8, 9]
        assert store.problems == []
    kept = {name.removesuffix(".bad-1"): p for name in files(results) if (p := name)[-1] == "1"}
    assert kept.keys() == bad.keys()
    assert all((path.parent / new).read_bytes() == bad[old] for old, new in kept.items())
    light.write(results, 5)
    assert problems_of(results) == []
    assert_same_content(results, tmp_path / "whole")
    now = files(results)
    assert {name: now[name] for name in others} == others


def test_a_second_repair_keeps_the_first_ones_files_and_a_whole_store_needs_none(
    results: Path,
) -> None:
    for number in (1, 2):
        _cut(results / "shards" / "00002.h5")
        with Store(results) as store:
            (entry,) = repair_store(store)["set_aside"]
        assert entry["files"] == [
            f"shards/00002.json.bad-{number}",
            f"shards/00002.h5.bad-{number}",
        ]
        light.write(results, 5)
    before = files(results)
    with Store(results) as store:
        answer = repair_store(store)
    assert (answer["ok"], answer["set_aside"], answer["to_make"]) == (True, [], 0)
    assert files(results) == before


def test_repair_says_what_it_did_and_exits_1_for_what_it_cannot_mend(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = results / "shards" / f".00007.h5.{socket.gethostname()}.{ended.pid}.tmp"
    stale.write_bytes(b"x")
    assert main(["repair", str(results), "--dry-run"]) == 0
    assert stale.exists()
    assert main(["repair", str(results)]) == 0
    assert not stale.exists()
    assert "removed: its process is gone" in capsys.readouterr().out
    _cut(results / "shards" / "00003.h5")
    assert main(["repair", str(results)]) == 0
    printed = capsys.readouterr().out
    assert "shard 3 set aside: shards/00003.json.bad-1, shards/00003.h5.bad-1" in printed
    assert "1 shards are to be made" in printed
    assert "headattr run --model MODEL --basis 0=tokens --texts TEXTS" in printed
    assert main(["repair", str(results), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["to_make"], answer["set_aside"]) == (True, 1, [])
    manifest = json.loads((results / "manifest.json").read_text())
    manifest["bos"]["prepend"] = True
    (results / "manifest.json").write_text(json.dumps(manifest))
    assert main(["repair", str(results)]) == 1
    assert "cannot be mended so: manifest.json was changed" in capsys.readouterr().out


def test_a_file_of_the_right_size_that_is_no_shard_is_not_taken_for_a_finished_one(
    results: Path,
) -> None:
    """Such as a copy that was interrupted after the room for it was made."""
    manifest = Store(results).manifest
    assert finished_shards(results, manifest) == [0, 1, 2, 3, 4]
    _zeros(results / "shards" / "00003.h5")
    assert finished_shards(results, manifest) == [0, 1, 2, 4]
    with Store(results) as store:
        with pytest.raises(StoreError, match=r"00003\.h5 cannot be read"):
            light.assert_right(store, 6)
        light.assert_right(store, 8)
    light.write(results, 5)
    assert problems_of(results) == []


# What was written is read back --------------------------------------------------------------------


def _hole(path: Path, dataset: str) -> None:
    with h5py.File(path, "r", locking=False) as file:
        found: Any = file[dataset]
        where = found.id.get_chunk_info(0) if found.chunks else None
        offset = where.byte_offset if where else found.id.get_offset()
        size = where.size if where else found.id.get_storage_size()
    with path.open("rb+") as raw:
        raw.seek(offset)
        raw.write(bytes(size))


LOST: dict[str, Callable[[Path], Any]] = {
    "a chunk": lambda path: _hole(path, "chunks"),
    "a small dataset": lambda path: _hole(path, "whole"),
    "the end": lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    "everything": lambda path: path.write_bytes(b""),
    "a dataset": lambda path: h5py.File(path, "r+").__delitem__("whole"),
}


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_what_a_disk_lost_in_silence_is_found_before_a_file_takes_its_name(
    tmp_path: Path, lose: Callable[[Path], Any]
) -> None:
    path = tmp_path / "shard.h5"
    with created(path) as file:
        file["whole"] = np.arange(1, 200)
        file.create_dataset("text", data=["a", "é"], dtype=h5py.string_dtype())
        options: dict[str, Any] = dict(hdf5plugin.Zstd(clevel=3))
        numbers = np.random.default_rng(0).random((1000, 3))
        file.create_dataset("chunks", data=numbers, chunks=(256, 3), **options)
        written = receipt(file)
    compare(path, written)
    lose(path)
    with pytest.raises(StoreError, match="cannot write"):
        compare(path, written)


# What is open -------------------------------------------------------------------------------------


def open_files(folder: Path) -> int:
    links = [p for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    return sum(str(p.readlink()).startswith(str(folder)) for p in links)


def test_shards_open_when_they_are_asked_and_the_least_recently_used_closes(
    tmp_path: Path,
) -> None:
    assert opened.MOST == 128
    light.write(tmp_path / "results", 12)
    with Store(tmp_path / "results") as store:
        store._served.handles.most = 4
        assert open_files(tmp_path) == 0
        for prompt in [*range(24), *reversed(range(24)), 0, 23, 0, 23]:
            light.assert_right(store, prompt)
            assert open_files(tmp_path) <= 4
        held = store.shards[0].layer(0)
        for prompt in range(2, 24):
            light.assert_right(store, prompt)
        assert open_files(tmp_path) == 5  # what is in use stays open
        assert held.dataset("score")[:].tolist()[:3] == light.scores_of(0)
        del held
        assert check_store(store)["problems"] == []
    assert open_files(tmp_path) == 0
    light.assert_right(store, 3)
    store.close()


def test_refresh_sees_what_was_finished_since_and_what_was_set_aside(tmp_path: Path) -> None:
    manifest = light.manifest_of(tmp_path / "out", 6)
    light.begin(tmp_path / "out", manifest, {})
    with Store(tmp_path / "out") as store:
        assert store.refresh() == []
        for index in (0, 2):
            light.write_shard(tmp_path / "out", manifest, index)
        with pytest.raises(StoreError, match="is not finished yet"):
            light.assert_right(store, 0)
        assert store.refresh() == [0, 1, 4, 5]
        light.assert_right(store, 5)
        assert (store.density(0, 99), store.mean_l0(0)) == (0.0, 1.0)
        _cut(tmp_path / "out" / "shards" / "00002.h5")
        (tmp_path / "out" / "shards" / "00002.json").touch()
        assert store.refresh() == []
        assert store.prompt_ids == [0, 1]
        assert "00002.h5" in store.problems[0]
        repair_store(store)
        light.write(tmp_path / "out", 3)
        assert store.refresh() == [2, 3, 4, 5]
        assert store.problems == []
        for prompt in store:
            light.assert_right(store, prompt)


def test_rows_beyond_two_to_the_31_are_read_where_they_are(tmp_path: Path) -> None:
    """V36: the same edges, behind as many that were never written."""
    light.write(tmp_path, 1)
    path, before = tmp_path / "shards" / "00000.h5", (1 << 31) + 7
    with h5py.File(path, "r+") as file:
        layer: Any = file["layer/0"]
        names: list[str] = []
        layer.visititems(
            lambda name, item: names.append(name) if getattr(item, "chunks", None) else None
        )
        for name in (name for name in names if not name.startswith(("index/", "tally/"))):
            own = layer[name][3:]
            del layer[name]
            shape, chunks = (before + 3, *own.shape[1:]), (4096, *own.shape[1:])
            layer.create_dataset(name, shape, own.dtype, chunks=chunks)[before:] = own
        layer["group_ptr"][:] = [0, before, before + 3]
    sidecar = path.with_suffix(".json")
    size = path.stat().st_size
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"bytes": size}))
    assert size < 2_000_000
    with Store(tmp_path) as store:
        light.assert_right(store, 1)
        view = store.shards[0].layer(0)
        assert len(view) == before + 3
        rows = np.arange(before, before + 3)
        assert view.where(rows).prompt.tolist() == [1, 1, 1]
        assert view.where(slice(before, before + 3)).q_pos.tolist() == [0, 5, 7]
        assert view.read(view.edge_columns["score"], rows).tolist() == light.scores_of(1)


FORKED = """
import os, pickle, sys, time
sys.path.insert(0, sys.argv[1])
import light, random
from pathlib import Path
from headattr.store.reader import Store

def files():
    return sorted(p.name for p in Path("/proc/self/fd").iterdir()
                  if p.is_symlink() and str(p.readlink()).endswith(".h5"))

store = Store(sys.argv[2])
for prompt in store:
    light.assert_right(store, prompt)
held = store.shards[0].layer(0)
before = files()

def child(seed):
    asked = random.Random(seed)
    for _ in range(100):
        prompt = asked.choice(store.prompt_ids)
        light.assert_right(store, prompt)
        assert store._where[prompt]._opened.process == os.getpid()
    assert held.dataset("score")[:3].tolist() == light.scores_of(0)
    assert len(files()) <= len(before) + 1, (files(), before)
    store.close()

children = [light.forked(lambda n=n: child(n)) for n in range(4)]
child_of_own = random.Random(9)
for _ in range(100):
    light.assert_right(store, child_of_own.choice(store.prompt_ids))
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
for prompt in store:
    light.assert_right(store, prompt)
assert files() == before
sys.stdout.buffer.write(pickle.dumps(store))
"""


def test_forked_readers_open_their_own_files_and_a_pickled_store_is_only_its_place(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V35. The store was given by a path that means something else where it is read."""
    found = subprocess.run(
        [sys.executable, "-c", FORKED, HERE, results.name],
        capture_output=True,
        cwd=results.parent,
    )
    assert found.returncode == 0, found.stderr.decode()
    assert len(found.stdout) < 500
    with pickle.loads(found.stdout) as store:
        assert store.path == results
        light.assert_right(store, 7)
        with pytest.raises(StoreError, match="was not kept"):
            store.edge(7, Edge(0, 0, 4, 0))
