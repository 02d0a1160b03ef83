"""Answers about many edges in words, for a terminal."""

from collections.abc import Sequence
from typing import Any

from headattr.edges import HeadId
from headattr.viewers.text import name_of


def render_feature(answer: dict[str, Any]) -> str:
    """Where a feature matters."""
    feature = answer["feature"]
    density = feature["density"]
    often = "" if density is None else f", active at {density:.2%} of positions"
    lines = [f"{feature['source']} {name_of(feature)}{often}"]
    for role in answer["roles"]:
        lines.append(f"  as {role['role']} feature: {_how_many(role)}, by {role['strength_is']}")
        lines += _hit_lines(role["hits"], role["strength_is"])
    return "\n".join([*lines, *_problems(answer)])


def render_pair(answer: dict[str, Any]) -> str:
    """Where a pair matters."""
    names = ("q_feature", "k_feature") if "q_feature" in answer else ("v_feature", "o_feature")
    lines = [f"{name_of(answer[names[0]])}  x  {name_of(answer[names[1]])}: {_how_many(answer)}"]
    lines += ["  head      edges        sum       mean"] if answer["heads"] else []
    lines += [
        f"  {HeadId(one['layer'], one['head'])!s:6} {one['edges']:8,} {one['sum']:+10.4g} "
        f"{one['mean']:+10.4g}"
        for one in answer["heads"]
    ]
    return "\n".join([*lines, *_hit_lines(answer["hits"], "value"), *_problems(answer)])


def render_head(answer: dict[str, Any]) -> str:
    """What a head does."""
    head = HeadId(answer["layer"], answer["head"])
    shares = (
        f"; features explain {answer['feature_share']:.2f} of its scores, "
        f"{answer['feature_share_centred']:.2f} with row means removed; "
        f"{answer['sink_share']:.2f} of its attention is swallowed"
        if "feature_share" in answer
        else ""
    )
    lines = [f"{head}: {answer['edges']:,} edges of {answer['prompts']:,} prompts{shares}"]
    for title, part, keys in (
        ("why it looks", answer["pairs"], ("q_feature", "k_feature")),
        ("what it moves", answer["moved"], ("v_feature", "o_feature")),
    ):
        for order, pairs in (part or {}).items():
            lines.append(f"  {title}: {order} pairs")
            lines.append("      edges          sum       mean   share")
            lines += [_tally_line(pair, keys) for pair in pairs]
    return "\n".join([*lines, *_problems(answer)])


def _tally_line(pair: dict[str, Any], keys: Sequence[str]) -> str:
    more = pair["edges_at_most"] > pair["edges"]
    share = "       " if pair.get("share") is None else f"{pair['share']:+7.2%}"
    return (
        f"   {pair['edges']:8,}{'+' if more else ' '} {pair['sum']:+11.4g} {pair['mean']:+10.4g} "
        f"{share}   {name_of(pair[keys[0]])}  x  {name_of(pair[keys[1]])}"
    )


def render_row(answer: dict[str, Any]) -> str:
    """What a query looked at."""
    head = HeadId(answer["layer"], answer["head"])
    lines = [
        f"{head}  q {answer['q_pos']} {answer['q_token']!r}: {answer['kept']} kept keys have "
        f"{answer['pattern']:.3f} of its attention; {answer['sink_share']:.3f} is swallowed",
        "   pattern      score   contrast   key",
    ]
    for key in answer["keys"]:
        lines.append(
            f"   {key['pattern']:7.3f} {key['score']:+10.4g} {key['score_contrast']:+10.4g}   "
            f"{key['k_pos']} {key['k_token']!r}" + (" (swallows)" if key["flagged"] else "")
        )
        if pair := key["pair"]:
            lines.append(
                f"{'':34} {pair['value']:+.4g}   {name_of(pair['q_feature'])}  x  "
                f"{name_of(pair['k_feature'])}"
            )
    return "\n".join(lines)


def render_span(answer: dict[str, Any]) -> str:
    """Sums over spans."""
    head, (q, k) = HeadId(answer["layer"], answer["head"]), (answer["q"], answer["k"])
    kinds = list(answer["totals"])
    lines = [
        f"{head}  from {answer['q_text']!r} ({q[0]}-{q[1]}) to {answer['k_text']!r} "
        f"({k[0]}-{k[1]}): {answer['edges']} kept edges, pattern {answer['pattern']:.3f}, score "
        f"{answer['score']:.3f} in all",
        f"{'':11} " + " ".join(f"{kind:>10}" for kind in kinds),
        *(
            f"{one:>11} " + " ".join(f"{answer['totals'][one][other]:+10.4g}" for other in kinds)
            for one in kinds
        ),
    ]
    for title, pairs, keys in (
        ("pairs of the scores", answer["pairs"], ("q_feature", "k_feature")),
        ("pairs of what is moved", answer["moved"], ("v_feature", "o_feature")),
    ):
        if pairs:
            lines.append(f"      edges          sum   {title}")
        lines += [
            f"   {pair['edges']:8,} {pair['sum']:+12.4g}   {name_of(pair[keys[0]])}  x  "
            f"{name_of(pair[keys[1]])}"
            for pair in pairs or []
        ]
    return "\n".join(lines)


def render_prompt(answer: dict[str, Any]) -> str:
    """A prompt and its strongest edges."""
    cut = " (cut to the context)" if answer["truncated"] else ""
    shown = " ".join(f"{i}:{token!r}" for i, token in enumerate(answer["tokens"]))
    lines = [f"prompt {answer['prompt']}{cut}, {len(answer['tokens'])} tokens: {shown}"]
    for head in answer["heads"]:
        lines.append(f"  {HeadId(head['layer'], head['head'])}: {head['edges']:,} edges")
        lines += [
            f"     {edge['pattern']:.3f}   q {edge['q_pos']} {edge['q_token']!r} -> k "
            f"{edge['k_pos']} {edge['k_token']!r}   score {edge['score']:+.4g}"
            for edge in head["strongest"]
        ]
    return "\n".join(lines)


def render_difference(answer: dict[str, Any]) -> str:
    """What changed between two stores."""
    lines = [
        f"{answer['prompts']:,} prompts in both",
        "  head       edges   first only  second only  mean change of score, of pattern",
    ]
    for one in answer["heads"]:
        edges, change = one["edges"], (one["score_change"], one["pattern_change"])
        shown = " ".join("      none" if part is None else f"{part:10.4g}" for part in change)
        lines.append(
            f"  {HeadId(one['layer'], one['head'])!s:6} {edges['both']:9,} "
            f"{edges['first_only']:12,} {edges['second_only']:12,}  {shown}"
        )
    for hit in answer["hits"]:
        pattern, score = hit["pattern"], hit["score"]
        lines.append(
            f"   pattern {pattern[0]:.3f} -> {pattern[1]:.3f}   score {score[0]:+.4g} -> "
            f"{score[1]:+.4g}   {_edge(hit)}"
        )
    return "\n".join(lines)


def _hit_lines(hits: Sequence[dict[str, Any]], strength: str) -> list[str]:
    if not hits:
        return []
    lines = [f"   {strength:>10}    pattern      score   edge"]
    return lines + [
        f"   {hit['strength']:+10.4g} {hit['pattern']:10.3f} {hit['score']:+10.4g}   {_edge(hit)}"
        for hit in hits
    ]


def _edge(hit: dict[str, Any]) -> str:
    return (
        f"prompt {hit['prompt']} {HeadId(hit['layer'], hit['head'])} q {hit['q_pos']} "
        f"{hit['q_token']!r} -> k {hit['k_pos']} {hit['k_token']!r}"
    )


def _how_many(page: dict[str, Any]) -> str:
    shown = len(page["hits"])
    first = f" from place {page['start']}" if page["start"] else ""
    if page["edges"] is None:
        return f"{shown} edges shown{first}"
    return f"{page['edges']:,} edges, {shown} shown{first}"


def _problems(answer: dict[str, Any]) -> list[str]:
    return [f"  problem: {problem}" for problem in answer["problems"]]
