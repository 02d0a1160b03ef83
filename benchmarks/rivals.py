"""The competitors of an op, on the same numbers: plain batched torch, bare products, a loop."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from clock import Work
from ops import OPS, again, calls_of
from torch import Tensor

from headattr.attribution.ov import output_side
from headattr.attribution.prepared import prepare
from headattr.attribution.sides import project
from headattr.attribution.task import LayerTask
from headattr.kernels.row_means import batched

KEYS = 32
"""Keys of a query that are one matrix product."""
LOOP_EDGES = 100
Select = Callable[[Tensor], object]


class Rival(NamedTuple):
    """Work, and how many edges it does."""

    edges: int
    work: Work


class Head(NamedTuple):
    """One head as plain lists, a row of features a position."""

    query: Tensor
    """[pos, slot, d], times the scale."""
    key: Tensor
    value: Tensor
    output: Tensor | None
    pattern: Tensor
    exact: Tensor
    """Keys in float64, [entry, d]."""
    columns: Tensor


def rivals(name: str, task: LayerTask) -> dict[str, Rival]:
    """Each competitor an op has, by name."""
    op, whole = OPS[name], name.startswith("whole layer")
    if op.function == "by_feature":
        return _of_row_sums(task)
    if op.function == "pair_contrasts":
        return _of_pair_contrasts(task)
    if op.function == "project":
        return _of_projection(task)
    heads = list(heads_of(task))
    parts = [name]
    if whole:
        parts = ["qk pairs" if op.rank == "value" else "contrast pairs"]
        parts += ["ov pairs"] if op.output else []
    products = [p for part in parts for p in (_PRODUCTS[part],)]
    edges = len(heads) * len(heads[0].key) * (len(heads[0].key) + 1) // 2

    def run(select: Select) -> Work:
        return lambda: [select(table) for of in products for head in heads for table in of(head)]

    few = spaced(len(heads[0].key), LOOP_EDGES)
    loops = [_LOOPS[part] for part in parts]
    return {
        "plain": Rival(edges, run(lambda table: table.abs().topk(task.topk, -1))),
        "products": Rival(edges, run(lambda table: None)),
        "loop": Rival(
            len(few),
            lambda: [_strongest(of(heads[0], q, k), task.topk) for of in loops for q, k in few],
        ),
    }


def spaced(length: int, most: int) -> list[tuple[int, int]]:
    """Some edges of a head, evenly from all."""
    q_pos, k_pos = torch.tril_indices(length, length)
    at = torch.linspace(0, len(q_pos) - 1, min(most, len(q_pos))).long()
    return list(zip(q_pos[at].tolist(), k_pos[at].tolist(), strict=True))


def heads_of(task: LayerTask) -> Iterator[Head]:
    weights, kept = task.weights, task.kept
    prepared = prepare(weights, task.components, task.directions, kept.resid_pre)
    length, dtype = len(kept.resid_pre), kept.resid_pre.dtype
    entries = {}
    for side in ("key", "value"):
        entries[side] = project(weights, side, 0, prepared, kept.rotary).entries.vectors
    lists = {
        side: found.to(dtype).view(length, -1, found.shape[1]) for side, found in entries.items()
    }
    allowed = weights.allowed(torch.arange(length), length)
    patterns = weights.pattern(weights.scores(kept.Q, kept.K), allowed)
    for head in task.heads:
        query = project(weights, "query", head, prepared, kept.rotary).entries.vectors
        query = (weights.scale * query).to(dtype).view(length, -1, query.shape[1])
        written = None
        if task.output is not None:
            side = output_side(task.output, every=False)
            rows = side.pushed(weights.writes.written[head])[side.columns]
            written = task.output.active.padded(rows * task.output.scale[:, None])
        yield Head(
            query, lists["key"], lists["value"], written, patterns[head],
            entries["key"], prepared.columns,
        )  # fmt: skip


def _qk(head: Head) -> Iterator[Tensor]:
    for q, turned in enumerate(head.query.transpose(1, 2)):
        for keys in head.key[: q + 1].split(KEYS):
            yield (keys.reshape(-1, keys.shape[-1]) @ turned).view(len(keys), -1)


def _ov(head: Head) -> Iterator[Tensor]:
    assert head.output is not None
    for q, turned in enumerate(head.output.transpose(1, 2)):
        weights = head.pattern[q, : q + 1].split(KEYS)
        for keys, weight in zip(head.value[: q + 1].split(KEYS), weights, strict=True):
            table = (keys.reshape(-1, keys.shape[-1]) @ turned).view(len(keys), -1)
            yield table * weight[:, None]


def _contrast(head: Head) -> Iterator[Tensor]:
    (length, n, d), features = head.key.shape, int(head.columns.max()) + 1
    exact, columns = head.exact.view(length, n, d), head.columns.view(length, n)
    for q, turned in enumerate(head.query.transpose(1, 2)):
        stop = (q + 1) * n
        weight = head.pattern[q, : q + 1].double().repeat_interleave(n)
        means = exact.new_zeros(features, d)
        means.index_add_(0, head.columns[:stop], weight[:, None] * head.exact[:stop])
        parts = exact[: q + 1].split(KEYS), columns[: q + 1].split(KEYS)
        for keys, which in zip(*parts, strict=True):
            differ = (keys - means[which]).to(head.query)
            yield (differ.reshape(-1, d) @ turned).view(len(keys), -1)


def _contrast_edge(head: Head, q: int, k: int) -> Tensor:
    n = head.key.shape[1]
    own, before = slice(k * n, (k + 1) * n), slice((q + 1) * n)
    same = (head.columns[before, None] == head.columns[own]).double()
    weight = head.pattern[q, : q + 1].double().repeat_interleave(n)
    mean = (same * weight[:, None]).T @ head.exact[before]
    return head.query[q] @ (head.exact[own] - mean).to(head.query).T


_PRODUCTS = {"qk pairs": _qk, "ov pairs": _ov, "contrast pairs": _contrast}
_LOOPS: dict[str, Callable[[Head, int, int], Tensor]] = {
    "qk pairs": lambda head, q, k: head.query[q] @ head.key[k].T,
    "ov pairs": lambda head, q, k: head.pattern[q, k] * head.value[k] @ head.output[q].T,
    "contrast pairs": _contrast_edge,
}


def _strongest(table: Tensor, topk: int) -> Tensor:
    index = table.abs().flatten().topk(topk).indices
    return table.flatten()[index]


def _of_row_sums(task: LayerTask) -> dict[str, Rival]:
    calls = calls_of(OPS["row sums"], task)
    edges = len(task.heads) * _edges(task)

    def products() -> None:
        for (keys, weight, Q, *_), _ in calls:
            stop = int(keys.ptr[weight.shape[1]])
            for some in keys.vectors[:stop].split(1 << 11):
                _ = some @ Q.T

    def loop() -> None:
        for (keys, weight, Q, features), _ in calls:
            for row, query in zip(weight, Q, strict=True):
                stop = int(keys.ptr[len(row)])
                of = row.repeat_interleave(keys.ptr[: len(row) + 1].diff())
                sums = row.new_zeros(features)
                sums.index_add_(0, keys.columns[:stop], keys.vectors[:stop] @ query * of)

    return {
        "plain": Rival(edges, again(batched.by_feature, calls)),
        "products": Rival(edges, products),
        "loop": Rival(edges, loop),
    }


def _of_pair_contrasts(task: LayerTask) -> dict[str, Rival]:
    calls = calls_of(OPS["pair contrasts"], task)
    (left, keys, rows, *of_edges), _ = calls[-1]
    at = torch.linspace(0, len(of_edges[0]) - 1, min(LOOP_EDGES // 4, len(of_edges[0]))).long()

    def loop() -> None:
        for edge in at.split(1):
            batched.pair_contrasts(left, keys, rows, *(part[edge] for part in of_edges))

    return {
        "plain": Rival(len(task.heads) * _edges(task), again(batched.pair_contrasts, calls)),
        "loop": Rival(len(at), loop),
    }


def _of_projection(task: LayerTask) -> dict[str, Rival]:
    calls = [arguments for arguments, _ in calls_of(OPS["projection"], task)]
    maps = [weights.folded[side][head] for weights, side, head, *_ in calls]
    prepared, active = calls[0][3], task.components.active
    used, edges = task.directions[prepared.used].double(), len(task.heads) * _edges(task)

    def some(entries: slice) -> None:
        rows = task.directions[active.ids[entries]].double() * prepared.coefs[entries, None]
        for W in maps:
            _ = rows @ W

    def by(step: int) -> Work:
        starts = range(0, len(active.ids), step)
        return lambda: [some(slice(start, start + step)) for start in starts]

    return {
        "plain": Rival(edges, by(2048)),
        "products": Rival(edges, lambda: [used @ W for W in maps]),
        "loop": Rival(edges, by(int(active.counts[0]))),
    }


def _edges(task: LayerTask) -> int:
    length = len(task.kept.resid_pre)
    return length * (length + 1) // 2
