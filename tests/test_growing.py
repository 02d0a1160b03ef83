"""What is written as it comes: rows appended, cut and widened, and what a failed prompt leaves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import content

import headattr
from headattr.basis.plain import PlainDictionary
from headattr.batch import rows_of_prompt
from headattr.errors import StoreError
from headattr.inputs import inputs_from_memory
from headattr.layers import Layers, budget_of
from headattr.pipeline import attribute_prompts
from headattr.plan import make_run
from headattr.store import growing, writer
from headattr.store.check import check_store
from headattr.store.coding import decode_slots, round_values
from headattr.store.growing import Growing
from headattr.store.reader import Store
from headattr.store.writer import new_shard

# Rows ---------------------------------------------------------------------------------------------


@contextmanager
def in_memory(held: int) -> Iterator[h5py.Group]:
    """A group of a file that is never on disk; `held`: rows that wait to be written."""
    before, growing._HELD = growing._HELD, held
    try:
        with h5py.File("none.h5", "w", driver="core", backing_store=False) as file:
            yield file.create_group("layer")
    finally:
        growing._HELD = before


TYPES = (np.uint8, np.uint16, np.uint32)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 23)),
        st.tuples(st.just("cut"), st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1))),
        st.tuples(st.just("widen"), st.integers(0, 2)),
    ),
    max_size=14,
)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(STEPS, st.integers(1, 6), st.integers(1, 20), st.integers(0, 2))
def test_slots_are_those_that_were_appended_whatever_was_cut_and_widened(
    steps: list[tuple[str, Any]], chunk: int, held: int, first: int
) -> None:
    """Against a list of rows. The type is wide enough for what is there, as `_Layer.widen` sees
    to; beyond that it may become wider or narrower at any time."""
    generator = np.random.default_rng(chunk + 7 * held)
    wanted, at = np.empty((0, 3), np.int32), first
    with in_memory(held) as group:
        found = Growing(group, "slots", chunk, "zstd")
        found.widen(np.dtype(TYPES[at]))
        found.append(wanted)
        for step, value in steps:
            if step == "append":
                most = int(np.iinfo(TYPES[at]).max) - 1
                rows = generator.integers(-1, most, (value, 3), endpoint=True, dtype=np.int64)
                rows[rows > np.iinfo(np.int32).max] = -1
                found.append(rows.astype(np.int32))
                wanted = np.concatenate([wanted, rows.astype(np.int32)])
            elif step == "cut":
                kept = int(value * len(wanted))
                found.cut(kept)
                wanted = wanted[:kept]
            elif wanted.max(initial=0) < np.iinfo(TYPES[value]).max:
                at = value
                found.widen(np.dtype(TYPES[at]))
            assert len(found) == len(wanted)
        found.finish()
        dataset = group["slots"]
        assert dataset.dtype == TYPES[at]
        assert np.array_equal(decode_slots(dataset[:]), wanted)
        assert list(group) == ["slots"]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    STEPS,
    st.integers(1, 6),
    st.integers(1, 20),
    st.sampled_from([None, 7, 10]),
    st.sampled_from(["zstd", "gzip"]),
)
def test_numbers_are_those_that_were_appended_rounded_once(
    steps: list[tuple[str, Any]], chunk: int, held: int, bits: int | None, filters: growing.Filter
) -> None:
    generator = np.random.default_rng(chunk)
    wanted = np.empty(0, np.float32)
    with in_memory(held) as group:
        found = Growing(group, "values", chunk, filters, bits=bits)
        found.append(wanted)
        for step, value in steps:
            if step == "append":
                rows = generator.standard_normal(value).astype(np.float32)
                found.append(rows)
                wanted = np.concatenate([wanted, rows])
            elif step == "cut":
                kept = int(value * len(wanted))
                found.cut(kept)
                wanted = wanted[:kept]
        found.finish()
        kept = wanted if bits is None else round_values(wanted, bits)
        assert np.array_equal(group["values"][:], kept)


def test_what_was_appended_may_change_afterwards() -> None:
    """Parts are views of the tables that are used again."""
    with in_memory(4) as group:
        found = Growing(group, "values", 2, "zstd")
        for start in range(0, 12, 3):
            rows = np.arange(start, start + 3, dtype=np.float32)
            found.append(rows.copy())
        found.finish()
        assert group["values"][:].tolist() == list(range(12))


@pytest.mark.parametrize("held", [2, 100])
def test_numbers_that_are_not_finite_are_refused_by_name(held: int) -> None:
    with in_memory(held) as group:
        found = Growing(group, "values", 2, "zstd")
        with pytest.raises(StoreError, match="values has non-finite values"):  # noqa: PT012
            found.append(np.array([1, 2, np.inf, 3, 4], np.float32))
            found.finish()


# Prompts that fail late ---------------------------------------------------------------------------

TEXTS = tiny.prompts(5, 8, 3, 9, 4)


@pytest.fixture(scope="module")
def hf() -> Any:
    return tiny.llama()


def plain(bad: tuple[int, ...], wide: tuple[int, ...], kept: list[int]) -> PlainDictionary:
    """300 directions; activations of bad prompts are finite and make numbers beyond float32, those
    of wide prompts are all active, which needs wider slots."""
    directions = torch.randn(300, 24, generator=torch.Generator().manual_seed(0))
    activations = []
    for index in kept:
        generator = torch.Generator().manual_seed(1 + index)
        acts = torch.randn(len(TEXTS[index]), 300, generator=generator)
        acts = acts.abs() if index in wide else torch.relu(acts - 2)
        activations.append(acts * (1e30 if index in bad else 1))
    return PlainDictionary(directions, activations)


def options_of(bad: Any, wide: Any, kept: list[int], **options: Any) -> dict[str, Any]:
    """Bases at three layers, of which the last breaks; edges of the others are then written."""
    return {
        "basis": {0: "tokens", 1: tiny.sae(layer=1), 2: plain(bad, wide, kept)},
        "texts": [TEXTS[index] for index in kept],
        "output": "unembed",
        "edges": "top:2",
        "heads": "L0H0,L1H1,L2H3",
        "topk": 8,
        **options,
    }


ALL = list(range(len(TEXTS)))


@pytest.mark.parametrize(
    ("bad", "wide", "batch"),
    [
        ((0,), (), 5),
        ((2,), (), 5),
        ((4,), (4,), 1),
        ((0, 1), (1,), 2),
        ((2, 3), (0, 3), 2),
    ],
)
def test_a_prompt_that_fails_in_a_later_layer_leaves_nothing_behind(
    hf: Any, tmp_path: Path, bad: Any, wide: Any, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard is that of a run without it, to the type of every dataset, whatever was written
    already (batches are the same, so that nothing is rounded otherwise)."""
    monkeypatch.setattr(growing, "_HELD", 1)
    monkeypatch.setattr(writer, "PAIR_CHUNK", 3)
    monkeypatch.setattr(writer, "SCALAR_CHUNK", 4)
    kept = [index for index in ALL if index not in bad]
    for name, some in (("whole", ALL), ("without", kept)):
        options = options_of(bad, wide, some, batch_size=batch)
        with headattr.attribute(hf, out=tmp_path / name, **options) as store:
            assert check_store(store)["problems"] == []
            if name == "whole":
                assert store.prompt_ids == kept
                assert [entry["prompt"] for entry in store.set_aside] == list(bad)
                for entry in store.set_aside:
                    assert "of layer 2; its activations are too large" in entry["reason"]
    found, wanted = content(tmp_path / "whole"), content(tmp_path / "without")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if not name.endswith((" manifest_hash", " prompt/id")):
            assert np.array_equal(found[name], value), name
            assert getattr(found[name], "dtype", None) == getattr(value, "dtype", None), name


@pytest.mark.parametrize("batch", [1, 5])
def test_a_shard_whose_every_prompt_failed_late_is_whole(
    hf: Any, tmp_path: Path, batch: int
) -> None:
    options = options_of(tuple(ALL), (), ALL, batch_size=batch)
    with headattr.attribute(hf, out=tmp_path / "out", **options) as store:
        assert store.prompt_ids == []
        answer = check_store(store)
        assert (answer["problems"], answer["edges"], answer["set_aside"]) == ([], 0, 5)
        assert set(store.shards[0].file) == {"prompt"}


@pytest.mark.parametrize("bad", [(), (1, 3), tuple(ALL)])
def test_the_bar_ends_at_its_total_and_never_beyond(hf: Any, tmp_path: Path, bad: Any) -> None:
    options = options_of(bad, (), ALL, batch_size=3)
    basis, output, texts = (options.pop(name) for name in ("basis", "output", "texts"))
    given = hf, basis, output, texts, tmp_path / "out", None, options
    run = make_run(*inputs_from_memory(*given))
    done: list[int] = [0]
    with new_shard(tmp_path, 0, run.plans, manifest_hash="", longest=16) as shard:
        attribute_prompts(
            Layers(run, budget_of(run)),
            run.prompts,
            shard,
            lambda rows: done.append(done[-1] + rows),
        )
    total = sum(rows_of_prompt(run, prompt) for prompt in run.prompts)
    assert done[-1] == total == 3 * sum(map(len, TEXTS))
    assert 0 <= min(done) <= max(done) <= total


def test_a_layer_without_edges_has_columns_of_its_width(hf: Any, tmp_path: Path) -> None:
    """One edge in one layer of three."""
    options = options_of((), (), ALL)
    basis, texts = options.pop("basis"), options.pop("texts")
    listed = tmp_path / "edges.jsonl"
    listed.write_text('{"prompt": 1, "layer": 1, "head": 1, "q_pos": 7, "k_pos": 3}\n')
    options["edges"] = f"file:{listed}"
    headattr.attribute(hf, basis, texts, tmp_path / "out", **options).close()
    with Store(tmp_path / "out") as store:
        assert check_store(store)["problems"] == []
        file = store.shards[0].file
        for layer, kinds in ((0, 2), (1, 3), (2, 3)):
            group = file[f"layer/{layer}"]
            assert len(group["key"]) == (layer == 1)
            for name in ("qk/q_slots", "qk/value", "ov/o_slots"):
                assert group[name].shape == (layer == 1, 8), name
            assert group["qk/totals"].shape == (layer == 1, kinds, kinds)
