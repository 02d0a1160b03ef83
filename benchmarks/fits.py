"""How a cost grows: slopes in log-log."""

import math
from collections.abc import Sequence


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent p of cost = c size^p, by least squares of the logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
