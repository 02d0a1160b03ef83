"""Questions to a store about many edges at once: sums over spans of tokens, and what changed
between two stores of the same texts."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.edges import HeadId, parse_head, parse_heads
from headattr.errors import UsageError
from headattr.query import SourceNames, feature_shape, names_of
from headattr.store.reader import Store
from headattr.store.tallies import Tally, tally_of


def span(
    store: Store,
    prompt: int,
    head: str | HeadId,
    q: tuple[int, int],
    k: tuple[int, int],
    *,
    count: int = 10,
) -> dict[str, Any]:
    """Sums over the kept edges from some query positions to some key positions, ends included.

    {"prompt", "layer", "head", "q", "k", "q_text", "k_text", "edges", "score", "pattern", "totals":
    {query kind: {key kind: number}}, "pairs": [{"q_feature", "k_feature", "edges", "sum"}],
    "moved": [{"v_feature", "o_feature", "edges", "sum"}] or null}: all sums over the edges; pairs
    by the sum of their sizes. Raises UsageError for a span beyond the prompt.
    """
    found, tokens = parse_head(head), store.token_texts(prompt)
    for name, (first, last) in (("--q", q), ("--k", k)):
        if not 0 <= first <= last < len(tokens):
            raise UsageError(
                f"{name} {first}-{last}: expected a range of positions within 0 to "
                f"{len(tokens) - 1}"
            )
    plan = store.plan(found)
    shard, start, stop = store.group(prompt, found)
    with shard.reading():
        view = shard.layer(found.layer)
        where = view.where(slice(start, stop))
        inside = (where.q_pos >= q[0]) & (where.q_pos <= q[1])
        inside &= (where.k_pos >= k[0]) & (where.k_pos <= k[1])
        rows = np.flatnonzero(inside) + start
        totals = view.read(view.edge_columns["totals"], rows).astype(np.float64).sum(0)
        sums = {
            name: float(view.take(name, rows).astype(np.float64).sum())
            for name in ("score", "pattern")
        }
        pairs = tally_of(view, rows, "qk")
        moved = None if view.output is None else tally_of(view, rows, "ov")
        kinds = view.kinds
    basis = names_of(store, plan["basis"])
    output = None if plan["output"] is None else names_of(store, plan["output"])
    return {
        "prompt": prompt,
        **found._asdict(),
        "q": list(q),
        "k": list(k),
        "q_text": "".join(tokens[q[0] : q[1] + 1]),
        "k_text": "".join(tokens[k[0] : k[1] + 1]),
        "edges": len(rows),
        **sums,
        "totals": {
            one: {other: float(totals[i, j]) for j, other in enumerate(kinds)}
            for i, one in enumerate(kinds)
        },
        "pairs": _pairs(pairs, ("q_feature", "k_feature"), (basis, basis), count),
        "moved": None
        if moved is None or output is None
        else _pairs(moved, ("v_feature", "o_feature"), (basis, output), count),
    }


def _pairs(
    tally: Tally, keys: tuple[str, str], names: tuple[SourceNames, SourceNames], count: int
) -> list[dict[str, Any]]:
    return [
        {
            keys[0]: feature_shape(names[0], int(tally.left[i])),
            keys[1]: feature_shape(names[1], int(tally.right[i])),
            "edges": int(tally.edges[i]),
            "sum": float(tally.total[i]),
        }
        for i in np.argsort(-tally.size, kind="stable")[:count].tolist()
    ]


class _Both(NamedTuple):
    """The edges of one head of one prompt that two stores have."""

    prompt: int
    head: HeadId
    q_pos: NDArray[np.int64]
    k_pos: NDArray[np.int64]
    scores: NDArray[np.float64]
    """[store, edge]"""
    patterns: NDArray[np.float64]


def difference(
    first: Store, second: Store, *, heads: str = "all", count: int = 20
) -> dict[str, Any]:
    """What changed between two stores of the same texts: two checkpoints, two dictionaries.

    {"prompts", "heads": [{"layer", "head", "edges": {"both", "first_only", "second_only"},
    "score_change", "pattern_change" (means of sizes over edges of both)}] with the largest pattern
    change first, "hits": [{"prompt", "layer", "head", "q_pos", "k_pos", "q_token", "k_token",
    "score": [2], "pattern": [2]}] with the largest pattern change first}. Raises UsageError where
    texts or tokens differ, or no head is in both.
    """
    _same_texts(first, second)
    shared = [head for head in first.heads if head in set(second.heads)]
    if heads != "all" and shared:
        sizes = (max(part) + 1 for part in zip(*shared, strict=True))
        shared = [head for head in shared if head in set(parse_heads(heads, *sizes))]
    if not shared:
        raise UsageError("the two stores have none of these heads in common")
    prompts = sorted(set(first.prompt_ids) & set(second.prompt_ids))
    changed: list[dict[str, Any]] = []
    hits: list[tuple[float, _Both, int]] = []
    for head in shared:
        counts, sums = np.zeros(3, np.int64), np.zeros(2)
        for prompt in prompts:
            both, only = _in_both(first, second, prompt, head)
            change = np.abs(both.patterns[0] - both.patterns[1])
            counts += [len(change), *only]
            sums += [np.abs(both.scores[0] - both.scores[1]).sum(), change.sum()]
            strongest = np.argsort(-change, kind="stable")[:count].tolist()
            hits += [(float(change[i]), both, i) for i in strongest]
        hits = sorted(hits, key=lambda hit: -hit[0])[:count]
        edges = dict(zip(("both", "first_only", "second_only"), counts.tolist(), strict=True))
        means = (sums / counts[0]).tolist() if counts[0] else [None, None]
        changed.append(
            {
                **head._asdict(),
                "edges": edges,
                "score_change": means[0],
                "pattern_change": means[1],
            }
        )
    return {
        "prompts": len(prompts),
        "heads": sorted(changed, key=lambda one: -(one["pattern_change"] or 0.0)),
        "hits": [_changed_edge(first, both, i) for _, both, i in hits],
    }


def _same_texts(first: Store, second: Store) -> None:
    one, other = first.manifest["identity"], second.manifest["identity"]
    for name in ("texts", "bos"):
        if one[name] != other[name]:
            raise UsageError(
                f"{first.path} and {second.path} have different {name} ({str(one[name])[:12]}, "
                f"{str(other[name])[:12]}); expected two runs over the same tokens"
            )


def _in_both(
    first: Store, second: Store, prompt: int, head: HeadId
) -> tuple[_Both, tuple[int, int]]:
    if first.tokens(prompt) != second.tokens(prompt):
        raise UsageError(f"prompt {prompt} has other tokens in {second.path}; expected the same")
    kept = [store.edges(prompt, head) for store in (first, second)]
    codes = [edges["q_pos"] << 32 | edges["k_pos"] for edges in kept]
    same, *at = np.intersect1d(*codes, assume_unique=True, return_indices=True)
    columns = [
        np.stack([edges[name][i].astype(np.float64) for edges, i in zip(kept, at, strict=True)])
        for name in ("score", "pattern")
    ]
    only = len(codes[0]) - len(same), len(codes[1]) - len(same)
    return _Both(prompt, head, same >> 32, same & 0xFFFFFFFF, columns[0], columns[1]), only


def _changed_edge(store: Store, both: _Both, i: int) -> dict[str, Any]:
    tokens, q, k = store.token_texts(both.prompt), int(both.q_pos[i]), int(both.k_pos[i])
    return {
        "prompt": both.prompt,
        **both.head._asdict(),
        "q_pos": q,
        "k_pos": k,
        "q_token": tokens[q],
        "k_token": tokens[k],
        "score": both.scores[:, i].tolist(),
        "pattern": both.patterns[:, i].tolist(),
    }
