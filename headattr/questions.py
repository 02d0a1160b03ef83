"""More questions to a store than one edge: where a feature or a pair is, what a head does, what
else a query saw, sums over spans, a prompt, and what changed between two stores.

Answers are JSON values, an interface as those of `query.edge`: documented in the README, additive.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headattr.edges import Edge, HeadId, parse_head
from headattr.errors import StoreError, UsageError
from headattr.query import SourceNames, feature_shape, head_shares, names_of
from headattr.store.columns import RoleName
from headattr.store.filters import EdgeFilter
from headattr.store.hits import Hits, Page
from headattr.store.lookup import feature_page, layers_of, pair_page
from headattr.store.reader import Store
from headattr.store.tallies import Table
from headattr.store.whole_heads import sums_of_heads, tally_of_head

Role = Literal["query", "key", "value", "output"]
ROLES: tuple[Role, ...] = ("query", "key", "value", "output")
_SHORT: dict[Role, RoleName] = {"query": "q", "key": "k", "value": "v", "output": "o"}
_STRENGTH = {"query": "marginal", "key": "marginal", "value": "norm", "output": "read"}


def feature(
    store: Store,
    feature: int,
    source: str | None = None,
    role: Role | None = None,
    chosen: EdgeFilter | None = None,
    *,
    start: int = 0,
    count: int = 20,
) -> dict[str, Any]:
    """Where a feature matters: the edges where it is among the strongest, strongest first.

    {"feature", "roles": [{"role", "strength_is", "edges", "start", "hits": [...]}], "problems"};
    `edges` is how many there are, null where a filter left them uncounted. `source` is the name or
    index of the dictionary, needed where a store has several. Raises UsageError for a feature or
    source that does not exist.
    """
    index, names = _source(store, source, feature)
    kept = feature - names.first
    answers = []
    for one in ROLES if role is None else (role,):
        short, filtered = _SHORT[one], chosen or EdgeFilter()
        if not layers_of(store, index, short):
            continue
        page = feature_page(store, index, kept, short, filtered, start, count)
        by_contrast = store.manifest["config"]["rank"] == "contrast" and one in ("query", "key")
        answers.append(
            {
                "role": one,
                "strength_is": "contrast" if by_contrast else _STRENGTH[one],
                **_page(page, start),
            }
        )
    if not answers:
        raise UsageError(f"features of {names.name} are never {role} features in this store")
    return {
        "feature": feature_shape(names, kept),
        "roles": answers,
        "problems": list(store.problems),
    }


def pair(
    store: Store,
    left: int,
    right: int,
    kind: Table = "qk",
    source: str | None = None,
    chosen: EdgeFilter | None = None,
    *,
    start: int = 0,
    count: int = 20,
) -> dict[str, Any]:
    """Where a pair matters: of a query and a key feature, or (`kind` ov) of a value and an output
    feature; the edges that keep it, strongest first, and what it comes to by head.

    {"q_feature", "k_feature" (or "v_feature", "o_feature"), "strength_is": "value", "edges",
    "start", "hits", "heads": [{"layer", "head", "edges", "sum", "mean"}], "problems"}.
    """
    index, names = _source(store, source, left, bases=True)
    others = [names] if kind == "qk" else _outputs(store, index)
    if not others:
        raise UsageError(f"no layer that {names.name} decomposes has an output")
    other = others[0]
    for one, asked in ((names, left), (other, right)):
        _check_id(one, asked)
    page, heads = pair_page(
        store,
        index,
        left - names.first,
        right - other.first,
        kind,
        chosen or EdgeFilter(),
        start,
        count,
    )
    first, second = ("q_feature", "k_feature") if kind == "qk" else ("v_feature", "o_feature")
    return {
        first: feature_shape(names, left - names.first),
        second: feature_shape(other, right - other.first),
        "strength_is": "value",
        **_page(page, start),
        "heads": [
            {
                **one.head._asdict(),
                "edges": one.edges,
                "sum": one.total,
                "mean": one.total / one.edges,
            }
            for one in heads
        ],
        "problems": list(store.problems),
    }


def head(store: Store, head: str | HeadId, *, count: int = 10) -> dict[str, Any]:
    """What a head does over the whole store.

    {"layer", "head", "edges", "prompts", "feature_share", "feature_share_centred", "sink_share",
    "pairs": {"strongest": [...], "frequent": [...]}, "moved": the same or null, "problems"}. A pair
    is {"q_feature", "k_feature" (or "v_feature", "o_feature"), "edges", "edges_at_most", "sum",
    "sum_at_most" (of sizes), "mean", "share"}: edges that keep it, at least and at most (equal
    where every shard has it among its own strongest), the sum and mean of its values there, and the
    sum over the sum of |score| of the head's edges (null for what is moved).
    """
    found = parse_head(head)
    plan = store.plan(found)
    place = plan["heads"].index(found.head)
    edges, size = sums_of_heads(store, found.layer)[place, :2].tolist()
    basis = names_of(store, plan["basis"])
    output = None if plan["output"] is None else names_of(store, plan["output"])
    return {
        **found._asdict(),
        "edges": int(edges),
        "prompts": len(store.prompt_ids),
        **head_shares(store, found.layer).get(found, {}),
        "pairs": _tallied(store, found, (basis, basis), "qk", size, count),
        "moved": None
        if output is None
        else _tallied(store, found, (basis, output), "ov", None, count),
        "problems": list(store.problems),
    }


def _tallied(
    store: Store,
    head: HeadId,
    names: tuple[SourceNames, SourceNames],
    table: Table,
    size: float | None,
    count: int,
) -> dict[str, list[dict[str, Any]]]:
    keys = ("q_feature", "k_feature") if table == "qk" else ("v_feature", "o_feature")
    whole, more, more_size = tally_of_head(store, head, table)

    def listed(by: NDArray[Any]) -> list[dict[str, Any]]:
        return [
            {
                keys[0]: feature_shape(names[0], int(whole.left[i])),
                keys[1]: feature_shape(names[1], int(whole.right[i])),
                "edges": int(whole.edges[i]),
                "edges_at_most": int(whole.edges[i] + more[i]),
                "sum": float(whole.total[i]),
                "sum_at_most": float(whole.size[i] + more_size[i]),
                "mean": float(whole.total[i] / whole.edges[i]),
                "share": float(whole.total[i] / size) if size else None,
            }
            for i in np.argsort(-by, kind="stable")[:count].tolist()
        ]

    return {"strongest": listed(whole.size), "frequent": listed(whole.edges)}


def row(store: Store, prompt: int, head: str | HeadId, q_pos: int) -> dict[str, Any]:
    """What else a query saw: all its kept keys, by softmax weight.

    {"prompt", "layer", "head", "q_pos", "q_token", "kept", "pattern" (their sum), "sink_share",
    "keys": [{"k_pos", "k_token", "score", "score_contrast", "pattern", "feature_share", "flagged",
    "pair": the strongest or null}]}. Raises UsageError for a position beyond the prompt.
    """
    found, tokens = parse_head(head), store.token_texts(prompt)
    if not 0 <= q_pos < len(tokens):
        raise UsageError(
            f"query position {q_pos} is beyond prompt {prompt}; positions are 0 to "
            f"{len(tokens) - 1}"
        )
    kept = store.edges(prompt, found)
    basis = names_of(store, store.plan(found)["basis"])
    keys = []
    for k_pos in kept["k_pos"][kept["q_pos"] == q_pos].tolist():
        edge = store.edge(prompt, Edge(found.layer, found.head, q_pos, k_pos))
        q, k = int(edge.q_slots[0]), int(edge.k_slots[0])
        strongest = q >= 0 and {
            "q_feature": feature_shape(basis, int(edge.q_active.features[q]), tokens[q_pos]),
            "k_feature": feature_shape(basis, int(edge.k_active.features[k]), tokens[k_pos]),
            "value": float(edge.values[0]),
            "contrast": float(edge.pair_contrasts[0]),
        }
        keys.append(
            {
                "k_pos": k_pos,
                "k_token": tokens[k_pos],
                **{name: getattr(edge, name) for name in ("score", "score_contrast", "pattern")},
                "feature_share": edge.feature_share,
                "flagged": edge.flagged,
                "pair": strongest or None,
            }
        )
    return {
        "prompt": prompt,
        **found._asdict(),
        "q_pos": q_pos,
        "q_token": tokens[q_pos],
        "kept": len(keys),
        "pattern": sum(key["pattern"] for key in keys),
        "sink_share": store.sink_share(prompt, found, q_pos),
        "keys": sorted(keys, key=lambda key: -key["pattern"]),
    }


def prompt(store: Store, prompt: int, *, count: int = 3) -> dict[str, Any]:
    """A prompt, and the strongest kept edges of each head in it.

    {"prompt", "text" (null for one given as tokens), "tokens", "truncated", "extra", "heads":
    [{"layer", "head", "edges", "strongest": [{"q_pos", "k_pos", "q_token", "k_token", "score",
    "pattern", "feature_share"}]}]}.
    """
    tokens, facts = store.token_texts(prompt), store.facts(prompt)
    heads = []
    for one in store.heads:
        kept = store.edges(prompt, one)
        order = np.argsort(-kept["pattern"], kind="stable")[:count].tolist()
        heads.append(
            {
                **one._asdict(),
                "edges": len(kept["pattern"]),
                "strongest": [
                    {
                        "q_pos": (q := int(kept["q_pos"][i])),
                        "k_pos": (k := int(kept["k_pos"][i])),
                        "q_token": tokens[q],
                        "k_token": tokens[k],
                        **{
                            name: float(kept[name][i])
                            for name in ("score", "pattern", "feature_share")
                        },
                    }
                    for i in order
                ],
            }
        )
    return {"prompt": prompt, **facts, "tokens": tokens, "heads": heads}


def _page(page: Page, start: int) -> dict[str, Any]:
    return {"edges": page.total, "start": start, "hits": hits_as_dicts(page.hits)}


def hits_as_dicts(hits: Hits) -> list[dict[str, Any]]:
    """A page of edges as JSON values."""
    return [
        dict(zip(Hits._fields, values, strict=True))
        for values in zip(*(column.tolist() for column in hits), strict=True)
    ]


def _source(
    store: Store, name: str | None, feature: int, *, bases: bool = False
) -> tuple[int, SourceNames]:
    """The source of this name or index, or the only one there is; its index and names."""
    plans = store.manifest["layers"]
    used = {plan["basis"] for plan in plans}
    if not bases:
        used |= {plan["output"] for plan in plans if plan["output"] is not None}
    known = {index: names_of(store, index) for index in sorted(used)}
    found = [i for i, names in known.items() if name in (None, names.name, str(i))]
    listed = ", ".join(
        f"{names.name} ({index}, of layer {store.manifest['sources'][index]['layer']})"
        for index, names in known.items()
    )
    if not found:
        raise UsageError(f"--source {name}: expected the name or number of one of {listed}")
    if len(found) > 1:
        raise UsageError(
            f"feature {feature} of which dictionary? give the name or number of one as --source: "
            f"{listed}"
        )
    _check_id(known[found[0]], feature)
    return found[0], known[found[0]]


def _check_id(names: SourceNames, feature: int) -> None:
    last = names.first + sum(count for _, count, _ in names.groups) - 1
    if not names.first <= feature <= last:
        raise UsageError(
            f"{names.name} has no feature {feature}; its ids are {names.first} to {last}"
        )


def _outputs(store: Store, basis: int) -> list[SourceNames]:
    """Outputs of the layers that a basis decomposes."""
    found: Sequence[int] = sorted(
        {
            plan["output"]
            for plan in store.manifest["layers"]
            if plan["basis"] == basis and plan["output"] is not None
        }
    )
    if len(found) > 1:
        named = ", ".join(names_of(store, index).name for index in found)
        raise StoreError(f"pairs with several outputs ({named}) cannot be told apart by their ids")
    return [names_of(store, index) for index in found]
