"""How much memory a run may work in, and what every chunk size follows from.

The budget is for what comes on top of the loaded model and its dictionaries. A prompt costs what
grows with its length (what is captured, its components); the rest goes to blocks, which fit what
is left: the tokens of a forward pass, the rows of attention that are there at once, the layers
captured in one pass, the queries and edges attributed at once.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headattr.errors import UsageError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for ending, base in (("iB", 1024), ("B", 1000), ("", 1024))
}
SMALLEST = 16 << 20
"""A budget below this bounds the blocks alone: the process itself moves by as much."""
LIBRARIES = 150 << 20
"""What a run loads beside model and dictionaries, measured."""


def parse_bytes(text: str | int) -> int:
    """`8GiB`, `500MB`, `2G` (of 1024), or a number of bytes; raises UsageError for anything
    else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    size = units.get(match[2].lower()) if match else None
    if match is None or size is None or float(match[1]) * size < 1:
        raise UsageError(f"--memory {text!r}: expected a size such as 8GiB or 500MB")
    return int(float(match[1]) * size)


def show_bytes(size: int | float) -> str:
    """A size as people write it: 3.2 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def free_memory() -> int:
    """Bytes of main memory that can be had now, within the limits of a container."""
    found = [16 << 30]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="ascii"))
        found = [int(match[1]) << 10] if match else found
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = (group / "memory.current").read_text(encoding="ascii").strip()
        found.append(int(limit) - int(used))
    except (OSError, ValueError):  # no such group, or no limit
        pass
    return max(0, min(found))


class Shape(NamedTuple):
    """What the memory of a prompt depends on, beside its length."""

    number: int
    """Bytes of a number of the model."""
    d_model: int
    d_mlp: int
    d_head: int
    n_heads: int
    n_kv_heads: int
    slots: int
    """Active features a position, at most."""
    reads: int
    """Output features a position; 0 without an output."""
    features: int
    """Of the largest dictionary."""
    layers: int
    """To capture."""
    sites: int
    """Whose vectors are kept."""
    parts: int = 0
    """Named components of a basis that are members of a kind."""
    together: int = 1
    """Sites that one dictionary, or one layer's basis, needs at once."""

    def captured(self, layers: int, sites: int) -> int:
        """Bytes that a token leaves behind."""
        a_layer = 3 * self.d_model + (self.n_heads + 2 * self.n_kv_heads) * self.d_head
        return self.number * (layers * a_layer + sites * self.d_model)

    def passing(self) -> int:
        """Bytes a token needs while a layer of the model runs."""
        heads = (2 * self.n_heads + 2 * self.n_kv_heads) * self.d_head
        return self.number * (5 * self.d_model + 3 * self.d_mlp + heads)

    def attributed(self, length: int) -> int:
        """Bytes that grow with the length of the prompt that is attributed, one layer at a time."""
        exact, kinds = 8, 3
        a_token = (5 + (self.reads > 0)) * self.d_model
        a_token += 3 * 2 * (kinds + 1) * self.d_head + 8 * (self.slots + self.reads)
        a_token += self.slots * self.d_head
        used = min(self.features, length * max(self.slots, self.reads))
        tables = (4 + (self.reads > 0)) * self.d_head * used
        parts = self.parts * (self.number * self.d_model + 4 * exact * self.d_head)
        return exact * (length * a_token + tables) + length * parts


class Budget(NamedTuple):
    """What a run may use, and of what it is made."""

    total: int
    shape: Shape
    asked: int = 0
    """What was asked for, of which `total` is for work."""

    def layers_at_once(self, tokens: int) -> int:
        """Layers to capture in one pass over `tokens` tokens."""
        one = tokens * self.shape.captured(1, 1)
        room = int(0.35 * self.total) - tokens * self.shape.captured(0, self.shape.together - 1)
        return max(1, min(self.shape.layers, room // max(1, one)))

    def sites_at_once(self, tokens: int) -> int:
        """Sites to keep in one pass."""
        shape = self.shape
        found = int(0.35 * self.total) // max(1, tokens * shape.captured(0, 1))
        return max(shape.together, min(shape.sites, found))

    def attention_numbers(self) -> int:
        """Numbers of an attention matrix that are there at once."""
        return max(1, self.total // 8 // (4 * self.shape.number))

    def encode_numbers(self) -> int:
        """Numbers of a dictionary's activations that are there at once."""
        return max(1, self.total // 8 // (6 * self.shape.number))

    def shared_bytes(self) -> int:
        """Bytes for what prompts share: dictionaries through the weights of a layer's heads."""
        return self.total // 8

    def block_bytes(self, length: int) -> int:
        """Bytes for the blocks of a prompt's attribution."""
        layers = self.layers_at_once(length)
        few = min(self.shape.together + 1, self.shape.sites)
        sites = self.shape.sites if layers == self.shape.layers else few
        fixed = length * self.shape.captured(layers, sites) + self.shape.attributed(length)
        fixed += self.shared_bytes()
        return max(self.total - fixed, self.total // 4)

    def batches(self, lengths: Sequence[int], most: int, more: int = 0) -> Iterator[range]:
        """Prompts of one forward pass, in order: at most `most`, and what is left of them takes at
        most a third of the budget; one at least. `more`: bytes that a token takes on top."""
        shape = self.shape
        a_token = shape.captured(shape.layers, shape.sites) + shape.passing() + more
        start = 0
        while start < len(lengths):
            stop, longest = start + 1, lengths[start]
            while stop < min(len(lengths), start + most):
                longest = max(longest, lengths[stop])
                if (stop + 1 - start) * longest * a_token > self.total // 3:
                    break
                stop += 1
            yield range(start, stop)
            start = stop

    def needed(self, length: int) -> int:
        """Bytes that a prompt of this length needs whatever the blocks, one layer at a time."""
        shape = self.shape
        few = min(shape.together + 1, shape.sites)
        running = length * (shape.passing() + shape.captured(1, shape.together)) + 4 * length**2
        done = length * shape.captured(1, few) + shape.attributed(length)
        return max(running, done)

    def check(self, lengths: Mapping[int, int]) -> None:
        """Raises UsageError for prompts that the budget cannot hold; `lengths`: tokens by id."""
        if not lengths:
            return
        prompt = max(lengths, key=lambda prompt: lengths[prompt])
        needed = int(1.2 * self.needed(lengths[prompt]))
        needed += max(self.asked - self.total, 0)
        if needed > max(self.asked, self.total, SMALLEST):
            raise UsageError(
                f"prompt {prompt} of {lengths[prompt]:,} tokens needs about {show_bytes(needed)} "
                f"beside the model, and --memory is {show_bytes(self.asked or self.total)} (by "
                "default half of what is free): raise it, or shorten the prompt"
            )


def budget_for(shape: Shape, asked: str | None, free: int | None = None) -> Budget:
    """What `--memory` leaves for work; by default half of what is free.

    Compiled kernels, HDF5 and the allocator take LIBRARIES of it, a quarter at most.
    """
    total = parse_bytes(asked) if asked is not None else free or free_memory() // 2
    return Budget(total - min(LIBRARIES, total // 4), shape, total)


def widest_layer(config: Any) -> int:
    """The width of a model's feed-forward layer, as its configuration says."""
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    return 4 * config.hidden_size
