"""Cross-entropy of the next token, with vectors put in at some sites."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headattr.model.load import LoadedModel
from headattr.model.sites import Site
from headattr.model.splice import run_spliced

_NUMBERS = 1 << 24  # of logits in float64 at once


_WORTH = 0.01
"""What ablation has to cost, of the clean loss, for a share of it to mean something."""


class Losses:
    """Sums over prompts: clean, and of every set of sites spliced and ablated."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of the sets."""
        self.clean, self.tokens = 0.0, 0
        self.sums = {name: [0.0, 0.0] for name in names}

    def add_clean(self, losses: Sequence[float], tokens: Sequence[int]) -> None:
        """Sums of some prompts, and how many tokens each predicts."""
        for loss, count in zip(losses, tokens, strict=True):
            self.clean += loss
            self.tokens += count

    def add(self, name: str, spliced: Sequence[float], ablated: Sequence[float]) -> None:
        """Sums of the same prompts for one set."""
        for at, losses in enumerate((spliced, ablated)):
            for loss in losses:
                self.sums[name][at] += loss

    def answer(self) -> dict[str, Any]:
        """{"loss_clean", "loss": {name: {"spliced", "ablated", "recovered"}}}, in nats a token;
        null where no token is predicted, `recovered` also where the mean in its place does not cost
        1 % of the clean loss: there is nothing to recover."""
        if not self.tokens:
            return {"loss_clean": None, "loss": {}}
        clean = self.clean / self.tokens
        found = {}
        for name, sums in self.sums.items():
            spliced, ablated = (total / self.tokens for total in sums)
            lost = ablated - clean
            recovered = (ablated - spliced) / lost if lost > _WORTH * clean else None
            found[name] = {"spliced": spliced, "ablated": ablated, "recovered": recovered}
        return {"loss_clean": clean, "loss": found}


def losses_of(
    model: LoadedModel,
    ids: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"],
    put: Mapping[Site, Float[Tensor, "batch pos _"]],
    where: Bool[Tensor, "batch pos"],
    numbers: int,
) -> list[float]:
    """The sum of -log p(next token) of each prompt, with `put` in place; see `run_spliced`."""
    logits = run_spliced(model, ids, mask, put, where, numbers=numbers)
    found = []
    for row, tokens, kept in zip(logits, ids.to(model.device), mask.to(model.device), strict=True):
        row, tokens = row[kept], tokens[kept]
        step, total = max(1, _NUMBERS // row.shape[1]), 0.0
        for start in range(0, len(tokens) - 1, step):
            some = slice(start, min(start + step, len(tokens) - 1))
            following = tokens[some.start + 1 : some.stop + 1]
            exact = row[some].double() if row.device.type != "mps" else row[some].float()
            total += float(torch.nn.functional.cross_entropy(exact, following, reduction="sum"))
        found.append(total)
    return found
