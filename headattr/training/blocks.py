"""Transcoders and crosscoders in training: groups of features that read some sites and write some.

    v_f  = |d_f| (sum over sites r read  c_r x_r . e_f,r + b_f)    |d_f|: sum over sites written
    a_f  = v_f where it is chosen, else 0                                 of |d_f,s|
    y_s  = sum_f a_f d_f,s / |d_f| + b_s,   compared with c_s x_s

c_s brings the mean norm of a site to sqrt(d), so that sites weigh alike. A feature is chosen by v,
what it writes in all, whatever the scale of its rows: the k largest of a position (topk), the
batch_size * k largest of a batch (batchtopk; saved with the threshold at which training positions
have k on average), or those above a learnt threshold (jumprelu). What a group does not read or
write has no parameters.

Saved is the same in the model's units: c is folded into the weights, rows are divided by |d_f|, and
activations are v times the mean of 1 / c_s: what a feature writes in all, measured in the typical
size of its sites. Where one site is written, its decoder rows have norm 1.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headattr.basis.dictionary import Activation, Tensors
from headattr.training.calibration import Largest

PRE_ACT = 3e-6
"""Of the loss that brings dead features of jumprelu back to their thresholds (Anthropic, January
2025); Adam makes steps of a full learning rate of it where there is no other."""
SMALL = 0.1
"""Norm of the first decoder rows where nothing is known of them; others begin at 1."""
BANDWIDTH = 0.1
"""Of the gradient of a threshold."""


class Group(NamedTuple):
    """Features that read the same sites; sites are counted in the order of the batch."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    features: int


class Sparsity(NamedTuple):
    """How features are chosen."""

    kind: str
    """batchtopk, topk or jumprelu."""
    k: int
    aux: float
    """Weight of the loss of dead features."""
    coefficient: float
    """Weight of the sparsity loss of jumprelu."""


class Moments(NamedTuple):
    """What training brings to one scale."""

    scales: tuple[float, ...]
    """sqrt(d) / mean norm, by site."""
    means: tuple[Float[Tensor, "d"], ...]


class Passed(NamedTuple):
    """One batch, forward."""

    loss: Float[Tensor, ""]
    fired: Bool[Tensor, "features"]
    l0: float
    explained_variance: float


class BlockCoder(nn.Module):
    """Groups in training."""

    limit: Tensor
    """The threshold that batchtopk is saved with."""

    def __init__(
        self, groups: Sequence[Group], moments: Moments, sparsity: Sparsity, seed: int
    ) -> None:
        """Biases at the means; a feature starts with one random direction at all of its sites, or
        with a small one of its own where it writes other sites than it reads."""
        super().__init__()
        self.groups, self.sparsity = tuple(groups), sparsity
        self.scales = moments.scales
        self.written = sorted({s for group in groups for s in group.writes})
        generator = torch.Generator().manual_seed(seed)
        weights: dict[str, nn.Parameter] = {}
        b_enc: list[Any] = []
        means = [c * mean for c, mean in zip(moments.scales, moments.means, strict=True)]
        for g, group in enumerate(groups):
            first = _directions(group.features, len(means[group.reads[0]]), generator)
            W_enc = first / len(group.reads)
            W_dec = first
            if not set(group.reads) & set(group.writes):
                width = len(means[group.writes[0]])
                W_dec = SMALL * _directions(group.features, width, generator)
            weights |= {f"enc_{g}_{s}": nn.Parameter(W_enc.clone()) for s in group.reads}
            weights |= {f"dec_{g}_{s}": nn.Parameter(W_dec.clone()) for s in group.writes}
            b_enc.append(-sum(W_enc @ means[s] for s in group.reads))
        for s in self.written:
            weights[f"out_{s}"] = nn.Parameter(means[s].clone())
        self.weights = nn.ParameterDict(weights)
        self.b_enc = nn.Parameter(torch.cat(b_enc))
        if sparsity.kind == "jumprelu":
            self.threshold = nn.Parameter(torch.zeros_like(self.b_enc))
        else:
            self.register_buffer("limit", torch.zeros((), dtype=torch.float64))

    @property
    def features(self) -> int:
        """Of all groups."""
        return sum(group.features for group in self.groups)

    @torch.no_grad()
    def prepare(self, batch: Sequence[Float[Tensor, "b d"]]) -> None:
        """Thresholds of jumprelu begin where the first batch has k features a position."""
        if self.sparsity.kind == "jumprelu":
            values = self.values(self.scaled(batch), self.norms())
            self.threshold.fill_(kth_of_batch(values, self.sparsity.k))

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Sequence[Float[Tensor, "b d"]]], positions: int) -> None:
        """The threshold of batchtopk becomes the one at which these have k features a position."""
        largest, norms = Largest(self.sparsity.k * positions), self.norms()
        for batch in batches:
            largest.add(self.values(self.scaled(batch), norms))
        self.limit.fill_(largest.threshold())

    def forward(
        self,
        batch: Sequence[Float[Tensor, "b d"]],
        dead: Bool[Tensor, "features"],
        warm: float,
    ) -> Passed:
        """Loss of a batch: squared errors summed over sites, the mean over positions, and what
        keeps features sparse and alive. `warm`: share of the sparsity loss that counts."""
        xs = self.scaled(batch)
        norms = self.norms()
        values = self.values(xs, norms)
        chosen, sparsity_loss = self._chosen(values, dead, warm)
        out = self.decode(chosen / norms)
        errors = {s: xs[s] - out[s] for s in self.written}
        loss = _squares(errors) + sparsity_loss
        if self.sparsity.kind != "jumprelu" and bool(dead.any()):
            loss = loss + self._revived(values, norms, errors, dead)
        with torch.no_grad():
            spread = {s: xs[s] - xs[s].mean(0) for s in self.written}
            explained = 1 - float(_squares(errors) / _squares(spread))
            l0 = float((chosen > 0).sum() / len(chosen))
        return Passed(loss, (chosen > 0).any(0), l0, explained)

    def scaled(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """Each site at norm sqrt(d) on average."""
        return [x * scale for x, scale in zip(batch, self.scales, strict=True)]

    def norms(self) -> Float[Tensor, "features"]:
        """|d_f|, the sum over the sites that a feature writes."""
        return torch.cat(
            [
                torch.stack([self.weights[f"dec_{g}_{s}"].norm(dim=1) for s in group.writes]).sum(0)
                for g, group in enumerate(self.groups)
            ]
        ).clamp_min(1e-12)

    def values(self, xs: Sequence[Tensor], norms: Tensor) -> Float[Tensor, "b features"]:
        """v of scaled inputs, before any choice."""
        pre = [
            sum(xs[s] @ self.weights[f"enc_{g}_{s}"].T for s in group.reads)
            for g, group in enumerate(self.groups)
        ]
        return (torch.cat(pre, 1) + self.b_enc) * norms  # type: ignore[arg-type]

    def decode(self, acts: Float[Tensor, "b features"]) -> dict[int, Tensor]:
        """What is written at each site, biases included."""
        parts = self._spread(acts)
        return {s: parts[s] + self.weights[f"out_{s}"] for s in self.written}

    def _spread(self, acts: Tensor) -> dict[int, Tensor]:
        counts = [group.features for group in self.groups]
        found: dict[int, Tensor] = {}
        for g, (group, part) in enumerate(zip(self.groups, acts.split(counts, 1), strict=True)):
            for s in group.writes:
                here = part @ self.weights[f"dec_{g}_{s}"]
                found[s] = found[s] + here if s in found else here
        return found

    def _chosen(self, values: Tensor, dead: Tensor, warm: float) -> tuple[Tensor, Tensor]:
        """Activations, and the loss that holds them at k."""
        k, none = self.sparsity.k, values.new_zeros(())
        if self.sparsity.kind == "jumprelu":
            return self._above_threshold(values, dead, warm)
        acts = values.relu()
        if self.sparsity.kind == "topk":
            best = acts.topk(k, dim=1)
            return torch.zeros_like(acts).scatter(1, best.indices, best.values), none
        flat = acts.flatten()
        best = flat.topk(min(k * len(acts), len(flat)), sorted=False)
        return torch.zeros_like(flat).scatter(0, best.indices, best.values).view_as(acts), none

    def _above_threshold(self, values: Tensor, dead: Tensor, warm: float) -> tuple[Tensor, Tensor]:
        """Quadratic in L0, as Gemma Scope 2; gradients as Rajamanoharan et al. 2024."""
        from sae_lens.saes.jumprelu_sae import JumpReLU, Step

        with torch.no_grad():
            self.threshold.clamp_(min=0.0)
        k = self.sparsity.k
        chosen = JumpReLU.apply(values, self.threshold, BANDWIDTH, False)
        l0 = Step.apply(values, self.threshold, BANDWIDTH, False).sum(-1)  # type: ignore[union-attr]
        loss = 2 / k * (l0 - k).square().mean()
        loss = self.sparsity.coefficient * warm * loss
        short = ((self.threshold - values).relu() * dead).sum(-1).mean()
        return chosen, loss + PRE_ACT * self.sparsity.aux * short  # type: ignore[return-value]

    def _revived(
        self, values: Tensor, norms: Tensor, errors: dict[int, Tensor], dead: Tensor
    ) -> Tensor:
        """Dead features are asked for what the living ones left (Gao et al. 2024)."""
        most = max(1, sum(error.shape[1] for error in errors.values()) // 2)
        count = int(dead.sum())
        asked = torch.where(dead, values, -torch.inf).topk(min(most, count), sorted=False)
        acts = torch.zeros_like(values).scatter(1, asked.indices, asked.values.relu())
        made = self._spread(acts / norms)
        left = {s: made[s] - error.detach() for s, error in errors.items()}
        return self.sparsity.aux * min(1.0, count / most) * _squares(left)

    @torch.no_grad()
    def saved(self) -> tuple[list[Tensors], Activation]:
        """The tensors of each group in the model's units, and what makes activations of them."""
        unit = sum(1 / self.scales[s] for s in self.written) / len(self.written)
        counts = [group.features for group in self.groups]
        norms, biases = self.norms().split(counts), self.b_enc.split(counts)
        limit = self._limit()
        limits = None if limit is None else (limit * unit).float().split(counts)
        found = []
        for g, group in enumerate(self.groups):
            size = norms[g][:, None]
            W_enc = [
                self.weights[f"enc_{g}_{s}"] * (size * unit * self.scales[s]) for s in group.reads
            ]
            W_dec = [
                self.weights[f"dec_{g}_{s}"] / (size * unit * self.scales[s]) for s in group.writes
            ]
            b_dec = [
                self.weights[f"out_{s}"] / self.scales[s] if g == 0 else None for s in group.writes
            ]
            threshold = None if limits is None else limits[g].clone()
            b_enc = (biases[g] * norms[g] * unit).detach()
            found.append(Tensors(tuple(W_enc), b_enc, tuple(W_dec), tuple(b_dec), threshold))
        kind = "topk" if self.sparsity.kind == "topk" else "jumprelu"
        return found, Activation(kind, self.sparsity.k if kind == "topk" else None)

    def _limit(self) -> Float[Tensor, "features"] | None:
        """Thresholds of v."""
        if self.sparsity.kind == "topk":
            return None
        if self.sparsity.kind == "jumprelu":
            return self.threshold.clamp_min(0.0)
        return torch.full_like(self.b_enc, float(self.limit))


def _directions(
    features: int, width: int, generator: torch.Generator
) -> Float[Tensor, "features width"]:
    W = torch.randn(features, width, generator=generator)
    return W / W.norm(dim=1, keepdim=True)


def _squares(parts: dict[int, Float[Tensor, "b d"]]) -> Float[Tensor, ""]:
    """Summed over sites, the mean over positions."""
    return torch.stack([part.square().sum(-1).mean() for part in parts.values()]).sum()


def kth_of_batch(values: Float[Tensor, "b features"], k: int) -> float:
    """What k values a position exceed on average; at least 0."""
    flat = values.flatten()
    return max(0.0, float(flat.topk(min(k * len(values), len(flat)), sorted=False).values.min()))
