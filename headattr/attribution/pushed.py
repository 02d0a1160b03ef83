"""A dictionary through the weights of a layer's heads: each row once, for all prompts of a run."""

from collections.abc import Hashable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.basis.rows import Matrix
from headattr.model.head import HeadWeights, Writes

_BLOCK = 256
"""Rows that are made together, always the same ones: what a row is to the last bit does not depend
on which prompts came before."""


class Pushed:
    """Rows of a dictionary times the matrices of a layer, made for all of them when a row, or one
    of its block, is first asked for."""

    def __init__(
        self,
        rows: Matrix,
        maps: Mapping[Hashable, Float[Tensor, "d_model d_head"]],
    ) -> None:
        """`maps`: the matrices by name; results have their type."""
        self.rows, self.maps = rows, dict(maps)
        self._known = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        self._tables = {name: W.new_empty(len(rows), W.shape[1]) for name, W in self.maps.items()}

    def table(self, name: Hashable, ids: Int[Tensor, "n"]) -> Float[Tensor, "n d_head"]:
        """Some rows through one matrix."""
        for block in (ids[~self._known[ids]] // _BLOCK).unique().tolist():
            some = slice(block * _BLOCK, (block + 1) * _BLOCK)
            for key, W in self.maps.items():
                self._tables[key][some] = self.rows[some].to(W) @ W
            self._known[some] = True
        return self._tables[name][ids]


def read_maps(
    weights: HeadWeights, heads: tuple[int, ...], *, values: bool
) -> dict[Hashable, Tensor]:
    """What turns directions into queries and keys of some heads, and `values` of every group."""
    groups = sorted({weights.kv_head(head) for head in heads})
    maps: dict[Hashable, Tensor] = {("query", h): weights.folded["query"][h] for h in heads}
    maps |= {("key", g): weights.folded["key"][g] for g in groups}
    if values:
        maps |= {("value", g): weights.folded["value"][g] for g in range(len(weights.W_V))}
    return maps


def written_maps(writes: Writes, heads: tuple[int, ...]) -> dict[Hashable, Tensor]:
    """What turns output features into what they read of some heads' values."""
    return {("output", head): writes.written[head].T for head in heads}
