"""`--memory` bounds what is there at once, never what is found: V26, and everything in blocks."""

import json
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tiny
import torch
from test_contrasts import fit, task_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import eager_attention_forward

import headattr
from headattr.attribution.layer import attribute_layer, stream_layer
from headattr.attribution.task import LayerTask
from headattr.basis.plain import PlainDictionary, plain_basis
from headattr.basis.sae import from_object
from headattr.basis.unembed import unembed_output
from headattr.budget import Budget, Shape, parse_bytes
from headattr.cli import main
from headattr.edges import parse_edge_rule, select_edges
from headattr.errors import ProofError, UsageError
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.forward import eager_in_blocks
from headattr.model.load import load_model
from headattr.store import check_layer
from headattr.store.check import check_store
from headattr.store.format import file_hash
from headattr.store.spread import Spread
from headattr.tables import LayerTable

BUDGET = 256 << 10
"""Of V26."""
RANKS = ("value", "contrast")

# What is there at once ----------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes of all tensors and numpy arrays that are there, and the most there were since `start`.

    A storage counts from the operation that made it to its end, whoever holds it; numpy's arrays
    are counted by tracemalloc, which also counts Python's objects. Between two operations the most
    of numpy is added to what torch holds, so that the sum is never too small. What an operation of
    torch needs inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[int, int]] = {}
        """Bytes and age of each storage."""
        self.held = self.most = self.age = self.numpy = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), counted=False)
        self.look()
        found = func(*args, **(kwargs or {}))
        self._see(found, counted=True)
        self.look()
        return found

    def _see(self, values: Any, *, counted: bool) -> None:
        """Storages that no operation made are numpy's, or were there before."""
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if key not in self.live:
                    size = storage.nbytes() if counted else 0
                    self.live[key] = size, self.age
                    self.held += size
                    weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.held -= self.live.pop(key)[0]

    def look(self) -> None:
        """Compare what is there now with the most there was."""
        self.most = max(self.most, self.held + tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()

    def start(self) -> None:
        """Count from here."""
        self.look()
        self.numpy, self.age = tracemalloc.get_traced_memory()[0], self.age + 1
        self.most = 0
        self.look()

    def above(self) -> int:
        """The most there was since `start`, above what was there at `start` and is there still."""
        self.look()
        before = sum(size for size, age in self.live.values() if age < self.age)
        return self.most - before - self.numpy


def peak_of(task: LayerTask) -> int:
    """The most bytes that a block of queries needs, above what the prompt costs once.

    Once are inputs, what all heads share (`Prepared`), both sides' tables, their kinds and entries.
    They are there when a block begins and when it ends, but in the first block with edges of a
    head, which makes some of them and is left out; everything else is counted, from one block's end
    to the next's: the block before, which is there until the next has its scores, and the finished
    edges until `keep` is done with them.
    """
    found: list[int] = []
    blocks_with_edges, kept = [0], list[bool]()

    def advance(rows: int) -> None:
        if blocks_with_edges[0]:
            found.append(live.above())
        blocks_with_edges[0] += bool(kept)
        kept.clear()
        live.start()

    def keep(part: Any) -> None:
        live.look()
        kept.append(True)

    attribute_layer(replace(task, heads=(0,), select=lambda head, rows, pattern: NOTHING))
    tracemalloc.start()
    try:
        with Live() as live:
            live.start()
            stream_layer(task, keep, advance)
    finally:
        tracemalloc.stop()
    assert blocks_with_edges[0] > 1
    return max(found)


NOTHING = np.empty(0, np.int64), np.empty(0, np.int64)


def selector(rule: str, window: int | None, queries: Callable[[int], bool]) -> Any:
    """As a run selects, of some queries."""

    def select(head: int, rows: range, pattern: np.ndarray) -> Any:
        back = np.array(rows)[:, None] - np.arange(rows.stop)
        return_to = select_edges(
            pattern,
            parse_edge_rule(rule),
            flagged=np.arange(rows.stop) == 0,
            keep_sinks=False,
            q_allowed=np.array([queries(row) for row in rows]),
            k_allowed=np.ones(rows.stop, bool),
            mask=(back >= 0) & (back < (window or rows.stop)),
        )
        return return_to[0] + rows.start, return_to[1]

    return select


def long_task(
    length: int,
    rule: str,
    rank: str,
    queries: Callable[[int], bool] = lambda row: True,
    *,
    family: str = "llama",
    k: int = 6,
    d_sae: int = 40,
    every: bool = False,
    **changes: Any,
) -> LayerTask:
    """Layer 1 of a prompt of some length, with an output."""
    model = load_model(tiny.MODELS[family](max_position_embeddings=length, **changes))
    tokens = tiny.prompts(length)[0]
    basis, output = (
        from_object(tiny.sae(layer=at, seed=at, k=k, d_sae=d_sae), at, **fit(model))
        for at in (1, 2)
    )
    prompt = capture(model, *pad([tokens]), layers=[1], sites=[1, 2])[0]
    assert isinstance(prompt, PromptCapture)
    reads = output.reads(prompt, output.active(prompt), "encoder")
    task = task_of(model, tokens, basis, rank=rank, output=reads, every_output=every, topk=32)
    window = task.weights.window
    return replace(task, select=selector(rule, window, queries))


def assert_same(found: LayerTable, wanted: LayerTable) -> None:
    """The same edges, features and pairs, but those of equal size, and the same numbers."""
    for name in ("q_pos", "k_pos", "head_ptr", "flagged"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    pairs = [(found, wanted)]
    if wanted.ov is not None:
        assert found.ov is not None
        pairs.append((found.ov, wanted.ov))  # pyright: ignore[reportArgumentType]
    # a query that sees one key has contrasts of 0, and rounding alone to rank them by
    told = wanted.q_pos > 0
    for one, other in pairs:
        for name, column in other._asdict().items():
            if not isinstance(column, np.ndarray) or column.dtype.kind != "f":
                continue
            size = max(1.0, float(abs(column).max(initial=0)))
            some = told if len(column) == len(told) else slice(None)
            assert np.allclose(getattr(one, name)[some], column[some], rtol=0, atol=1e-6 * size), (
                name
            )
        for name in SLOTS:
            if hasattr(other, name):
                differ = (getattr(one, name) != getattr(other, name)).any(-1) & told
                assert not differ.any(), name


SLOTS = ("q_slots", "k_slots", "q_top", "k_top", "v_slots", "o_slots", "v_top", "o_top")


@pytest.mark.parametrize(("rule", "rank"), product(("top:4", "all"), RANKS))
def test_256_tokens_in_256_kib_give_the_same_edges(rule: str, rank: str) -> None:
    """V26, of some queries, so that a test takes seconds."""
    step = 85 if rule == "all" else 17
    task = long_task(256, rule, rank, lambda row: row % step == 0)
    task = replace(task, heads=(0, 1, 2, 3) if rule == "top:4" else (1,))
    whole = attribute_layer(task)
    assert len(whole.q_pos) == (1 + 86 + 171 + 256 if rule == "all" else 4 * 15 * 4)
    assert_same(attribute_layer(replace(task, memory=BUDGET)), whole)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "rank"), product(("top:4", "all"), RANKS))
def test_256_tokens_in_256_kib_give_the_same_edges_all_of_them(rule: str, rank: str) -> None:
    """V26 to the letter."""
    task = long_task(256, rule, rank)
    assert_same(attribute_layer(replace(task, memory=BUDGET)), attribute_layer(task))


def late(row: int) -> bool:
    """The query with the most keys; an early one fills what a head makes once."""
    return row in (9, 255)


SIZES: dict[str, dict[str, Any]] = {
    "few features": {},
    "many features": {"k": 24, "d_sae": 200},
    "one feature, wide heads": {"k": 1, "head_dim": 64},
    "QK-norm": {"family": "qwen3", "use_sliding_window": False},
    "all outputs": {"every": True, "d_sae": 400},
}


OFTEN = [("few features", "all", "value"), ("few features", "all", "contrast")]
OFTEN += [(name, "top:4", "contrast") for name in SIZES]


@pytest.mark.parametrize(
    ("sizes", "rule", "rank"),
    [
        pytest.param(*case, marks=[] if case in OFTEN else pytest.mark.slow)
        for case in product(SIZES, ["all", "top:4"], RANKS)
    ],
)
def test_the_peak_of_a_block_is_under_twice_the_budget(
    sizes: str, rule: str, rank: str, record_property: Any
) -> None:
    """V26. `pytest --junitxml` keeps the numbers."""
    task = long_task(256, rule, rank, late, **SIZES[sizes])
    peak = peak_of(replace(task, heads=(3,), memory=BUDGET)) / BUDGET
    record_property("peak / budget", f"{peak:.2f}")
    sys.stderr.write(f"{sizes}, {rule}, by {rank}: {peak:.2f} budgets\n")
    assert 0.05 < peak < 2


@pytest.mark.parametrize("rank", RANKS)
def test_the_peak_does_not_grow_with_the_edges(rank: str) -> None:
    """All keys of a query against its four strongest; nor with the length, as blocks shrink."""
    few, many = (peak_of(_one_head(80, rule, rank)) for rule in ("top:4", "all"))
    assert many < few + BUDGET // 2
    assert peak_of(_one_head(160, "top:4", rank)) < few + BUDGET // 2


def _one_head(length: int, rule: str, rank: str) -> LayerTask:
    task = long_task(length, rule, rank, lambda row: row in (9, length - 1))
    return replace(task, heads=(3,), memory=BUDGET)


# Blocks against whole -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype", "rank", "every"),
    [
        ("llama", "float64", "contrast", False),
        ("gpt2", "float32", "value", True),
        ("qwen3", "float32", "contrast", False),
        ("gemma3_text", "float32", "value", True),
        ("gemma2", "float64", "value", True),
    ],
)
def test_a_byte_of_memory_gives_the_same_layer(
    family: str, dtype: Any, rank: str, every: bool
) -> None:
    """One row, one edge at a time: the most blocks there can be."""
    model = load_model(tiny.MODELS[family](), dtype=dtype)
    tokens = tiny.prompts(7)[0]
    basis, output = (
        from_object(tiny.sae("abstopk", layer=at, seed=at), at, **fit(model)) for at in (1, 2)
    )
    prompt = capture(model, *pad([tokens]), layers=[1], sites=[1, 2])[0]
    assert isinstance(prompt, PromptCapture)
    reads = output.reads(prompt, output.active(prompt), "encoder")
    task = task_of(model, tokens, basis, rank=rank, output=reads, every_output=every, heads=(0, 2))
    task = replace(task, heads=task.heads[: model.n_heads])
    whole = attribute_layer(task)
    for memory in (1, 9000):
        assert_same(attribute_layer(replace(task, memory=memory)), whole)


def stored(folder: Path) -> dict[str, Any]:
    """Every dataset and attribute of the shards."""
    found: dict[str, Any] = {}
    for path in sorted((folder / "shards").glob("*.h5")):
        with h5py.File(path, locking=False) as file:

            def keep(name: str, item: Any, at: str = path.name) -> None:
                found.update({f"{at} {name} {key}": value for key, value in item.attrs.items()})
                if isinstance(item, h5py.Dataset):
                    found[f"{at} {name}"] = item[()]

            keep("/", file)
            file.visititems(keep)
    return found


def assert_same_store(one: Path, other: Path) -> None:
    """All whole numbers and texts; real numbers to rounding, stored pairs to a bit of theirs."""
    found, wanted = stored(one), stored(other)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if getattr(value, "dtype", np.dtype("O")).kind == "f":
            size = max(1.0, float(abs(value).max(initial=0)))
            pair = name.endswith(("qk/value", "qk/contrast", "ov/value"))
            near = np.allclose(found[name], value, rtol=1e-3 if pair else 0, atol=2e-6 * size)
            assert near, name
        else:
            assert np.array_equal(found[name], value), name


TEXTS = tiny.prompts(7, 1, 5)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"edges": "all", "dtype": "float64"}),
        ("qwen3", {"edges": "top:2", "outputs": "all", "output": {2: "sae"}}),
        ("gemma3_text", {"edges": "threshold:0.3", "read": "decoder", "output": {3: "sae"}}),
        ("gpt2", {"edges": "file"}),
        ("gemma2", {"edges": "all", "q_token": "/[37]/", "k_token": "/1|2/"}),
        ("mistral", {"edges": "threshold:1", "q_token": "none of them"}),
    ],
)
def test_a_run_in_little_memory_is_the_same_run(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Attention by rows, positions encoded one at a time, a layer a pass, prompts alone, blocks of
    few edges: the manifest is the same, and so is what is stored."""
    hf, options = tiny.MODELS[family](), dict(options)
    if options["edges"] == "file":
        listed = tmp_path / "edges.jsonl"
        edges = [(0, 1, 0, 6, 2), (0, 1, 0, 3, 3), (2, 2, 2, 4, 0), (1, 1, 0, 0, 0)]
        names = ("prompt", "layer", "head", "q_pos", "k_pos")
        lines = [json.dumps(dict(zip(names, edge, strict=True))) for edge in edges]
        listed.write_text("\n".join(lines))
        options["edges"] = f"file:{listed}"
    output = options.pop("output", "unembed")
    if not isinstance(output, str):
        output = {at: tiny.sae(layer=at, seed=7) for at in output}
    basis = {0: "tokens", 1: tiny.sae("abstopk", layer=1), 2: tiny.sae(layer=2, seed=3)}
    if isinstance(output, dict):
        del basis[2]
    options |= {
        "heads": ",".join(f"L{at}H2" for at in basis) + ",L1H0",
        "output": output,
        "topk": 9,
    }
    for name, memory in (("whole", "4GiB"), ("small", "20KiB")):
        given = {**options, "batch_size": 1, "memory": memory}
        with headattr.attribute(hf, basis, TEXTS, tmp_path / name, **given) as store:
            answer = check_store(store)
            assert answer["problems"] == []
            if options.get("q_token") == "none of them":
                assert answer["edges"] == 0
            else:
                assert answer["edges"] > 0
    manifests = [
        json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("whole", "small")
    ]
    assert manifests[0]["hash"] == manifests[1]["hash"]
    assert_same_store(tmp_path / "small", tmp_path / "whole")


# Attention and dictionaries in parts --------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", tiny.MODELS)
def test_attention_by_rows_is_that_of_one_piece(family: str, side: str) -> None:
    """Every number of a capture, whatever the block, with windows, caps and grouped heads."""
    model = load_model(tiny.MODELS[family]())
    batch = pad(tiny.prompts(9, 4, 1, 7), side)
    options: dict[str, Any] = {"layers": [0, 1, 2], "sites": [3], "rows": None}
    whole = capture(model, *batch, **options)
    row = 4 * model.n_heads * 9  # numbers of one query's rows
    for numbers in (1, row - 1, 2 * row, 5 * row + 1, 8 * row, 9 * row):
        for found, wanted in zip(capture(model, *batch, **options, numbers=numbers), whole,
                                 strict=True):  # fmt: skip
            assert isinstance(found, PromptCapture)
            assert isinstance(wanted, PromptCapture)
            for layer in (0, 1, 2):
                for one, other in zip(found.layers[layer], wanted.layers[layer], strict=True):
                    if isinstance(other, torch.Tensor):
                        size = max(1.0, float(other.abs().max()))
                        assert torch.allclose(one, other, rtol=0, atol=2e-5 * size)
            size = float(wanted.resid[3].abs().max())
            assert torch.allclose(found.resid[3], wanted.resid[3], rtol=0, atol=2e-5 * size)


ARCHITECTURES = ("standard", "gated", "topk", "abstopk", "jumprelu", "matching_pursuit")


def test_a_query_that_sees_later_keys_is_refused_in_blocks_and_kept_in_one_piece() -> None:
    """Blocks leave out keys behind their last query, so none of those may be seen."""
    hf = tiny.llama()
    attention = hf.model.layers[0].self_attn
    shape = (1, hf.config.num_attention_heads, 6, attention.head_dim)
    query, key, value = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    key, value = (part[:, : hf.config.num_key_value_heads] for part in (key, value))
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    mask[..., 1, 4] = True
    given: dict[str, Any] = {"rows": torch.tensor([[5]]), "scaling": 1.0}
    whole = eager_in_blocks(
        eager_attention_forward, attention, query, key, value, mask, numbers=1 << 20, **given
    )
    assert whole[0].isfinite().all()
    with pytest.raises(ProofError, match="see later keys"):
        eager_in_blocks(
            eager_attention_forward, attention, query, key, value, mask, numbers=1, **given
        )


@pytest.mark.parametrize("kind", [*ARCHITECTURES, "plain", "unembed"])
def test_positions_encoded_in_parts_have_the_same_features(kind: str) -> None:
    model = load_model(tiny.llama())
    tokens = tiny.prompts(13)[0]
    prompt = capture(model, *pad([tokens]), layers=[1], sites=[1, 3])[0]
    assert isinstance(prompt, PromptCapture)
    if kind == "unembed":
        source: Any = unembed_output(model)
    elif kind == "plain":
        acts = torch.relu(torch.randn(13, 30, generator=torch.Generator().manual_seed(0)))
        acts[4:7] = 0
        plain = PlainDictionary(torch.randn(30, 24), [acts])
        source = plain_basis(plain, 1, **fit(model))
    else:
        source = from_object(tiny.sae(kind, layer=1), 1, **fit(model))
    whole, width = source.active(prompt), source.about.n_features
    assert len(whole.counts) == 13
    if kind == "unembed":
        for at, token in enumerate(tokens[1:]):
            assert token in whole.ids[whole.ptr[at] : whole.ptr[at + 1]]
    for numbers in (1, width, 2 * width + 1, 6 * width, 12 * width, 13 * width):
        found = source.active(prompt, numbers)
        assert torch.equal(found.ptr, whole.ptr)
        assert torch.equal(found.ids, whole.ids)
        assert torch.allclose(found.acts, whole.acts, rtol=1e-5, atol=1e-5)


# The budget ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        (" 500 MB ", 500_000_000),
        ("2G", 2 << 30),
        ("1.5k", 1536),
        ("1TB", 10**12),
        ("77", 77),
        (78, 78),
        ("77B", 77),
        ("0.5KiB", 512),
    ],
)
def test_a_size_is_read_as_people_write_it(text: Any, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "0", "0GiB", "-1GiB", "8 GiB more", "GiB", "8PiB", "1e9", "8,5GiB", "nan", "inf", "0.5",
     "0x10", ".5GiB", "5.GiB"],
)  # fmt: skip
def test_a_size_that_is_none_is_refused_in_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"^--memory .*: expected a size such as 8GiB or 500MB$"):
        parse_bytes(text)
    argv = ["run", "--model", "demo", "--basis", "demo", "--texts", "t.txt"]
    assert main([*argv, "--out", str(tmp_path / "out"), f"--memory={text}"]) == 2
    said = capsys.readouterr().err.strip()
    assert "expected a size such as 8GiB or 500MB" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_prompt_beyond_the_budget_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The sentence says what is needed, what there is, and what to do; the same call with more
    memory then runs, and a finished store asks for nothing."""
    hf = tiny.llama(max_position_embeddings=2600)
    texts, out = tiny.prompts(5, 2500, 7), tmp_path / "out"
    options: dict[str, Any] = {"heads": "L1H0", "edges": "top:1", "topk": 4}
    basis = {1: tiny.sae(layer=1)}
    with pytest.raises(UsageError, match=r"prompt 1 of 2,500 tokens needs about .* is 1\.0 MiB"):
        headattr.attribute(hf, basis, texts, out, memory="1MiB", **options)
    assert not out.exists()
    headattr.attribute(hf, basis, texts, out, **options).close()
    with headattr.attribute(hf, basis, texts, out, memory="1MiB", **options) as store:
        assert store.prompt_ids == [0, 1, 2]


def test_a_run_goes_on_with_another_memory(tmp_path: Path) -> None:
    hf, basis = tiny.llama(), {1: tiny.sae(layer=1)}
    options: dict[str, Any] = {"heads": "L1H0", "topk": 4, "prompts_per_shard": 2}
    for name, memory in (("out", "20KiB"), ("whole", None)):
        given = {**options, "memory": memory, "batch_size": 1}
        headattr.attribute(hf, basis, TEXTS, tmp_path / name, **given).close()
    for path in (tmp_path / "out" / "shards").glob("00001.*"):
        path.unlink()
    first = (tmp_path / "out" / "shards" / "00000.h5").stat().st_mtime_ns
    given = {**options, "memory": "1GiB"}
    headattr.attribute(hf, basis, TEXTS, tmp_path / "out", **given).close()
    assert (tmp_path / "out" / "shards" / "00000.h5").stat().st_mtime_ns == first
    assert_same_store(tmp_path / "out", tmp_path / "whole")


SHAPE = Shape(4, 64, 256, 16, 4, 2, 8, 8, 512, 3, 3)


@pytest.mark.parametrize("total", [1, 10_000, 300_000, 1 << 24, 1 << 33])
@pytest.mark.parametrize("most", [1, 3, 100])
def test_batches_are_all_prompts_in_order(total: int, most: int) -> None:
    lengths = [5, 1, 70, 70, 2, 300, 1, 1, 1, 9]
    found = list(Budget(total, SHAPE).batches(lengths, most))
    assert [i for batch in found for i in batch] == list(range(len(lengths)))
    assert all(1 <= len(batch) <= most for batch in found)
    assert list(Budget(total, SHAPE).batches([], most)) == []
    for length in (1, 70, 10_000):
        budget = Budget(total, SHAPE)
        assert 1 <= budget.layers_at_once(length) <= 3
        assert 1 <= budget.sites_at_once(length) <= 3
        assert min(budget.attention_numbers(), budget.encode_numbers()) >= 1
        assert total // 4 <= budget.block_bytes(length) <= total


# A check in blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7])
def test_a_check_by_blocks_of_edges_finds_the_same(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole store, and of one with a swapped key, a number changed and a slot beyond its
    list, each at a place where blocks of 7 meet."""
    hf, basis = tiny.gemma2(), {1: tiny.sae(layer=1)}
    options: dict[str, Any] = {"heads": "L1H0,L1H2", "edges": "all", "topk": 4}
    texts = tiny.prompts(5, 1, 4)
    headattr.attribute(hf, basis, texts, tmp_path / "out", output="unembed", **options).close()
    changes: list[Callable[[Any], None]] = [
        lambda layer: None,
        lambda layer: _swap(layer["key"], 6, 7),
        lambda layer: _set(layer["key"], 14, layer["key"][13]),
        lambda layer: _set(layer["score"], 7, 1e3),
        lambda layer: _set(layer["completeness"], 13, 0.5),
        lambda layer: _set(layer["qk/k_slots"], 21, 77),
        lambda layer: _set(layer["score_contrast"], 20, np.nan),
    ]
    path = tmp_path / "out" / "shards" / "00000.h5"
    for change in changes:
        before = path.read_bytes()
        with h5py.File(path, "r+", locking=False) as file:
            change(file["layer/1"])
        _mend_hash(path)
        answers = []
        for step in (1 << 16, rows):
            monkeypatch.setattr(check_layer, "_ROWS", step)
            with headattr.open_store(tmp_path / "out") as store:
                answers.append(check_store(store))
        assert answers[0] == answers[1]
        assert answers[0]["ok"] == (change is changes[0])
        path.write_bytes(before)
        _mend_hash(path)


def _set(dataset: Any, at: int, value: Any) -> None:
    dataset[at] = value


def _swap(dataset: Any, at: int, other: int) -> None:
    dataset[at], dataset[other] = dataset[other], dataset[at]


def _mend_hash(path: Path) -> None:
    sidecar = path.with_suffix(".json")
    said = json.loads(sidecar.read_text())
    said |= {"sha256": file_hash(path), "bytes": path.stat().st_size}
    sidecar.write_text(json.dumps(said))


@pytest.mark.parametrize("seed", range(4))
def test_the_median_of_a_spread_is_right_to_one_in_a_hundred(seed: int) -> None:
    generator = np.random.default_rng(seed)
    numbers = generator.lognormal(-20, [0.1, 1, 5, 20][seed], 3001).astype(np.float32)
    numbers[: seed * 700] = 0
    spread = Spread()
    for part in np.split(numbers, [0, 1, 7, 2000]):
        spread.add(part)
    spread.add(np.array([np.nan, np.inf]))
    assert spread.worst == float(numbers.max())
    assert spread.median == pytest.approx(float(np.median(numbers)), rel=0.01)
    assert Spread().as_dict() == {"worst": None, "median": None}
