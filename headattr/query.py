"""Questions to a store, answered as JSON values; `viewers/text.py` puts an answer in words.

The shapes are an interface: documented in the README, additive only; null where something is not
computed yet.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from headattr.edges import Edge, HeadId, parse_head
from headattr.store.reader import Store
from headattr.store.rows import EdgeRow, OvRow
from headattr.store.whole_heads import sums_of_heads

_REMEMBERED = 1 << 16
"""Features of a source whose label and density are remembered."""


class SourceNames(NamedTuple):
    """How the features of one basis or output are named."""

    name: str
    kind: str
    """feature, token or unembed."""
    first: int
    """What an id in the store is counted from."""
    groups: tuple[tuple[int, int, int], ...]
    """(first id, features, layer) by the site that makes them; one group where there is one
    site."""
    label: Callable[[int], str | None]
    density: Callable[[int], float | None]


def edge(store: Store, prompt: int, edge: Edge) -> dict[str, Any]:
    """Why `edge` of `prompt` is there, and what it moves, as kept in the store.

    Raises UsageError for an edge that cannot exist, StoreError for one that was not kept.
    """
    row = store.edge(prompt, edge)
    plan = next(plan for plan in store.manifest["layers"] if plan["layer"] == edge.layer)
    output = plan["output"]
    return edge_answer(
        row,
        prompt,
        basis=names_of(store, plan["basis"]),
        output=None if output is None else names_of(store, output),
        read=plan["read"],
        ov_reason=plan["ov_reason"],
        notes=store.manifest["model"]["notes"],
    )


def query_edge(
    store: Store, prompt: int, head: str | HeadId, q_pos: int, k_pos: int
) -> dict[str, Any]:
    """`edge` with the head written L5H1: what the command `query edge` answers."""
    found = parse_head(head)
    return edge(store, prompt, Edge(found.layer, found.head, q_pos, k_pos))


def edge_answer(
    row: EdgeRow,
    prompt: int | None,
    *,
    basis: SourceNames,
    output: SourceNames | None,
    read: str | None,
    ov_reason: str | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """The answer for one edge, from its row and the names of its features; `notes`: what was
    converted or assumed about the model."""
    q_features = [feature_shape(basis, int(f), row.tokens[0]) for f in row.q_active.features]
    k_features = [feature_shape(basis, int(f), row.tokens[1]) for f in row.k_active.features]
    pairs = [
        {
            "q_feature": q_features[q],
            "k_feature": k_features[k],
            "value": float(value),
            "contrast": float(contrast),
        }
        for q, k, value, contrast in zip(
            row.q_slots.tolist(), row.k_slots.tolist(), row.values, row.pair_contrasts, strict=True
        )
        if q >= 0
    ]
    totals = {
        q_kind: {k_kind: float(row.totals[i, j]) for j, k_kind in enumerate(row.kinds)}
        for i, q_kind in enumerate(row.kinds)
    }
    named = [map(float, part) for part in (row.q_contrast_totals, row.k_contrast_totals)]
    q_contrasts = dict(zip(row.kinds, named[0], strict=True))
    k_contrasts = dict(zip((*row.kinds, "elsewhere"), named[1], strict=True))
    answer = {
        "prompt": prompt,
        **row.edge._asdict(),
        "q_token": row.tokens[0],
        "k_token": row.tokens[1],
        "score": row.score,
        "position_bias": 0.0,
        "score_capped": row.score_capped,
        "cap_ratio": row.score_capped / row.score if row.score else 1.0,
        "score_contrast": row.score_contrast,
        "pattern": row.pattern,
        "flagged": row.flagged,
        "qk": {
            "pairs": pairs,
            "totals": totals,
            "completeness": row.completeness,
            "feature_share": row.feature_share,
            "q_features": _sizes(q_features, row, "q"),
            "k_features": _sizes(k_features, row, "k"),
            "q_parts": _parts(row, "q"),
            "k_parts": _parts(row, "k"),
            "elsewhere": k_contrasts["elsewhere"],
            "contrast_totals": {"query": q_contrasts, "key": k_contrasts},
            "contrast_completeness": row.contrast_completeness,
        },
        "ov": [],
        "ov_reason": ov_reason,
        "notes": list(notes),
    }
    if row.ov is not None and output is not None:
        answer["ov"] = [_ov_answer(row, row.ov, k_features, output, read)]
    return answer


def _sizes(
    features: list[dict[str, Any]], row: EdgeRow, side: Literal["q", "k"]
) -> list[dict[str, Any]]:
    """The kept features of one side with what each does to the score."""
    active, slots = (row.q_active, row.q_top) if side == "q" else (row.k_active, row.k_top)
    columns = [getattr(row, f"{side}_{name}") for name in ("marginals", "contrasts", "ablations")]
    return [
        {
            **features[slot],
            "activation": float(active.acts[slot]),
            "marginal": float(marginal),
            "contrast": float(contrast),
            "ablation": float(ablation),
        }
        for slot, marginal, contrast, ablation in zip(slots.tolist(), *columns, strict=True)
        if slot >= 0
    ]


def _parts(row: EdgeRow, side: Literal["q", "k"]) -> list[dict[str, Any]]:
    """The strongest named components of one side among several of their kind."""
    columns = [getattr(row, f"{side}_part_{name}") for name in ("marginals", "contrasts")]
    places = getattr(row, f"{side}_parts").tolist()
    return [
        {
            "kind": row.parts[place][0],
            "name": row.parts[place][1],
            "marginal": float(marginal),
            "contrast": float(contrast),
        }
        for place, marginal, contrast in zip(places, *columns, strict=True)
        if place >= 0
    ]


def _ov_answer(
    row: EdgeRow, ov: OvRow, k_features: list[dict[str, Any]], output: SourceNames, read: str | None
) -> dict[str, Any]:
    def o_feature(slot: int) -> dict[str, Any]:
        return feature_shape(
            output, slot if row.o_active is None else int(row.o_active.features[slot]), None
        )

    return {
        "output": output.name,
        "read": read,
        "pairs": [
            {"v_feature": k_features[v], "o_feature": o_feature(o), "value": float(value)}
            for v, o, value in zip(ov.v_slots.tolist(), ov.o_slots.tolist(), ov.values, strict=True)
            if v >= 0
        ],
        "completeness": ov.completeness,
        "block_completeness": ov.block_completeness,
        "v_features": [
            {**k_features[v], "activation": float(row.k_active.acts[v]), "norm": float(norm)}
            for v, norm in zip(ov.v_top.tolist(), ov.v_norms, strict=True)
            if v >= 0
        ],
        "v_parts": [
            {"kind": row.parts[place][0], "name": row.parts[place][1], "norm": float(norm)}
            for place, norm in zip(ov.v_parts.tolist(), ov.v_part_norms, strict=True)
            if place >= 0
        ],
        "o_features": [
            {
                **o_feature(o),
                "read": float(value),
                "totals": {kind: float(part) for kind, part in zip(row.kinds, parts, strict=True)},
            }
            for o, value, parts in zip(ov.o_top.tolist(), ov.o_reads, ov.o_totals, strict=True)
            if o >= 0
        ],
    }


def feature_shape(names: SourceNames, kept: int, token: str | None = None) -> dict[str, Any]:
    """A feature, by its id in the store, as every answer has it."""
    feature = kept + names.first
    label = names.label(feature)
    if label is None and names.kind == "token":
        label = token
    return {
        "kind": "feature" if names.kind == "feature" else "token",
        "source": names.name,
        **_origin(names, feature),
        "id": feature,
        "label": label,
        "density": names.density(kept),
    }


def _origin(names: SourceNames, feature: int) -> dict[str, int | None]:
    """The layer that a feature comes from and, where a source has several, its index there."""
    for first, count, layer in names.groups if names.kind == "feature" else ():
        if first <= feature < first + count:
            several = {"index": feature - first} if len(names.groups) > 1 else {}
            return {"layer": layer, **several}
    return {"layer": None}


def names_of(store: Store, source: int) -> SourceNames:
    """How the features of one of a store's sources are named."""
    if source not in store.named:
        entry = store.manifest["sources"][source]
        counted = entry["kind"] != "unembed"
        store.named[source] = source_names(
            entry,
            lru_cache(_REMEMBERED)(lambda feature: store.label(source, feature)),
            lru_cache(_REMEMBERED)(
                lambda feature: store.density(source, feature) if counted else None
            ),
        )
    return store.named[source]


def source_names(
    entry: dict[str, Any],
    label: Callable[[int], str | None],
    density: Callable[[int], float | None],
) -> SourceNames:
    """Names for one entry of a manifest's sources."""
    kind = {"tokens": "token", "unembed": "unembed"}.get(entry["kind"], "feature")
    counts = [(group["features"], group["layer"]) for group in entry["groups"]]
    counts = counts or [(entry["n_features"], entry["layer"])]
    starts = [sum(count for count, _ in counts[:i]) for i in range(len(counts))]
    groups = tuple((start, *found) for start, found in zip(starts, counts, strict=True))
    return SourceNames(entry["name"], kind, entry["first"], groups, label, density)


def head_shares(store: Store, layer: int | None = None) -> dict[HeadId, dict[str, float]]:
    """Per head (of one layer), over all edges of all prompts: how much of the score its features
    explain; no head of a layer without positions.

    {"feature_share": 1 - sum (s - T_ff)^2 / sum s^2, "feature_share_centred": the same with row
    means removed, "sink_share": mean pattern mass on positions that swallow attention}.
    """
    answer: dict[HeadId, dict[str, float]] = {}
    for plan in store.manifest["layers"]:
        if layer in (None, plan["layer"]):
            for head, sums in zip(plan["heads"], sums_of_heads(store, plan["layer"]), strict=True):
                s2, rest, s2_centred, rest_centred, mass, positions = sums[2:].tolist()
                if positions:
                    answer[HeadId(plan["layer"], head)] = {
                        "feature_share": share_of(s2, rest),
                        "feature_share_centred": share_of(s2_centred, rest_centred),
                        "sink_share": mass / positions,
                    }
    return answer


def share_of(whole: float, rest: float) -> float:
    """1 - rest / whole: what is explained of a sum of squares; 0 where there is nothing."""
    return float(1 - rest / whole) if whole else 0.0
