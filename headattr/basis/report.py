"""How well a dictionary fits what it was given: a wrong scaling or a wrong site shows at once.

    L0                    active features a position
    explained variance    1 - sum |x - made|^2 / sum |x - mean|^2      by site, one mean over all

Positions that swallow attention are not counted: their norms are of another size.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headattr.basis.active import ACTIVATIONS, ActiveFeatures
from headattr.basis.component import sum_dtype
from headattr.model.capture import PromptCapture
from headattr.model.sites import Site

DENSE = 0.1
"""A feature that is active at more than this share of the positions is dense."""


class SiteSums:
    """One site: float64 sums over counted positions, of any number of prompts."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        self.positions = 0
        self.squares, self.errors = 0.0, 0.0
        self.total: Tensor | None = None

    def add(self, x: Float[Tensor, "pos d"], made: Float[Tensor, "pos d"]) -> None:
        """Some positions: what is there, and what was made of it."""
        x, made = (part.to(sum_dtype(part.device)) for part in (x, made))
        self.positions += len(x)
        self.squares += float(x.square().sum())
        self.errors += float((x - made).square().sum())
        self.total = x.sum(0) if self.total is None else self.total + x.sum(0)

    def merge(self, other: "SiteSums") -> None:
        """Add what another has counted."""
        self.positions += other.positions
        self.squares += other.squares
        self.errors += other.errors
        if other.total is not None:
            self.total = other.total if self.total is None else self.total + other.total

    @property
    def mean(self) -> Float[Tensor, "d"]:
        """The mean vector."""
        assert self.total is not None
        return self.total / self.positions

    @property
    def explained_variance(self) -> float | None:
        """None where nothing varies."""
        if self.total is None or not self.positions:
            return None
        around = self.squares - float(self.total.square().sum()) / self.positions
        if around <= 1e-12 * self.squares:  # what rounding leaves of a constant
            return None
        return 1 - self.errors / around


class Tally:
    """What a source makes of prompts, added up prompt by prompt: the order of the prompts is all
    that the sums depend on."""

    def __init__(self, source: Any) -> None:
        """`source` says which features are active and reconstructs what it writes."""
        self.source = source
        self.positions = self.left_out = 0
        self.fired = torch.zeros(source.about.n_features, dtype=torch.long)
        """At how many positions each feature is active."""
        self.sites = {site: SiteSums() for site in source.writes}

    @property
    def needed(self) -> tuple[Site, ...]:
        """What it needs of a prompt."""
        return tuple(dict.fromkeys([*self.source.sites, *self.source.writes]))

    def add(
        self, prompt: PromptCapture, active: ActiveFeatures, counted: Bool[Tensor, "pos"]
    ) -> dict[Site, Float[Tensor, "pos d"]]:
        """One prompt, of which the positions `counted` count; gives what was made of it."""
        self.positions += int(counted.sum())
        self.left_out += int((~counted).sum())
        ids = active.ids[counted[active.positions]]
        self.fired += torch.bincount(ids, minlength=len(self.fired)).cpu()
        made = self.source.reconstruct(prompt, active)
        for site, sums in self.sites.items():
            sums.add(prompt.at(site)[counted], made[site][counted])
        return made

    def merge(self, other: "Tally") -> None:
        """Add what another tally of the same source has counted."""
        self.positions += other.positions
        self.left_out += other.left_out
        self.fired += other.fired
        for site, sums in self.sites.items():
            sums.merge(other.sites[site])

    @property
    def l0(self) -> float:
        """Mean active features a position."""
        return int(self.fired.sum()) / max(1, self.positions)

    @property
    def dead(self) -> float:
        """Share of the features that are active nowhere."""
        return float((self.fired == 0).double().mean())

    @property
    def dense(self) -> float:
        """Share of the features that are active at more than a tenth of the positions."""
        return float((self.fired > DENSE * self.positions).double().mean())

    @property
    def groups(self) -> list[dict[str, Any]]:
        """By group of features: {"site", "layer", "features", "l0", "dead"}."""
        found, start = [], 0
        for group in self.source.about.groups:
            fired = self.fired[start : start + group.features]
            start += group.features
            found.append(
                {
                    **group._asdict(),
                    "l0": int(fired.sum()) / max(1, self.positions),
                    "dead": float((fired == 0).double().mean()),
                }
            )
        return found

    @property
    def report(self) -> dict[str, Any]:
        """{"positions", "left_out", "l0", "explained_variance": {site: a number or null}}."""
        return {
            "positions": self.positions,
            "left_out": self.left_out,
            "l0": self.l0,
            "explained_variance": {
                str(s): sums.explained_variance for s, sums in self.sites.items()
            },
        }


def measure(
    source: Any,
    prompts: Iterable[PromptCapture],
    counted: Mapping[int, Bool[Tensor, "pos"]],
    numbers: int = ACTIVATIONS,
) -> Tally:
    """A source over some captured prompts; `counted`: by the prompt's id, the positions that
    count; `numbers`: activations that are there at once."""
    tally = Tally(source)
    for prompt in prompts:
        tally.add(prompt, source.active(prompt, numbers), counted[prompt.id])
    return tally


def stream_of(source: Any) -> Site:
    """The residual site whose norms say which positions count."""
    return [site for site in source.sites if site.kind == "resid_pre"][-1]
