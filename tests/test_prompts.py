"""Every line of a texts file is run, or set aside with its reason; positions are kept by index."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import headattr
from headattr import query
from headattr.edges import Edge
from headattr.errors import HeadattrError, UsageError
from headattr.model.tokens import decide_bos
from headattr.store.check import check_store
from headattr.store.reader import Store
from headattr.texts import Texts, read_texts, texts_from_memory

CONTEXT = 32


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.gpt2(vocab_size=tiny.BYTES, n_positions=CONTEXT)


@pytest.fixture
def run(model: Any, tmp_path: Path) -> Callable[..., Store]:
    """Attribute layer 0 by token, all edges, in a new folder each time."""

    def attribute(texts: Any, *, basis: Any = None, **options: Any) -> Store:
        out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        given = {"tokenizer": tiny.byte_tokenizer(), "edges": "all", **options}
        return headattr.attribute(model, basis or {0: "tokens"}, texts, out, **given)

    return attribute


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes | str], Path]:
    def to_file(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return to_file


def kept(store: Store) -> dict[int, dict[str, Any]]:
    """What the store says of each prompt that ran."""
    found = {}
    for shard in store.shards:
        columns = {name: shard.file[f"prompt/{name}"] for name in ("text", "extra", "truncated")}
        for row, prompt in enumerate(shard.ids):
            found[prompt] = {
                "text": columns["text"][row].decode(),
                "extra": json.loads(columns["extra"][row]),
                "truncated": bool(columns["truncated"][row]),
                "tokens": store.tokens(prompt),
            }
    return found


def reasons(texts: Texts) -> dict[int, str]:
    return {item.id: item.reason for item in texts.set_aside}


def by_id(texts: Texts) -> dict[int, Any]:
    return {p.id: p.text if p.tokens is None else p.tokens for p in texts.prompts}


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "prompts", "empty"),
    [
        ("one\ntwo\n", {0: "one", 1: "two"}, []),
        ("one\ntwo", {0: "one", 1: "two"}, []),
        ("one\r\ntwo\r\n", {0: "one", 1: "two"}, []),
        ("one\n\n\nfour\n", {0: "one", 3: "four"}, [1, 2]),
        ("\n \t \nthree", {2: "three"}, [0, 1]),
        ("one\n\n", {0: "one"}, [1]),
        ("\ufeffone\ntwo", {0: "one", 1: "two"}, []),
        ("  one  \n\ttwo", {0: "  one  ", 1: "\ttwo"}, []),
        ("a\u2028b\x0cc\x0bd\x85e\rf\ng", {0: "a\u2028b\x0cc\x0bd\x85e\rf", 1: "g"}, []),
        ("", {}, [0]),
        ("\ufeff", {}, [0]),
    ],
)
def test_a_line_is_a_prompt_and_its_id_counts_blank_lines(
    write: Any, content: str, prompts: dict[int, str], empty: list[int]
) -> None:
    found = read_texts(write("prompts.txt", content))
    assert by_id(found) == prompts
    assert reasons(found) == dict.fromkeys(empty, "empty")


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ("one\ntwo\n\nthree\n", ["one\ntwo", "three"]),
        ("one\r\ntwo\r\n\r\nthree\r\n", ["one\ntwo", "three"]),
        ("\n\n  \none\n\n \t\n\n    two\n      three\n\n\n", ["one", "    two\n      three"]),
        ("  one\n\ntwo", ["  one", "two"]),
        ("\ufeffone\n\ntwo", ["one", "two"]),
        ("one", ["one"]),
    ],
)
def test_a_paragraph_is_a_prompt_with_its_indents(
    write: Any, content: str, prompts: list[str]
) -> None:
    found = read_texts(write("prompts.txt", content), paragraphs=True)
    assert by_id(found) == dict(enumerate(prompts))
    assert found.set_aside == []


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n\n"])
def test_a_file_of_blank_paragraphs_is_one_empty_prompt(write: Any, content: str) -> None:
    assert reasons(read_texts(write("prompts.txt", content), paragraphs=True)) == {0: "empty"}


def test_bytes_that_are_not_utf8_set_their_own_line_aside(write: Any) -> None:
    found = read_texts(write("prompts.txt", b"good\nca\xe9\n\xff\xfea\ncut \xf0\x9f\x98\ngood too"))
    assert by_id(found) == {0: "good", 4: "good too"}
    assert reasons(found) == {
        1: "not UTF-8: byte 0xe9 at offset 2",
        2: "not UTF-8: byte 0xff at offset 0",
        3: "not UTF-8: byte 0xf0 at offset 4",
    }
    found = read_texts(write("prompts.jsonl", b'{"text": "a"}\n{"text": "\x80"}\n{"text": "c"}\n'))
    assert by_id(found) == {0: "a", 2: "c"}
    assert reasons(found) == {1: "not UTF-8: byte 0x80 at offset 10"}
    found = read_texts(write("prompts.txt", b"one\n\nt\xc0wo\n\nthree"), paragraphs=True)
    assert by_id(found) == {0: "one", 2: "three"}


def test_jsonl_lines_without_their_field_are_set_aside_and_ids_are_line_numbers(write: Any) -> None:
    """V31."""
    lines = (
        '{"text": "a"}',
        '{"txt": "b"}',
        '{"text": null}',
        "",
        '{"text": "c", "extra": {"x": 1}}',
    )
    found = read_texts(write("prompts.jsonl", "\n".join(lines)))
    assert by_id(found) == {0: "a", 4: "c"}
    assert found.prompts[1].extra == {"extra": {"x": 1}}
    assert [item.as_dict()["line"] for item in found.set_aside] == [2, 3]
    assert "txt" in reasons(found)[1]
    assert "null" in reasons(found)[2]


BAD_LINES = {
    "{": "not JSON",
    '{"text": "a"} {"text": "b"}': "not JSON",
    "nonsense": "not JSON",
    '{"text": "a", "score": NaN}': "not JSON",
    '{"text": "a", "score": 1e999}': "not JSON",
    "[" * 100_000: "not JSON",
    "[1, 2]": "list",
    '"text"': "str",
    "null": "NoneType",
    "{}": "found nothing",
    '{"text": "a", "tokens": [1]}': "exactly one",
    '{"Text": "a"}': "found Text",
    '{"text": ""}': "empty",
    '{"text": 5}': "text is 5",
    '{"text": ["a"]}': "expected a string",
    '{"text": "half \\ud83d"}': "U+D83D at offset 5",
    '{"text": "nul \\u0000"}': "U+0000 at offset 4",
    '{"tokens": []}': "empty",
    '{"tokens": "12"}': "token ids",
    '{"tokens": null}': "token ids",
    '{"tokens": {"a": 1}}': "token ids",
    '{"tokens": [1, true]}': "token ids",
    '{"tokens": [1, -2]}': "token ids",
    '{"tokens": [1, 2.0]}': "token ids",
    '{"tokens": [1, "2"]}': "token ids",
    '{"tokens": [1, [2]]}': "token ids",
    '{"tokens": [' + "1, " * 5000 + "-1]}": "token ids",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=lambda text: text[:30])
def test_a_bad_jsonl_line_does_not_harm_its_neighbours(write: Any, line: str, reason: str) -> None:
    found = read_texts(write("prompts.jsonl", f'{{"text": "a"}}\n{line}\n{{"tokens": [7]}}'))
    assert by_id(found) == {0: "a", 2: (7,)}
    assert list(reasons(found)) == [1]
    assert reason in reasons(found)[1]
    assert len(reasons(found)[1]) < 250


def test_a_reason_is_one_line_whatever_the_field_is_called(write: Any) -> None:
    found = read_texts(write("prompts.jsonl", '{"a\\nb": 1}'))
    assert "\n" not in found.set_aside[0].as_dict()["reason"]


def test_in_memory_prompts_obey_the_same_rules() -> None:
    given = ["a", "", [1, 2], [], [True], [1.5], (3,), 7, None, b"ab", "x\0", torch.tensor([4, 5])]
    found = texts_from_memory([*given, np.array([6], np.int64)])
    assert by_id(found) == {0: "a", 2: (1, 2), 6: (3,), 11: (4, 5), 12: (6,)}
    assert list(reasons(found)) == [1, 3, 4, 5, 7, 8, 9, 10]


def test_the_texts_hash_is_of_the_prompts_not_of_the_file(write: Any) -> None:
    wanted = texts_from_memory(["a", "b c", "é"]).hash
    for name, content in (
        ("prompts.txt", "a\nb c\né\n"),
        ("other.txt", "\ufeffa\r\nb c\r\né"),
        ("prompts.jsonl", '{"text": "a"}\n{"text": "b c"}\n{"text": "\\u00e9"}'),
    ):
        assert read_texts(write(name, content)).hash == wanted
    for other in (["a", "é", "b c"], ["a", "b c"], ["a", "b c", "é", ""], [[1], "b c", "é"]):
        assert texts_from_memory(other).hash != wanted
    shifted = read_texts(write("shifted.txt", "a\n\nb c\né"))
    assert shifted.hash != wanted


@pytest.mark.parametrize(
    "name", ["missing.txt", "missing.jsonl", "there.csv", "there", "folder.txt"]
)
def test_a_file_that_is_no_text_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    for there in ("there.csv", "there"):
        (tmp_path / there).write_text("a")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UsageError, match=name):
        read_texts(tmp_path / name)


def test_endings_may_be_in_capitals_and_paragraphs_need_a_txt(write: Any) -> None:
    assert by_id(read_texts(write("PROMPTS.TXT", "a"))) == {0: "a"}
    with pytest.raises(UsageError, match="paragraphs"):
        read_texts(write("prompts.jsonl", '{"text": "a"}'), paragraphs=True)


# Runs ---------------------------------------------------------------------------------------------


def test_empty_one_token_and_too_long_prompts_have_three_rows(run: Any) -> None:
    """V29: context 32, no BOS."""
    store = run(["", "a", "x" * 40])
    assert store.set_aside == [
        {"prompt": 0, "line": 1, "reason": "empty"},
        {
            "prompt": 2,
            "line": 3,
            "reason": "too long: 40 tokens > context 32 (--truncate cuts it)",
        },
    ]
    assert store.prompt_ids == [1]
    for head in store.heads:
        edges = store.edges(1, head)
        assert (edges["q_pos"].tolist(), edges["k_pos"].tolist()) == ([0], [0])
        assert edges["pattern"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("length", "ran", "cut"), [(31, 31, False), (32, 32, False), (33, 32, True)]
)
def test_a_prompt_is_cut_only_if_asked_and_is_flagged(
    run: Any, length: int, ran: int, cut: bool
) -> None:
    text = "".join(chr(97 + i % 26) for i in range(length))
    found = kept(run([text, list(range(length))], truncate=True))
    assert found[0] == {
        "text": text,
        "extra": {},
        "truncated": cut,
        "tokens": tiny.byte_tokenizer()(text).input_ids[:ran],
    }
    assert (found[1]["tokens"], found[1]["truncated"]) == (list(range(ran)), cut)
    store = run([text, list(range(length))])
    assert store.prompt_ids == ([] if cut else [0, 1])


def test_bos_counts_in_the_length_of_a_prompt(run: Any) -> None:
    tokenizer = tiny.byte_tokenizer(bos="<s>")
    store = run(["x" * 32, "x" * 31], tokenizer=tokenizer, bos="yes")
    assert "33 tokens > context 32" in store.set_aside[0]["reason"]
    cut = kept(run(["x" * 32], tokenizer=tokenizer, bos="yes", truncate=True))[0]
    assert (len(cut["tokens"]), cut["tokens"][0], cut["truncated"]) == (32, 256, True)


def test_an_emoji_keeps_its_four_positions_and_its_text(run: Any) -> None:
    """V30."""
    text = "a\U0001f600b"
    store = run([text])
    assert store.token_texts(0) == ["a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "b"]
    assert kept(store)[0]["text"] == text
    for head in store.heads:
        assert len(store.edges(0, head)["q_pos"]) == 6 * 7 / 2
    answer = query.edge(store, 0, Edge(0, 1, 4, 2))
    assert (answer["q_token"], answer["k_token"]) == ("<0x80>", "<0x9F>")


@pytest.mark.parametrize(
    "text",
    ["é\u0301 日本 \u200d\U0001f468\u200d\U0001f469", "\t\r \x1b[31m\x7f", "\ufffd", "\U0010ffff"],
)
def test_any_text_round_trips_and_shows_valid_characters(run: Any, text: str) -> None:
    store = run([text])
    assert kept(store)[0]["text"] == text
    shown = store.token_texts(0)
    assert len(shown) == len(text.encode())
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown).encode()  # no lone surrogate
    whole = [piece for piece in shown if not piece.startswith("<0x")]
    assert whole == [c for c in text if ord(c) < 128]


def test_every_byte_a_token_can_be_has_a_text(run: Any) -> None:
    """NUL among them: HDF5 would end the text there."""
    alphabet = np.arange(256).reshape(8, CONTEXT).tolist()
    store = run(alphabet, edges="top:1", heads="L0H0")
    shown = {text for prompt in store for text in store.token_texts(prompt)}
    assert len(shown) == 256
    assert "<0x00>" in shown
    assert {chr(byte) for byte in range(1, 128)} <= shown


def test_added_tokens_are_shown_as_they_are_written(run: Any) -> None:
    tokenizer = tiny.byte_tokenizer(bos="<début>")
    tokenizer.add_tokens(["été"])
    store = run([[256, 257, 64]], tokenizer=tokenizer)
    assert store.token_texts(0) == ["<début>", "été", "a"]


def test_ids_without_a_text_are_shown_as_numbers(run: Any) -> None:
    assert run([[258, 64]]).token_texts(0) == ["<258>", "a"]
    assert run([[258, 64]], tokenizer=None).token_texts(0) == ["<258>", "<64>"]


def test_texts_without_a_tokenizer_are_refused(run: Any) -> None:
    with pytest.raises(HeadattrError, match="no tokenizer"):
        run(["a"], tokenizer=None)


def test_tokens_beyond_the_vocabulary_are_set_aside(run: Any) -> None:
    store = run([[1, 2], [1, tiny.BYTES], [tiny.BYTES - 1], [10**30]])
    assert store.prompt_ids == [0, 2]
    assert [entry["line"] for entry in store.set_aside] == [2, 4]
    assert f"token id {tiny.BYTES} is not in the vocabulary of 260" in store.set_aside[0]["reason"]


def test_other_keys_and_line_numbers_stay_with_their_prompts(run: Any, write: Any) -> None:
    lines = (
        '{"text": "ab", "name": "é\\ud800", "n": {"x": [1, null]}}',
        "",
        '{"txt": "b"}',
        '{"tokens": [3, 4], "text2": "c"}',
    )
    store = run(write("prompts.jsonl", "\n".join(lines)))
    found = kept(store)
    assert found[0]["extra"] == {"name": "é\ud800", "n": {"x": [1, None]}}
    assert found[3]["extra"] == {"text2": "c"}
    assert found[3]["text"] == ""
    assert [entry["prompt"] for entry in store.set_aside] == [2]


def test_a_run_of_nothing_but_bad_prompts_is_a_store_of_reasons(run: Any) -> None:
    store = run(["", [], [1000]])
    assert (store.prompt_ids, len(store.set_aside)) == ([], 3)
    assert check_store(store)["ok"]


def test_texts_without_any_prompt_are_refused(run: Any, write: Any) -> None:
    for texts in (write("prompts.jsonl", "\n\n"), []):
        with pytest.raises(UsageError, match="no prompt"):
            run(texts)


# BOS ----------------------------------------------------------------------------------------------

PLAIN, KNOWS, ADDS = (
    {"bos": None},
    {"bos": "<s>"},
    {"bos": "<s>", "adds_bos": True},
)


@pytest.mark.parametrize(
    ("tokenizer", "asked", "trained", "prepended"),
    [
        (PLAIN, "auto", None, False),
        (KNOWS, "auto", None, False),
        (ADDS, "auto", None, True),
        (KNOWS, "auto", True, True),
        (ADDS, "auto", False, False),
        (KNOWS, "yes", None, True),
        (ADDS, "yes", True, True),
        (ADDS, "no", None, False),
        (ADDS, "no", False, False),
        (PLAIN, "no", None, False),
        (PLAIN, "no", False, False),
    ],
)
def test_bos_is_as_asked_else_as_trained_else_as_the_tokenizer_does(
    run: Any, tokenizer: dict[str, Any], asked: str, trained: bool | None, prepended: bool
) -> None:
    sae = tiny.sae(layer=1)
    sae.cfg.metadata.prepend_bos = trained
    texts = ["ab", "<s>ab", [64, 65], [256, 64]]
    built = tiny.byte_tokenizer(**tokenizer)
    store = run(texts, basis={1: sae}, tokenizer=built, bos=asked, heads="L1H0")
    begin = [256] if prepended else []
    literal = [27, 82, 29] if tokenizer is PLAIN else [256]
    assert [store.tokens(prompt) for prompt in store] == [
        [*begin, 64, 65],
        [*literal, 64, 65],
        [64, 65],
        [256, 64],
    ]
    assert store.manifest["bos"]["prepend"] is prepended
    assert store.manifest["bos"]["id"] == (None if tokenizer is PLAIN else 256)


@pytest.mark.parametrize(
    ("tokenizer", "asked", "trained", "message"),
    [
        (ADDS, "no", [True], "trained with BOS"),
        (ADDS, "yes", [False], "trained without BOS"),
        (KNOWS, "auto", [True, False], "disagree on BOS"),
        (KNOWS, "yes", [False, True], "disagree on BOS"),
        (PLAIN, "yes", [None], "no BOS token"),
        (PLAIN, "auto", [True], "no BOS token"),
    ],
)
def test_a_disagreement_on_bos_is_refused_before_any_work(
    run: Any,
    tmp_path: Path,
    tokenizer: dict[str, Any],
    asked: str,
    trained: list[Any],
    message: str,
) -> None:
    basis = {}
    for layer, with_bos in enumerate(trained, 1):
        basis[layer] = tiny.sae(layer=layer)
        basis[layer].cfg.metadata.prepend_bos = with_bos
    with pytest.raises(HeadattrError, match=message):
        run(["ab"], basis=basis, tokenizer=tiny.byte_tokenizer(**tokenizer), bos=asked)
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize("asked", ["auto", "yes", "no"])
def test_without_a_tokenizer_no_bos_is_claimed(run: Any, asked: str) -> None:
    store = run([[1, 2]], tokenizer=None, bos=asked)
    assert (store.tokens(0), store.manifest["bos"]["prepend"]) == ([1, 2], False)
    with pytest.raises(HeadattrError, match="trained with BOS"):
        decide_bos(None, "no", {"sae": True})


def test_token_ids_are_taken_as_they_are_and_come_back_as_they_were(run: Any) -> None:
    """V03: a tokenizer that adds BOS does not touch ids, nor do ids pass through text."""
    tokenizer = tiny.byte_tokenizer(bos="<s>", adds_bos=True)
    given = [[256, 10, 11], [10, 11], [256, 256, 10], [172, 253]]
    store = run(given, tokenizer=tokenizer)
    assert [store.tokens(prompt) for prompt in store] == given
    answer = query.edge(store, 0, Edge(0, 0, 2, 1))
    shown = [tokenizer.convert_ids_to_tokens(token) for token in (11, 10)]
    assert [answer["q_token"], answer["k_token"]] == shown
    again = run([store.tokens(prompt) for prompt in store], tokenizer=tokenizer)
    assert again.manifest["hash"] == store.manifest["hash"]
    assert [again.tokens(prompt) for prompt in again] == given


def test_a_tokenizers_padded_batch_runs_without_its_padding(run: Any) -> None:
    tokenizer = tiny.byte_tokenizer(bos="<s>")
    tokenizer.pad_token = "<s>"
    for side in ("left", "right"):
        tokenizer.padding_side = side
        batch = tokenizer(["abc", "d", "ef"], padding=True, return_tensors="pt")
        store = run(batch, tokenizer=tokenizer)
        assert [store.tokens(prompt) for prompt in store] == [[64, 65, 66], [67], [68, 69]]
