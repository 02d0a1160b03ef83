"""The columns of an edge, one line each: field of the result tables -> dataset of a shard.

Writer, reader, index, export and check go through these; FORMAT.md says what each holds.
"""

from typing import Literal, NamedTuple

from headattr.store.coding import COARSE_BITS, PAIR_BITS, ROUGH_BITS, SUM_BITS


class Column(NamedTuple):
    """Where a column is kept in its layer's group, and how."""

    dataset: str
    kind: Literal["scalar", "array", "falling", "q", "k", "o", "part"]
    """A float an edge, an array of floats, an array whose sizes fall (kept as codes), slots in an
    active list (q_pos in the basis, k_pos in the basis, q_pos in the output), or places among the
    layer's parts."""
    bits: int | None = None
    """Bits of mantissa that floats are rounded to; None: as computed."""
    compact: int | None = None
    """The same in a compact store, where it is not `bits`."""

    @property
    def first(self) -> "Column":
        """Where the codes of a falling column begin."""
        return Column(f"{self.dataset}_first", "scalar")


EDGE: dict[str, Column] = {
    "score": Column("score", "scalar"),
    "pattern": Column("pattern", "scalar"),
    "completeness": Column("completeness", "scalar", COARSE_BITS),
    "feature_share": Column("feature_share", "scalar"),
    "score_contrast": Column("score_contrast", "scalar"),
    "contrast_completeness": Column("contrast_completeness", "scalar", COARSE_BITS),
    "totals": Column("qk/totals", "array"),
    "values": Column("qk/value", "falling"),
    "pair_contrasts": Column("qk/contrast", "array", PAIR_BITS, ROUGH_BITS),
    "q_slots": Column("qk/q_slots", "q"),
    "k_slots": Column("qk/k_slots", "k"),
    "q_contrast_totals": Column("qk/q_contrast_totals", "array", compact=SUM_BITS),
    "k_contrast_totals": Column("qk/k_contrast_totals", "array", compact=SUM_BITS),
    "q_top": Column("qk/q_top", "q"),
    "q_marginals": Column("qk/q_marginals", "array"),
    "q_contrasts": Column("qk/q_contrasts", "array", compact=COARSE_BITS),
    "q_ablations": Column("qk/q_ablations", "array", compact=COARSE_BITS),
    "k_top": Column("qk/k_top", "k"),
    "k_marginals": Column("qk/k_marginals", "array"),
    "k_contrasts": Column("qk/k_contrasts", "array", compact=COARSE_BITS),
    "k_ablations": Column("qk/k_ablations", "array", compact=COARSE_BITS),
}
BY_CONTRAST: dict[str, Column] = {
    "values": Column("qk/value", "array", PAIR_BITS),
    "pair_contrasts": Column("qk/contrast", "falling"),
}
"""Where pairs are ranked by contrast, their contrasts fall, not their values."""
PARTS: dict[str, Column] = {
    "q_parts": Column("qk/q_parts", "part"),
    "q_part_marginals": Column("qk/q_part_marginals", "array"),
    "q_part_contrasts": Column("qk/q_part_contrasts", "array", compact=COARSE_BITS),
    "k_parts": Column("qk/k_parts", "part"),
    "k_part_marginals": Column("qk/k_part_marginals", "array"),
    "k_part_contrasts": Column("qk/k_part_contrasts", "array", compact=COARSE_BITS),
}
OV_PARTS: dict[str, Column] = {
    "v_parts": Column("ov/v_parts", "part"),
    "v_part_norms": Column("ov/v_part_norms", "array", compact=COARSE_BITS),
}
"""Only where kinds of the basis have members."""
CAPPED: dict[str, Column] = {"score_capped": Column("score_capped", "scalar")}
"""Only where the layer caps its scores; elsewhere it is the score."""
OV: dict[str, Column] = {
    "values": Column("ov/value", "falling"),
    "v_slots": Column("ov/v_slots", "k"),
    "o_slots": Column("ov/o_slots", "o"),
    "completeness": Column("ov/completeness", "scalar", COARSE_BITS),
    "v_top": Column("ov/v_top", "k"),
    "v_norms": Column("ov/v_norms", "array", compact=COARSE_BITS),
    "o_top": Column("ov/o_top", "o"),
    "o_reads": Column("ov/o_reads", "array", compact=SUM_BITS),
    "o_totals": Column("ov/o_totals", "array", compact=ROUGH_BITS),
}

Rank = Literal["value", "contrast"]


def edge_columns(*, capped: bool, parts: bool, rank: Rank) -> dict[str, Column]:
    """The columns of a layer, by field."""
    return (
        EDGE
        | (BY_CONTRAST if rank == "contrast" else {})
        | (CAPPED if capped else {})
        | (PARTS if parts else {})
    )


def ov_columns(*, parts: bool) -> dict[str, Column]:
    """The columns of what a layer's edges move."""
    return OV | (OV_PARTS if parts else {})


RoleName = Literal["q", "k", "v", "o"]


class Role(NamedTuple):
    """One of the places that a feature has in an edge, and how strong it is there."""

    name: RoleName
    table: Literal["qk", "ov"]
    top: str
    """Field of the slots of the strongest features."""
    strength: str
    """Field of the number that says how strong."""


def roles(rank: Rank, *, moved: bool) -> tuple[Role, ...]:
    """The roles of features in a layer's edges; `moved`: it has an output."""
    field = "contrasts" if rank == "contrast" else "marginals"
    seen = tuple(Role(side, "qk", f"{side}_top", f"{side}_{field}") for side in ("q", "k"))
    if not moved:
        return seen
    return (*seen, Role("v", "ov", "v_top", "v_norms"), Role("o", "ov", "o_top", "o_reads"))
