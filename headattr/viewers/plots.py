"""One attribution as a picture.

Where the query looks, the feature pairs behind it, and what is moved.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headattr.edges import HeadId
from headattr.viewers.text import name_of

_COLUMNS = 64
_BLUE, _RED, _INK = "#2b6cb0", "#c05621", "#1a202c"


def draw_edge(
    path: Path,
    answer: dict[str, Any],
    tokens: Sequence[str],
    keys: dict[int, float],
    *,
    pairs: int = 10,
) -> None:
    """Draw an edge answer to a PNG.

    `tokens` are the display texts of the prompt, `keys` the pattern of the query over its kept
    keys.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13, 6.6), dpi=130)
    grid = figure.add_gridspec(2, 2, height_ratios=(0.35, 2.4), hspace=0.3, wspace=0.75)
    _draw_text(figure.add_subplot(grid[0, :]), answer, tokens, keys)
    qk = answer["qk"]
    shown = [
        (name_of(p["q_feature"]), name_of(p["k_feature"]), p["value"]) for p in qk["pairs"][:pairs]
    ]
    _draw_pairs(
        figure.add_subplot(grid[1, 0]),
        shown,
        f"Why it looks there: query feature by key feature\nscore {answer['score']:.2f}, "
        "features give "
        f"{_features_total(qk['totals']):.2f}; error of the table {qk['completeness']:.0e}",
    )
    axis = figure.add_subplot(grid[1, 1])
    if answer["ov"]:
        ov = answer["ov"][0]
        shown = [
            (name_of(p["v_feature"]), name_of(p["o_feature"]), p["value"])
            for p in ov["pairs"][:pairs]
        ]
        title = (
            f"What it moves: value feature → feature of {ov['output']}\n"
            f"error {ov['completeness']:.0e}; shading above: weight of every kept key"
        )
        _draw_pairs(axis, shown, title, arrow="→")
    else:
        axis.set_axis_off()
        axis.text(0, 0.5, answer["ov_reason"], wrap=True, color=_INK)
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    plt.close(figure)


def _features_total(totals: dict[str, dict[str, float]]) -> float:
    kind = "feature" if "feature" in totals else "token"
    return totals[kind][kind]


def _draw_text(
    axis: Any, answer: dict[str, Any], tokens: Sequence[str], keys: dict[int, float]
) -> None:
    """The prompt up to a little beyond the query, each key shaded by its weight."""
    head = HeadId(answer["layer"], answer["head"])
    stop = min(len(tokens), answer["q_pos"] + 16)
    widths = [max(1, len(token.replace("\n", "↵"))) for token in tokens[:stop]]
    x, y = _flow(widths)
    for pos in range(stop):
        box: dict[str, Any] = {"boxstyle": "square,pad=0.12", "lw": 0, "fc": "none"}
        if pos in keys:
            box |= {"fc": _BLUE, "alpha": 0.08 + 0.6 * keys[pos]}
        if pos in (answer["q_pos"], answer["k_pos"]):
            box |= {"lw": 1.6, "ec": _RED if pos == answer["q_pos"] else _BLUE, "alpha": None}
            box["fc"] = "#fbd38d" if pos == answer["q_pos"] else "#90cdf4"
        colour = _INK if pos <= answer["q_pos"] else "#a0aec0"
        text = tokens[pos].replace("\n", "↵")
        axis.text(
            x[pos],
            -y[pos],
            text,
            family="monospace",
            fontsize=11,
            color=colour,
            bbox=box,
            va="center",
        )
    axis.set_xlim(-1, _COLUMNS + 1)
    axis.set_ylim(-y.max() - 0.8, 0.8)
    axis.set_axis_off()
    axis.set_title(
        f"{head}: query {answer['q_token']!r} (position {answer['q_pos']}, orange) attends "
        f"{answer['pattern']:.0%} to key {answer['k_token']!r} (position {answer['k_pos']}, blue)",
        loc="left",
        fontsize=13,
        color=_INK,
    )


def _flow(widths: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Column and line of each piece of text."""
    x, y, column, line = [], [], 0, 0
    for width in widths:
        if column + width > _COLUMNS:
            column, line = 0, line + 1
        x.append(column)
        y.append(line)
        column += width
    return np.array(x, float), np.array(y, float)


def _draw_pairs(
    axis: Any, pairs: Sequence[tuple[str, str, float]], title: str, arrow: str = "by"
) -> None:
    values = [value for *_, value in pairs]
    rows = np.arange(len(pairs))
    axis.barh(rows, values, color=[_BLUE if value > 0 else _RED for value in values], height=0.7)
    axis.set_yticks(rows, [f"{left}\n{arrow} {right}" for left, right, _ in pairs], fontsize=7.5)
    axis.invert_yaxis()
    axis.axvline(0, color=_INK, lw=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_title(title, fontsize=10.5, loc="left", color=_INK)
