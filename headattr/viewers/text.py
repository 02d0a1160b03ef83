"""Answers in words, for a terminal."""

from collections.abc import Sequence
from typing import Any

from headattr.edges import HeadId


def render_edge(answer: dict[str, Any], *, pairs: int = 8, features: int = 3) -> str:
    """An edge answer as text for a terminal, with some of its pairs and of each side's features."""
    head, qk = HeadId(answer["layer"], answer["head"]), answer["qk"]
    above = answer["score_contrast"]
    lines = [
        f"{head}  q {answer['q_pos']} {answer['q_token']!r} -> k {answer['k_pos']} "
        f"{answer['k_token']!r}   pattern {answer['pattern']:.3f}   score {answer['score']:.3f}"
        + _capped(answer)
        + f" ({abs(above):.3f} {'above' if above >= 0 else 'below'} the row's mean)"
        + ("   (the key swallows attention)" if answer["flagged"] else ""),
        f"  why it looks there: the score as query part by key part (error "
        f"{qk['completeness']:.0e}, feature share {qk['feature_share']:+.2f} of scale |Q||K|)",
        *_total_lines(qk["totals"], qk["contrast_totals"]),
    ]
    if pairs:
        lines.append("         value   contrast   strongest pairs, query feature by key feature")
        lines += _pair_lines(qk["pairs"][:pairs], "q_feature", "k_feature")
    for side in ("query", "key") if features else ():
        lines.append(f"      marginal   contrast   ablation   {side} features")
        lines += [_feature_line(feature) for feature in qk[f"{side[0]}_features"][:features]]
        parts = qk[f"{side[0]}_parts"][:features]
        if parts:
            lines.append(f"      marginal   contrast              {side} parts")
        lines += [
            f"   {part['marginal']:+11.4g}{part['contrast']:+11.4g}{'':11}   {part['name']}"
            for part in parts
        ]
    for ov in answer["ov"]:
        lines.append(
            f"  what it moves, as {ov['output']} reads it ({ov['read']}; error "
            f"{ov['completeness']:.0e}), value feature to output feature:"
        )
        lines += _pair_lines(ov["pairs"][:pairs], "v_feature", "o_feature")
        if not ov["o_features"]:
            lines.append("     no output feature is active at the query")
        elif features:
            lines.append("          read   output features, and what of it comes from which part")
        for feature in ov["o_features"][:features]:
            parts = ", ".join(f"{kind} {part:+.3g}" for kind, part in feature["totals"].items())
            lines.append(f"   {feature['read']:+11.4g}   {name_of(feature)}: {parts}")
    if answer["ov_reason"]:
        lines.append(f"  what it moves: {answer['ov_reason']}")
    return "\n".join(lines)


def _capped(answer: dict[str, Any]) -> str:
    same = answer["score_capped"] == answer["score"]
    return "" if same else f", capped {answer['score_capped']:.3f}"


def _feature_line(feature: dict[str, Any]) -> str:
    sizes = (f"{feature[name]:+11.4g}" for name in ("marginal", "contrast", "ablation"))
    return f"   {''.join(sizes)}   {name_of(feature)}"


def _total_lines(
    totals: dict[str, dict[str, float]], contrasts: dict[str, dict[str, float]]
) -> list[str]:
    """The totals as a small table, query kinds down, key kinds across, each side's contrasts at the
    end."""
    kinds, of_query, of_key = list(totals), contrasts["query"], contrasts["key"]
    lines = ["    " + " " * 9 + "".join(f"{kind:>10}" for kind in (*kinds, "contrast"))]
    for q_kind in kinds:
        cells = "".join(f"{cell:>+10.3f}" for cell in (*totals[q_kind].values(), of_query[q_kind]))
        lines.append(f"    {q_kind:9}{cells}")
    cells = "".join(f"{of_key[kind]:>+10.3f}" for kind in kinds)
    lines.append(f"    {'contrast':9}{cells}   elsewhere {of_key['elsewhere']:+.3f}")
    return lines


def _pair_lines(pairs: Sequence[dict[str, Any]], left: str, right: str) -> list[str]:
    width = max((len(name_of(pair[left])) for pair in pairs), default=0)
    return [
        "   "
        + "".join(f"{pair[name]:+11.4g}" for name in ("value", "contrast") if name in pair)
        + f"   {name_of(pair[left]):{width}}  x  {name_of(pair[right])}"
        for pair in pairs
    ]


def name_of(feature: dict[str, Any]) -> str:
    """A feature as people read it."""
    label = feature["label"]
    if feature["kind"] == "token":
        return f"token {feature['id'] if label is None else repr(label)}"
    origin = f" (L{feature['layer']})" if "index" in feature else ""
    return f"{feature['id']}{origin}" + (f" {label!r}" if label else "")


def render_estimate(answer: dict[str, Any]) -> str:
    """The estimate as text for a terminal."""
    memory, seconds = answer["memory"], answer["seconds"]
    at_most = "" if answer["edges_are"] == "exact" else "at most "
    parts = ", ".join(f"{k} {_bytes(v)}" for k, v in memory.items() if k != "peak")
    times = ", ".join(f"{k} {v:.0f}" for k, v in seconds.items() if k != "total")
    lines = [
        f"{at_most}{answer['edges']:,} edges: {answer['prompts']} prompts of {answer['tokens']:,} "
        f"tokens in all, {answer['heads']} heads",
        f"  store: {at_most}{_bytes(answer['bytes'])} ({answer['bytes_per_edge']} bytes an edge)",
        f"  memory at its peak: {at_most or 'about '}{_bytes(memory['peak'])} ({parts}, and the "
        "process)",
        f"  time: {at_most or 'about '}{seconds['total']:.0f} s on this machine as busy as it is "
        f"now ({times})",
    ]
    if answer["set_aside"]:
        lines.append(f"  {answer['set_aside']} prompts will be set aside")
    return "\n".join([*lines, *(f"  assumed: {line}" for line in answer["assumed"])])


def _bytes(value: float | int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
