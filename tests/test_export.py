"""Tables of a store: the same numbers as its answers, in files that are whole or named as not."""

import csv
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import h5py
import hdf5plugin  # noqa: F401  registers the zstd filter
import made
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

import headattr
from headattr import query
from headattr.cli import main
from headattr.edges import Edge, HeadId
from headattr.errors import StoreError, UsageError
from headattr.export.check import check_export
from headattr.export.folder import NAME, part_name, shard_of
from headattr.export.parts import Kind, csv_kind, parquet_kind, without_first, write_parts
from headattr.export.run import export_store
from headattr.export.sql import sql
from headattr.store.choice import choose
from headattr.store.fields import TABLES, Field
from headattr.store.format import file_hash
from headattr.store.frames import AT_ONCE, count_rows, frames, naming, spans
from headattr.store.reader import Store, open_store

BOTH = {1: tiny.sae(layer=1), 2: tiny.sae(layer=2, seed=5)}
STACK = {0: "tokens", 2: made.transcoders(0, 1, skip=True)}
TEXTS = tiny.prompts(5, 1, 7)
AWKWARD = 'a,"b"\r\n\tc\n\'d\' é😀, "'

STORES: dict[str, dict[str, Any]] = {
    "the next basis": {"basis": BOTH},
    "tokens and the unembedding": {
        "basis": {0: "tokens", **BOTH},
        "output": "unembed",
        "heads": "L0H0,L1H0,L1H2,L2H3",
    },
    "all outputs": {"basis": BOTH, "outputs": "all"},
    "no output": {"basis": {1: BOTH[1]}, "heads": "L1H2"},
    "few pairs": {"basis": BOTH, "topk": 3},
    "more pairs than there are": {"basis": BOTH, "topk": 300},
    "contrasts under a cap": {
        "model": tiny.gemma2,
        "basis": BOTH,
        "rank": "contrast",
        "output": "unembed",
    },
    "a window": {"model": tiny.mistral, "basis": BOTH},
    "parts": {
        "model": tiny.qwen3,
        "basis": STACK,
        "output": "unembed",
        "heads": "L0H1,L2H1",
    },
    "ids from a set": {
        "basis": {2: BOTH[2]},
        "output": {2: made.transcoders(0, 1, 2)},
        "heads": "L2H1",
    },
    "top edges": {"basis": BOTH, "edges": "top:2"},
}


def run(out: Path, texts: Any = TEXTS, **options: Any) -> Store:
    given = {"model": tiny.llama, "basis": BOTH, "edges": "all", "prompts_per_shard": 2}
    given |= {"heads": "L1H0,L2H3", "topk": 8, **options}
    hf, basis = given.pop("model")(), given.pop("basis")
    return headattr.attribute(hf, basis, texts, out, **given)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Finished stores by name, each made once."""
    made_of: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made_of:
            made_of[name] = tmp_path_factory.mktemp("stores") / "results"
            run(made_of[name], **STORES[name]).close()
        return made_of[name]

    return of


@pytest.fixture(scope="module")
def finished(stores: Callable[[str], Path]) -> Path:
    """Two shards, three layers, all tables but parts with rows."""
    return stores("tokens and the unembedding")


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "results"))


@pytest.fixture(scope="module")
def awkward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with everything that CSV and terminals stumble over."""
    out = tmp_path_factory.mktemp("awkward") / "results"
    texts = [AWKWARD, "a,b", "=1+1;'"]
    options = {"tokenizer": tiny.byte_tokenizer(), "basis": {1: BOTH[1]}, "heads": "L1H0"}
    run(out, texts, model=lambda: tiny.llama(vocab_size=tiny.BYTES), **options).close()
    return out


def every_edge(store: Store) -> Iterator[tuple[int, Edge]]:
    for prompt in store.prompt_ids:
        for head in store.heads:
            kept = store.edges(prompt, head)
            for q_pos, k_pos in zip(kept["q_pos"].tolist(), kept["k_pos"].tolist(), strict=True):
                yield prompt, Edge(head.layer, head.head, q_pos, k_pos)


IDS = ("prompt", "layer", "head", "q_pos", "k_pos")


def by_edge(frame: dict[str, Any]) -> dict[tuple[int, ...], list[dict[str, Any]]]:
    """Rows of each edge, in order; None where a value is masked."""
    found = defaultdict(list)
    for values in zip(*(column.tolist() for column in frame.values()), strict=True):
        row = dict(zip(frame, values, strict=True))
        found[tuple(row.pop(name) for name in IDS)].append(row)
    return found


def columns(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


# The same numbers as the answers ------------------------------------------------------------------


@pytest.mark.parametrize("name", STORES)
def test_every_table_says_of_every_edge_what_its_answer_says(
    stores: Callable[[str], Path], name: str
) -> None:
    with open_store(stores(name)) as store:
        tables = {table: by_edge(store.frame(table)) for table in TABLES[:5]}
        edges = 0
        for prompt, edge in every_edge(store):
            answer, key = query.edge(store, prompt, edge), (prompt, *edge)
            rows = {table: found.pop(key, []) for table, found in tables.items()}
            assert len(rows["edges"]) == 1
            assert_edge(rows["edges"][0], answer)
            assert_pairs(rows, answer)
            assert_features(rows["features"], answer, store.edge(prompt, edge))
            assert_parts(rows["parts"], answer)
            edges += 1
        assert edges > 10
        assert not any(tables.values())


def assert_edge(row: dict[str, Any], answer: dict[str, Any]) -> None:
    for name in ("q_token", "k_token", "score", "score_capped", "score_contrast", "pattern"):
        assert row.pop(name) == answer[name], name
    for name in ("feature_share", "completeness", "contrast_completeness"):
        assert row.pop(name) == answer["qk"][name], name
    assert row.pop("flagged") is answer["flagged"]
    ov = answer["ov"][0] if answer["ov"] else {"completeness": None, "block_completeness": None}
    assert row.pop("ov_completeness") == ov["completeness"]
    assert row.pop("block_completeness") == ov["block_completeness"]
    totals = answer["qk"]["totals"]
    wanted = {f"total_{q}_{k}": v for q, cells in totals.items() for k, v in cells.items()}
    for side, letter in (("query", "q"), ("key", "k")):
        named = answer["qk"]["contrast_totals"][side]
        wanted |= {f"{letter}_contrast_{kind}": value for kind, value in named.items()}
    assert {name: value for name, value in row.items() if value is not None} == wanted


def assert_pairs(rows: dict[str, list[dict[str, Any]]], answer: dict[str, Any]) -> None:
    pairs = columns(rows["pairs"], "place", "q_feature", "k_feature", "value", "contrast", "source")
    assert pairs == [
        (i, p["q_feature"]["id"], p["k_feature"]["id"], p["value"], p["contrast"], source)
        for i, p in enumerate(answer["qk"]["pairs"])
        for source in {p["q_feature"]["source"], p["k_feature"]["source"]}
    ]
    names = ("place", "v_feature", "o_feature", "value", "source", "output")
    assert columns(rows["moved"], *names) == [
        (i, v["id"], o["id"], pair["value"], v["source"], o["source"])
        for ov in answer["ov"]
        for i, pair in enumerate(ov["pairs"])
        for v, o in [(pair["v_feature"], pair["o_feature"])]
    ]


def assert_features(rows: list[dict[str, Any]], answer: dict[str, Any], kept: Any) -> None:
    ov = answer["ov"][0] if answer["ov"] else {"v_features": [], "o_features": []}
    lists = {"q": answer["qk"]["q_features"], "k": answer["qk"]["k_features"]}
    lists |= {"v": ov["v_features"], "o": ov["o_features"]}
    numbers = ("marginal", "contrast", "ablation", "norm", "read")
    wanted = [
        (role, i, f["id"], f["source"], *(f.get(number) for number in numbers))
        for role, found in lists.items()
        for i, f in enumerate(found)
    ]
    assert columns(rows, "role", "place", "feature", "source", *numbers) == wanted
    acts = [row["activation"] for row in rows if row["role"] != "o"]
    assert acts == [f["activation"] for side in "qkv" for f in lists[side]]
    outputs = [row["activation"] for row in rows if row["role"] == "o"]
    if kept.o_active is None:
        assert set(outputs) <= {None}
    else:
        slots = kept.ov.o_top[kept.ov.o_top >= 0]
        assert outputs == kept.o_active.acts[slots].tolist()


def assert_parts(rows: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    lists = {"q": answer["qk"]["q_parts"], "k": answer["qk"]["k_parts"]}
    lists["v"] = [part for ov in answer["ov"] for part in ov["v_parts"]]
    numbers = ("marginal", "contrast", "norm")
    assert columns(rows, "role", "place", "kind", "name", *numbers) == [
        (role, i, part["kind"], part["name"], *(part.get(number) for number in numbers))
        for role, found in lists.items()
        for i, part in enumerate(found)
    ]


def test_the_stores_above_have_every_kind_of_row(stores: Callable[[str], Path]) -> None:
    with open_store(stores("parts")) as store:
        roles = {table: set(store.frame(table)["role"]) for table in ("features", "parts")}
        assert roles == {"features": {*"qkvo"}, "parts": {*"qkv"}}
        edges = store.frame("edges")
        assert edges["total_feature_feature"].mask.any()
        assert edges["total_token_token"].mask.any()
        assert not (edges["total_bias_bias"].mask).any()
    with open_store(stores("ids from a set")) as store:
        assert store.manifest["sources"][store.manifest["layers"][0]["output"]]["first"] > 0


def test_prompts_and_tokens_are_those_that_ran(awkward: Path) -> None:
    with open_store(awkward) as store:
        prompts, tokens = store.frame("prompts"), store.frame("tokens")
        assert prompts["text"].tolist() == [AWKWARD, "a,b", "=1+1;'"]
        lengths = [len(text.encode()) for text in prompts["text"]]
        assert prompts["n_tokens"].tolist() == lengths
        for prompt in store.prompt_ids:
            here = tokens["prompt"] == prompt
            assert tokens["position"][here].tolist() == list(range(lengths[prompt]))
            assert tokens["token"][here].tolist() == store.tokens(prompt)
            assert tokens["text"][here].tolist() == store.token_texts(prompt)


@pytest.mark.parametrize(
    ("heads", "prompts"),
    [
        ("L1H2", "all"),
        ("L2H*", "all"),
        ("L0H0,L2H3", "1-2"),
        ("all", "0"),
        ("all", "2,0-1"),
        ("L1H*,L1H0", [2]),
    ],
)
def test_heads_and_prompts_choose_the_rows_of_the_whole(
    finished: Path, heads: str, prompts: Any
) -> None:
    wanted_prompts = {"all": [0, 1, 2], "1-2": [1, 2], "0": [0], "2,0-1": [0, 1, 2]}
    ids = prompts if isinstance(prompts, list) else wanted_prompts[prompts]
    with open_store(finished) as store:
        chosen = choose(store, heads).heads
        for table in TABLES:
            whole, some = store.frame(table), store.frame(table, heads=heads, prompts=prompts)
            kept = np.isin(whole["prompt"], ids)
            if "layer" in whole:
                pairs = zip(whole["layer"].tolist(), whole["head"].tolist(), strict=True)
                kept &= np.array([HeadId(*pair) in chosen for pair in pairs], bool)
            assert table == "parts" or kept.any()
            for name, column in some.items():
                assert column.tolist() == whole[name][kept].tolist(), name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": "L7H0"}, "L7H0: not in this store; it holds L0H0"),
        ({"heads": "L1H9"}, "L1H9: not in this store"),
        ({"heads": "H1"}, "expected all, or a list such as L5H1"),
        ({"heads": ""}, "expected all, or a list such as L5H1"),
        ({"prompts": "3"}, "--prompts 3: no finished prompt of this store; it holds 0 to 2"),
        ({"prompts": "1,7-9"}, "--prompts 7-9: no finished prompt"),
        ({"prompts": "2-1"}, "expected all, or a list such as 0-99,120"),
        ({"prompts": "-1"}, "expected all, or a list such as 0-99,120"),
        ({"prompts": []}, "none given"),
    ],
)
def test_a_head_or_prompt_that_is_not_there_is_refused(
    finished: Path, options: dict[str, Any], said: str
) -> None:
    with open_store(finished) as store, pytest.raises(UsageError, match=said):
        store.frame("edges", **options)


def test_a_table_that_is_none_is_refused_naming_those_that_there_are(finished: Path) -> None:
    with open_store(finished) as store, pytest.raises(UsageError, match="edges, pairs, moved"):
        store.frame("edge")


def test_pandas_and_arrow_take_a_frame_as_it_is(finished: Path) -> None:
    with open_store(finished) as store:
        for table in TABLES:
            frame = store.frame(table)
            arrow, pandas = pa.table(frame), pd.DataFrame(frame)
            for name, column in frame.items():
                wanted = column.tolist()
                assert arrow[name].to_pylist() == wanted
                found = pandas[name].astype(object).where(pandas[name].notna(), None).tolist()
                assert found == wanted


# Frames are bounded -------------------------------------------------------------------------------


def test_frames_are_bounded_and_together_the_table(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(finished) as store:
        whole = {table: store.frame(table) for table in TABLES}
        monkeypatch.setattr("headattr.store.frames.AT_ONCE", 40)
        choice = choose(store)
        names = naming(store, choice, store.shards)
        for table in TABLES:
            found = list(frames(table, choice, names, store.shards))
            assert all(0 < count_rows(frame) <= 40 for frame in found), table
            for name, column in whole[table].items():
                together = [value for frame in found for value in frame[name].tolist()]
                assert together == column.tolist(), name


def test_rows_beyond_two_to_the_31_are_read_where_they_are() -> None:
    """Edges of three groups, far apart, of a layer with 2^40."""
    ptr = np.array([0, 5, 5, 2**31 + 7, 2**31 + 9, 2**40 - 3, 2**40], np.int64)
    wanted = np.array([True, True, False, True, False, True])
    found = [(rows.start, rows.stop) for rows in spans(ptr, wanted, 4)]
    assert found == [(0, 4), (4, 5), (2**31 + 7, 2**31 + 9), (2**40 - 3, 2**40)]


def test_spans_cover_the_wanted_groups_once_in_order_and_leave_large_gaps_out() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        counts = generator.choice([0, 1, 7, 3000], 12)
        ptr, wanted = np.append(0, np.cumsum(counts)), generator.random(12) < 0.4
        found = list(spans(ptr, wanted, 100))
        rows = np.concatenate([np.arange(s.start, s.stop) for s in found] or [np.arange(0)])
        assert (np.diff(rows) > 0).all()
        assert all(s.stop - s.start <= 100 for s in found)
        group = np.searchsorted(ptr, rows, "right") - 1
        assert np.count_nonzero(wanted[group]) == counts[wanted].sum()
        assert not any((group == g).any() for g in np.flatnonzero((counts == 3000) & ~wanted))


def test_parts_are_numbered_beyond_99999_shards_and_999_parts() -> None:
    for shard, number in ((0, 0), (99999, 999), (123456, 4321)):
        name = part_name("pairs", shard, number, "parquet")
        assert NAME.fullmatch(name)
        assert shard_of(name) == shard
    for name in ("pairs/../x", "/etc/passwd", "other/part-00000-000.csv", "pairs/part-0-0.csv"):
        assert not NAME.fullmatch(name)


# Files --------------------------------------------------------------------------------------------


def read_back(folder: Path, kind: str, table: str) -> dict[str, list[Any]]:
    """All parts of a table, in order, by other people's readers."""
    files = sorted((folder / table).glob(f"part-*.{kind}"))
    manifest = json.loads((folder / "manifest.json").read_text())
    fields = manifest["tables"][table]["columns"]
    found: dict[str, list[Any]] = {field["name"]: [] for field in fields}
    for path in files:
        part = csv_columns(path, fields) if kind == "csv" else pq.read_table(path).to_pydict()
        for name, values in part.items():
            found[name] += values
    return found


def csv_columns(path: Path, fields: list[dict[str, Any]]) -> dict[str, list[Any]]:
    parse: dict[str, Callable[[str], Any]] = {
        "text": str,
        "bool": {"true": True, "false": False}.__getitem__,
        "float32": lambda text: float(np.float32(text)),
        "int32": int,
        "int64": int,
    }
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file, strict=True)
    assert header == [field["name"] for field in fields]
    return {
        field["name"]: [
            None if field["optional"] and text == "" else parse[field["type"]](text)
            for text in (row[i] for row in rows)
        ]
        for i, field in enumerate(fields)
    }


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("largest", ["256MiB", "16KiB"])
def test_what_is_read_back_is_what_was_kept(
    finished: Path, tmp_path: Path, kind: str, largest: str
) -> None:
    answer = export_store(finished, tmp_path / "out", kind, max_file=largest)
    assert answer["complete"]
    with open_store(finished) as store:
        for table in TABLES:
            wanted = {name: column.tolist() for name, column in store.frame(table).items()}
            assert read_back(tmp_path / "out", kind, table) == wanted
            assert answer["tables"][table]["rows"] == len(wanted["prompt"])
    files = list((tmp_path / "out").glob("*/part-*"))
    assert all(path.stat().st_size <= 16 << 10 for path in files) == (largest == "16KiB")
    assert len(files) == answer["parts"]
    assert check_export(tmp_path / "out")["ok"]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_texts_with_newlines_quotes_and_commas_come_back(
    awkward: Path, tmp_path: Path, kind: str
) -> None:
    export_store(awkward, tmp_path / "out", kind)
    with open_store(awkward) as store:
        for table in ("prompts", "tokens", "edges"):
            wanted = {name: column.tolist() for name, column in store.frame(table).items()}
            assert read_back(tmp_path / "out", kind, table) == wanted
    asked = 'SELECT text FROM tokens ORDER BY prompt, "position"'
    rows = [row for (row,) in sql(tmp_path / "out", asked)["rows"]]
    with open_store(awkward) as store:
        assert rows == store.frame("tokens")["text"].tolist()
        assert sql(tmp_path / "out", "SELECT text FROM prompts ORDER BY ALL")["rows"] == sorted(
            [[AWKWARD], ["a,b"], ["=1+1;'"]]
        )


def test_csv_ends_lines_as_the_standard_says_and_floats_are_the_shortest_that_read_back(
    tmp_path: Path,
) -> None:
    values = np.array([0.1, 1e-5, 3.4028235e38, 1e-45, -0.0, 16777216, 1 / 3], np.float32)
    frame = {
        "x": np.ma.masked_array(np.append(values, np.float32(np.nan)), [False] * 7 + [True]),
        "t": np.array(["", "a", ",", '"', "\n", "\r", "é", "null"], object),
    }
    kind = csv_kind((Field("x", "float32", True), Field("t", "text")))
    (part,) = write_parts(kind, [frame], iter([tmp_path / "x.csv"]), 1 << 20, "x")
    assert part.path.read_bytes().startswith(b"x,t\r\n0.1,\r\n1e-05,a\r\n")
    with part.path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, strict=True))[1:]
    assert [row[1] for row in rows] == frame["t"].tolist()
    found = np.array([np.float32(row[0]) for row in rows[:-1]])
    assert found.tobytes() == values.tobytes()
    assert rows[-1][0] == ""


def edit(store: Path, shard: int, change: Callable[[Any], None]) -> None:
    """Change a shard and make its sidecar agree again."""
    path = store / "shards" / f"{shard:05d}.h5"
    with h5py.File(path, "r+") as file:
        change(file)
    sidecar = json.loads(path.with_suffix(".json").read_text())
    sidecar |= {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    path.with_suffix(".json").write_text(json.dumps(sidecar))


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_token_texts_and_prompts_beyond_64_kib_come_back(
    copy: Path, tmp_path: Path, kind: str
) -> None:
    long = "x,\n" * 30_000

    def lengthen(file: Any) -> None:
        file["prompt/token_text"][2] = long
        file["prompt/text"][0] = long

    edit(copy, 0, lengthen)
    tables = "edges,prompts,tokens"
    export_store(copy, tmp_path / "out", kind, tables=tables, max_file="1MiB")
    assert read_back(tmp_path / "out", kind, "tokens")["text"][2] == long
    assert read_back(tmp_path / "out", kind, "prompts")["text"][0] == long
    edges = read_back(tmp_path / "out", kind, "edges")
    at = [i for i, q in enumerate(edges["q_pos"]) if q == 2 and edges["prompt"][i] == 0]
    assert {edges["q_token"][i] for i in at} == {long}
    files = list((tmp_path / "out").glob("*/part-*"))
    assert max(path.stat().st_size for path in files) <= 1 << 20
    asked = "SELECT max(length(text)) FROM tokens"
    assert sql(tmp_path / "out", asked)["rows"] == [[len(long)]]


# No file is too large, and one that is gone is named (V39) ----------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 tokens, 4 x 4 heads, every edge."""
    out = tmp_path_factory.mktemp("large") / "results"
    basis = {0: "tokens"} | {i: tiny.sae(layer=i, seed=i) for i in (1, 2, 3)}
    four = {"model": lambda: tiny.llama(num_hidden_layers=4), "basis": basis}
    run(out, tiny.prompts(64), output="unembed", heads="all", **four).close()
    return out


SMALL = "16KiB"


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    export_store(finished, out, max_file=SMALL)
    return out


@pytest.fixture
def export(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "out"))


def test_no_file_of_a_large_export_is_larger_than_asked_and_what_is_gone_is_said(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["export", "parquet", str(large), "--out", str(out), "--max-file", "1MiB"]
    assert main(command) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    parts = {p["file"]: p for table in manifest["tables"].values() for p in table["parts"]}
    files = {path.relative_to(out).as_posix(): path for path in out.glob("*/part-*")}
    assert parts.keys() == files.keys()
    assert len(parts) > 10
    for name, path in files.items():
        assert path.stat().st_size == parts[name]["bytes"] <= 1 << 20
        assert file_hash(path) == parts[name]["sha256"]
        assert pq.read_metadata(path).num_rows == parts[name]["rows"]
    n_edges = 16 * tiny.n_edges(64)
    assert manifest["tables"]["edges"]["rows"] == n_edges
    assert sql(out, "SELECT count(DISTINCT (layer, head, q_pos, k_pos)) FROM features")["rows"] == [
        [n_edges]
    ]
    (out / "features" / "part-00000-002.parquet").unlink()
    capsys.readouterr()
    assert main(["check", str(out)]) == 1
    assert "features/part-00000-002.parquet is missing" in capsys.readouterr().out
    (out / "manifest.json").unlink()
    assert main(["check", str(out)]) == 1
    assert "has no manifest.json" in capsys.readouterr().err


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gone": (Path.unlink, "is missing"),
    "truncated": (_truncate, "bytes, expected"),
    "empty": (lambda path: path.write_bytes(b""), "is 0 bytes, expected"),
    "changed": (_flip, "does not have the hash"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is missing"),
    "moved": (lambda path: path.rename(path.with_name("part-00000-900.parquet")), "is missing"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_a_part_that_is_not_what_was_written_is_named_and_the_same_export_mends_it(
    finished: Path,
    export: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], Any],
    said: str,
) -> None:
    name = "features/part-00000-001.parquet"
    damage(export / name)
    assert main(["check", str(export)]) == 1
    out = capsys.readouterr().out
    assert "NOT OK" in out
    assert f"{name} " in out
    assert said in out
    if (export / name).is_dir():
        (export / name).rmdir()
    answer = export_store(finished, export, max_file=SMALL)
    assert 0 < answer["kept"] < answer["parts"]
    assert check_export(export)["problems"] == []
    with open_store(finished) as store:
        wanted = {name: column.tolist() for name, column in store.frame("features").items()}
    assert read_back(export, "parquet", "features") == wanted


@pytest.mark.parametrize("name", ["pairs/part-00000-900.parquet", "notes.txt", "more/x.csv"])
def test_a_foreign_file_is_named(export: Path, name: str) -> None:
    (export / name).parent.mkdir(exist_ok=True)
    (export / name).write_bytes(b"x")
    problems = check_export(export)["problems"]
    assert [name in problem for problem in problems] == [True]


def test_without_its_manifest_an_export_is_not_taken_for_one(
    finished: Path, export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (export / "manifest.json").unlink()
    for command in (["check", str(export)], ["sql", str(export), "SELECT 1"]):
        assert main(command) == 1
        said = capsys.readouterr()
        assert "has no manifest.json: the export was not finished" in said.err
        assert len(said.err.splitlines()) == 1
        assert said.out == ""
    answer = export_store(finished, export, max_file=SMALL)
    assert answer["kept"] == answer["parts"]
    assert check_export(export)["ok"]


def test_an_empty_folder_is_neither_a_store_nor_an_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["check", str(tmp_path)], ["sql", str(tmp_path), "SELECT 1"]):
        assert main(command) == 1
        assert "manifest.json" in capsys.readouterr().err


MANIFESTS: dict[str, tuple[Callable[[str], str], str]] = {
    "not JSON": (lambda text: text[: len(text) // 2], "is not JSON"),
    "a number changed": (lambda text: text.replace('"rows": ', '"rows": 1', 1), "its hash"),
    "another version": (lambda text: text.replace('"version": "1', '"version": "9'), "version 9"),
    "a list": (lambda _: "[]", "is not the manifest"),
}


@pytest.mark.parametrize(("change", "said"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_was_changed_is_refused_in_one_line(
    export: Path, capsys: pytest.CaptureFixture[str], change: Callable[[str], str], said: str
) -> None:
    path = export / "manifest.json"
    path.write_text(change(path.read_text()))
    assert main(["check", str(export)]) == 1
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_manifest_that_names_files_elsewhere_is_refused(export: Path) -> None:
    from headattr.export.folder import content_hash

    path = export / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tables"]["pairs"]["parts"][0]["file"] = "../../etc/passwd"
    manifest["content_hash"] = content_hash(manifest)
    path.write_text(json.dumps(manifest))
    for ask in (check_export, lambda folder: sql(folder, "SELECT 1")):
        with pytest.raises(StoreError, match="no name of a part"):
            ask(export)


@pytest.mark.parametrize(("kind", "largest"), [("parquet", "600"), ("csv", "60")])
def test_a_size_that_one_row_does_not_fit_in_is_refused_with_what_it_takes(
    finished: Path, tmp_path: Path, kind: str, largest: str
) -> None:
    with pytest.raises(UsageError, match=rf"--max-file is {largest} .* file of \w+ with [01] rows"):
        export_store(finished, tmp_path / "out", kind, max_file=largest)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert export_store(finished, tmp_path / "out", kind)["complete"]
    assert check_export(tmp_path / "out")["ok"]


@pytest.mark.parametrize("largest", ["0", "-1", "some", ""])
def test_a_size_that_is_none_is_refused(finished: Path, tmp_path: Path, largest: str) -> None:
    with pytest.raises(UsageError, match="--max-file"):
        export_store(finished, tmp_path / "out", max_file=largest)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [csv_kind, parquet_kind], ids=["csv", "parquet"])
@pytest.mark.parametrize("largest", [4500, 9000, 30_000])
def test_rows_of_very_different_sizes_are_split_until_every_file_fits(
    tmp_path: Path, make: Callable[..., Kind], largest: int
) -> None:
    generator = np.random.default_rng(0)
    sizes = generator.choice([0, 1, 30, 700], 400, p=[0.5, 0.3, 0.15, 0.05])
    texts = [generator.bytes(size // 2).hex() for size in sizes]  # does not compress to nothing
    frame = {"n": np.arange(400), "t": np.array(texts, object)}
    given = [{name: column[i : i + 130] for name, column in frame.items()} for i in (0, 130, 260)]
    given.append({name: column[390:] for name, column in frame.items()})
    fields = (Field("n", "int64"), Field("t", "text"))
    kind = make(fields)
    paths = (tmp_path / f"{i:04d}.{kind.name}" for i in count())
    parts = list(write_parts(kind, given, paths, largest, "x"))
    assert [part.path.stat().st_size for part in parts] == [part.bytes for part in parts]
    assert all(part.bytes <= largest for part in parts)
    found: list[Any] = []
    for part in parts:
        if kind.name == "parquet":
            read = pq.read_table(part.path).to_pydict()
        else:
            read = csv_columns(part.path, [field._asdict() for field in fields])
        assert len(read["n"]) == part.rows > 0
        found += zip(read["n"], read["t"], strict=True)
    assert found == list(enumerate(texts))
    assert len(list(tmp_path.iterdir())) == len(parts)


# Going on, and stores that are not whole ----------------------------------------------------------


def names_of(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_mtime_ns
        for path in folder.glob("*/part-*")
    }


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("after", [0, 1, 3, 9])
def test_an_export_that_was_stopped_between_parts_goes_on_and_keeps_what_is_there(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, after: int
) -> None:
    from headattr.export import run as export_run

    options: dict[str, Any] = {"kind": kind, "tables": "edges,features", "heads": "L1H*,L2H3"}
    options["max_file"] = "12KiB"
    out, real = tmp_path / "out", export_run.write_parts

    def stopping(*given: Any) -> Iterator[Any]:
        for part in real(*given):
            if len(names_of(out)) > after:  # this one is there, and not written down
                raise KeyboardInterrupt
            yield part

    with monkeypatch.context() as patch:
        patch.setattr(export_run, "write_parts", stopping)
        with pytest.raises(KeyboardInterrupt):
            export_store(finished, out, **options)
    before = names_of(out)
    assert len(before) == after + 1
    assert main(["check", str(out)]) == 1
    answer = export_store(finished, out, **options)
    assert answer["kept"] == after
    now = names_of(out)
    assert sum(now[name] == when for name, when in before.items()) == after
    assert check_export(out)["ok"]
    with open_store(finished) as store:
        for table in ("edges", "features"):
            wanted = store.frame(table, heads=options["heads"])
            assert read_back(out, kind, table) == {n: c.tolist() for n, c in wanted.items()}
    again = export_store(finished, out, **options)
    assert again["kept"] == again["parts"]
    assert names_of(out) == now


def test_a_smaller_size_makes_the_files_that_are_too_large_again(
    finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = export_store(finished, out, tables="features,tokens")
    second = export_store(finished, out, tables="features,tokens", max_file="16KiB")
    assert second["parts"] > first["parts"]
    assert max(path.stat().st_size for path in out.glob("*/part-*")) <= 16 << 10
    assert second["rows"] == first["rows"]
    assert check_export(out)["ok"]


OTHERS: dict[str, dict[str, Any]] = {
    "tables": {"tables": "edges"},
    "heads": {"heads": "L1H0"},
    "prompts": {"prompts": "0-1"},
    "kind": {"kind": "csv"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_export_in_the_same_folder_is_refused_and_nothing_changes(
    finished: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    export_store(finished, out)
    before = names_of(out)
    with pytest.raises(StoreError, match=f"holds another export.*{name}.*another --out"):
        export_store(finished, out, **OTHERS[name])
    assert names_of(out) == before
    assert check_export(out)["ok"]


def test_the_export_of_another_store_is_refused(
    finished: Path, stores: Callable[[str], Path], tmp_path: Path
) -> None:
    export_store(finished, tmp_path / "out")
    with pytest.raises(StoreError, match=r"holds another export \(store: "):
        export_store(stores("no output"), tmp_path / "out")


def test_a_folder_that_holds_something_else_is_refused_and_left(
    finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for out in (tmp_path, tmp_path / "notes.txt", finished):
        with pytest.raises(StoreError, match=r"is no export; give an empty or new --out folder"):
            export_store(finished, out)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def _unfinished(store: Path) -> None:
    for ending in ("json", "h5"):
        (store / "shards" / f"00001.{ending}").unlink()


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "not finished": (_unfinished, "shards/00001.h5 is not finished"),
    "truncated": (lambda store: _truncate(store / "shards/00001.h5"), "bytes, expected"),
    "changed": (lambda store: _flip(store / "shards/00001.h5"), "hash of its sidecar"),
    "sidecar broken": (
        lambda store: (store / "shards/00001.json").write_text("{"),
        "shards/00001.json is broken",
    ),
    "not a number": (
        lambda store: edit(store, 1, lambda f: f["layer/1/score"].__setitem__(0, np.nan)),
        "score has non-finite values",
    ),
    "infinite": (
        lambda store: edit(store, 1, lambda f: f["layer/2/qk/totals"].__setitem__(0, -np.inf)),
        "qk/totals has non-finite values",
    ),
    "a slot beyond its list": (
        lambda store: edit(store, 1, lambda f: f["layer/1/qk/k_slots"].__setitem__((0, 0), 99)),
        "qk/k_slots points beyond an active list",
    ),
    "an edge beyond its prompt": (
        lambda store: edit(store, 1, lambda f: f["layer/1/key"].__setitem__(0, 40 << 16)),
        "beyond its prompt",
    ),
}


@pytest.mark.parametrize(("damage", "said"), BROKEN.values(), ids=BROKEN)
def test_a_store_that_is_not_whole_is_exported_as_far_as_it_is_with_a_word_and_exit_code_3(
    copy: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], Any],
    said: str,
) -> None:
    damage(copy)
    out = tmp_path / "out"
    command = ["export", "parquet", str(copy), "--out", str(out)]
    assert main([*command, "--json"]) == 3
    found = capsys.readouterr()
    assert "left out: " in found.err
    assert said in found.err
    answer = json.loads(found.out)
    assert answer["complete"] is False
    assert [said in problem for problem in answer["problems"]] == [True]
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["complete"], manifest["problems"]) == (False, answer["problems"])
    assert check_export(out)["ok"]
    assert check_export(out)["complete"] is False
    assert main(["sql", str(out), "SELECT count(*) FROM prompts"]) == 3
    found = capsys.readouterr()
    assert said in found.err
    with open_store(finished) as store:
        wanted = store.frame("pairs", prompts=[0, 1])
    assert read_back(out, "parquet", "pairs") == {n: c.tolist() for n, c in wanted.items()}
    assert main([*command, "--prompts", "0-1", "--json"]) == 1  # another export
    whole = [*command[:-1], str(tmp_path / "first"), "--prompts", "0-1"]
    assert main(whole) == 0


def test_an_export_goes_on_when_its_store_does(copy: Path, finished: Path, tmp_path: Path) -> None:
    _unfinished(copy)
    out = tmp_path / "out"
    first = export_store(copy, out)
    for ending in ("h5", "json"):
        shutil.copy(finished / "shards" / f"00001.{ending}", copy / "shards")
    second = export_store(copy, out)
    assert (first["complete"], second["complete"]) == (False, True)
    assert second["kept"] == first["parts"]
    with open_store(finished) as store:
        wanted = store.frame("features")
    assert read_back(out, "parquet", "features") == {n: c.tolist() for n, c in wanted.items()}
    assert check_export(out)["complete"]


def test_a_shard_that_was_made_again_is_exported_again(copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_store(copy, out)
    edit(copy, 1, lambda file: file["layer/1/pattern"].__setitem__(0, 0.125))
    answer = export_store(copy, out)
    assert 0 < answer["kept"] < answer["parts"]
    assert 0.125 in read_back(out, "parquet", "edges")["pattern"]
    assert check_export(out)["ok"]


def test_prompts_that_were_set_aside_are_no_gap(tmp_path: Path) -> None:
    run(tmp_path / "results", [[1, 2], [99], [3, 4], [99]], heads="L1H0").close()
    answer = export_store(tmp_path / "results", tmp_path / "out")
    assert (answer["complete"], answer["set_aside"]) == (True, 2)
    assert read_back(tmp_path / "out", "parquet", "prompts")["prompt"] == [0, 2]


def test_temporary_files_of_a_killed_export_are_no_parts(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_store(finished, out)
    (out / "pairs" / ".part-00000-007.parquet.999.elsewhere.1.tmp").write_bytes(b"x")
    assert check_export(out)["ok"]
    assert sql(out, "SELECT count(*) > 0 FROM pairs")["rows"] == [[True]]


# SQL ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kinds(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    for kind in ("parquet", "csv"):
        export_store(finished, folder / kind, kind, max_file="32KiB")
    return {"store": finished, "parquet": folder / "parquet", "csv": folder / "csv"}


KIND_NAMES = ("store", "parquet", "csv")


@pytest.mark.parametrize("name", KIND_NAMES)
def test_sql_sees_the_same_tables_over_a_store_and_its_exports(
    finished: Path, kinds: dict[str, Path], name: str
) -> None:
    with open_store(finished) as store:
        for table in TABLES:
            answer = sql(kinds[name], f"SELECT * FROM {table}", limit=10**6)
            frame = store.frame(table)
            assert [column["name"] for column in answer["columns"]] == list(frame)
            wanted = zip(*(column.tolist() for column in frame.values()), strict=True)
            key = repr
            assert sorted(map(tuple, answer["rows"]), key=key) == sorted(wanted, key=key)
            assert (answer["more"], answer["complete"], answer["non_finite"]) == (False, True, 0)


@pytest.mark.parametrize("name", KIND_NAMES)
def test_a_table_may_be_named_twice_quoted_or_in_capitals(
    finished: Path, kinds: dict[str, Path], name: str
) -> None:
    with open_store(finished) as store:
        rows = len(store.frame("pairs")["prompt"])
    key = "prompt, layer, head, q_pos, k_pos, place"
    for asked in (
        f'SELECT count(*) FROM Pairs a JOIN "pairs" b USING ({key})',
        "WITH found AS (FROM main.PAIRS) SELECT count(*) FROM found",
        "SELECT count(*) FROM edges JOIN pairs USING (prompt, layer, head, q_pos, k_pos)",
    ):
        assert sql(kinds[name], asked)["rows"] == [[rows]]


@pytest.mark.parametrize("name", KIND_NAMES)
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("SELEC 1", 'syntax error at or near "SELEC"'),
        ("SELECT nothing FROM edges", "nothing"),
        ("SELECT * FROM nowhere", "there are edges, pairs, moved"),
        ("SELECT 1; SELECT 2", "found 2 statements; expected one"),
        ("", "found 0 statements; expected one"),
        ("SELECT * FROM kinds", "nowhere|does not exist"),
        ("SELECT CAST('x' AS INTEGER)", "Conversion"),
    ],
)
def test_what_duckdb_refuses_is_one_line_of_usage(
    kinds: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    name: str,
    asked: str,
    said: str,
) -> None:
    with pytest.raises(UsageError, match=said):
        sql(kinds[name], asked)
    assert main(["sql", str(kinds[name]), asked]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert [line for line in found.err.splitlines() if line.startswith("headattr: sql: ")]


def test_numbers_that_json_has_not_are_null_and_counted(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (
        "SELECT 'nan'::FLOAT, '-inf'::DOUBLE, 0.5, [1, 'inf'::DOUBLE], {'x': 'nan'::FLOAT}, "
        "DATE '2020-01-02', NULL, 'a\n\"b', 170141183460469231731687303715884105727"
    )
    assert main(["sql", str(finished), asked, "--json"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(name)

    answer = json.loads(capsys.readouterr().out, parse_constant=refuse)
    (row,) = answer["rows"]
    assert row[:5] == [None, None, 0.5, [1.0, None], {"x": None}]
    assert row[5:] == ["2020-01-02", None, 'a\n"b', 2**127 - 1]
    assert answer["non_finite"] == 4


def test_the_limit_is_said_where_there_is_more(
    kinds: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = sql(kinds["parquet"], "FROM tokens ORDER BY ALL", limit=2)
    assert (len(answer["rows"]), answer["more"]) == (2, True)
    answer = sql(kinds["parquet"], "FROM tokens LIMIT 2", limit=2)
    assert (len(answer["rows"]), answer["more"]) == (2, False)
    assert main(["sql", str(kinds["parquet"]), "FROM tokens", "--limit", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["prompt", "position", "token", "text"]
    assert len(lines) == 4
    assert "more than 2 rows" in lines[3]
    assert main(["sql", str(kinds["parquet"]), "FROM tokens", "--limit", "-1"]) == 2


def test_a_missing_part_is_named_before_it_is_asked(kinds: dict[str, Path], tmp_path: Path) -> None:
    out = Path(shutil.copytree(kinds["parquet"], tmp_path / "out"))
    (out / "tokens" / "part-00001-000.parquet").unlink()
    with pytest.raises(StoreError, match=r"tokens/part-00001-000\.parquet is missing"):
        sql(out, "SELECT 1")


def test_a_folder_with_quotes_in_its_name_is_a_folder(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    for kind in ("parquet", "csv"):
        out = Path(shutil.copytree(kinds[kind], tmp_path / f"it's [{kind}] *"))
        assert sql(out, "SELECT count(*) FROM prompts")["rows"] == [[3]]


def test_over_a_store_only_the_tables_that_are_named_are_made(finished: Path) -> None:
    said: list[str] = []
    sql(finished, "SELECT count(*) FROM tokens JOIN prompts USING (prompt)", say=said.append)
    assert [line.split()[2] for line in said] == ["prompts", "tokens"]


def test_an_unfinished_store_is_asked_with_a_word_and_exit_code_3(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _unfinished(copy)
    assert main(["sql", str(copy), "SELECT count(*) FROM prompts", "--json"]) == 3
    found = capsys.readouterr()
    assert "1 shards are not finished" in found.err
    answer = json.loads(found.out)
    assert (answer["rows"], answer["complete"]) == ([[2]], False)


@pytest.mark.parametrize("package", ["pyarrow", "duckdb"])
def test_a_package_that_is_missing_is_named_with_how_to_get_it(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    out = str(tmp_path / "out")
    parquet = ["export", "parquet", str(finished), "--out", out]
    command = parquet if package == "pyarrow" else ["sql", str(finished), "SELECT 1"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f'{package}, which is not installed: pip install "headattr[export]"' in said
    assert not (tmp_path / "out").exists()
    assert main(["export", "csv", str(finished), "--out", out]) == 0
    assert main(["check", out]) == 0


def test_importing_the_export_and_the_command_line_imports_no_optional_package() -> None:
    import subprocess

    code = (
        "import sys, headattr.cli, headattr.export.run, headattr.export.sql, headattr.export.check;"
        "print([n for n in ('torch', 'pyarrow', 'duckdb', 'pandas') if n in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_first_rows_are_left_out_across_frames() -> None:
    given = [{"n": np.arange(i, i + 3)} for i in (0, 3, 6)]
    for rows in range(10):
        found = [n for frame in without_first(given, rows) for n in frame["n"].tolist()]
        assert found == list(range(rows, 9))
    assert AT_ONCE <= 200_000


def test_duckdb_reads_the_files_without_headattr(kinds: dict[str, Path]) -> None:
    found = duckdb.sql(f"SELECT count(*) FROM '{kinds['parquet']}/pairs/*.parquet'").fetchall()
    table = pq.read_table(kinds["parquet"] / "pairs")
    assert found == [(table.num_rows,)]
