"""The command line: answers on stdout, one line on stderr where something is off, exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import headattr
from headattr.cli import COMMANDS, main
from headattr.store.check import check_store
from headattr.store.reader import open_store

FEATURE = {"kind", "source", "layer", "id", "label", "density"}
TEXTS = ("the cat sat on the mat", "é 😀 the cat", "a", "one two three one two three")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two dictionaries, texts and a finished store in one folder."""
    folder = tmp_path_factory.mktemp("place")
    model = tiny.llama(vocab_size=tiny.BYTES)
    with torch.no_grad():
        model.get_input_embeddings().weight[259] = 3e38  # its square is not finite
    model.save_pretrained(folder / "model")
    tiny.byte_tokenizer(bos="<s>").save_pretrained(folder / "model")
    for layer in (1, 2):
        tiny.sae(layer=layer, seed=layer).save_model(folder / f"sae{layer}")
    tiny.sae(d_in=16, layer=1).save_model(folder / "narrow")
    (folder / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    (folder / "mixed.jsonl").write_text(
        '{"text": "abc"}\n{"txt": "b"}\n{"text": ""}\n{"tokens": [65, 259]}\n'
    )
    (folder / "spec.toml").write_text(
        "".join(f'[[basis]]\nkind = "sae"\nlayer = {i}\npath = "sae{i}"\n' for i in (1, 2))
    )
    assert main(arguments(folder, out="store", quiet=True)) == 0
    return folder


def arguments(place: Path, *, quiet: bool = False, **changes: Any) -> list[str]:
    """A `run` command; a list of values repeats its flag, None leaves it out."""
    options: dict[str, Any] = {
        "model": place / "model",
        "basis": f"1={place / 'sae1'}",
        "output": "unembed",
        "texts": place / "texts.txt",
        "heads": "L1H0,L1H2",
        **changes,
        "out": place / changes.get("out", "out"),
    }
    found = ["run", *(["--no-progress"] if quiet else [])]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            found += [f"--{name}", *([] if one is True else [str(one)])]
    return found


def strict(text: str) -> Any:
    """JSON as a browser reads it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def started(argv: list[str], **options: Any) -> subprocess.Popen[str]:
    """The console script in a process of its own."""
    code = "from headattr.cli import run_and_exit; run_and_exit()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
    )


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], tuple[int, str, str]]:
    """Run a command in this process: exit code, stdout, stderr."""

    def run(argv: list[str]) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(argv)
        return code, *capsys.readouterr()

    return run


# What the commands print --------------------------------------------------------------------------


def _edge(place: Path, *more: str, prompt: int = 0, q: int = 10, k: int | None = None) -> list[str]:
    if k is None:
        with open_store(place / "store") as store:
            kept = store.edges(prompt, headattr.HeadId(1, 2))
            k = int(kept["k_pos"][kept["q_pos"] == q][0])
    where = ["--prompt", str(prompt), "--head", "L1H2", "--q", str(q), "--k", str(k)]
    return ["query", "edge", str(place / "store"), *where, *more]


def test_query_edge_has_the_documented_keys(place: Path, say: Any) -> None:
    code, out, err = say(_edge(place, "--json"))
    answer = strict(out)
    assert (code, err) == (0, "")
    assert answer.keys() >= {
        *("prompt", "layer", "head", "q_pos", "k_pos", "q_token", "k_token", "score"),
        *("position_bias", "score_capped", "cap_ratio", "score_contrast", "pattern", "flagged"),
        *("qk", "ov", "ov_reason"),
    }
    qk = answer["qk"]
    assert qk.keys() >= {
        *("pairs", "totals", "completeness", "feature_share"),
        *("q_features", "k_features", "elsewhere", "contrast_totals", "contrast_completeness"),
    }
    for pair in qk["pairs"]:
        assert pair.keys() >= {"q_feature", "k_feature", "value", "contrast"}
        assert pair["q_feature"].keys() >= FEATURE
        assert pair["q_feature"]["layer"] == 1
    for feature in (*qk["q_features"], *qk["k_features"]):
        assert feature.keys() >= FEATURE | {"activation", "marginal", "contrast", "ablation"}
    assert [row.keys() for row in qk["totals"].values()] == [qk["totals"].keys()] * 3
    assert qk["totals"].keys() == {"feature", "bias", "error"}
    total = sum(sum(row.values()) for row in qk["totals"].values())
    assert total == pytest.approx(answer["score"] - answer["position_bias"], abs=1e-4)
    contrasts = qk["contrast_totals"]
    assert contrasts.keys() == {"query", "key"}
    assert contrasts["query"].keys() == qk["totals"].keys()
    assert list(contrasts["key"]) == [*qk["totals"], "elsewhere"]
    for side in contrasts.values():
        assert sum(side.values()) == pytest.approx(answer["score_contrast"], abs=1e-4)
    assert qk["elsewhere"] == contrasts["key"]["elsewhere"] != 0
    assert 0 < qk["contrast_completeness"] <= 1e-5
    for feature in (*qk["q_features"], *qk["k_features"], *qk["pairs"]):
        assert type(feature["contrast"]) is float
    assert (answer["score_capped"], answer["cap_ratio"]) == (answer["score"], 1.0)
    (ov,) = answer["ov"]
    assert ov.keys() >= {
        *("output", "read", "pairs", "completeness", "block_completeness"),
        *("v_features", "o_features"),
    }
    assert ov["pairs"][0].keys() >= {"v_feature", "o_feature", "value"}
    assert ov["pairs"][0]["o_feature"]["layer"] is None
    assert ov["v_features"][0].keys() >= FEATURE | {"activation", "norm"}
    assert ov["o_features"][0].keys() >= FEATURE | {"read", "totals"}
    assert ov["o_features"][0]["totals"].keys() == {"feature", "bias", "error"}


def test_query_edge_prints_the_strongest_pairs_in_words(place: Path, say: Any) -> None:
    code, out, _ = say(_edge(place, "--pairs", "3"))
    answer = strict(say(_edge(place, "--json"))[1])
    assert code == 0
    assert out.splitlines()[0].startswith("L1H2  q 10")
    assert f"score {answer['score']:.3f}" in out
    shown = [line for line in out.splitlines() if "  x  " in line and line.startswith("    ")]
    assert len(shown) == 6
    assert f"{answer['qk']['pairs'][0]['value']:+.4g}" in shown[0]


def test_check_has_the_documented_keys(place: Path, say: Any) -> None:
    code, out, err = say(["check", str(place / "store"), "--json"])
    answer = strict(out)
    assert (code, err, answer["ok"], answer["problems"]) == (0, "", True, [])
    assert answer.keys() >= {
        *("shards", "edges", "completeness", "contrast_completeness", "ov", "pattern_error"),
        "set_aside",
    }
    assert answer["completeness"].keys() >= {"worst", "median"}
    contrasts = answer["contrast_completeness"]
    assert 0 < contrasts["median"] <= contrasts["worst"] <= 1e-5
    assert answer["ov"].keys() >= {"completeness", "block_completeness"}
    assert answer["ov"]["completeness"].keys() >= {"worst", "median"}
    assert answer["ov"]["block_completeness"]["worst"] <= 1e-5
    assert 0 < answer["completeness"]["median"] <= answer["completeness"]["worst"] <= 1e-5
    assert (answer["shards"], answer["set_aside"]) == (1, 0)
    assert say(["check", str(place / "store")])[1].startswith("ok: 1 shards")


def test_models_has_the_documented_keys(say: Any) -> None:
    code, out, _ = say(["models", "--json"])
    table = strict(out)
    assert code == 0
    assert {row["family"] for row in table} == tiny.MODELS.keys()
    for row in table:
        assert row.keys() >= {"family", "special", "proven_error", "since"}
        assert 0 < row["proven_error"] <= 1e-5
    assert "llama" in say(["models"])[1]


def test_dictionaries_list_names_what_is_cached_and_what_is_broken(
    place: Path, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADATTR_CACHE", str(tmp_path / "cache"))
    before = {row["name"] for row in strict(say(["dictionaries", "list", "--json"])[1])}
    shutil.copytree(place / "sae1", tmp_path / "cache" / "mine" / "good")
    bad = Path(shutil.copytree(place / "sae2", tmp_path / "cache" / "mine" / "bad"))
    weights = bad / "sae_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    code, out, _ = say(["dictionaries", "list", "--json"])
    rows = {row["name"]: row for row in strict(out) if row["name"] not in before}
    assert code == 0
    assert rows.keys() == {"mine/good", "mine/bad"}
    good, broken = rows["mine/good"], rows["mine/bad"]
    assert good.keys() == broken.keys()
    assert (good["site"], good["features"], good["d_model"]) == ("blocks.1.hook_resid_pre", 40, 24)
    assert good["activation"] == "topk k=6"
    assert good["problem"] is None
    assert "sae_weights.safetensors" in broken["problem"]
    assert "mine/bad" in say(["dictionaries", "list"])[1]


def test_run_says_what_was_done_and_assumed(place: Path, tmp_path: Path, say: Any) -> None:
    argv = arguments(place, out=tmp_path / "out", json=True)
    code, out, err = say(argv)
    answer = strict(out)
    assert code == 0
    assert answer.keys() >= {
        *("out", "prompts", "edges", "set_aside", "completeness", "contrast_completeness"),
        *("ov", "pattern_error"),
        *("problems", "model_notes", "bos", "sources", "layers_without_basis", "seconds"),
    }
    assert (answer["prompts"], answer["set_aside"], answer["problems"]) == (4, [], [])
    assert answer["sources"][0].keys() >= {"name", "layer", "activation", "mean_l0", "assumed"}
    assert answer["sources"][0]["activation"] == "topk k=6"
    assert answer["sources"][0]["mean_l0"] == 6.0
    assert answer["bos"]["prepend"] is False
    assert "0/130 [" in err  # the bar counts rows: tokens times heads
    code, out, err = say([*argv[:-1], "--no-progress"])
    assert (code, err) == (0, "")
    for part in ("4 prompts", "BOS: not prepended", "layer 1: sae1 (sae, topk k=6, mean L0 6.0)"):
        assert part in out


# Exit codes ---------------------------------------------------------------------------------------


def test_a_run_with_prompts_set_aside_exits_3_and_its_check_0(
    place: Path, tmp_path: Path, say: Any
) -> None:
    argv = arguments(place, texts=place / "mixed.jsonl", out=tmp_path / "out", quiet=True)
    for _ in "twice":
        code, out, _ = say([*argv, "--json"])
        assert code == 3
        assert [entry["line"] for entry in strict(out)["set_aside"]] == [2, 3, 4]
        assert "non-finite" in strict(out)["set_aside"][2]["reason"]
    assert "set aside: line 2: expected exactly one" in say(argv)[1]
    code, out, _ = say(["check", str(tmp_path / "out"), "--json"])
    assert (code, strict(out)["set_aside"]) == (0, 3)
    for prompt, code in ((1, 1), (3, 1), (7, 2)):
        asked = ["--prompt", str(prompt), "--head", "L1H0", "--q", "0", "--k", "0"]
        assert say(["query", "edge", str(tmp_path / "out"), *asked])[0] == code


def test_check_exits_1_and_names_the_file_that_is_off(
    place: Path, tmp_path: Path, say: Any
) -> None:
    store = Path(shutil.copytree(place / "store", tmp_path / "store"))
    shard = store / "shards" / "00000.h5"
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    code, out, _ = say(["check", str(store), "--json"])
    assert (code, strict(out)["ok"]) == (1, False)
    assert "shards/00000.h5" in strict(out)["problems"][0]
    code, out, err = say(["query", "edge", str(store), *_edge(place)[3:]])
    assert (code, out) == (1, "")
    assert "shards/00000.h5" in err
    assert say(arguments(place, out=store, quiet=True))[0] == 0
    assert say(["check", str(store)])[0] == 0


def test_a_run_that_finds_a_damaged_shard_in_its_folder_exits_1(
    place: Path, tmp_path: Path, say: Any
) -> None:
    store = Path(shutil.copytree(place / "store", tmp_path / "store"))
    shard = store / "shards" / "00000.h5"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    code, out, _ = say(arguments(place, out=store, quiet=True))
    assert code == 1
    assert "problem: shards/00000.h5 does not have the hash" in out


def test_another_configuration_in_the_same_folder_exits_1_with_both_hashes(
    place: Path, say: Any
) -> None:
    code, out, err = say(arguments(place, out="store", topk=5))
    with open_store(place / "store") as store:
        assert store.manifest["hash"][:16] in err
    assert (code, out) == (1, "")
    assert "topk: 32 there, 5 here" in err


BAD: dict[str, tuple[Callable[[Path], list[str]], int, str]] = {
    "no texts": (lambda p: arguments(p, texts=p / "no.txt"), 2, "no.txt: no such file"),
    "texts of another kind": (lambda p: arguments(p, texts=p / "a.csv"), 2, "a.csv"),
    "no model": (lambda p: arguments(p, model=p / "nothing"), 1, "nothing"),
    "a model without weights": (lambda p: arguments(p, model=p / "sae1"), 1, "config.json"),
    "no dictionary": (lambda p: arguments(p, basis=f"1={p / 'nothing'}"), 2, "not a folder"),
    "no cfg.json": (lambda p: arguments(p, basis=f"1={p / 'model'}"), 1, "cfg.json"),
    "another width": (lambda p: arguments(p, basis=f"1={p / 'narrow'}"), 1, "width 16"),
    "another site": (lambda p: arguments(p, basis=f"2={p / 'sae1'}"), 1, "use 1="),
    "no layer": (lambda p: arguments(p, basis=str(p / "sae8")), 2, "expected layer=PATH"),
    "a layer twice": (
        lambda p: arguments(p, basis=[f"1={p / 'sae1'}", f"1={p / 'sae1'}"]),
        2,
        "layer 1 is given twice",
    ),
    "tokens above": (lambda p: arguments(p, basis="1=tokens"), 2, "layer 0"),
    "tokens as output": (lambda p: arguments(p, output="0=tokens"), 2, "layer 0"),
    "unembed as basis": (lambda p: arguments(p, basis="unembed"), 2, "'unembed'"),
    "no TOML": (lambda p: arguments(p, basis=str(p / "no.toml")), 2, "no.toml: no such file"),
    "a head too many": (lambda p: arguments(p, heads="L1H4"), 2, "heads 0 to 3"),
    "no basis for it": (lambda p: arguments(p, heads="L0H0"), 2, "have no basis"),
    "edges": (lambda p: arguments(p, edges="best"), 2, "expected top:M"),
    "an expression": (lambda p: arguments(p, **{"q-token": "/(/"}), 2, "regular expression"),
    "topk": (lambda p: arguments(p, topk=0), 2, "topk is 0"),
    "topk in words": (lambda p: arguments(p, topk="many"), 2, "--topk"),
    "dtype": (lambda p: arguments(p, dtype="bfloat16"), 2, "float32"),
    "bos": (lambda p: arguments(p, bos="maybe"), 2, "auto"),
    "rank": (lambda p: arguments(p, rank="marginal"), 2, "contrast"),
    "device": (lambda p: arguments(p, device="abacus"), 2, "abacus"),
    "an unknown flag": (lambda p: [*arguments(p), "--depth", "3"], 2, "--depth"),
    "nothing": (lambda p: ["run"], 2, "--model"),
    "no store": (lambda p: ["check", str(p / "model")], 1, "is not a headattr store"),
    "no folder": (lambda p: ["check", str(p / "nowhere")], 1, "does not exist"),
    "no path": (lambda p: ["check"], 2, "PATH"),
    "two paths": (lambda p: ["check", str(p), "b"], 2, "b"),
    "a masked edge": (lambda p: _edge(p, q=3, k=5), 2, "masked"),
    "beyond": (lambda p: _edge(p, q=99, k=5), 2, "positions are 0 to 21"),
    "negative": (lambda p: _edge(p, q=3, k=-1), 2, "beyond"),
    "prompt": (lambda p: _edge(p, prompt=44, q=3, k=1), 2, "it holds 0 to 3"),
    "head": (lambda p: [*_edge(p, k=1), "--head", "5.1"], 2, "L5H1"),
    "another head": (lambda p: [*_edge(p, k=1), "--head", "L1H1"], 2, "L1H0, L1H2"),
    "not kept": (lambda p: _edge(p, q=10, k=0), 1, "was not kept"),
    "a number in words": (lambda p: [*_edge(p, k=1), "--q", "ten"], 2, "--q"),
}


@pytest.mark.parametrize(("argv", "code", "found"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_line_and_leaves_nothing(
    place: Path, say: Any, argv: Callable[[Path], list[str]], code: int, found: str
) -> None:
    given, out, err = say(argv(place))
    assert found in err
    assert (given, out) == (code, "")
    assert err.startswith("headattr: ")
    assert err.count("\n") == 1
    assert not (place / "out").exists()


def test_a_truncated_dictionary_is_refused_before_the_model_is_loaded(
    place: Path, tmp_path: Path, say: Any
) -> None:
    """V24, among good ones and with a model that is not there."""
    folder = Path(shutil.copytree(place / "sae2", tmp_path / "sae2"))
    weights = folder / "sae_weights.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-10])
    basis = [f"1={place / 'sae1'}", f"2={folder}"]
    code, _, err = say(arguments(place, basis=basis, model=place / "no-model"))
    assert code == 1
    assert "sae_weights.safetensors" in err
    assert str(size - 10) in err
    assert str(size) in err


@pytest.mark.parametrize(
    "argv", [["nonsense"], ["query"], ["query", "node"], ["dictionaries"], ["--json"], ["Run"]]
)
def test_an_unknown_command_exits_2_with_the_list_of_commands(say: Any, argv: list[str]) -> None:
    code, out, err = say(argv)
    assert (code, out) == (2, "")
    for name in COMMANDS:
        assert f"headattr {name}" in err


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["query", "--help"]])
def test_help_lists_the_commands(say: Any, argv: list[str]) -> None:
    code, out, err = say(argv)
    assert (code, err) == (0, "")
    for name in COMMANDS:
        assert f"headattr {name}" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example_that_parses(say: Any, name: str) -> None:
    import shlex

    import tyro

    code, out, err = say([*name.split(), "--help"])
    assert (code, err) == (0, "")
    example = next(line.strip() for line in out.splitlines() if line.startswith("  headattr "))
    assert example.startswith(f"headattr {name}")
    assert "Example:" in out
    words = shlex.split(example)[1 + len(name.split()) :]
    assert tyro.cli(COMMANDS[name], args=words)


def test_version_is_the_packages(say: Any) -> None:
    from importlib.metadata import version

    assert say(["--version"]) == (0, f"headattr {version('headattr')}\n", "")


# Flags --------------------------------------------------------------------------------------------


def test_a_repeated_basis_or_output_adds(place: Path, tmp_path: Path, say: Any) -> None:
    one, two = f"1={place / 'sae1'}", f"2={place / 'sae2'}"
    start = arguments(place, basis=None, output=None, out=tmp_path / "out", heads="L0H0,L1H0,L2H0")
    forms = (
        ["--basis", one, two, "0=tokens", "--output", two, "unembed"],
        [
            "--basis",
            one,
            "--output",
            two,
            "--basis",
            two,
            "--output",
            "unembed",
            "--basis",
            "0=tokens",
        ],
        [
            f"--basis={one}",
            f"--output={two}",
            f"--basis={two}",
            "--output=unembed",
            "--basis=0=tokens",
        ],
    )
    hashes = set()
    for form in forms:
        assert say([*start, *form, "--no-progress"])[0] == 0
        with open_store(tmp_path / "out") as store:
            hashes.add(store.manifest["hash"])
            assert [plan["layer"] for plan in store.manifest["layers"]] == [0, 1, 2]
    assert len(hashes) == 1


def test_a_toml_file_or_its_folder_names_the_dictionaries(
    place: Path, tmp_path: Path, say: Any
) -> None:
    for basis in (place / "spec.toml", place):
        argv = arguments(
            place, basis=str(basis), out=tmp_path / "out", heads="L1H0,L2H0", quiet=True
        )
        assert say(argv)[0] == 0
    plain = [f"{layer}={place / f'sae{layer}'}" for layer in (2, 1)]
    argv = arguments(place, basis=plain, out=tmp_path / "out", heads="L1H0,L2H0", quiet=True)
    assert say(argv)[0] == 0


BAD_TOML = {
    "layer = ": "is not TOML",
    "": "no [[basis]] tables",
    "[[basis]]\nlayer = 1": "has no path",
    '[[basis]]\nkind = "sae"\npath = "sae1"': "sae1 is not a folder",
    '[[basis]]\nkind = "lens"\nlayer = 1\npath = "sae1"': 'kind = "sae"',
    '[[basis]]\nkind = "sae"\nlayer = "1"\npath = "sae1"': "layer = N",
    '[[basis]]\nkind = "sae"\nlayer = 1\npath = 3': "path",
    '[basis]\nkind = "sae"\nlayer = 1\npath = "sae1"': "[[basis]]",
    "basis = 3": "[[basis]]",
    '[[basis]]\nkind = "sae"\nlayer = true\npath = "sae1"': "layer = N",
}


@pytest.mark.parametrize(("text", "found"), BAD_TOML.items())
def test_a_toml_file_that_is_off_is_refused_in_one_line(
    place: Path, tmp_path: Path, say: Any, text: str, found: str
) -> None:
    (tmp_path / "spec.toml").write_text(text)
    code, _, err = say(arguments(place, basis=str(tmp_path / "spec.toml")))
    assert code == 2
    assert found in err
    assert err.count("\n") == 1


# In a process of its own --------------------------------------------------------------------------

HEAVY = "{'torch', 'transformers', 'sae_lens', 'matplotlib', 'scipy', 'pandas'}"


def test_asking_a_store_imports_nothing_heavy(place: Path) -> None:
    code = f"""
import sys
import headattr, headattr.config, headattr.edges, headattr.texts, headattr.query
import headattr.store.reader, headattr.store.check
from headattr.cli import main
assert main(sys.argv[1:]) == 0
assert main(["check", sys.argv[3]]) == 0
assert main(["run"]) == 2
heavy = {HEAVY} & {{name.split(".")[0] for name in sys.modules}}
assert not heavy, heavy
"""
    found = subprocess.run(
        [sys.executable, "-c", code, *_edge(place, "--json")], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_a_cold_question_takes_little_longer_than_its_imports(place: Path) -> None:
    """No absolute time: beside the imports that it cannot do without, in the same minute."""

    def best(argv: list[str]) -> float:
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            subprocess.run(argv, check=True, capture_output=True)
            times.append(time.perf_counter() - begun)
        return min(times)

    imports = best([sys.executable, "-c", "import numpy, h5py, hdf5plugin, tyro"])
    script = "from headattr.cli import run_and_exit; run_and_exit()"
    question = best([sys.executable, "-c", script, *_edge(place)])
    assert question < 3 * imports


def test_an_interrupted_run_keeps_what_is_finished_and_says_that_the_same_command_goes_on(
    place: Path, tmp_path: Path, say: Any
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"{i} the cat sat on the mat" for i in range(30)))
    argv = arguments(
        place, texts=texts, out=tmp_path / "out", heads="L1H0", **{"prompts-per-shard": "1"}
    )
    shards = tmp_path / "out" / "shards"
    process = started(argv)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if len(list(shards.glob("*.json"))) >= 2:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    said = err.replace("\r", "\n").strip().splitlines()[-1]
    assert said == "headattr: interrupted; what is finished is kept, the same command goes on"
    left = {path.name for path in shards.iterdir()}
    assert not [name for name in left if name.endswith(".tmp")]
    assert len([name for name in left if name.endswith(".json")]) < 30
    with open_store(tmp_path / "out") as store:
        assert store.problems == []
    assert say([*argv, "--no-progress"])[0] == 0
    with open_store(tmp_path / "out") as store:
        assert check_store(store)["problems"] == []


def test_exit_codes_reach_the_shell_and_a_closed_pipe_is_no_error(place: Path) -> None:
    process = started(["check", str(place / "nowhere")])
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err == f"headattr: {place / 'nowhere'} does not exist; expected the folder of a result\n"
    reader, writer = os.pipe()
    os.close(reader)
    process = started(_edge(place, "--json"), stdout=writer)
    os.close(writer)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


def test_an_output_that_is_not_utf8_gets_ascii(place: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for more in (["--json"], []):
        process = started(_edge(place, *more, prompt=1, q=2, k=2), env=environment)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        assert out.isascii()
        if more:
            assert strict(out)["q_token"] == " "
