"""What a trained dictionary is worth on positions that it was not trained on, as it is saved."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.active import ActiveFeatures
from headattr.basis.coder import Coder
from headattr.basis.component import sparse_sum
from headattr.basis.dictionary import Dictionary
from headattr.training.harvest import Rows

DENSE = 0.1
"""A feature that is active at more than this share of the positions is dense."""
_POSITIONS_AT_ONCE = 2048
_WINDOWS_AT_ONCE = 16


class Scores(NamedTuple):
    """Measured on held-out positions."""

    explained_variance: dict[str, float]
    """By site written: 1 - |x - reconstruction|^2 / |x - mean|^2, both summed over positions."""
    l0: float
    """Mean number of active features at a position."""
    dead_share: float
    """Share of the features that were active nowhere."""
    dense_share: float
    """Share of the features that were active at more than a tenth of the positions."""
    positions: int


def coders_of(dictionaries: Sequence[Dictionary]) -> list[Coder]:
    """The dictionaries at work, in float32 on the CPU."""
    return [Coder(d, torch.float32, torch.device("cpu")) for d in dictionaries]


@torch.no_grad()
def score(coders: Sequence[Coder], rows: Rows) -> Scores:
    """Scores of dictionaries that belong together."""
    features = sum(coder.dictionary.features for coder in coders)
    fired = torch.zeros(features, dtype=torch.long)
    written = sorted({s for coder in coders for s in coder.dictionary.writes if s is not None})
    sums = {site: [0.0, 0.0] for site in written}
    means = {site: _mean(rows, site) for site in written}
    for chosen in torch.arange(len(rows)).split(_POSITIONS_AT_ONCE):
        xs = dict(zip(rows.sites, rows.batch(chosen), strict=True))
        active = [encoded(coder, xs) for coder in coders]
        starts = _starts(coders)
        ids = torch.cat([part.ids + i for part, i in zip(active, starts, strict=True)])
        fired += torch.bincount(ids, minlength=features)
        for site in written:
            x = xs[site].double()
            missed = x - reconstructed(coders, active, site, xs[site])
            sums[site][0] += float(missed.square().sum())
            sums[site][1] += float((x - means[site]).square().sum())
    n = len(rows)
    return Scores(
        {str(site): 1 - missed / total for site, (missed, total) in sums.items()},
        float(fired.sum()) / n,
        float((fired == 0).float().mean()),
        float((fired > DENSE * n).float().mean()),
        n,
    )


def encoded(coder: Coder, xs: dict[Any, Tensor]) -> ActiveFeatures:
    """The active features of some positions; `xs`: the vectors of each site."""
    return coder.encode([xs[site] for site in coder.dictionary.reads])


def reconstructed(
    coders: Sequence[Coder],
    active: Sequence[ActiveFeatures],
    site: object,
    x: Float[Tensor, "pos d"],
) -> Float[Tensor, "pos d"]:
    """What they make of one site, float64."""
    total = torch.zeros_like(x, dtype=torch.float64)
    for coder, part in zip(coders, active, strict=True):
        if site in coder.dictionary.writes:
            index = coder.dictionary.writes.index(site)  # type: ignore[arg-type]
            total += sparse_sum(part, part.acts, coder.directions(index))
            total += coder.bias(index, x)
    return total


@torch.no_grad()
def windows_of(coder: Coder, rows: Rows) -> Iterator[tuple[Float[Tensor, "window pos f"], int]]:
    """Activations of one dictionary, some windows at a time, zero at positions that do not count;
    with the number of those that do, as `labels.top_windows` takes them."""
    counts, index = torch.zeros_like(rows.counted), rows.counted.nonzero()
    place = index[rows.kept]
    counts[place[:, 0], place[:, 1]] = True
    start = 0
    for kept in counts.split(_WINDOWS_AT_ONCE):
        n = int(kept.sum())
        acts = torch.zeros(*kept.shape, coder.dictionary.features)
        if n:
            xs = dict(zip(rows.sites, rows.batch(torch.arange(start, start + n)), strict=True))
            active = encoded(coder, xs)
            dense = torch.zeros(n, coder.dictionary.features)
            dense[active.positions, active.ids] = active.acts
            acts[kept] = dense
        yield acts, n
        start += n


def _mean(rows: Rows, site: object) -> Float[Tensor, "d"]:
    part = rows.values[rows.sites.index(site)]  # type: ignore[arg-type]
    total = torch.zeros(part.shape[1], dtype=torch.float64)
    for kept in rows.kept.split(_POSITIONS_AT_ONCE):
        total += part[kept].double().sum(0)
    return total / len(rows)


def _starts(coders: Sequence[Coder]) -> list[int]:
    """The first id of each."""
    counts = [coder.dictionary.features for coder in coders]
    return [sum(counts[:i]) for i in range(len(counts))]
