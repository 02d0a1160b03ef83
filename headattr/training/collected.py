"""What labels need of sparse activations, prompt by prompt, in memory that the texts do not grow:
the strongest places of each feature, how often it fires, and quantiles of how strongly.

Quantiles are counted in buckets of the upper 16 bits of a float32: right to 0.4 %. Activations are
taken by size; those of abstopk have signs.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headattr.basis.active import ActiveFeatures
from headattr.training.labels import TopWindows

QUANTILES = (0.5, 0.9, 0.99)
WINDOW = 64
"""A feature has at most one place in so many tokens of a prompt."""
_PENDING = 1 << 21  # entries that wait to be merged


class Collected:
    """Of one dictionary, over any number of prompts."""

    def __init__(self, features: int, ranks: int = 20, early: int = 8) -> None:
        """`ranks`: places kept a feature; those before position `early` come last."""
        self.features, self.ranks, self.early = features, ranks, early
        self.active = torch.zeros(features, dtype=torch.long)
        self.strongest = torch.zeros(features)
        self.prompts = self.positions = 0
        self._places = _Places.none()
        self._waiting: list[_Places] = []
        self._keys = torch.zeros(0, dtype=torch.long)
        """feature << 16 | bucket, ascending, and how many entries are in each."""
        self._counts = torch.zeros(0, dtype=torch.long)
        self._new: list[Tensor] = []

    def add(self, active: ActiveFeatures, counted: Bool[Tensor, "pos"]) -> None:
        """The next prompt, of which the positions `counted` count."""
        kept = counted[active.positions]
        ids, pos = active.ids[kept].cpu(), active.positions[kept].cpu()
        acts = active.acts[kept].abs().float().cpu()
        self.active += torch.bincount(ids, minlength=self.features)
        self.strongest.scatter_reduce_(0, ids, acts, "amax")
        self.positions += int(counted.sum())
        window = torch.full_like(ids, self.prompts)
        self._waiting.append(_Places(ids, acts, window, pos).best(1, self.early, WINDOW))
        self._new.append(ids << 16 | acts.view(torch.int32).long() >> 16)
        self.prompts += 1
        if sum(map(len, self._new)) > _PENDING:
            self._merge()

    def top(self) -> TopWindows:
        """The strongest places; `window` is the prompt, in the order in which they came."""
        self._merge()
        places, rank = self._places, self._places.ranks()
        shape = max(1, self.ranks), self.features
        activation = torch.zeros(shape)
        window, pos = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        activation[rank, places.ids] = places.acts
        window[rank, places.ids], pos[rank, places.ids] = places.windows, places.positions
        return TopWindows(activation, window, pos, self.active, self.strongest, self.positions)

    def quantiles(self) -> Float[Tensor, "features quantile"]:
        """QUANTILES of each feature's activations where it is active: the least that so large a
        share does not exceed; 0 where it never is."""
        self._merge()
        ids = self._keys >> 16
        values = ((self._keys & 0xFFFF) << 16 | 0x8000).int().view(torch.float32)
        values = torch.minimum(values, self.strongest[ids])
        whole = self._counts.cumsum(0)
        before = torch.cat([self.active.new_zeros(1), self.active.cumsum(0)])[ids]
        share = (whole - before).double() / self.active[ids].clamp(min=1)
        found = torch.zeros(self.features, len(QUANTILES))
        if not len(ids):
            return found
        for at, quantile in enumerate(QUANTILES):
            enough = share >= quantile - 1e-12
            first = enough & ~torch.cat([enough.new_zeros(1), enough[:-1] & (ids[1:] == ids[:-1])])
            found[ids[first], at] = values[first]
        return found

    def _merge(self) -> None:
        """Take in what waits."""
        if not self._new:
            return
        places = _Places.joined([self._places, *self._waiting])
        self._places = places.best(self.ranks, self.early, None)
        keys, counts = torch.cat(self._new).unique(return_counts=True)
        merged, inverse = torch.cat([self._keys, keys]).unique(return_inverse=True)
        total = torch.zeros(len(merged), dtype=torch.long)
        total.scatter_add_(0, inverse, torch.cat([self._counts, counts]))
        self._keys, self._counts = merged, total
        self._waiting, self._new = [], []


class _Places:
    """Places where features fire."""

    def __init__(
        self,
        ids: Int[Tensor, "n"],
        acts: Float[Tensor, "n"],
        windows: Int[Tensor, "n"],
        positions: Int[Tensor, "n"],
    ) -> None:
        self.ids, self.acts, self.windows, self.positions = ids, acts, windows, positions

    @staticmethod
    def none() -> "_Places":
        """No place."""
        empty = torch.zeros(0, dtype=torch.long)
        return _Places(empty, torch.zeros(0), empty, empty)

    @staticmethod
    def joined(parts: "list[_Places]") -> "_Places":
        """One list after the other."""
        names = ("ids", "acts", "windows", "positions")
        return _Places(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def best(self, ranks: int, early: int, block: int | None) -> "_Places":
        """The strongest `ranks` of each feature (of each feature and block of positions), late ones
        first, strongest first, by feature."""
        group = self.ids
        if block is not None:
            group = group * (1 << 20) + self.positions // block
        order = self.acts.argsort(descending=True, stable=True)
        for key in ((self.positions < early).long(), group):
            order = order[key[order].argsort(stable=True)]
        found = self._taken(order)
        return found._taken(found._ranks(group[order]) < ranks)

    def ranks(self) -> Int[Tensor, "n"]:
        """The place of each among those of its feature, where features follow each other."""
        return self._ranks(self.ids)

    @staticmethod
    def _ranks(group: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        _, counts = group.unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        return torch.arange(len(group)) - starts.repeat_interleave(counts)

    def _taken(self, index: Tensor) -> "_Places":
        return _Places(
            self.ids[index], self.acts[index], self.windows[index], self.positions[index]
        )
