"""Rows of a matrix that may be larger than memory: read and converted when they are asked for."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

WHOLE = 1 << 28
"""Numbers of dictionaries that belong together and are converted once and kept; larger ones stay as
they are stored (on disk, where the file is mapped), their rows converted whenever they are used."""


class LazyRows(ABC):
    """A matrix [row, column] of which only some rows are wanted at a time."""

    dtype: torch.dtype
    device: torch.device

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""

    @abstractmethod
    def some(self, index: Int[Tensor, "n"]) -> Float[Tensor, "n column"]:
        """The rows of these indexes."""

    def __len__(self) -> int:
        """Number of rows."""
        return self.shape[0]

    def __getitem__(self, index: Int[Tensor, "n"] | slice | int) -> Tensor:
        """Some rows, in the type and on the device of the whole; one row for a number."""
        if isinstance(index, int):
            return self.some(torch.tensor([index], device=self.device))[0]
        if isinstance(index, slice):
            index = torch.arange(*index.indices(len(self)), device=self.device)
        return self.some(index)


Matrix = Float[Tensor, "features d"] | LazyRows
"""What gives rows: a tensor, or what stands for one."""


class StoredRows(LazyRows):
    """Rows as a file keeps them, converted when they are used."""

    def __init__(
        self,
        stored: Shaped[Tensor, "row column"],
        factor: Float[Tensor, "row"] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`stored` in any type, row by row times `factor`."""
        self.stored, self.factor = stored, factor
        self.dtype, self.device = dtype, device

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.stored.shape[0], self.stored.shape[1]

    def some(self, index: Int[Tensor, "n"]) -> Float[Tensor, "n column"]:
        """The rows of these indexes."""
        found = self.stored[index.to(self.stored.device)].to(self.device, self.dtype)
        return found if self.factor is None else found * self.factor[index][:, None]


class JoinedRows(LazyRows):
    """Several matrices, one under the other; a part that is None is zeros."""

    def __init__(
        self,
        parts: Sequence[Matrix | None],
        counts: Sequence[int],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`counts`: rows of each part."""
        self.parts, self.counts = tuple(parts), tuple(counts)
        self.starts = [sum(self.counts[:i]) for i in range(len(counts))]
        self.width, self.dtype, self.device = width, dtype, device

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return sum(self.counts), self.width

    def some(self, index: Int[Tensor, "n"]) -> Float[Tensor, "n column"]:
        """The rows of these indexes."""
        out = torch.zeros(len(index), self.width, dtype=self.dtype, device=self.device)
        for start, count, part in zip(self.starts, self.counts, self.parts, strict=True):
            if part is not None:
                inside = ((index >= start) & (index < start + count)).nonzero().flatten()
                if len(inside):
                    out[inside] = part[index[inside] - start]
        return out


class SummedRows(LazyRows):
    """The sum of some matrices of one shape."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        """One at least."""
        self.parts = tuple(parts)
        self.dtype, self.device = parts[0].dtype, parts[0].device

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.parts[0].shape[0], self.parts[0].shape[1]

    def some(self, index: Int[Tensor, "n"]) -> Float[Tensor, "n column"]:
        """The rows of these indexes."""
        found = self.parts[0][index]
        for part in self.parts[1:]:
            found = found + part[index]
        return found


class MappedRows(LazyRows):
    """Rows that are changed, each by itself, when they are used."""

    def __init__(self, rows: Matrix, change: Callable[[Tensor], Tensor]) -> None:
        """`change`: [n, column] -> [n, column]."""
        self.rows, self.change = rows, change
        self.dtype, self.device = rows.dtype, rows.device

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows.shape[0], self.rows.shape[1]

    def some(self, index: Int[Tensor, "n"]) -> Float[Tensor, "n column"]:
        """The rows of these indexes."""
        return self.change(self.rows[index])


class ThroughRows(LazyRows):
    """Rows of a matrix times another."""

    def __init__(self, rows: Matrix, through: Float[Tensor, "d column"]) -> None:
        """`rows @ through`, as rows are asked for."""
        self.rows, self.through = rows, through
        self.dtype, self.device = through.dtype, through.device

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.rows), self.through.shape[1]

    def some(self, index: Int[Tensor, "n"]) -> Float[Tensor, "n column"]:
        """The rows of these indexes."""
        return self.rows[index].to(self.through) @ self.through


def mapped(rows: Matrix, change: Callable[[Tensor], Tensor]) -> Matrix:
    """Rows changed each by itself: now where they are there, later where they are not."""
    if isinstance(rows, LazyRows):
        return MappedRows(rows, change)
    return change(rows).contiguous()


def matrix(
    stored: Shaped[Tensor, "row column"],
    dtype: torch.dtype,
    device: torch.device,
    factor: Float[Tensor, "row"] | None = None,
    *,
    whole: bool = True,
) -> Matrix:
    """A matrix `whole` and converted, or as rows that are read when they are asked for."""
    if not whole:
        return StoredRows(stored, factor, dtype, device)
    found = stored.to(device, dtype)
    return found if factor is None else found * factor[:, None]
