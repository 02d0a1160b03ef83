"""How many queries and edges of a head are attributed at once, from the memory there is."""

from typing import Literal, NamedTuple

Rank = Literal["value", "contrast"]

_MOST_ROWS, _MOST_EDGES = 128, 2048
"""Queries and edges at once, at most: more no longer stay in the processor's caches."""


class Sizes(NamedTuple):
    """What the memory of a block depends on."""

    length: int
    """Tokens of the prompt."""
    used: int
    """Features that are active somewhere in it."""
    slots: int
    """Active features a position, at most."""
    reads: int
    """Output features a query, at most; 0 without an output."""
    every: bool
    """Are these all features of the output, shared by all queries?"""
    d_head: int
    kinds: int
    parts: int
    """Members of kinds that have several."""
    topk: int
    top_marginals: int
    rank: Rank
    products: bool
    """Does the kernel hold the products of an edge in memory?"""


class Blocks(NamedTuple):
    """What is at work at once, at most."""

    rows: int
    """Queries whose scores, pattern and sums are there."""
    kept: int
    """Edges whose results are held before they are handed on."""
    edges: int
    """Edges whose temporaries are there."""
    bytes: int
    """Of all three."""


def blocks_of(sizes: Sizes, memory: int) -> Blocks:
    """Blocks of about `memory` bytes in all; one row and one edge at least."""
    slots, d, top = max(1, sizes.slots), sizes.d_head, sizes.top_marginals
    a_row = 8 * (10 * sizes.length + 3 * sizes.used + 3 * slots * d)
    a_row += 16 * sizes.parts * d
    rows = max(1, min(_MOST_ROWS, memory // 4 // a_row))
    a_result = 2 * (16 * min(top, sizes.parts) + 40 * sizes.topk + 32 * sizes.kinds**2 + 100 * top)
    kept = max(1, memory // 8 // a_result)
    pairs = slots if sizes.rank == "contrast" else 0
    an_edge = 8 * (20 * slots + 10 * sizes.parts + 3 * pairs * d) + 16 * slots * d + 24 * sizes.topk
    if sizes.reads:
        an_edge += 4 * sizes.reads * (6 if sizes.every else 12 * d)
        an_edge += 12 * top * d
    if sizes.products:
        an_edge += 16 * slots * max(slots, sizes.reads)
    edges = max(1, min(_MOST_EDGES, memory // 4 // an_edge))
    kept_most = min(kept, rows * sizes.length)
    return Blocks(rows, kept, edges, rows * a_row + kept_most * a_result + edges * an_edge)
