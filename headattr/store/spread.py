"""Worst and median of more numbers than are kept."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Spread:
    """Worst and median of numbers from 0 on that come in parts, without keeping them.

    The median is that of a histogram over the upper half of their bits as float32: to 1 in 128.
    """

    def __init__(self) -> None:
        """Of no numbers yet."""
        self._counts = np.zeros(1 << 16, np.int64)
        self._worst = 0.0

    def add(self, numbers: NDArray[Any]) -> None:
        """More numbers; what is not finite is left out."""
        finite = np.abs(numbers[np.isfinite(numbers)]).astype(np.float32).ravel()
        self._counts += np.bincount(finite.view(np.uint32) >> 16, minlength=1 << 16)
        self._worst = max(self._worst, float(finite.max(initial=0)))

    @property
    def worst(self) -> float | None:
        """The largest, None of none."""
        return self._worst if self._counts.any() else None

    @property
    def median(self) -> float | None:
        """The middle one, None of none."""
        total = int(self._counts.sum())
        if not total:
            return None
        at = int(np.searchsorted(np.cumsum(self._counts), (total + 1) // 2))
        return float(np.array(at << 16 | 1 << 15, np.uint32).view(np.float32)) if at else 0.0

    def as_dict(self) -> dict[str, float | None]:
        """{"worst", "median"}."""
        return {"worst": self.worst, "median": self.median}
