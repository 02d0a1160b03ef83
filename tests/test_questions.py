"""Questions about many edges, against every edge read one by one."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import headattr
from headattr import comparisons, query, questions
from headattr.cli import main
from headattr.edges import Edge, HeadId
from headattr.errors import UsageError
from headattr.store import index, merge, tallies
from headattr.store.check import check_store
from headattr.store.filters import EdgeFilter
from headattr.store.reader import Store, open_store
from headattr.store.tallies import Tally, add

LENGTHS = (5, 7, 1, 9, 3)
TEXTS = tiny.prompts(*LENGTHS)
FIRST, SECOND = {1: tiny.sae(layer=1)}, {2: tiny.sae(layer=2)}
OPTIONS: dict[str, dict[str, Any]] = {
    "two bases": {"basis": {1: FIRST[1], 2: SECOND[2]}},
    "tokens and the unembedding": {"basis": {0: "tokens", 1: FIRST[1]}, "output": "unembed"},
    "contrasts": {"basis": FIRST, "rank": "contrast"},
    "all outputs": {"basis": {1: FIRST[1], 2: SECOND[2]}, "outputs": "all"},
    "no output": {"basis": SECOND},
}
ROLE_FIELDS = {"q": "q_features", "k": "k_features", "v": "v_features", "o": "o_features"}
STRENGTHS = {"q": "marginal", "k": "marginal", "v": "norm", "o": "read"}


@pytest.fixture(scope="module", params=OPTIONS, ids=list(OPTIONS))
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = dict(OPTIONS[request.param])
    model, out = tiny.gpt2(n_layer=3), tmp_path_factory.mktemp("questions") / "results"
    rules = {"edges": "all", "prompts_per_shard": 2, "topk": 6, **options}
    with headattr.attribute(model, rules.pop("basis"), TEXTS, out, **rules) as found:
        yield found


def every_edge(store: Store) -> list[dict[str, Any]]:
    """Every edge's answer, one by one."""
    return [
        query.edge(store, prompt, Edge(head.layer, head.head, q, k))
        for prompt in store.prompt_ids
        for head in store.heads
        for q, k in zip(
            *(store.edges(prompt, head)[name].tolist() for name in ("q_pos", "k_pos")), strict=True
        )
    ]


_EDGES: dict[Path, list[dict[str, Any]]] = {}


@pytest.fixture
def edges(store: Store) -> list[dict[str, Any]]:
    if store.path not in _EDGES:
        _EDGES[store.path] = every_edge(store)
    return _EDGES[store.path]


def place(edge: dict[str, Any]) -> tuple[int, ...]:
    return tuple(edge[name] for name in ("prompt", "layer", "head", "q_pos", "k_pos"))


def source_of(store: Store, feature: dict[str, Any], role: str) -> str:
    """The number of a feature's source: names may be the same."""
    key = "output" if role == "o" else "basis"
    sources = {plan[key] for plan in store.manifest["layers"] if plan[key] is not None}
    (found,) = {
        str(index)
        for index in sources
        if (entry := store.manifest["sources"][index])["name"] == feature["source"]
        and feature["layer"] in (None, entry["layer"])
    }
    return found


def by_feature(store: Store, edges: list[dict[str, Any]]) -> dict[Any, dict[Any, float]]:
    """(role, source, feature) -> edge -> how strong it is there."""
    found: dict[Any, dict[Any, float]] = defaultdict(dict)
    by_contrast = store.manifest["config"]["rank"] == "contrast"
    for edge in edges:
        for role, field in ROLE_FIELDS.items():
            table = edge["qk"] if role in "qk" else (edge["ov"] or [{field: []}])[0]
            name = "contrast" if by_contrast and role in "qk" else STRENGTHS[role]
            for feature in table[field]:
                source = source_of(store, feature, role)
                found[role, source, feature["id"]][place(edge)] = feature[name]
    return found


def some(items: Any, count: int) -> list[Any]:
    """Some of many, spread over them, the largest too."""
    listed = sorted(items, key=lambda item: (-len(item[1]), str(item[0])))
    return [*listed[:3], *listed[:: max(1, len(listed) // count)]]


def test_a_feature_is_where_it_is_among_the_strongest_of_its_edge_strongest_first(
    store: Store, edges: list[dict[str, Any]]
) -> None:
    found = by_feature(store, edges)
    assert found
    for (role, source, feature), places in some(found.items(), 40):
        name = next(one for one in questions.ROLES if one[0] == role)
        answer = questions.feature(store, feature, source, name, start=2, count=7)
        (told,) = answer["roles"]
        json.dumps(answer, allow_nan=False)
        assert answer["problems"] == []
        assert told["edges"] == len(places)
        strongest = sorted(places.values(), key=lambda value: -abs(value))[2:9]
        assert [hit["strength"] for hit in told["hits"]] == pytest.approx(strongest)
        for hit in told["hits"]:
            assert places[place(hit)] == pytest.approx(hit["strength"])


def test_pages_follow_on_each_other_and_repeat_nothing(
    store: Store, edges: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (role, source, feature), places = max(
        by_feature(store, edges).items(), key=lambda item: len(item[1])
    )
    name = next(one for one in questions.ROLES if one[0] == role)
    pages = [
        questions.feature(store, feature, source, name, start=start, count=5)["roles"][0]["hits"]
        for start in range(0, len(places) + 5, 5)
    ]
    hits = [hit for page in pages for hit in page]
    assert len(hits) == len(places) > index.BEST
    assert {place(hit) for hit in hits} == places.keys()
    sizes = [abs(hit["strength"]) for hit in hits]
    assert sizes == sorted(sizes, reverse=True)


FILTERS: dict[str, tuple[EdgeFilter, Any]] = {
    "heads": (EdgeFilter(heads="L1H*"), lambda e, s: e["layer"] == 1),
    "a head": (EdgeFilter(heads="L2H1"), lambda e, s: (e["layer"], e["head"]) == (2, 1)),
    "a prompt": (EdgeFilter(prompts="3"), lambda e, s: e["prompt"] == 3),
    "prompts": (EdgeFilter(prompts="1-4"), lambda e, s: 1 <= e["prompt"] <= 4),
    "pattern": (EdgeFilter(min_pattern=0.1), lambda e, s: e["pattern"] >= 0.1),
    "distance": (EdgeFilter(distance="2-5"), lambda e, s: 2 <= e["q_pos"] - e["k_pos"] <= 5),
    "itself": (EdgeFilter(distance="0"), lambda e, s: e["q_pos"] == e["k_pos"]),
    "positive": (EdgeFilter(sign="positive"), lambda e, s: s > 0),
    "negative": (EdgeFilter(sign="negative"), lambda e, s: s < 0),
    "tokens": (
        EdgeFilter(q_token="/[13579]/", k_token="/[02468]/"),
        lambda e, s: (
            any(c in e["q_token"] for c in "13579") and any(c in e["k_token"] for c in "02468")
        ),
    ),
    "several": (
        EdgeFilter(sign="positive", distance="1-9", min_pattern=0.02),
        lambda e, s: s > 0 and 1 <= e["q_pos"] - e["k_pos"] <= 9 and e["pattern"] >= 0.02,
    ),
}


@pytest.mark.parametrize("chosen", FILTERS)
def test_a_filter_leaves_exactly_the_edges_that_it_means(
    store: Store, edges: list[dict[str, Any]], chosen: str
) -> None:
    filtered, means = FILTERS[chosen]
    if chosen in ("heads", "a head") and not {1, 2} <= {head.layer for head in store.heads}:
        pytest.skip("the store has one layer")
    by_place = {place(edge): edge for edge in edges}
    for (role, source, feature), places in some(by_feature(store, edges).items(), 6):
        name = next(one for one in questions.ROLES if one[0] == role)
        wanted = {at: s for at, s in places.items() if means(by_place[at], s)}
        answer = questions.feature(store, feature, source, name, filtered, count=len(places) + 1)
        (told,) = answer["roles"]
        assert {place(hit) for hit in told["hits"]} == wanted.keys()
        assert told["edges"] == len(wanted)
        page = questions.feature(store, feature, source, name, filtered, count=4)["roles"][0]
        strongest = sorted(map(abs, wanted.values()), reverse=True)[:4]
        assert [abs(hit["strength"]) for hit in page["hits"]] == pytest.approx(strongest)


def by_pair(store: Store, edges: list[dict[str, Any]], table: str) -> dict[Any, dict[Any, float]]:
    keys = ("q_feature", "k_feature") if table == "qk" else ("v_feature", "o_feature")
    found: dict[Any, dict[Any, float]] = defaultdict(dict)
    for edge in edges:
        held = edge["qk"] if table == "qk" else (edge["ov"] or [{"pairs": []}])[0]
        for pair in held["pairs"]:
            source = source_of(store, pair[keys[0]], "q")
            name = (source, pair[keys[0]]["id"], pair[keys[1]]["id"])
            found[name][place(edge)] = pair["value"]
    return found


@pytest.mark.parametrize("table", ["qk", "ov"])
def test_a_pair_is_in_the_edges_that_keep_it_and_adds_up_by_head(
    store: Store, edges: list[dict[str, Any]], table: Any
) -> None:
    found = by_pair(store, edges, table)
    if not found:
        assert all(plan["output"] is None for plan in store.manifest["layers"])
        return
    for (source, left, right), places in some(found.items(), 25):
        answer = questions.pair(store, left, right, table, source, count=len(places))
        json.dumps(answer, allow_nan=False)
        assert answer["edges"] == len(places)
        assert {place(hit) for hit in answer["hits"]} == places.keys()
        for hit in answer["hits"]:
            assert hit["strength"] == pytest.approx(places[place(hit)])
        sums: dict[Any, list[float]] = defaultdict(list)
        for at, value in places.items():
            sums[at[1], at[2]].append(value)
        told = {(one["layer"], one["head"]): (one["edges"], one["sum"]) for one in answer["heads"]}
        assert told == {
            head: (len(values), pytest.approx(sum(values), abs=1e-6))
            for head, values in sums.items()
        }


def test_a_heads_pairs_are_counted_exactly_while_all_are_kept(
    store: Store, edges: list[dict[str, Any]]
) -> None:
    head = store.heads[-1]
    own = [edge for edge in edges if (edge["layer"], edge["head"]) == head]
    answer = questions.head(store, head, count=8)
    json.dumps(answer, allow_nan=False)
    assert (answer["edges"], answer["prompts"]) == (len(own), len(store.prompt_ids))
    size = sum(abs(edge["score"]) for edge in own)
    found = by_pair(store, own, "qk")
    for pair in (*answer["pairs"]["strongest"], *answer["pairs"]["frequent"]):
        source = source_of(store, pair["q_feature"], "q")
        names = source, pair["q_feature"]["id"], pair["k_feature"]["id"]
        values = list(found[names].values())
        assert pair["edges"] <= len(values) <= pair["edges_at_most"]
        assert sum(map(abs, values)) <= pair["sum_at_most"] * (1 + 1e-6)
        if pair["edges"] == pair["edges_at_most"]:
            assert pair["sum"] == pytest.approx(sum(values), abs=1e-5)
            assert pair["mean"] == pytest.approx(sum(values) / len(values), abs=1e-6)
            assert pair["share"] == pytest.approx(sum(values) / size, abs=1e-6)
    most = max(len(values) for values in found.values())
    assert answer["pairs"]["frequent"][0]["edges_at_most"] >= most


def test_tallies_that_were_cut_say_what_a_pair_may_have_beyond_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = np.random.default_rng(0)
    wanted: dict[tuple[int, int], list[float]] = defaultdict(list)
    parts: list[Tally] = []
    for _ in range(6):
        left, right = generator.zipf(1.6, 400) % 30, generator.zipf(1.6, 400) % 30
        values = generator.standard_normal(400)
        for pair in zip(left.tolist(), right.tolist(), values.tolist(), strict=True):
            wanted[pair[:2]].append(pair[2])
        whole = tallies._summed([left, right, np.ones(400, int), values, np.abs(values)], 0, 0.0)
        parts.append(tallies.cut(whole, 25))
    added, more, more_size = add(parts)
    known = set(zip(added.left.tolist(), added.right.tolist(), strict=True))
    assert len(known) < len(wanted)
    assert (more > 0).any()
    for i, pair in enumerate(zip(added.left.tolist(), added.right.tolist(), strict=True)):
        count, size = len(wanted[pair]), sum(map(abs, wanted[pair]))
        assert added.edges[i] <= count <= added.edges[i] + more[i]
        assert added.size[i] - 1e-9 <= size <= added.size[i] + more_size[i] + 1e-9
    for pair in wanted.keys() - known:
        assert len(wanted[pair]) <= added.missed_count
        assert sum(map(abs, wanted[pair])) <= added.missed_size + 1e-9


def test_a_row_has_all_kept_keys_of_a_query(store: Store, edges: list[dict[str, Any]]) -> None:
    head = store.heads[1]
    answer = questions.row(store, 3, head, 7)
    json.dumps(answer, allow_nan=False)
    own = {
        edge["k_pos"]: edge
        for edge in edges
        if (edge["prompt"], edge["layer"], edge["head"], edge["q_pos"]) == (3, *head, 7)
    }
    assert answer["kept"] == len(own) == 8
    assert answer["pattern"] == pytest.approx(1, abs=1e-5)
    assert {key["k_pos"] for key in answer["keys"]} == own.keys()
    for key in answer["keys"]:
        for name in ("score", "pattern", "score_contrast", "flagged", "k_token"):
            assert key[name] == own[key["k_pos"]][name]
        assert key["feature_share"] == own[key["k_pos"]]["qk"]["feature_share"]
        assert key["pair"] == own[key["k_pos"]]["qk"]["pairs"][0]
    with pytest.raises(UsageError, match="positions are 0 to 8"):
        questions.row(store, 3, head, 9)


def test_a_span_is_the_sum_of_its_edges(store: Store, edges: list[dict[str, Any]]) -> None:
    head, q, k = store.heads[0], (5, 8), (1, 4)
    answer = comparisons.span(store, 3, head, q, k, count=1000)
    json.dumps(answer, allow_nan=False)
    own = [
        edge
        for edge in edges
        if (edge["prompt"], edge["layer"], edge["head"]) == (3, *head)
        and q[0] <= edge["q_pos"] <= q[1]
        and k[0] <= edge["k_pos"] <= k[1]
    ]
    assert answer["edges"] == len(own) == 16
    for name in ("score", "pattern"):
        assert answer[name] == pytest.approx(sum(edge[name] for edge in own))
    total = sum(sum(row.values()) for row in answer["totals"].values())
    assert total == pytest.approx(answer["score"], rel=1e-4)
    found = by_pair(store, own, "qk")
    told = {(pair["q_feature"]["id"], pair["k_feature"]["id"]): pair for pair in answer["pairs"]}
    assert told.keys() == {name[1:] for name in found}
    for name, places in found.items():
        assert told[name[1:]]["edges"] == len(places)
        assert told[name[1:]]["sum"] == pytest.approx(sum(places.values()), abs=1e-6)
    with pytest.raises(UsageError, match="within 0 to 8"):
        comparisons.span(store, 3, head, (5, 9), k)


def test_a_prompt_shows_its_strongest_edges(store: Store, edges: list[dict[str, Any]]) -> None:
    answer = questions.prompt(store, 1, count=2)
    json.dumps(answer, allow_nan=False)
    assert len(answer["tokens"]) == 7
    assert [HeadId(one["layer"], one["head"]) for one in answer["heads"]] == store.heads
    for one in answer["heads"]:
        own = [
            e for e in edges if (e["prompt"], e["layer"], e["head"]) == (1, *list(one.values())[:2])
        ]
        assert one["edges"] == len(own)
        strongest = sorted((edge["pattern"] for edge in own), reverse=True)[:2]
        assert [edge["pattern"] for edge in one["strongest"]] == pytest.approx(strongest)


def test_two_stores_of_the_same_texts_are_compared_edge_by_edge(tmp_path: Path) -> None:
    stores = [
        headattr.attribute(
            tiny.gpt2(seed=seed), FIRST, TEXTS[:4], tmp_path / str(seed), edges=edges
        )
        for seed, edges in ((0, "all"), (1, "top:3"))
    ]
    answer = comparisons.difference(*stores, count=5)
    json.dumps(answer, allow_nan=False)
    assert answer["prompts"] == len(stores[0].prompt_ids)
    changes: list[float] = []
    for one in answer["heads"]:
        head, own, both = HeadId(one["layer"], one["head"]), [], 0
        for prompt in stores[0].prompt_ids:
            found = []
            for store in stores:
                kept = store.edges(prompt, head)
                names = zip(kept["q_pos"].tolist(), kept["k_pos"].tolist(), strict=True)
                found.append(dict(zip(names, kept["pattern"].tolist(), strict=True)))
            shared = found[0].keys() & found[1].keys()
            own += [abs(found[0][edge] - found[1][edge]) for edge in shared]
            both += len(shared)
        assert one["edges"]["both"] == both > 0
        assert one["edges"]["second_only"] == 0
        assert one["pattern_change"] == pytest.approx(np.mean(own))
        changes += own
    told = [abs(hit["pattern"][0] - hit["pattern"][1]) for hit in answer["hits"]]
    assert told == pytest.approx(sorted(changes, reverse=True)[:5])
    other = headattr.attribute(tiny.gpt2(), FIRST, TEXTS[:3], tmp_path / "other")
    with pytest.raises(UsageError, match="different texts"):
        comparisons.difference(stores[0], other)


def test_a_damaged_shard_is_a_problem_of_the_answer_and_the_others_are_asked(
    tmp_path: Path,
) -> None:
    out = tmp_path / "results"
    headattr.attribute(tiny.gpt2(), FIRST, TEXTS, out, prompts_per_shard=2).close()
    with open_store(out) as store:
        before = questions.head(store, "L1H0")
    file = out / "shards" / "00001.h5"
    file.write_bytes(b"\0" * 4096 + file.read_bytes()[4096:])
    with open_store(out) as store:
        answer = questions.head(store, "L1H0")
    assert 0 < answer["edges"] < before["edges"]
    assert any("00001.h5" in problem for problem in answer["problems"])


def test_the_index_is_made_in_ranges_where_there_is_much_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for at_once, block in ((index._AT_ONCE, index.BLOCK), (50, 64)):
        monkeypatch.setattr(index, "_AT_ONCE", at_once)
        monkeypatch.setattr(index, "BLOCK", block)
        out = tmp_path / str(block)
        with headattr.attribute(tiny.gpt2(), FIRST, TEXTS[:4], out, edges="all") as store:
            names = ("feature", "ptr", "step", "best_ptr", "best_row", "best_strength")
            group = store.shards[0].file["layer/1/index/k"]
            answers.append([group[name][:] for name in names])
    for one, other in zip(*answers, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("shards", [1, 3])
def test_the_index_over_all_shards_gives_the_same_answers_without_opening_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    monkeypatch.setattr(merge, "_AT_ONCE", 300)
    basis, out = {0: "tokens", 1: FIRST[1]}, tmp_path / "results"
    rules = {"edges": "all", "output": "unembed", "prompts_per_shard": shards}
    headattr.attribute(tiny.gpt2(), basis, TEXTS, out, **rules).close()

    def answers(store: Store, count: int) -> list[Any]:
        asked = [
            questions.feature(store, feature, str(source), count=count)
            for source, plan in enumerate(store.manifest["sources"])
            for feature in range(0, min(plan["n_features"], 40), 3)
        ]
        return [*asked, *(questions.head(store, head) for head in store.heads)]

    with open_store(out) as store:
        assert store.merged is None
        wanted = answers(store, 20), answers(store, 500)
        merge.make_index(store)
    with open_store(out) as store:
        assert store.merged is not None
        assert answers(store, 500) == wanted[1]
    with open_store(out) as store:
        assert len(store.shards) > 1
        assert len(store._served.handles) == 0
        assert answers(store, 20) == wanted[0]
    for name in ("h5", "json"):
        (out / "shards" / f"00001.{name}").unlink()
    with open_store(out) as store:
        assert store.merged is None
        assert answers(store, 20) != wanted[0]
    (out / merge.NAME).write_bytes(b"no index")
    with open_store(out) as store:
        assert store.merged is None


def test_a_run_of_many_shards_makes_the_index_and_check_does_not_mind_it(tmp_path: Path) -> None:
    texts, out = tiny.prompts(*[3] * merge.WORTH), tmp_path / "results"
    with headattr.attribute(tiny.gpt2(), FIRST, texts, out, prompts_per_shard=1) as store:
        assert store.merged is not None
        assert check_store(store)["problems"] == []
        made = (out / merge.NAME).stat().st_mtime_ns
    assert main(["index", str(out), "--json"]) == 0
    assert (out / merge.NAME).stat().st_mtime_ns > made


ASKED = {
    "feature": ["5", "--role", "key", "--count", "2"],
    "pair": ["5", "5"],
    "head": ["L1H0"],
    "row": ["--prompt", "1", "--head", "L1H0", "--q", "6"],
    "span": ["--prompt", "1", "--head", "L1H0", "--q", "4-6", "--k", "2"],
    "prompt": ["1"],
    "diff": [],
}


@pytest.mark.parametrize("question", ASKED)
def test_a_question_is_answered_in_words_and_as_json(
    question: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "results")
    headattr.attribute(tiny.gpt2(), FIRST, TEXTS[:3], out, edges="all").close()
    arguments = ["query", question, out, *([out] if question == "diff" else []), *ASKED[question]]
    capsys.readouterr()
    assert main(arguments) == 0
    words = capsys.readouterr().out
    assert len(words.splitlines()) > 1 or question == "pair"
    assert main([*arguments, "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)


WRONG = {
    "no such feature": (["feature", "9999"], "has no feature 9999; its ids are 0 to"),
    "no such source": (["feature", "1", "--source", "x"], "expected the name or number of"),
    "no such head": (["feature", "1", "--heads", "L0H0"], "head L0H0 is not in this store"),
    "no range": (["feature", "1", "--distance", "x"], "--distance 'x': expected all"),
    "a falling range": (["feature", "1", "--prompts", "5-2"], "--prompts '5-2'"),
    "no page": (["feature", "1", "--count", "0"], "--count is 0"),
    "no start": (["pair", "1", "1", "--start", "-1"], "--start is -1"),
    "no weight": (["pair", "1", "1", "--min-pattern", "2"], "expected 0 to 1"),
    "no pair": (["pair", "1", "77777"], "has no feature 77777"),
    "nothing is moved": (["pair", "1", "1", "--moved"], "has an output"),
    "no expression": (["feature", "1", "--q-token", "/(/"], "not a regular expression"),
    "never an output": (["feature", "1", "--role", "output"], "are never output features"),
    "head": (["head", "L9H9"], "head L9H9 is not in this store"),
    "prompt": (["prompt", "99"], "prompt 99 is not in this store"),
    "span": (
        ["span", "--prompt", "1", "--head", "L1H0", "--q", "3", "--k", "all"],
        "expected a position",
    ),
}


@pytest.mark.parametrize(("arguments", "said"), WRONG.values(), ids=WRONG)
def test_a_question_that_cannot_be_is_refused_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "results")
    headattr.attribute(tiny.gpt2(), FIRST, TEXTS[:2], out).close()
    capsys.readouterr()
    assert main(["query", arguments[0], out, *arguments[1:]]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
