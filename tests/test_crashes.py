"""Writers that are killed, disks that are full, readers meanwhile: nothing published is lost."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import light
import pytest
import tiny
from test_store import assert_same_content

from headattr.cli import main
from headattr.store.check import check_store
from headattr.store.reader import Store, open_store

HERE = Path(__file__).parent
KILLS, SHARDS = 50, 5


def published(folder: Path) -> dict[str, str]:
    """Hash of every file that is not a temporary one."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "shards").glob("[0-9]*"))
    }


class Nursery:
    """A light process that forks writers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, HERE / "light.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def write(self, folder: Path, kill_after: float | None = None) -> int:
        """How a writer ended."""
        assert self.process.stdin
        assert self.process.stdout
        print("write", folder, SHARDS, file=self.process.stdin, flush=True)
        pid = int(self.process.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.process.communicate()


def test_a_writer_killed_at_fifty_moments_loses_nothing_and_ends_as_if_undisturbed(
    nursery: Nursery, tmp_path: Path
) -> None:
    """V27, V33. A store that is finished before all kills makes room for the next."""
    whole = tmp_path / "whole"
    begun = time.monotonic()
    assert nursery.write(whole) == 0
    usual = time.monotonic() - begun
    undisturbed, rng, kills, stores = published(whole), random.Random(0), 0, 0
    while kills < KILLS:
        stores += 1
        folder, before, checked = tmp_path / f"killed{stores}", dict[str, str](), 0
        while True:
            ended = nursery.write(folder, rng.uniform(0, usual / 2) if kills < KILLS else None)
            kills += ended == -signal.SIGKILL
            assert ended in (0, -signal.SIGKILL)
            there = published(folder) if (folder / "shards").exists() else {}
            assert (
                before.items()
                <= {
                    name: found for name, found in there.items() if undisturbed[name] == found
                }.items()
            )
            finished = {name for name in there if name.endswith(".json")}
            assert {name.replace(".json", ".h5") for name in finished} <= there.keys()
            before = {
                name: found for name, found in there.items() if name[:5] + ".json" in finished
            }
            if len(finished) > checked:
                checked = len(finished)
                _assert_right(folder)
            if ended == 0:
                break
        assert published(folder) == undisturbed
        assert not list((folder / "shards").glob(".*"))
        shutil.rmtree(folder)


def _assert_right(folder: Path) -> None:
    with Store(folder) as store:
        assert store.problems == []
        problems = check_store(store)["problems"]
        assert all("not finished" in problem for problem in problems), problems
        for prompt in store.prompt_ids:
            light.assert_right(store, prompt)


def test_readers_get_whole_answers_while_writers_publish_and_are_killed(tmp_path: Path) -> None:
    """V32, V35: 8 readers, some of them forked with open files. `make soak` takes ten minutes."""
    seconds = "60" if os.environ.get("CI") else "10"
    found = subprocess.run(
        [sys.executable, HERE / "soak.py", tmp_path / "results", seconds],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["answers"] > 100


# Full disks ---------------------------------------------------------------------------------------

LIMITED = """
import json, os, resource, signal, sys
import headattr.pipeline, headattr.summary  # before the limit: what is compiled is written
from headattr.cli import main
ends = []
for limit, arguments in json.load(sys.stdin):
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(write, 2)
        os.close(read)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        sys.exit(main(arguments))
    os.close(write)
    said = os.fdopen(read).read()
    ends.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said])
json.dump(ends, sys.stdout)
"""
PARTS = (0.002, 0.05, 0.3, 0.7, 0.97, 0.999)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, texts, and a finished run of one shard."""
    place = tmp_path_factory.mktemp("small")
    tiny.llama().save_pretrained(place / "model")
    lines = [json.dumps({"tokens": tokens}) for tokens in tiny.prompts(24, 30)]
    (place / "texts.jsonl").write_text("\n".join(lines))
    assert main(_run(place, place / "whole")) == 0
    return place


def _run(place: Path, out: Path) -> list[str]:
    found = f"run --model {place / 'model'} --basis 0=tokens --texts {place / 'texts.jsonl'}"
    return [*found.split(), "--output", "unembed", "--edges", "all", "--out", str(out)]


@pytest.fixture(scope="module")
def limited(small: Path) -> dict[float, tuple[int, str]]:
    """How runs ended whose files could not be larger than a part of the shard."""
    size = (small / "whole" / "shards" / "00000.h5").stat().st_size
    asked = [(int(part * size), _run(small, small / f"at{part}")) for part in PARTS]
    found = subprocess.run(
        [sys.executable, "-c", LIMITED], input=json.dumps(asked), capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return {part: tuple(ended) for part, ended in zip(PARTS, json.loads(found.stdout), strict=True)}


@pytest.mark.parametrize("part", PARTS)
def test_a_full_disk_ends_the_run_with_path_and_cause_and_a_rerun_completes_it(
    small: Path, limited: dict[float, tuple[int, str]], part: float
) -> None:
    """V34: or with a crash, but never with a file that is not whole."""
    out, (status, said) = small / f"at{part}", limited[part]
    assert status != 0
    if status > 0:
        assert "cannot write" in said
        assert str(out) in said
    assert not list(out.glob("shards/0*"))
    if (out / "manifest.json").exists():
        with open_store(out) as store:
            assert (store.problems, store.prompt_ids) == ([], [])
    assert main(_run(small, out)) == 0
    assert_same_content(out, small / "whole")
    assert not list(out.glob("shards/.*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A disk of so many bytes; another number makes it larger."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = False

    def make(size: int) -> Path:
        nonlocal mounted
        again = "remount," if mounted else ""
        command = ["mount", "-t", "tmpfs", "-o", f"{again}size={size}", "tmpfs", place]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"no disk can be mounted here: {error}")
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
        mounted = True
        return place

    yield make
    if mounted:
        subprocess.run(["umount", place], check=True)


def test_a_disk_that_fills_keeps_what_is_finished_and_goes_on_when_there_is_room(
    nursery: Nursery, disk: Callable[[int], Path], tmp_path: Path
) -> None:
    """V34: a real one, of several sizes, until all fits."""
    assert nursery.write(tmp_path / "whole") == 0
    undisturbed = published(tmp_path / "whole")
    need = sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*"))
    before: dict[str, str] = {}
    for part in (0.03, 0.2, 0.45, 0.5, 0.8, 3.0):
        folder = disk(max(4096, int(part * need))) / "results"
        ended = nursery.write(folder)
        assert (ended == 0) == (part == 3.0)
        there = published(folder) if (folder / "shards").exists() else {}
        assert before.items() <= there.items()
        before = {n: h for n, h in there.items() if n[:5] + ".json" in there}
        assert before.items() <= undisturbed.items()
        if before:
            _assert_right(folder)
    assert there == undisturbed


REFUSED = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import light
from headattr.errors import StoreError
out = Path(sys.argv[2])
manifest = light.manifest_of(out, 2)
light.begin(out, manifest, {})
before = resource.getrlimit(resource.RLIMIT_FSIZE)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
try:
    light.write_shard(out, manifest, 0)
except StoreError as error:
    print(error)
assert not list((out / "shards").iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, before)
light.write_shard(out, manifest, 0)
"""


def test_a_disk_that_refuses_is_a_store_error_and_the_shard_can_be_written_later(
    tmp_path: Path,
) -> None:
    """The same process goes on when there is room again."""
    found = subprocess.run(
        [sys.executable, "-c", REFUSED, HERE, tmp_path], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert f"cannot write {tmp_path / 'shards' / '00000.h5'}" in found.stdout
    assert "free the disk" in found.stdout
    with Store(tmp_path) as store:
        light.assert_right(store, 1)


def test_one_run_beside_another_leaves_what_it_has_finished(tmp_path: Path) -> None:
    """Both make the same shard; the one that ends later keeps the other's."""
    manifest = light.manifest_of(tmp_path, 2)
    light.begin(tmp_path, manifest, {})
    options: dict[str, Any] = {"manifest_hash": manifest["hash"], "longest": 9}
    with light.new_shard(tmp_path / "shards", 0, light.PLANS, **options):
        work = subprocess.run(
            [sys.executable, HERE / "light.py"],
            input=f"write {tmp_path} 1\n",
            capture_output=True,
            text=True,
        )
        assert work.stdout.split()[1] == "0", work.stderr
        before = published(tmp_path)
    assert published(tmp_path) == before
    assert check_store(Store(tmp_path))["problems"] == []
