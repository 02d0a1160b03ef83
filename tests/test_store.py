"""The store: what is written is whole, is what was computed, and says so when it is no longer."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401  registers the zstd filter
import light
import made
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

import headattr
from headattr import query
from headattr.edges import (
    Edge,
    EdgeRule,
    HeadId,
    parse_edge_rule,
    parse_heads,
    select_edges,
    token_filter,
)
from headattr.errors import HeadattrError, PromptError, StoreError, UsageError
from headattr.store.check import check_store
from headattr.store.coding import (
    decode_slots,
    encode_slots,
    falling_codes,
    falling_values,
    round_values,
    slot_type,
)
from headattr.store.format import key_type, make_keys, split_keys
from headattr.store.manifest import begin
from headattr.store.reader import Store, open_store
from headattr.store.writer import new_shard

LENGTHS = (9, 14, 1, 40, 5, 22, 3, 17, 30, 2)
TEXTS = tiny.prompts(*LENGTHS)
FORMAT = Path(headattr.__file__).parent / "store" / "FORMAT.md"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def saes() -> dict[int, Any]:
    return {1: tiny.sae(layer=1)}


@pytest.fixture(scope="module")
def run(model: Any, saes: dict[int, Any]) -> Callable[..., Store]:
    """Five shards of two prompts, bases at layers 0 and 1, three heads."""

    def attribute(out: Path, texts: Any = TEXTS, **options: Any) -> Store:
        found = {"model": model, "basis": {0: "tokens", **saes}, "output": "unembed"}
        found |= {"prompts_per_shard": 2, "heads": "L0H0,L1H0,L1H2", **options}
        return headattr.attribute(found.pop("model"), found.pop("basis"), texts, out, **found)

    return attribute


@pytest.fixture(scope="module")
def finished(run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests that change it take a copy."""
    out = tmp_path_factory.mktemp("finished") / "results"
    run(out).close()
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "results"))


def content(folder: Path) -> dict[str, Any]:
    """Every number, text and attribute of every shard, and every sidecar."""
    found: dict[str, Any] = {}
    for path in sorted((folder / "shards").glob("*.h5")):
        with h5py.File(path) as file:

            def keep(name: str, item: Any, at: str = path.name) -> None:
                found[f"{at} {name}"] = item[()] if isinstance(item, h5py.Dataset) else None
                found.update({f"{at} {name} {key}": value for key, value in item.attrs.items()})

            keep("/", file)
            file.visititems(keep)
    return found


def assert_same_content(one: Path, other: Path) -> None:
    found, wanted = content(one), content(other)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.array_equal(found[name], value), name


def files(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        path.name: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted((folder / "shards").iterdir())
    }


def every_edge(store: Store, prompt: int) -> Iterator[Edge]:
    for head in store.heads:
        kept = store.edges(prompt, head)
        for q_pos, k_pos in zip(kept["q_pos"].tolist(), kept["k_pos"].tolist(), strict=True):
            yield Edge(head.layer, head.head, q_pos, k_pos)


# Numbers, slots and keys --------------------------------------------------------------------------

FLOATS = np_st.arrays(
    np.float32,
    st.integers(0, 20),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(FLOATS, st.sampled_from([10, 7]))
def test_numbers_are_rounded_by_at_most_half_of_their_last_bit(
    values: np.ndarray, bits: int
) -> None:
    rounded = round_values(values, bits)
    assert rounded.dtype == np.float32
    assert rounded.shape == values.shape
    assert np.isfinite(rounded).all()
    error = np.abs(rounded.astype(np.float64) - values)
    assert (error <= 2.0 ** -(bits + 1) * np.abs(values.astype(np.float64))).all()
    assert np.array_equal(np.signbit(rounded), np.signbit(values))
    assert np.array_equal(round_values(rounded, bits), rounded)
    in_order = round_values(np.sort(values), bits)
    assert (np.diff(in_order) >= 0).all()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    np_st.arrays(
        np.float32,
        np_st.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12),
        elements=st.one_of(
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.floats(-4, 4, width=32),
        ),
    )
)
def test_codes_of_falling_values_are_off_by_at_most_two_to_the_minus_eleven(
    values: np.ndarray,
) -> None:
    order = np.argsort(-np.abs(values), axis=1, kind="stable")
    falling = np.take_along_axis(values, order, 1)
    first, codes = falling_codes(falling)
    found, sizes = falling_values(first, codes), np.abs(falling.astype(np.float64))
    assert (first.dtype, codes.dtype, found.dtype) == (np.int32, np.uint16, np.float32)
    before = np.concatenate([sizes[:, :1], sizes[:, :-1]], axis=1)
    lost = np.logical_or.accumulate(sizes < 2.0**-45 * before, axis=1)
    error = np.abs(found.astype(np.float64) - falling)
    top = np.where(sizes > 3.39e38, 2.0**-10, 2.0**-11)
    assert (error <= top * sizes + 2.0**-149)[~lost].all()
    assert (found[lost & (found == 0)] == 0).all()
    assert (np.diff(np.abs(found), axis=1) <= 0).all()
    assert (np.sign(found) == np.sign(falling))[found != 0].all()
    again = falling_codes(found)
    assert np.array_equal(falling_values(*again), found)


def test_values_that_do_not_fall_or_are_not_finite_are_refused() -> None:
    with pytest.raises(StoreError, match="not in falling order"):
        falling_codes(np.array([[2.0, 1.0], [1.0, 2.0]], np.float32))
    with pytest.raises(StoreError, match="not in falling order"):
        falling_codes(np.array([[0.0, 1.0]], np.float32))
    with pytest.raises(StoreError, match="non-finite"):
        falling_codes(np.array([[np.inf, 1.0]], np.float32))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0, 1.0),
        (1 + 2**-11, 1.0),
        (1 + 3 * 2**-11, 1 + 2**-9),
        (1 + 2**-11 + 2**-23, 1 + 2**-10),
        (-(2 - 2**-11), -2.0),
        (3.4028235e38, 3.4028235e38),
        (1e-45, 1e-45),
        (-0.0, -0.0),
        (1e-38, 1e-38),
    ],
)
def test_ties_go_to_even_and_the_ends_of_the_range_are_kept(value: float, rounded: float) -> None:
    found = round_values(np.array([value], np.float32))
    assert found.tobytes() == np.array([rounded], np.float32).tobytes()


@pytest.mark.parametrize("longest", [0, 1, 253, 254, 255, 256, 65533, 65534, 65535, 65536, 1 << 31])
def test_slots_round_trip_and_none_is_never_taken_for_a_slot(longest: int) -> None:
    dtype = slot_type(longest)
    slots = np.array([-1, *(s for s in (0, 1, longest - 2, longest - 1) if 0 <= s < longest)])
    stored = encode_slots(slots, dtype)
    assert np.array_equal(decode_slots(stored), slots)
    smaller = {1: 0, 2: np.iinfo(np.uint8).max, 4: np.iinfo(np.uint16).max}[dtype.itemsize]
    assert longest >= smaller


@pytest.mark.parametrize(
    ("longest", "dtype"),
    [
        (1, np.uint32),
        (65535, np.uint32),
        (65536, np.uint32),
        (65537, np.uint64),
        (10**6, np.uint64),
    ],
)
def test_keys_round_trip_and_sort_by_query_then_key(longest: int, dtype: Any) -> None:
    assert key_type(longest) == dtype
    generator = np.random.default_rng(0)
    q_pos = np.sort(generator.integers(0, longest, 500)).astype(np.int64)
    q_pos[-1] = longest - 1
    k_pos = (q_pos * generator.random(500)).astype(np.int64)
    k_pos[-1] = longest - 1
    keys = make_keys(q_pos, k_pos, key_type(longest))
    assert keys.dtype == dtype
    for found, wanted in zip(split_keys(keys), (q_pos, k_pos), strict=True):
        assert np.array_equal(found, wanted)
    assert np.array_equal(np.argsort(keys, kind="stable"), np.lexsort((k_pos, q_pos)))


@pytest.mark.parametrize(("length", "dtype"), [(65536, np.uint32), (65537, np.uint64)])
def test_a_prompt_beyond_65536_tokens_has_wide_keys(
    tmp_path: Path, length: int, dtype: Any
) -> None:
    out = tmp_path / "results"
    manifest = light.manifest_of(out, 2)
    begin(out, manifest, {})
    with new_shard(
        out / "shards", 0, light.PLANS, manifest_hash=manifest["hash"], longest=length
    ) as shard:
        for prompt, tokens in enumerate((7, length)):
            record, edges, facts = light.long_prompt(tokens, prompt, [1.0, 2.0, 3.0])
            shard.add_prompt(record)
            shard.add_edges(0, edges)
            shard.add_layer(facts)
    with open_store(out) as store:
        assert store.shards[0].file["layer/0/key"].dtype == dtype
        assert check_store(store)["problems"] == []
        for prompt, last in ((0, 6), (1, length - 1)):
            assert store.edges(prompt, HeadId(0, 0))["k_pos"].tolist() == [0, 3, last]
            assert query.edge(store, prompt, Edge(0, 0, last, last))["score"] == 3.0
        with pytest.raises(StoreError, match="was not kept"):
            store.edge(1, Edge(0, 0, length - 1, 0))


# A shard is what FORMAT.md says -------------------------------------------------------------------


def test_a_shard_reads_with_h5py_alone(finished: Path) -> None:
    with open_store(finished) as store, h5py.File(finished / "shards" / "00001.h5") as shard:
        layer = shard["layer/1"]
        heads = layer.attrs["heads"].tolist()
        place = shard["prompt/id"][:].tolist().index(3)
        begin_at = int(shard["prompt/ptr"][place])
        active = shard[f"source/{layer.attrs['basis']}"]
        for row in range(*layer["group_ptr"][place * len(heads) + 1 :][:2], 7):
            q_pos, k_pos = divmod(int(layer["key"][row]), 1 << 16)
            answer = query.edge(store, 3, Edge(1, heads[1], q_pos, k_pos))
            assert answer["score"] == layer["score"][row]
            ends = active["ptr"][[begin_at + k_pos, begin_at + k_pos + 1]]
            ids = active["feature"][slice(*ends)].tolist()
            slots = layer["qk/k_slots"][row]
            kept = slots[slots != np.iinfo(slots.dtype).max]
            found = [pair["k_feature"]["id"] for pair in answer["qk"]["pairs"]]
            assert [ids[slot] for slot in kept] == found
            assert sum(map(sum, layer["qk/totals"][row])) == pytest.approx(
                answer["score"], abs=1e-4
            )


def test_the_code_in_format_md_prints_the_pairs_of_the_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.search(r"```python\n(.*?)```", FORMAT.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    layer = int(re.search(r"layer/(\d+)", code[1])[1])  # pyright: ignore[reportOptionalSubscript]
    values = re.search(r"p, h, q, k = (.*)", code[1])
    assert values is not None
    prompt, head, q_pos, k_pos = map(int, values[1].split(","))
    deep = tiny.gpt2(n_layer=layer + 1, n_head=max(3, head + 1))
    store = headattr.attribute(
        deep,
        {layer: tiny.sae(layer=layer)},
        tiny.prompts(*[q_pos + 5] * (prompt + 1)),
        tmp_path / "results",
        edges="all",
    )
    monkeypatch.chdir(tmp_path)
    exec(code[1], {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    answer = query.edge(store, prompt, Edge(layer, head, q_pos, k_pos))
    pairs = [[float(line[0]), *map(int, line[1:])] for line in printed if len(line) == 3]
    assert pairs == [
        [pytest.approx(pair["value"]), pair["q_feature"]["id"], pair["k_feature"]["id"]]
        for pair in answer["qk"]["pairs"]
    ]
    ablations = [[int(line[0]), float(line[1])] for line in printed if len(line) == 2]
    assert ablations == [
        [feature["id"], pytest.approx(feature["ablation"])]
        for feature in answer["qk"]["q_features"]
    ]


SWAPPED = {"qk/value": "qk/contrast", "qk/contrast": "qk/value"}
FORMAT_TYPES = {"slot": ("uint8", "uint16", "uint32"), "UTF-8": ("object",), "code": ("uint16",)}


def described_datasets() -> dict[str, tuple[tuple[str, ...], int]]:
    """Of the tables in FORMAT.md: dataset -> its types and number of axes."""
    found: dict[str, tuple[tuple[str, ...], int]] = {}
    for line in FORMAT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if not line.startswith("| `"):
            continue
        _, names, types, content, _ = cells
        assert content, line
        kinds = re.findall(r"([\w-]+) \[([^\]]*)\]", types)
        names = re.findall(r"`([^`]+)`", names)
        for name, (kind, axes) in zip(names, kinds * (len(names) // len(kinds)), strict=True):
            found[name] = FORMAT_TYPES.get(kind, (kind,)), len(axes.split(","))
    return found


@pytest.fixture(scope="module")
def contrasted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose pairs are ranked by contrast."""
    out = tmp_path_factory.mktemp("contrasted") / "results"
    basis, texts = {0: "tokens", 1: tiny.sae(layer=1)}, TEXTS[:2]
    headattr.attribute(tiny.gpt2(), basis, texts, out, rank="contrast").close()
    return out


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a model with windows and capped scores, through all of its layers."""
    out = tmp_path_factory.mktemp("capped") / "results"
    basis = {0: "tokens", **{layer: tiny.sae(layer=layer) for layer in (1, 2)}}
    texts, options = TEXTS[:3], {"edges": "all", "output": "unembed"}
    headattr.attribute(tiny.gemma2(), basis, texts, out, **options).close()
    return out


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose basis has several components of a kind."""
    out = tmp_path_factory.mktemp("stacked") / "results"
    headattr.attribute(
        tiny.llama(),
        {2: made.transcoders(0, 1)},
        TEXTS[:2],
        out,
        output="unembed",
    ).close()
    return out


def test_every_dataset_and_attribute_is_in_format_md(
    finished: Path, capped: Path, stacked: Path, contrasted: Path
) -> None:
    text, described = FORMAT.read_text(encoding="utf-8"), described_datasets()
    seen: set[str] = set()
    runs = {path: content(path) for path in (finished, capped, stacked, contrasted)}
    for one, name, value in [(path, *item) for path in runs for item in runs[path].items()]:
        _, path, *attribute = name.split()
        known = re.sub(r"^layer/\d+/?", "", re.sub(r"^source/\d+", "source/S", path))
        known = re.sub(r"^index/[qkvo]", "index/R", known)
        known = re.sub(r"^tally/(qk|ov)", "tally/T", known)
        if one == contrasted and known in SWAPPED:  # the types are those of the other
            seen.add(known)
            known = SWAPPED[known]
        for part in attribute:
            assert f"`{part}`" in text, name
        if not attribute and isinstance(value, np.ndarray):
            types, axes = described[known]
            assert value.dtype.name in types, name
            assert value.ndim == axes, name
            seen.add(known)
    assert seen == described.keys()


def test_a_layer_says_its_window_and_its_cap_and_keeps_capped_scores_only_where_there_is_one(
    finished: Path, capped: Path
) -> None:
    with open_store(capped) as store, h5py.File(capped / "shards" / "00000.h5") as shard:
        for layer, window in enumerate(tiny.WINDOWS["gemma2"]):
            attrs = shard[f"layer/{layer}"].attrs
            assert attrs.get("window") == window
            assert attrs["softcap"] == 2.0
            plan = store.manifest["layers"][layer]
            assert (plan["window"], plan["softcap"]) == (window, 2.0)
            score = shard[f"layer/{layer}/score"][:].astype(np.float64)
            wanted = 2 * np.tanh(score / 2)
            assert shard[f"layer/{layer}/score_capped"][:] == pytest.approx(wanted, abs=1e-6)
    with open_store(finished) as store, h5py.File(finished / "shards" / "00000.h5") as shard:
        for layer in (0, 1):
            assert shard[f"layer/{layer}"].attrs.keys().isdisjoint({"window", "softcap"})
            assert "score_capped" not in shard[f"layer/{layer}"]
            plan = store.manifest["layers"][layer]
            assert (plan["window"], plan["softcap"]) == (None, None)
        row = store.edge(1, Edge(1, 0, 9, 9))
        assert row.score_capped == row.score


EXACT = ("/score", "/score_capped", "/score_contrast", "/totals", "/pattern", "_marginals")
IN_FULL = {
    16: ("_contrast_totals", "/o_reads"),
    7: ("_contrasts", "_ablations", "/v_norms"),
    6: ("/o_totals",),
}
"""What is rounded in a compact store only, to so many bits."""


def test_pairs_and_measured_errors_are_rounded_and_nothing_else(
    finished: Path, capped: Path
) -> None:
    found = (*content(finished).items(), *content(capped).items())
    exact = (*EXACT, *(end for ends in IN_FULL.values() for end in ends))
    assert all(any(name.endswith(end) for name, _ in found) for end in exact)
    for name, column in found:
        if name.endswith("/contrast"):
            assert np.array_equal(round_values(column), column), name
        elif name.endswith("completeness") and not name.endswith("block_completeness"):
            assert np.array_equal(round_values(column, 7), column), name
        elif name.endswith(exact):
            assert column.dtype == np.float32
            assert not np.array_equal(round_values(column), column), name
        if getattr(column, "dtype", np.dtype("O")).kind == "f":
            assert np.isfinite(column).all(), name


def test_a_portable_store_is_the_same_and_needs_no_filter_but_hdf5s_own(
    model: Any, tmp_path: Path
) -> None:
    basis, stores = {0: "tokens", 1: tiny.sae(layer=1)}, {}
    for name, portable in (("plain", False), ("portable", True)):
        out = tmp_path / name
        headattr.attribute(model, basis, TEXTS[:3], out, portable=portable).close()
        stores[name] = content(out)
    used: set[Any] = set()
    with h5py.File(tmp_path / "portable" / "shards" / "00000.h5") as shard:
        shard.visititems(
            lambda _, item: used.add(item.compression) if isinstance(item, h5py.Dataset) else None
        )
        filters: list[int] = []
        shard.visititems(
            lambda _, item: (
                filters.extend(
                    item.id.get_create_plist().get_filter(i)[0]
                    for i in range(item.id.get_create_plist().get_nfilters())
                )
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
    assert used == {None, "gzip"}
    assert set(filters) == {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE}
    assert stores["plain"].keys() == stores["portable"].keys()
    for name, column in stores["plain"].items():
        if isinstance(column, np.ndarray):
            assert np.array_equal(stores["portable"][name], column), name


def test_a_compact_store_is_the_same_but_for_its_stated_roundings(
    model: Any, tmp_path: Path
) -> None:
    options = {"edges": "all", "prompts_per_shard": 3, "batch_size": 1}
    basis, out = {0: "tokens", 1: tiny.sae(layer=1)}, tmp_path / "results"
    for name, compact in (("exact", False), ("compact", True)):
        headattr.attribute(model, basis, TEXTS[:3], out / name, compact=compact, **options).close()
    exact, rounded = content(out / "exact"), content(out / "compact")
    bits = {end: number for number, ends in IN_FULL.items() for end in ends} | {"/contrast": 6}
    for name, column in rounded.items():
        ends = [end for end in bits if name.endswith(end)]
        if ends:
            assert np.array_equal(round_values(column, bits[ends[0]]), column), name
            near = 2.0 ** -(bits[ends[0]] + 1) + 2.0**-11 * (ends[0] == "/contrast")
            assert (np.abs(column - exact[name]) <= near * 1.01 * np.abs(exact[name])).all(), name
        elif isinstance(column, np.ndarray) and "index/" not in name and "hash" not in name:
            assert np.array_equal(column, exact[name]), name
    with open_store(out / "compact") as store:
        assert check_store(store)["problems"] == []


# Resume -------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_and_leaves_finished_shards_alone(
    run: Any, finished: Path, copy: Path
) -> None:
    """Between two shards: shards 3 and 4 are not there yet, shard 2 has no sidecar yet."""
    for index in (3, 4):
        for path in (copy / "shards").glob(f"0000{index}.*"):
            path.unlink()
    (copy / "shards" / "00002.json").unlink()
    before = files(copy)
    with open_store(copy) as part:
        assert part.prompt_ids == [0, 1, 2, 3]
        with pytest.raises(StoreError, match=r"00003.h5, which is not finished"):
            part.edge(6, Edge(1, 0, 1, 0))
    with run(copy) as store:
        assert store.prompt_ids == list(range(10))
        assert check_store(store)["problems"] == []
    after = files(copy)
    for name in ("00000.h5", "00000.json", "00001.h5", "00001.json"):
        assert after[name] == before[name]
    assert_same_content(copy, finished)
    again = run(copy)
    assert files(copy) == after
    assert again.manifest == open_store(finished).manifest


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import headattr, tiny, torch
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
headattr.attribute(tiny.llama(), {0: "tokens"}, tiny.prompts(*[32] * 24), sys.argv[2],
                   output="unembed", edges="all", heads="L0H0", prompts_per_shard=2)
"""


def test_a_killed_run_leaves_whole_shards_only_and_the_same_call_completes_it(
    run: Any, tmp_path: Path
) -> None:
    """V27: SIGKILL while a shard is being written."""
    out, shards = tmp_path / "killed", tmp_path / "killed" / "shards"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(Path(__file__).parent), str(out)])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if len(list(shards.glob("*.json"))) >= 2 and list(shards.glob(".*.h5.*.tmp")):
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    with open_store(out) as part:
        assert part.problems == []
        assert 2 <= len(part.shards) < 12
        for shard in part.shards:
            digest = hashlib.sha256(shard.path.read_bytes()).hexdigest()
            assert digest == shard.sidecar["sha256"]
        assert not check_store(part)["ok"]
    before = files(out)
    options = {"basis": {0: "tokens"}, "edges": "all", "heads": "L0H0"}
    texts = tiny.prompts(*[32] * 24)
    with run(out, texts, **options) as store:
        assert check_store(store)["problems"] == []
    after = files(out)
    assert not any(name.endswith(".tmp") for name in after)
    finished_before = {name[:5] for name in before if name.endswith(".json") and name[0] != "."}
    assert {n for n in before if n[:5] in finished_before} <= {
        n for n in after if before.get(n) == after[n]
    }
    run(tmp_path / "whole", texts, **options)
    assert_same_content(out, tmp_path / "whole")


def test_a_run_killed_before_its_manifest_was_whole_starts_again(run: Any, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / "results" / f".manifest.json.{socket.gethostname()}.{ended.pid}.tmp"
    left.parent.mkdir()
    left.write_text('{"format": "headattr-st')
    with run(tmp_path / "results", TEXTS[:1]) as store:
        assert check_store(store)["ok"]
    assert not left.exists()


def test_temporary_files_of_living_processes_and_other_machines_stay(run: Any, copy: Path) -> None:
    living = copy / "shards" / f".00000.h5.{socket.gethostname()}.{os.getppid()}.tmp"
    foreign = copy / "shards" / ".00000.h5.elsewhere.1.tmp"
    for path in (living, foreign):
        path.write_bytes(b"")
    run(copy)
    assert living.exists()
    assert foreign.exists()


OTHER_RUNS: dict[str, dict[str, Any]] = {
    "topk": {"topk": 5},
    "edges": {"edges": "top:3"},
    "threshold": {"edges": "threshold:0.1"},
    "heads": {"heads": "L1H0"},
    "keep_sinks": {"keep_sinks": True},
    "q_token": {"q_token": "<3>"},
    "k_token": {"k_token": "/<3/"},
    "outputs": {"outputs": "all"},
    "read": {"read": "decoder"},
    "rank": {"rank": "contrast"},
    "output": {"output": ()},
    "shards": {"prompts_per_shard": 3},
    "dtype": {"dtype": "float64"},
    "basis": {"basis": {0: "tokens", 1: tiny.sae(layer=1, seed=9)}},
    "one basis less": {"basis": {0: "tokens"}, "heads": "L0H0"},
    "model": {"model": tiny.llama(rms_norm_eps=1e-5)},
    "texts": {"texts": TEXTS[:-1]},
    "order of texts": {"texts": TEXTS[::-1]},
}


@pytest.mark.parametrize("changes", OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_another_configuration_is_refused_with_both_hashes(
    run: Any, finished: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    before = files(finished)
    with pytest.raises(StoreError, match="holds another run") as refused:
        run(finished, **changes)
    there = open_store(finished).manifest["hash"]
    assert there[:16] in str(refused.value)
    here = re.findall(r"this one's is ([0-9a-f]{16})", str(refused.value))
    assert here
    assert here[0] != there[:16]
    assert files(finished) == before


def test_changed_weights_of_the_same_shape_are_another_run(run: Any, finished: Path) -> None:
    other = tiny.llama()
    with torch.no_grad():
        other.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-3
    with pytest.raises(StoreError, match="different: model"):
        run(finished, model=other)


def test_places_and_speed_are_no_part_of_a_run(
    run: Any, model: Any, saes: dict[int, Any], finished: Path, copy: Path, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "model")
    for layer, sae in saes.items():
        sae.save_model(tmp_path / f"sae{layer}")
    before = files(copy)
    for options in ({"batch_size": 1}, {"device": "cpu"}, {"progress": True}, {"json": True}):
        run(copy, **options)
    lines = "".join(json.dumps({"tokens": tokens}) + "\n" for tokens in TEXTS)
    (tmp_path / "texts.jsonl").write_text(lines)
    run(tmp_path / "results" / ".." / "results", tmp_path / "texts.jsonl")
    assert files(copy) == before
    (copy / "shards" / "00003.json").unlink()
    run(copy, batch_size=1)
    for name, value in content(finished).items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            assert np.allclose(content(copy)[name], value, atol=2e-5, rtol=1e-3), name
            break


@pytest.mark.parametrize(
    "content", ["a file", "a folder", "a broken manifest", "a foreign manifest"]
)
def test_a_place_that_holds_something_else_is_refused_and_left(
    run: Any, tmp_path: Path, content: str
) -> None:
    out = tmp_path / "out"
    if content == "a file":
        out.write_text("precious")
    else:
        out.mkdir()
        name = "notes.txt" if content == "a folder" else "manifest.json"
        text = {"a broken manifest": "{", "a foreign manifest": '{"name": "web app"}'}
        (out / name).write_text(text.get(content, "precious"))
    before = (
        sorted(tmp_path.rglob("*")),
        [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()],
    )
    with pytest.raises(StoreError, match=re.escape(str(out))):
        run(out)
    after = (
        sorted(tmp_path.rglob("*")),
        [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()],
    )
    assert after == before


def test_an_empty_folder_that_is_there_is_taken(run: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run(tmp_path / "out", TEXTS[:1]).prompt_ids == [0]


def test_a_folder_below_a_file_is_refused_in_one_line(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write to --out"):
        run(tmp_path / "file" / "out", TEXTS[:1])


# Damage -------------------------------------------------------------------------------------------


def _problems(folder: Path) -> list[str]:
    with open_store(folder) as store:
        answer = check_store(store)
    assert answer["ok"] == (answer["problems"] == [])
    json.dumps(answer, allow_nan=False)
    return answer["problems"]


def test_a_truncated_shard_is_named_the_rest_is_served_and_the_same_run_mends_it(
    run: Any, finished: Path, copy: Path
) -> None:
    """V33."""
    shard = copy / "shards" / "00002.h5"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert h5py.is_hdf5(shard)
    with open_store(copy) as store:
        assert "shards/00002.h5" in store.problems[0]
        assert store.prompt_ids == [0, 1, 2, 3, 6, 7, 8, 9]
        assert query.edge(store, 3, Edge(1, 0, 9, next(iter(_keys(store, 3, 9)))))
        with pytest.raises(StoreError, match=r"shards/00002\.h5 is \d+ bytes, expected \d+"):
            store.edge(4, Edge(1, 0, 1, 1))
    assert len(_problems(copy)) == 1
    untouched = {name: found for name, found in files(copy).items() if not name.startswith("00002")}
    run(copy)
    assert _problems(copy) == []
    assert_same_content(copy, finished)
    assert {n: f for n, f in files(copy).items() if not n.startswith("00002")} == untouched


def _keys(store: Store, prompt: int, q_pos: int) -> set[int]:
    kept = store.edges(prompt, HeadId(1, 0))
    return set(kept["k_pos"][kept["q_pos"] == q_pos].tolist())


@pytest.mark.parametrize("name", ["00002.json", "00002.h5"])
def test_a_lost_half_of_a_shard_is_named_and_mended(
    run: Any, finished: Path, copy: Path, name: str
) -> None:
    (copy / "shards" / name).unlink()
    problems = _problems(copy)
    assert len(problems) == 1
    assert "shards/00002.h5" in problems[0]
    assert "same command" in problems[0]
    run(copy)
    assert _problems(copy) == []
    assert_same_content(copy, finished)


SIDECARS = (b"", b'{"format": "headattr-shard", "ver', b"[]", b"3", b"{}", b"null", b"\xff")


def test_a_broken_sidecar_is_named_and_its_shard_done_again(run: Any, copy: Path) -> None:
    for text in SIDECARS:
        (copy / "shards" / "00001.json").write_bytes(text)
        with open_store(copy) as store:
            assert len(store.problems) == 1, text
            assert "00001.json is broken" in store.problems[0]
            assert 0 in store
            assert 2 not in store
    assert len(_problems(copy)) == 1
    run(copy)
    assert _problems(copy) == []


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"prompts": [2, 7]}, "holds prompts"),
        ({"prompts": [2]}, "holds prompts"),
        ({"edges": 5}, "its sidecar says 5"),
        ({"set_aside": [{"prompt": 3, "line": 4, "reason": "?"}]}, "do not account"),
        ({"sha256": "0" * 64}, "hash of its sidecar"),
        ({"bytes": 17}, "bytes, expected 17"),
        ({"manifest_hash": "0" * 64}, "another run"),
        ({"shard": 4}, "another run"),
    ],
)
def test_an_edited_sidecar_is_found(copy: Path, changes: dict[str, Any], found: str) -> None:
    path = copy / "shards" / "00001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    problems = _problems(copy)
    assert any(found in problem for problem in problems), problems
    assert all("00001" in problem for problem in problems)


def test_shards_that_changed_places_are_not_served(copy: Path) -> None:
    for ending in ("h5", "json"):
        one, other = (copy / "shards" / f"0000{i}.{ending}" for i in (0, 1))
        one.rename(copy / "aside")
        other.rename(one)
        (copy / "aside").rename(other)
    with open_store(copy) as store:
        assert store.prompt_ids == [4, 5, 6, 7, 8, 9]
    assert len(_problems(copy)) == 2


def test_a_flipped_byte_is_found_by_its_hash(run: Any, finished: Path, copy: Path) -> None:
    path = copy / "shards" / "00001.h5"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    problems = _problems(copy)
    assert problems == [
        "shards/00001.h5 does not have the hash of its sidecar: delete it and run again"
    ]
    path.unlink()
    run(copy)
    assert _problems(copy) == []
    assert_same_content(copy, finished)


def test_wherever_a_byte_is_flipped_a_question_gets_an_answer_or_one_line(copy: Path) -> None:
    path = copy / "shards" / "00001.h5"
    whole = path.read_bytes()
    asked = 0
    for offset in range(5, len(whole), len(whole) // 25):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0xFF]) + whole[offset + 1 :])
        with open_store(copy) as store:
            for prompt in (2, 3):
                try:
                    query.edge(store, prompt, Edge(1, 0, 0, 0))
                except HeadattrError as error:
                    asked += "00001.h5" in str(error)
            edge = next(every_edge(store, 0))
            assert query.edge(store, 0, edge)["score"] is not None
    assert asked > 0


def _edit(folder: Path, change: Callable[[Any], None], *, cover: bool) -> None:
    """Change a shard; `cover` mends the size and hash in its sidecar."""
    path = folder / "shards" / "00001.h5"
    with h5py.File(path, "r+") as file:
        change(file)
    sidecar = json.loads(path.with_suffix(".json").read_text())
    if cover:
        sidecar["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    sidecar["bytes"] = path.stat().st_size
    path.with_suffix(".json").write_text(json.dumps(sidecar))


def _set(name: str, row: Any, value: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file[name][row] = value

    return change


EDITS = {
    "totals": (_set("layer/1/qk/totals", (3, 0, 0), 4.0), "qk/totals does not sum to the score"),
    "score": (_set("layer/1/score", 3, 4.0), "qk/totals does not sum to the score"),
    "query contrasts": (
        _set("layer/1/qk/q_contrast_totals", (3, 0), 4.0),
        "qk/q_contrast_totals does not sum to the score_contrast",
    ),
    "key contrasts": (
        _set("layer/1/qk/k_contrast_totals", (3, 0), 4.0),
        "qk/k_contrast_totals does not sum to the score_contrast",
    ),
    "elsewhere": (
        _set("layer/1/qk/k_contrast_totals", (3, 3), 4.0),
        "qk/k_contrast_totals does not sum to the score_contrast",
    ),
    "score contrast": (
        _set("layer/1/score_contrast", 3, 4.0),
        "contrast_totals does not sum to the score_contrast",
    ),
    "contrast completeness": (
        _set("layer/1/contrast_completeness", 3, 1e-3),
        "worst contrast completeness is 1.0e-03",
    ),
    "an ablation": (_set("layer/1/qk/q_ablations", (3, 0), np.nan), "non-finite values"),
    "a contrast": (_set("layer/1/qk/contrast", (3, 0), -np.inf), "non-finite values"),
    "NaN": (_set("layer/1/pattern", 3, np.nan), "pattern has non-finite values"),
    "infinity": (_set("layer/0/ov/o_totals", (3, 0, 0), np.inf), "non-finite values"),
    "masked": (_set("layer/1/key", 4, 5), "masked or beyond"),
    "beyond": (_set("layer/1/key", 4, (60 << 16) | 3), "masked or beyond"),
    "order": (_set("layer/1/key", slice(6, 8), [(4 << 16) | 1, (4 << 16) | 1]), "not in order"),
    "index": (_set("layer/1/group_ptr", 1, 10**6), "the edge index does not fit"),
    "slots": (_set("layer/1/qk/q_slots", (3, 0), 77), "points beyond an active list"),
    "value slots": (_set("layer/1/ov/v_slots", (3, 0), 77), "points beyond an active list"),
    "output slots": (_set("layer/1/ov/o_slots", (3, 0), 99), "points beyond an active list"),
    "top slots": (_set("layer/1/qk/k_top", (3, 0), 77), "points beyond an active list"),
    "completeness": (_set("layer/1/completeness", 3, 1e-3), "worst completeness is 1.0e-03"),
    "OV": (_set("layer/1/ov/completeness", 3, 1e-3), "worst OV completeness"),
    "block": (_set("layer/1/ov/block_completeness", 3, 1e-3), "worst block completeness"),
    "pattern error": (_set("layer/0/pattern_error", 0, 1e-3), "worst pattern error"),
    "ids": (_set("prompt/id", 0, 8), "holds prompts [8, 3]"),
    "a lost dataset": (lambda file: file.__delitem__("layer/1/key"), "is damaged"),
    "a lost layer": (lambda file: file.__delitem__("layer/1"), "is damaged"),
}


@pytest.mark.parametrize(("change", "found"), EDITS.values(), ids=EDITS)
def test_an_edited_shard_is_found_by_its_sums_even_where_its_hash_was_mended(
    copy: Path, change: Any, found: str
) -> None:
    _edit(copy, change, cover=True)
    problems = _problems(copy)
    assert any(found in problem for problem in problems), problems


def test_a_capped_score_that_was_edited_is_found_by_its_score(tmp_path: Path) -> None:
    model, prompts = tiny.gemma2(attn_logit_softcapping=1.5), tiny.prompts(9)
    headattr.attribute(model, {1: tiny.sae(layer=1)}, prompts, tmp_path / "out", edges="all")
    assert _problems(tmp_path / "out") == []
    path = tmp_path / "out" / "shards" / "00000.h5"
    with h5py.File(path, "r+") as file:
        file["layer/1/score_capped"][3] += 0.01
    sidecar = json.loads(path.with_suffix(".json").read_text())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sidecar.update(sha256=digest, bytes=path.stat().st_size)
    path.with_suffix(".json").write_text(json.dumps(sidecar))
    assert _problems(tmp_path / "out") == [
        "shards/00000.h5 layer 1: score_capped is not the score under the cap of 1.5"
    ]


def test_an_edited_shard_is_found_by_its_hash(copy: Path) -> None:
    _edit(copy, EDITS["totals"][0], cover=False)
    assert _problems(copy) == [
        "shards/00001.h5 does not have the hash of its sidecar: delete it and run again"
    ]


def test_numbers_that_are_not_finite_are_not_answered(copy: Path) -> None:
    with open_store(copy) as store:
        edge = next(every_edge(store, 2))
    _edit(copy, _set("layer/0/score", slice(None), np.nan), cover=True)
    with open_store(copy) as store, pytest.raises(StoreError, match=r"00001\.h5 is damaged"):
        store.edge(2, edge)


MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "topk": lambda m: m["config"].update(topk=31),
    "identity": lambda m: m["identity"]["config"].update(topk=31),
    "model": lambda m: m["model"].update(hash="0" * 64),
    "layers": lambda m: m["layers"][0].update(read="decoder"),
    "shards": lambda m: m["shards"][0].update(prompts=[1, 0]),
    "a shard less": lambda m: m["shards"].pop(),
    "set aside": lambda m: m["set_aside"].append({"prompt": 9, "line": 10, "reason": "?"}),
    "bos": lambda m: m["bos"].update(prepend=True),
    "source": lambda m: m["sources"][1].update(name="better"),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_an_edited_manifest_is_found(copy: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest, indent=1))
    assert any("manifest.json was changed" in problem for problem in _problems(copy))


BROKEN_MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "newer version": lambda m: m.update(version="99"),
    "no version": lambda m: m.pop("version"),
    "odd version": lambda m: m.update(version="new"),
    "no shards": lambda m: m.pop("shards"),
    "no hash": lambda m: m.pop("hash"),
    "layers of another type": lambda m: m.update(layers=3),
    "another format": lambda m: m.update(format="x"),
}


@pytest.mark.parametrize("change", BROKEN_MANIFESTS.values(), ids=BROKEN_MANIFESTS)
def test_a_manifest_that_cannot_be_read_is_refused_in_one_line(
    copy: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    for text in (json.dumps(manifest), "[]", "", "{"):
        path.write_text(text)
        with pytest.raises(StoreError, match="results"):
            open_store(copy)


def test_a_folder_without_a_manifest_is_no_store(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing", tmp_path / "x.h5"):
        with pytest.raises(StoreError, match="is not a headattr store"):
            open_store(place)


def test_lost_labels_are_named_and_written_again(run: Any, copy: Path) -> None:
    path = copy / "labels" / "2.jsonl"
    before = path.read_bytes()
    path.unlink()
    assert _problems(copy) == ["labels/2.jsonl is missing: run the same command again"]
    run(copy)
    assert path.read_bytes() == before


def test_a_moved_folder_gives_the_same_answers(
    finished: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "else where" / "é"
    moved.parent.mkdir()
    with open_store(finished) as store:
        edges = [(p, edge) for p in (2, 6) for edge in every_edge(store, p)]
        wanted = [query.edge(store, *asked) for asked in edges]
        checked = check_store(store)
    copy.rename(moved)
    monkeypatch.chdir(moved)
    with open_store(".") as store:
        assert [query.edge(store, *asked) for asked in edges] == wanted
        assert check_store(store) == checked
    assert str(finished.parent) not in (moved / "manifest.json").read_text()


# Which edges --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Store]:
    """Layer 1 through an SAE, no outputs; a run that was made before is not made again."""
    made: dict[str, Store] = {}

    def attribute(texts: Any, **options: Any) -> Store:
        name = repr((texts, {**options, "model": id(options.get("model"))}))
        if name not in made or "file:" in name:
            given = {"model": model, "basis": {1: tiny.sae(layer=1)}, "heads": "L1H0,L1H3"}
            given |= options
            out = tmp_path_factory.mktemp("small") / "results"
            made[name] = headattr.attribute(
                given.pop("model"), given.pop("basis"), texts, out, **given
            )
        return made[name]

    return attribute


@pytest.fixture(scope="module")
def sink_model() -> Any:
    """Token 7 has a norm over ten times the median."""
    hf = tiny.llama()
    with torch.no_grad():
        hf.model.embed_tokens.weight[7] *= 200
    return hf


SINK_TEXT = [3, 9, 7, 4, 5, 6, 7, 8, 11, 12, 13, 2]
SINKS = [True, *(token == 7 for token in SINK_TEXT[1:])]


def _table(store: Store, head: HeadId, prompt: int = 0) -> dict[tuple[int, int], float]:
    kept = store.edges(prompt, head)
    rows = zip(
        kept["q_pos"].tolist(), kept["k_pos"].tolist(), kept["pattern"].tolist(), strict=True
    )
    return {(q_pos, k_pos): weight for q_pos, k_pos, weight in rows}


@pytest.mark.parametrize("m", [1, 2, 4, 11, 12, 50])
@pytest.mark.parametrize("keep_sinks", [False, True])
def test_top_m_leaves_positions_that_swallow_attention_out_unless_they_are_asked_for(
    small: Any, sink_model: Any, m: int, keep_sinks: bool
) -> None:
    options = {"model": sink_model, "heads": "L1H0"}
    every = _table(small([SINK_TEXT], edges="all", **options), HeadId(1, 0))
    store = small([SINK_TEXT], edges=f"top:{m}", keep_sinks=keep_sinks, **options)
    flagged = store.shards[0].file["layer/1/flagged"][:].tolist()
    assert flagged == SINKS
    wanted = set()
    for q_pos in range(len(SINK_TEXT)):
        keys = [k for k in range(q_pos + 1) if keep_sinks or not flagged[k]]
        ranked = sorted(keys, key=lambda k: (-every[q_pos, k], k))
        wanted |= {(q_pos, k_pos) for k_pos in ranked[:m]}
    assert _table(store, HeadId(1, 0)).keys() == wanted
    share = store.shards[0].file["layer/1/sink_share"][:, 0]
    for q_pos, found in enumerate(share):
        mass = sum(every[q_pos, k] for k in range(q_pos + 1) if flagged[k])
        assert found == pytest.approx(mass, abs=1e-5)


@pytest.mark.parametrize("edges", ["all", "threshold:0", "file"])
def test_other_rules_treat_flagged_positions_like_any(
    small: Any, sink_model: Any, tmp_path: Path, edges: str
) -> None:
    if edges == "file":
        listed = tmp_path / "edges.jsonl"
        listed.write_text(_listed(0, 1, 0, 5, 2) + _listed(0, 1, 0, 5, 0))
        edges = f"file:{listed}"
    store = small([SINK_TEXT], edges=edges, model=sink_model, heads="L1H0")
    answer = query.edge(store, 0, Edge(1, 0, 5, 2))
    assert answer["flagged"]
    assert answer["qk"]["completeness"] <= 1e-5
    assert check_store(store)["ok"]
    assert query.edge(store, 0, Edge(1, 0, 5, 0))["flagged"]


def test_a_prompt_of_one_token_has_one_edge_of_weight_one(small: Any) -> None:
    store = small([[3], [4, 5]], edges="top:4")
    for head in store.heads:
        assert _table(store, head, 0) == {(0, 0): 1.0}
        assert _table(store, head, 1).keys() == {(1, 1)}
    assert store.mean_l0(0) == 6.0


@pytest.mark.parametrize("threshold", ["0", "0.02", "0.5", "1"])
def test_threshold_keeps_edges_of_at_least_that_weight(small: Any, threshold: str) -> None:
    every = small(TEXTS[:3], edges="all")
    store = small(TEXTS[:3], edges=f"threshold:{threshold}")
    for prompt in range(3):
        for head in store.heads:
            wanted = _table(every, head, prompt)
            kept = {edge: p for edge, p in wanted.items() if p >= float(threshold)}
            assert _table(store, head, prompt).keys() == kept.keys()


def test_the_threshold_itself_is_kept_and_ties_go_to_the_earlier_key() -> None:
    pattern = np.array([[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.5, 0.25]])
    options: dict[str, Any] = {
        "flagged": np.zeros(3, bool),
        "keep_sinks": False,
        "q_allowed": np.ones(3, bool),
        "k_allowed": np.ones(3, bool),
        "mask": np.tri(3, dtype=bool),
    }
    for rule, wanted in (
        ("threshold:0.5", [(0, 0), (1, 0), (1, 1), (2, 1)]),
        ("threshold:0.25", [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]),
        ("top:1", [(0, 0), (1, 0), (2, 1)]),
        ("top:2", [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]),
    ):
        found = select_edges(pattern, parse_edge_rule(rule), **options)
        assert list(zip(*map(np.ndarray.tolist, found), strict=True)) == wanted


def test_top_m_never_reaches_behind_the_mask_even_where_weights_are_zero() -> None:
    pattern = np.zeros((4, 4))
    pattern[:, 0] = 1.0
    found = select_edges(
        pattern,
        EdgeRule("top", m=3),
        flagged=np.array([True, False, False, False]),
        keep_sinks=False,
        q_allowed=np.ones(4, bool),
        k_allowed=np.ones(4, bool),
        mask=np.tri(4, dtype=bool),
    )
    assert (found[1] <= found[0]).all()
    assert (found[1] > 0).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"q_token": "<9>"}, lambda q, k: q == "<9>"),
        ({"k_token": "<4>"}, lambda q, k: k == "<4>"),
        ({"k_token": "/^<1/"}, lambda q, k: k.startswith("<1")),
        ({"q_token": "/3|5/", "k_token": "/>$/"}, lambda q, k: "3" in q or "5" in q),
        ({"q_token": "9"}, lambda q, k: False),
        ({"q_token": "<9> "}, lambda q, k: False),
        ({"k_token": "//"}, lambda q, k: True),
    ],
)
@pytest.mark.parametrize("edges", ["top:2", "threshold:0.1", "all"])
def test_tokens_narrow_the_edges_that_the_rule_has_chosen(
    small: Any, options: dict[str, Any], match: Callable[[str, str], bool], edges: str
) -> None:
    texts = [[3, 9, 4, 14, 9, 5, 3], [9]]
    every, store = small(texts, edges=edges), small(texts, edges=edges, **options)
    for prompt in range(len(texts)):
        shown = store.token_texts(prompt)
        for head in store.heads:
            wanted = {e for e in _table(every, head, prompt) if match(shown[e[0]], shown[e[1]])}
            assert _table(store, head, prompt).keys() == wanted
    assert check_store(store)["ok"]


def test_a_token_filter_is_a_text_unless_it_stands_between_slashes() -> None:
    tokens = [" the", "the", "/", "a/b", "(", "//x/"]
    for text, wanted in (
        (" the", [0]),
        ("/", [2]),
        ("/the$/", [0, 1]),
        ("//x//", [5]),
        ("(", [4]),
        (r"/\(/", [4]),
        ("/^/$/", [2]),
        (None, [0, 1, 2, 3, 4, 5]),
    ):
        assert np.nonzero(token_filter(text, tokens))[0].tolist() == wanted, text


def _listed(prompt: Any, layer: Any, head: Any, q_pos: Any, k_pos: Any) -> str:
    names = ("prompt", "layer", "head", "q_pos", "k_pos")
    values = (prompt, layer, head, q_pos, k_pos)
    return json.dumps(dict(zip(names, values, strict=True))) + "\n"


def test_listed_edges_are_kept_whatever_their_order_and_nothing_else_is(
    small: Any, tmp_path: Path
) -> None:
    wanted = [(0, 1, 3, 8, 2), (0, 1, 0, 8, 2), (0, 1, 0, 8, 0), (2, 1, 0, 0, 0), (1, 1, 0, 3, 3)]
    listed, other = tmp_path / "edges.jsonl", tmp_path / "other.jsonl"
    listed.write_text("\ufeff" + "".join(_listed(*edge) for edge in wanted), encoding="utf-8")
    lines = [_listed(*edge).replace("{", '{"note": "\u2028", ') for edge in wanted]
    other.write_text("\n".join(reversed(lines + lines[:2])), encoding="utf-8")
    store = small(TEXTS[:4], edges=f"file:{listed}")
    found = [(p, *edge) for p in store for edge in every_edge(store, p)]
    assert sorted(found) == sorted(wanted)
    assert check_store(store)["edges"] == 5
    again = small(TEXTS[:4], edges=f"file:{other}")
    assert again.manifest["hash"] == store.manifest["hash"]
    listed.write_text(_listed(*wanted[0]))
    fewer = small(TEXTS[:4], edges=f"file:{listed}")
    assert fewer.manifest["hash"] != store.manifest["hash"]


LISTED = {
    "a masked edge": (_listed(0, 1, 0, 2, 3), "masked"),
    "a query beyond": (_listed(0, 1, 0, 9, 0), "positions are 0 to 8"),
    "a negative key": (_listed(0, 1, 0, 1, -1), "beyond the prompt"),
    "an unknown head": (_listed(0, 1, 9, 2, 1), "head L1H9"),
    "a head that is not asked for": (_listed(0, 1, 1, 2, 1), "head L1H1"),
    "a layer without a basis": (_listed(0, 0, 0, 2, 1), "head L0H0"),
    "an unknown prompt": (_listed(99, 1, 0, 2, 1), "not in the texts"),
    "a prompt that is set aside": (_listed(1, 1, 0, 0, 0), "set aside"),
    "no key": ('{"prompt": 0, "layer": 1, "head": 0, "q_pos": 2}', "expected prompt, layer"),
    "a float": (_listed(0, 1, 0, 2.5, 1), "as integers"),
    "a whole float": (_listed(0, 1, 0, 2.0, 1), "as integers"),
    "a string": (_listed(0, 1, 0, "2", 1), "as integers"),
    "a bool": (_listed(0, True, 0, 2, 1), "as integers"),
    "null": (_listed(0, 1, 0, None, 1), "as integers"),
    "infinity": (_listed(0, 1, 0, float("inf"), 1), "as integers"),
    "a list": ("[0, 1, 0, 2, 1]", "expected prompt, layer"),
    "no JSON": ("0 1 0 2 1", "not JSON"),
    "no UTF-8": ('{"prompt": "\udcff"}', "not JSON"),
    "too deep": ("[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize(("line", "found"), LISTED.values(), ids=LISTED)
def test_a_listed_edge_that_cannot_be_is_refused_with_its_line_before_any_work(
    small: Any, model: Any, tmp_path: Path, line: str, found: str
) -> None:
    listed = tmp_path / "edges.jsonl"
    text = _listed(0, 1, 0, 2, 1) + "\n" + line.rstrip("\n")
    listed.write_bytes(text.encode("utf-8", "surrogateescape"))
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=re.escape(found)) as refused:
        headattr.attribute(
            model,
            {1: tiny.sae(layer=1)},
            [TEXTS[0], []],
            out,
            heads="L1H0,L1H3",
            edges=f"file:{listed}",
        )
    assert "edges.jsonl line 3" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert not out.exists()


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "edges": ({"edges": "some"}, "expected top:M"),
    "top:0": ({"edges": "top:0"}, "expected top:M"),
    "top:-1": ({"edges": "top:-1"}, "expected top:M"),
    "top:x": ({"edges": "top:x"}, "expected top:M"),
    "top": ({"edges": "top"}, "expected top:M"),
    "threshold:2": ({"edges": "threshold:2"}, "expected top:M"),
    "threshold:nan": ({"edges": "threshold:nan"}, "expected top:M"),
    "file": ({"edges": "file:"}, "expected top:M"),
    "a missing file": ({"edges": "file:missing.jsonl"}, "no such file"),
    "all:3": ({"edges": "all:3"}, "expected top:M"),
    "head": ({"heads": "L1H4"}, "heads 0 to 3"),
    "layer": ({"heads": "L3H0"}, "layers 0 to 2"),
    "no head": ({"heads": ""}, "expected all, or a list"),
    "odd head": ({"heads": "L1H0,1.2"}, "expected all, or a list"),
    "no basis": ({"heads": "L0H0,L1H0"}, "layers [0] have no basis"),
    "star": ({"heads": "L2H*"}, "layers [2] have no basis"),
    "topk": ({"topk": 0}, "topk is 0"),
    "batch size": ({"batch_size": 0}, "batch-size is 0"),
    "shards": ({"prompts_per_shard": -1}, "prompts-per-shard is -1"),
    "read": ({"read": "decoder", "outputs": "all"}, "--outputs all"),
    "expression": ({"q_token": "/(/"}, "not a regular expression"),
    "key expression": ({"k_token": "/[/"}, "not a regular expression"),
}


@pytest.mark.parametrize(("options", "found"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_a_request_that_cannot_be_met_is_refused_before_any_work(
    model: Any, tmp_path: Path, options: dict[str, Any], found: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(found)):
        headattr.attribute(model, {1: tiny.sae(layer=1)}, TEXTS[:1], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


WRONG_TYPES = """
from headattr.config import RunConfig
from headattr.errors import UsageError
for name, value, expected in (
    ("topk", "5", "topk is '5'"),
    ("topk", 2.5, "topk is 2.5"),
    ("topk", True, "topk is True"),
    ("batch_size", None, "batch-size is None"),
    ("dtype", "bfloat16", "dtype is 'bfloat16'; expected float32 or float64"),
    ("read", "both", "expected encoder or decoder"),
    ("outputs", "some", "expected active or all"),
    ("bos", "maybe", "expected auto or yes or no"),
    ("bos", True, "bos is True"),
    ("edges", 4, "edges is 4"),
    ("heads", ["L1H0"], "heads is ['L1H0']"),
):
    try:
        RunConfig("m", ("0=tokens",), "t", "o", **{name: value})
    except UsageError as error:
        assert expected in str(error), error
    else:
        raise AssertionError(name)
"""


def test_values_of_another_type_are_refused_in_python_too() -> None:
    """In a process of its own: here every type is checked before the package can look."""
    found = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_heads_are_written_as_a_list_of_heads_and_layers() -> None:
    assert parse_heads("L5H1,L3H*", 6, 2) == [HeadId(3, 0), HeadId(3, 1), HeadId(5, 1)]
    assert parse_heads(" L1H0 , L1H*,L1H0", 2, 2) == [HeadId(1, 0), HeadId(1, 1)]
    assert len(parse_heads("all", 6, 2)) == 12
    assert str(HeadId(5, 1)) == "L5H1"


def test_layers_without_a_basis_are_left_out_of_all_heads_and_named(small: Any) -> None:
    store = small(TEXTS[:2], heads="all")
    assert store.heads == [HeadId(1, head) for head in range(4)]
    assert store.manifest["layers_without_basis"] == [0, 2]
    with pytest.raises(UsageError, match="head L0H0 is not in this store"):
        store.edge(0, Edge(0, 0, 1, 0))


def test_an_edge_that_was_not_kept_is_told_from_one_that_cannot_be(finished: Path) -> None:
    with open_store(finished) as store:
        kept = _keys(store, 3, 20)
        missing = next(k for k in range(20) if k not in kept)
        with pytest.raises(StoreError, match=r"was not kept \(--edges top:4\)"):
            store.edge(3, Edge(1, 0, 20, missing))
        for edge, found in (
            (Edge(1, 0, 3, 4), "masked"),
            (Edge(1, 0, 40, 4), "positions are 0 to 39"),
            (Edge(1, 0, -1, -1), "beyond the prompt"),
            (Edge(1, 7, 3, 1), "head L1H7 is not in this store"),
            (Edge(5, 0, 3, 1), "head L5H0 is not in this store"),
        ):
            with pytest.raises(UsageError, match=found):
                store.edge(3, edge)
        for prompt in (-1, 10, 99):
            with pytest.raises(UsageError, match="it holds 0 to 9"):
                store.edge(prompt, Edge(1, 0, 0, 0))


# What is kept of an edge --------------------------------------------------------------------------

BOTH = {1: tiny.sae(layer=1), 2: tiny.sae(layer=2, seed=5)}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "the basis of the next layer": ({"basis": BOTH}, "L1H2"),
    "decoder reads": ({"basis": BOTH, "read": "decoder"}, "L1H2"),
    "all outputs": ({"basis": BOTH, "outputs": "all"}, "L1H2"),
    "tokens and the next basis": ({"basis": {0: "tokens", 1: BOTH[1]}}, "L0H1"),
    "the unembedding": ({"basis": BOTH, "output": "unembed"}, "L2H3"),
    "all of the vocabulary": ({"basis": BOTH, "output": "unembed", "outputs": "all"}, "L2H3"),
    "no output": ({"basis": {1: BOTH[1]}}, "L1H2"),
    "few pairs": ({"basis": BOTH, "topk": 3}, "L1H2"),
    "more pairs than there are": ({"basis": BOTH, "topk": 300}, "L1H2"),
    "a ReLU": ({"basis": {1: tiny.sae("standard", layer=1), 2: BOTH[2]}}, "L1H2"),
    "float64": ({"basis": BOTH, "dtype": "float64"}, "L1H2"),
    "contrasts": ({"basis": BOTH, "rank": "contrast"}, "L1H2"),
    "few contrasts": ({"basis": BOTH, "rank": "contrast", "topk": 3}, "L1H2"),
    "contrasts of tokens": ({"basis": {0: "tokens"}, "rank": "contrast"}, "L0H1"),
    "a cap": ({"model": tiny.gemma2, "basis": BOTH}, "L1H2"),
    "contrasts under a cap": (
        {"model": tiny.gemma2, "basis": BOTH, "rank": "contrast", "output": "unembed"},
        "L1H2",
    ),
    "QK-norm": ({"model": tiny.gemma3, "basis": BOTH, "rank": "contrast"}, "L1H2"),
}


def _feature_key(feature: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(feature[key] for key in ("kind", "source", "layer", "id", "label"))


NOT_THE_SAME = {
    *("density", "completeness", "block_completeness", "contrast_completeness", "prompt"),
}
"""What a store says otherwise: rounding errors, and what needs a run."""


def _assert_close(found: Any, wanted: Any, where: str = "") -> None:
    """Equal but for float32 rounding, the rounding of pairs, and densities, which need a run."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted.keys() - NOT_THE_SAME:
            _assert_close(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == min(len(wanted), len(found)), where
        for index, (one, other) in enumerate(zip(found, wanted, strict=False)):
            _assert_close(one, other, f"{where}[{index}]")
    elif isinstance(wanted, float):
        _assert_near(found, wanted, where)
    else:
        assert found == wanted, where


def _assert_near(found: float, wanted: float, where: str) -> None:
    """As near as the rounding of its column: see FORMAT.md."""
    pair = ".pairs[" in where and where.endswith(("].value", "].contrast"))
    assert found == pytest.approx(wanted, rel=2.0**-11 if pair else 2e-6, abs=1e-6), where


@pytest.mark.parametrize(("options", "head"), KINDS.values(), ids=KINDS)
def test_the_stores_answer_is_explain_edges_with_the_strongest_features(
    model: Any, tmp_path: Path, options: dict[str, Any], head: str
) -> None:
    options = {"edges": "all", "batch_size": 1, "heads": head, **options}
    basis, model = options.pop("basis"), options.pop("model", lambda: model)()
    store = headattr.attribute(model, basis, TEXTS[:2], tmp_path / "out", **options)
    layer, number = int(head[1]), int(head[3])
    for prompt, q_pos, k_pos in ((0, 8, 3), (1, 13, 13)):
        found = query.edge(store, prompt, Edge(layer, number, q_pos, k_pos))
        wanted = headattr.explain_edge(
            model, basis, TEXTS[prompt], head, q_pos, k_pos, **{**options, "edges": "top:1"}
        )
        json.dumps(found, allow_nan=False)
        json.dumps(wanted, allow_nan=False)
        assert (found["prompt"], wanted["prompt"]) == (prompt, None)
        _assert_close(found, wanted)
        assert len(found["qk"]["pairs"]) == len(wanted["qk"]["pairs"])
        for side in ("q_features", "k_features"):
            assert len(found["qk"][side]) == min(8, len(wanted["qk"][side]))
            assert all(f["density"] is None for f in wanted["qk"][side])
            assert all(f["density"] is not None for f in found["qk"][side])
        total = sum(sum(row.values()) for row in found["qk"]["totals"].values())
        assert total == pytest.approx(found["score"], abs=1e-4)
        assert bool(found["ov"]) == (found["ov_reason"] is None)
        for marginal in ("q_features", "k_features"):
            kinds = wanted["qk"]["totals"]
            own = next(iter(kinds))
            whole = (
                sum(kinds[own].values())
                if marginal == "q_features"
                else sum(row[own] for row in kinds.values())
            )
            assert sum(f["marginal"] for f in wanted["qk"][marginal]) == pytest.approx(
                whole, abs=1e-4
            )


@pytest.mark.parametrize(
    ("basis", "output", "wanted"),
    [
        ((0, 1, 2), (), {0: 1, 1: 2, 2: None}),
        ((0, 1, 2), ("unembed",), {0: 3, 1: 3, 2: 3}),
        ((0, 1, 2), (2, "unembed"), {0: 2, 1: 2, 2: 3}),
        ((0, 1, 2), (1,), {0: 1, 1: 2, 2: None}),
        ((0, 1), (2,), {0: 2, 1: 2}),
        ((0, 2), (), {0: None, 2: None}),
        ((1,), (3,), {1: 3}),
        ((2,), (1, 2), {2: None}),
    ],
)
def test_the_output_of_a_layer_is_the_nearest_behind_it_else_the_next_basis_else_a_reason(
    model: Any, tmp_path: Path, basis: Any, output: Any, wanted: dict[int, int | None]
) -> None:
    made = {layer: tiny.sae(layer=layer, seed=layer) for layer in (1, 2, 3)}
    tokens_or_sae = {layer: "tokens" if layer == 0 else made[layer] for layer in basis}
    outputs: Any = (
        ("unembed",) if output == ("unembed",) else {layer: made.get(layer) for layer in output}
    )
    if output == (2, "unembed"):
        made[2].save_model(tmp_path / "sae2")
        outputs = (f"2={tmp_path / 'sae2'}", "unembed")
    store = headattr.attribute(model, tokens_or_sae, TEXTS[:1], tmp_path / "out", output=outputs)
    sources = store.manifest["sources"]
    found = {
        plan["layer"]: None if plan["output"] is None else sources[plan["output"]]["layer"]
        for plan in store.manifest["layers"]
    }
    assert found == wanted
    for plan in store.manifest["layers"]:
        answer = query.edge(
            store, 0, next(e for e in every_edge(store, 0) if e.layer == plan["layer"])
        )
        if wanted[plan["layer"]] is None:
            assert answer["ov"] == []
            assert f"--output {plan['layer'] + 1}=PATH" in answer["ov_reason"]
        else:
            assert answer["ov_reason"] is None
            assert [ov["output"] for ov in answer["ov"]] == [sources[plan["output"]]["name"]]
            source = sources[plan["output"]]["kind"]
            assert answer["ov"][0]["read"] == ("unembed" if source == "unembed" else "encoder")


def test_density_is_the_share_of_unflagged_positions_where_a_feature_is_active(
    finished: Path,
) -> None:
    with open_store(finished) as store:
        for source, layer in ((0, 0), (1, 1)):
            times: dict[int, int] = {}
            positions = active = 0
            for shard in store.shards:
                flagged = shard.file[f"layer/{layer}/flagged"][:]
                ptr = shard.file[f"source/{source}/ptr"][:]
                for pos in np.nonzero(~flagged)[0]:
                    positions += 1
                    ids = shard.file[f"source/{source}/feature"][ptr[pos] : ptr[pos + 1]].tolist()
                    active += len(ids)
                    times |= {feature: times.get(feature, 0) + 1 for feature in ids}
            assert positions == sum(n - 1 for n in LENGTHS)
            for feature in range(40):
                wanted = times.get(feature, 0) / positions
                assert store.density(source, feature) == pytest.approx(wanted)
            assert store.mean_l0(source) == pytest.approx(active / positions)


def test_an_unembed_output_names_its_tokens(model: Any, tmp_path: Path) -> None:
    store = headattr.attribute(
        model, {2: BOTH[2]}, TEXTS[:1], tmp_path / "out", output="unembed", heads="L2H0"
    )
    answer = query.edge(store, 0, next(every_edge(store, 0)))
    for feature in answer["ov"][0]["o_features"]:
        assert feature["kind"] == "token"
        assert feature["layer"] is None
        assert feature["label"] == f"<{feature['id']}>"


# Prompts that fail in the run ---------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.MODELS)
@pytest.mark.parametrize("value", [3e38, 1e30, 1e20])
def test_a_prompt_with_activations_that_are_not_finite_is_set_aside_alone(
    tmp_path: Path, family: str, value: float
) -> None:
    """One embedding is so large that its square, or what follows from it, overflows float32."""
    hf = tiny.MODELS[family](vocab_size=1000)
    with torch.no_grad():
        embedding = hf.get_input_embeddings().weight
        embedding[999] = value
    texts = [[1, 2, 3], [4, 5, 999, 6], [7, 8], [999], [9, 10, 11, 12, 13]]
    options = {"heads": "L1H0", "edges": "all", "prompts_per_shard": 2}
    sae = tiny.sae(layer=1)
    store = headattr.attribute(hf, {1: sae}, texts, tmp_path / "out", **options)
    assert store.prompt_ids == [0, 2, 4]
    assert [(entry["prompt"], entry["line"]) for entry in store.set_aside] == [(1, 2), (3, 4)]
    for entry in store.set_aside:
        assert "finite" in entry["reason"]
    assert store.manifest["set_aside"] == []
    answer = check_store(store)
    assert (answer["ok"], answer["set_aside"]) == (True, 2)
    with pytest.raises(StoreError, match=r"prompt 1 \(line 2\) was set aside: non-finite"):
        store.edge(1, Edge(1, 0, 0, 0))
    alone = headattr.attribute(hf, {1: sae}, [texts[0]], tmp_path / "alone", **options)
    for edge in every_edge(alone, 0):
        assert store.edge(0, edge).score == pytest.approx(alone.edge(0, edge).score, abs=1e-5)
    with pytest.raises(PromptError, match="non-finite"):
        headattr.explain_edge(hf, {1: sae}, texts[1], "L1H0", 1, 0)


def test_a_shard_whose_every_prompt_was_set_aside_is_finished(tmp_path: Path) -> None:
    hf = tiny.llama(vocab_size=1000)
    with torch.no_grad():
        hf.get_input_embeddings().weight[999] = 3e38
    options = {"heads": "L1H0", "prompts_per_shard": 1}
    sae, texts = tiny.sae(layer=1), [[999, 1], [1, 2]]
    store = headattr.attribute(hf, {1: sae}, texts, tmp_path / "out", **options)
    assert check_store(store)["problems"] == []
    assert store.prompt_ids == [1]
    before = files(tmp_path / "out")
    headattr.attribute(hf, {1: sae}, texts, tmp_path / "out", **options)
    assert files(tmp_path / "out") == before
