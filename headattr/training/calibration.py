"""The threshold that batchtopk is saved with: the one at which as many features are active at a
position, on average over positions that were trained on, as in training."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.training.harvest import Rows
from headattr.training.recipe import Recipe

POSITIONS = 65_536
"""At most so many positions decide the threshold."""


def calibration_batches(rows: Rows, recipe: Recipe) -> Iterator[tuple[Float[Tensor, "b d"], ...]]:
    """The positions that decide it, drawn with the recipe's seed, a batch at a time."""
    generator = torch.Generator().manual_seed(recipe.seed)
    chosen = torch.randperm(len(rows), generator=generator)[: calibration_positions(rows)]
    for some in chosen.split(recipe.batch_size):
        yield rows.batch(some)


def calibration_positions(rows: Rows) -> int:
    """How many there are."""
    return min(POSITIONS, len(rows))


class Largest:
    """The `count` largest of numbers that come batch by batch, and the next one; positive ones."""

    def __init__(self, count: int) -> None:
        """None has come yet."""
        self.count = count
        self._kept = torch.zeros(0)
        self._bound = 0.0

    def add(self, values: Float[Tensor, "b features"]) -> None:
        """The next batch."""
        kept = torch.cat([self._kept, values[values > self._bound]])
        if len(kept) > self.count + 1:
            kept = kept.topk(self.count + 1, sorted=False).values
            self._bound = float(kept.min())
        self._kept = kept

    def threshold(self) -> float:
        """What exactly `count` exceed, half way to the next; 0 where no more than `count` are
        positive."""
        if len(self._kept) <= self.count:
            return 0.0
        last, following = self._kept.double().sort(descending=True).values[-2:].tolist()
        return (last + following) / 2
