"""Two trainings into one folder at once, and what another recipe has left there."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from headattr.errors import HeadattrError, UsageError
from headattr.training.lock import alone
from headattr.training.recipe import recipe_of
from headattr.training.run import train_dictionaries

HOLDER = """
import sys, time
from pathlib import Path
from headattr.training.lock import alone
with alone(Path(sys.argv[1]), Path("out")):
    print("holds it", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    lines = [json.dumps({"tokens": p}) + "\n" for p in tiny.prompts(*[400] * 5)]
    (tmp_path / "tokens.jsonl").write_text("".join(lines))
    return recipe_of(
        {
            "model": "tiny",
            "texts": ["tokens.jsonl"],
            "layers": [0, 1],
            "context_size": 16,
            "prepend_bos": False,
            "tokens": 800,
            "held_out_tokens": 160,
            "d_sae": 16,
            "k": 3,
            "batch_size": 128,
        },
        "transcoder",
    )


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that trains into `out`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out.part")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds it\n"
        yield process
        process.kill()


def test_the_second_of_two_trainings_is_refused_with_the_process_of_the_first(
    recipe: Any, tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    said = rf"another process \({holder.pid} on {socket.gethostname()}\) is training into .*out;"
    with pytest.raises(HeadattrError, match=said) as caught:
        train_dictionaries(recipe, tmp_path / "out", base=tmp_path, model=tiny.gpt2())
    assert caught.value.exit_code == 1
    assert [path.name for path in (tmp_path / "out.part").iterdir()] == ["lock"]


def test_a_process_that_was_killed_locks_nothing(
    recipe: Any, tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "out.part" / "lock").exists()
    train_dictionaries(recipe, tmp_path / "out", base=tmp_path, model=tiny.gpt2())
    assert not (tmp_path / "out.part").exists()
    assert not (tmp_path / "out" / "lock").exists()


def test_a_lock_that_nothing_was_done_under_leaves_no_folder(tmp_path: Path) -> None:
    with alone(tmp_path / "out.part", tmp_path / "out"):
        with pytest.raises(HeadattrError, match=rf"another process \({os.getpid()} on "):
            alone(tmp_path / "out.part", tmp_path / "out").__enter__()
        assert (tmp_path / "out.part" / "lock").exists()
    assert not (tmp_path / "out.part").exists()


def test_what_is_finished_of_another_recipe_is_not_taken(recipe: Any, tmp_path: Path) -> None:
    def stop(said: str) -> None:
        if said.startswith("layer_1"):
            raise RuntimeError

    out, model = tmp_path / "out", tiny.gpt2()
    with pytest.raises(RuntimeError):
        train_dictionaries(recipe, out, base=tmp_path, model=model, say=stop)
    assert (tmp_path / "out.part" / "layer_0.json").is_file()
    other = replace(recipe, learning_rate=2e-3)
    with pytest.raises(UsageError, match=r"layer_0\.json is of another recipe"):
        train_dictionaries(other, out, base=tmp_path, model=model)
