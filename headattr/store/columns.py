"""The columns of an edge, one line each: field of the result tables -> dataset of a shard.

Writer, reader and check go through these; FORMAT.md says what each holds.
"""

from typing import Literal, NamedTuple


class Column(NamedTuple):
    """Where a column is kept in its layer's group, and how."""

    dataset: str
    kind: Literal["scalar", "array", "rounded", "q", "k", "o", "part"]
    """A float an edge, an array of floats, an array rounded as pair values are, slots in an
    active list (q_pos in the basis, k_pos in the basis, q_pos in the output), or places among the
    layer's parts."""


EDGE: dict[str, Column] = {
    "score": Column("score", "scalar"),
    "pattern": Column("pattern", "scalar"),
    "completeness": Column("completeness", "scalar"),
    "feature_share": Column("feature_share", "scalar"),
    "score_contrast": Column("score_contrast", "scalar"),
    "contrast_completeness": Column("contrast_completeness", "scalar"),
    "totals": Column("qk/totals", "array"),
    "values": Column("qk/value", "rounded"),
    "pair_contrasts": Column("qk/contrast", "rounded"),
    "q_slots": Column("qk/q_slots", "q"),
    "k_slots": Column("qk/k_slots", "k"),
    "q_contrast_totals": Column("qk/q_contrast_totals", "array"),
    "k_contrast_totals": Column("qk/k_contrast_totals", "array"),
    "q_top": Column("qk/q_top", "q"),
    "q_marginals": Column("qk/q_marginals", "array"),
    "q_contrasts": Column("qk/q_contrasts", "array"),
    "q_ablations": Column("qk/q_ablations", "array"),
    "k_top": Column("qk/k_top", "k"),
    "k_marginals": Column("qk/k_marginals", "array"),
    "k_contrasts": Column("qk/k_contrasts", "array"),
    "k_ablations": Column("qk/k_ablations", "array"),
}
PARTS: dict[str, Column] = {
    "q_parts": Column("qk/q_parts", "part"),
    "q_part_marginals": Column("qk/q_part_marginals", "array"),
    "q_part_contrasts": Column("qk/q_part_contrasts", "array"),
    "k_parts": Column("qk/k_parts", "part"),
    "k_part_marginals": Column("qk/k_part_marginals", "array"),
    "k_part_contrasts": Column("qk/k_part_contrasts", "array"),
}
OV_PARTS: dict[str, Column] = {
    "v_parts": Column("ov/v_parts", "part"),
    "v_part_norms": Column("ov/v_part_norms", "array"),
}
"""Only where kinds of the basis have members."""
CAPPED: dict[str, Column] = {"score_capped": Column("score_capped", "scalar")}
"""Only where the layer caps its scores; elsewhere it is the score."""
OV: dict[str, Column] = {
    "values": Column("ov/value", "rounded"),
    "v_slots": Column("ov/v_slots", "k"),
    "o_slots": Column("ov/o_slots", "o"),
    "completeness": Column("ov/completeness", "scalar"),
    "v_top": Column("ov/v_top", "k"),
    "v_norms": Column("ov/v_norms", "array"),
    "o_top": Column("ov/o_top", "o"),
    "o_reads": Column("ov/o_reads", "array"),
    "o_totals": Column("ov/o_totals", "array"),
}


def edge_columns(*, capped: bool, parts: bool) -> dict[str, Column]:
    """The columns of a layer, by field."""
    return EDGE | (CAPPED if capped else {}) | (PARTS if parts else {})


def ov_columns(*, parts: bool) -> dict[str, Column]:
    """The columns of what a layer's edges move."""
    return OV | (OV_PARTS if parts else {})
