"""The sizes that are measured, and how strongly their features are active."""

from typing import Literal, NamedTuple

Spread = Literal["heavy", "even"]
SPREADS: dict[Spread, str] = {
    "heavy": "heavy-tailed activations, rand()**-0.7",
    "even": "equal activations, Gaussian directions: norms nearly equal, so little can be pruned",
}


class Size(NamedTuple):
    """One layer; only the query heads that share one key head are there."""

    d_model: int
    heads: int
    """Query heads of one key and value head."""
    d_head: int
    length: int
    active: int
    """Features a position, of the basis and of the output."""
    features: int
    topk: int = 20
    norm: Literal["layer", "rms"] = "rms"
    rotary: bool = True
    softcap: float | None = None

    @property
    def edges(self) -> int:
        """All of the measured heads."""
        return self.heads * self.length * (self.length + 1) // 2

    def __str__(self) -> str:
        """As a report says it."""
        return (
            f"d_model {self.d_model}, {self.heads} query head(s) on one key head, d_head "
            f"{self.d_head}, T {self.length}, {self.active} of {self.features:,} features active, "
            f"top {self.topk}, float32"
        )


SETTING = Size(768, 1, 64, 128, 64, 24_576, norm="layer", rotary=False)
SIZES = {
    "setting": SETTING,  # one of 12 heads
    "gemma-2-2b": Size(2304, 2, 256, 32, 64, 16_384, softcap=50.0),  # one of 4 groups
    "llama-3-8b": Size(4096, 4, 128, 32, 64, 32_768),  # one of 8 groups
}
TINY = Size(32, 1, 8, 6, 4, 40, topk=3)
"""For the tests of the suite itself."""
