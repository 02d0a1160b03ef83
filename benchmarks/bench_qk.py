"""Edges a second of the QK path, beside bare matrix products and a loop over edges, in one run.

    python benchmarks/bench_qk.py            one thread, process time, medians of five

Sizes: d_model 768, 12 heads, d_head 64, 128 tokens, 64 active features a token, top 20 by |value|,
float32. Prints one JSON line; the figures are kept in RESULTS.md with date, commit and hardware.
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headattr.attribution.contrast import rows_of
from headattr.attribution.prepared import prepare
from headattr.attribution.qk import QkHead, Rank, qk_edges
from headattr.attribution.sides import project
from headattr.basis.component import ActiveFeatures, decompose
from headattr.kernels.pair_topk import batched as plain
from headattr.kernels.pair_topk import dispatch
from headattr.model.head import HeadWeights, Norm

D_MODEL, HEADS, D_HEAD, LENGTH, ACTIVE, D_SAE, TOPK = 768, 12, 64, 128, 64, 24576, 20
MEASURED_HEADS, LOOP_EDGES, CHUNK, REPEATS = 3, 500, 512, 5


def make_layer() -> HeadWeights:
    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape) / D_MODEL**0.5

    norm = Norm("layer", torch.rand(D_MODEL) + 0.5, torch.randn(D_MODEL), 1e-5)
    biases = [torch.randn(HEADS, D_HEAD) for _ in range(3)]
    weights = [weight(HEADS, D_MODEL, D_HEAD) for _ in range(3)]
    W_O = weight(HEADS, D_HEAD, D_MODEL)
    return HeadWeights(0, norm, *weights, W_O, *biases, torch.zeros(D_MODEL), D_HEAD**-0.5)


def median_rate(edges: int, work: Callable[[], object]) -> float:
    """Edges a second of process time, the median of five runs after one that warms up."""
    work()
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return edges / statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = make_layer()
    x, directions = torch.randn(LENGTH, D_MODEL), torch.randn(D_SAE, D_MODEL) / D_MODEL**0.5
    ids = torch.stack(
        [torch.randperm(D_SAE)[:ACTIVE].sort().values for _ in range(LENGTH)]
    ).flatten()
    active = ActiveFeatures(torch.arange(LENGTH + 1) * ACTIVE, ids, torch.rand(len(ids)))
    ones, zeros = torch.ones(LENGTH), torch.zeros_like(x)
    components = decompose(x, active, ones, directions, zeros)
    prepared = prepare(weights, components, directions, x)
    q_pos, k_pos = torch.tril_indices(LENGTH, LENGTH)
    edges = len(q_pos) * MEASURED_HEADS
    allowed = weights.allowed(torch.arange(LENGTH), LENGTH)
    own = torch.randn(2, HEADS, LENGTH, D_HEAD, dtype=torch.float64)

    def sides(head: int) -> tuple:
        return tuple(project(weights, side, head, prepared, None) for side in ("query", "key"))

    given = [sides(head) for head in range(MEASURED_HEADS)]

    def project_all() -> None:
        for head in range(MEASURED_HEADS):
            sides(head)

    def batched(rank: Rank) -> None:
        for head in range(MEASURED_HEADS):
            (query, key), (Q, K) = given[head], own[:, head]
            scores = weights.scale * Q @ K.T
            rows = rows_of(weights, key, ids, scores, weights.pattern(scores[None], allowed)[0])
            shared = QkHead(weights, query, key, Q, K, weights.scale, active.padded(ids), rows)
            for q, k in zip(q_pos.split(CHUNK), k_pos.split(CHUNK), strict=True):
                qk_edges(shared, q, k, topk=TOPK, top_marginals=8, rank=rank)

    def pairs_alone(path: Callable[..., object]) -> None:
        for query, key in given:
            for q, k in zip(q_pos.split(CHUNK), k_pos.split(CHUNK), strict=True):
                path(
                    query.features, key.features, query.counts, key.counts, TOPK,
                    left_at=q, right_at=k,
                )  # fmt: skip

    def rows_of_products(select: Callable[[torch.Tensor], object]) -> None:
        """The products of a query's features with those of 32 keys at once, as one matrix
        product."""
        for query, key in given:
            for row in range(LENGTH):
                turned = query.features[row].T
                for keys in key.features[: row + 1].split(32):
                    select((keys.reshape(-1, D_HEAD) @ turned).view(len(keys), -1))

    query, key = given[0]

    def loop() -> None:
        for q, k in zip(q_pos[:LOOP_EDGES].tolist(), k_pos[:LOOP_EDGES].tolist(), strict=True):
            table = weights.scale * query.features[q] @ key.features[k].T
            index = table.abs().flatten().topk(TOPK).indices
            table.flatten()[index]

    rates = {
        "all of it": median_rate(edges, lambda: batched("value")),
        "all of it, ranked by contrast": median_rate(edges, lambda: batched("contrast")),
        "pairs alone": median_rate(edges, lambda: pairs_alone(dispatch.topk_pairs)),
        "pairs alone, without numba": median_rate(edges, lambda: pairs_alone(plain.topk_pairs)),
        "plain batched torch and topk": median_rate(
            edges, lambda: rows_of_products(lambda table: table.abs().topk(TOPK, -1))
        ),
        "bare products": median_rate(edges, lambda: rows_of_products(lambda table: None)),
        "projection of both sides, for all edges": median_rate(edges, project_all),
        "loop over edges": median_rate(LOOP_EDGES, loop),
    }
    ratios = {
        f"pairs alone / {name}": round(rates["pairs alone"] / rates[name], 2)
        for name in list(rates)
        if name != "pairs alone"
    }
    machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    figures = {name: round(rate) for name, rate in rates.items()}
    print(json.dumps({"edges_per_second": figures, "ratios": ratios, "machine": machine}))
    print(
        f"sizes: see {Path(__file__).name}; all of it: totals, marginals, contrasts, ablations",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
