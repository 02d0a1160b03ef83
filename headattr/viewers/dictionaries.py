"""What is known of dictionaries, in words and tables, for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headattr.edges import layer_ranges

_COLUMNS = ("L0", "dead", "dense", "EV", "recovered", "scores", "centred", "outputs")
FEW = 200
"""Positions below which explained variance says little."""
_NAMES = 3  # columns of words before those
_LEGEND = (
    "L0: active features a position; dead, dense: share of the features that are active nowhere",
    "here, at over 10 % of the positions; EV: explained variance; recovered: share of the loss,",
    "spliced in against the mean (none where the mean costs nothing); scores, centred, outputs:",
    "share of attention scores (with and without row means) and of head outputs that is features",
    "alone, neither bias nor error; positions that swallow attention are left out of all",
    "Several in a row: L0 is the sum over the layers of a set, EV the mean over sites; recovered",
    "is with all layers of transcoders spliced in together, of a crosscoder the mean over single",
    "sites; scores, centred and outputs are means over the layers named. Rows of other sites or",
    "layers are not comparable: --layers N makes L0, EV and recovered of a crosscoder those of its",
    "sites there (of the features that write them); transcoders, dead and dense stay whole.",
    "At early layers most of the scores are bias: there EV may be high and their share low.",
)


def render_report(report: Mapping[str, Any]) -> list[str]:
    """A load report in lines; what speaks against the dictionary in lines of its own."""
    found = report["explained_variance"]
    shown = ", ".join(f"{number(ev)} at {site}" for site, ev in found.items())
    lines = [
        f"first {report['positions']} positions: L0 {report['l0']:.1f}"
        + (f", explained variance {shown}" if shown else "")
    ]
    n = report["positions"]
    unless = f"unless it is undertrained, or the texts are {'few or ' if n < FEW else ''}unusual"
    return lines + [
        f"explained variance at {site} is below 0 on {n} positions: its scaling, or its site, is "
        f"probably wrong, {unless}"
        for site, ev in found.items()
        if ev is not None and ev < 0
    ]


def render_inspection(answer: Sequence[Mapping[str, Any]]) -> str:
    """The answer of `dictionaries inspect`."""
    lines: list[str] = []
    for release in answer:
        lines.append(f"{release['name']}: {release['kind']}, {release['features']:,} features")
        lines += [f"  not whole: {release['gap']}"] if release["gap"] else []
        lines += [f"  {release['path']}"] if release["path"] else []
        for one in release["dictionaries"]:
            lines += _dictionary(one)
        if release["report"] is not None:
            lines += [f"  {line}" for line in render_report(release["report"])]
    return "\n".join(lines)


def _dictionary(one: Mapping[str, Any]) -> Iterable[str]:
    activation = one["activation"]
    k = "" if activation["k"] is None else f" k={activation['k']}"
    unsaid = "a site that it does not name"
    reads, writes = (", ".join(site or unsaid for site in one[key]) for key in ("reads", "writes"))
    yield f"  {one['name']} ({one['format']}): {one['architecture']}, {activation['kind']}{k}"
    hook = "" if one["hook_name"] is None else f" ({one['hook_name']})"
    yield f"    reads {reads}{hook}, writes {writes}"
    yield f"    {one['features']:,} features, {one['d_in']} -> {one['d_out']}"
    yield f"    input: {'; '.join(one['frame']) or 'as it is'}"
    if one["prepend_bos"] is not None:
        yield f"    trained {'with' if one['prepend_bos'] else 'without'} BOS"
    for name in ("trained_on", "labels", "hash"):
        if one[name] is not None:
            yield f"    {name.replace('_', ' ')}: {one[name]}"
    for assumed in one["assumed"]:
        yield f"    assumed: {assumed}"


def render_evaluation(answer: Mapping[str, Any]) -> str:
    """The answer of `evaluate`: one table to choose by, then what it is made of by site and
    layer."""
    found = answer["dictionaries"]
    left = f", {answer['left']} left for --max-tokens" if answer["left"] else ""
    # trained with BOS and without: each with prompts of its own
    tokens = [answer["tokens"]] if answer["tokens"] else [one["tokens"] for one in found]
    shown = " or ".join(f"{count:,}" for count in dict.fromkeys(tokens))
    lines = [
        f"{answer['prompts']} prompts of {shown} tokens{left}",
        *(_bos(one) for one in found if answer["bos"] is None),
        *(f"  set aside: line {a['line']}: {a['reason']}" for a in answer["set_aside"]),
        *_table(found),
        *_LEGEND,
    ]
    for one in found:
        lines += _details(one)
    return "\n".join(lines)


def _bos(one: Mapping[str, Any]) -> str:
    how = "with" if one["bos"]["prepend"] else "without"
    return f"  {one['name']} is judged {how} BOS ({one['bos']['why']})"


def _table(found: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """A row a dictionary, with what it is of."""
    rows = [["dictionary", "sites", "layers", *_COLUMNS]]
    for one in found:
        layers = layer_ranges(one["row"]["layers"]) or "-"
        rows.append([one["name"], _sites(one["row"]["sites"]), layers, *_row(one)])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        cells = zip(row[_NAMES:], widths[_NAMES:], strict=True)
        named = zip(row[:_NAMES], widths[:_NAMES], strict=True)
        words = [f"{cell:{width}}" for cell, width in named]
        yield "  ".join([*words, *(f"{cell:>{max(6, width)}}" for cell, width in cells)])


def _sites(names: Sequence[str]) -> str:
    """`resid_pre 1-3`."""
    layers: dict[str, list[int]] = {}
    for name in names:
        kind, _, layer = name.partition(" ")
        layers.setdefault(kind, []).append(int(layer))
    return ", ".join(f"{kind} {layer_ranges(some)}" for kind, some in layers.items())


def _row(one: Mapping[str, Any]) -> list[str]:
    """The numbers of one dictionary."""
    row = one["row"]
    shown = ("recovered", "feature_share", "feature_share_centred", "output_share")
    return [
        f"{row['l0']:.1f}",
        *(number(one[key]) for key in ("dead", "dense")),
        number(row["explained_variance"]),
        *(number(row[key]) for key in shown),
    ]


def _details(one: Mapping[str, Any]) -> Iterable[str]:
    """What the row of a dictionary is made of."""
    yield (
        f"{one['name']}: {one['kind']}, {one['features']:,} features ({one['activation']}); "
        f"{one['left_out']} positions that swallow attention are not counted, "
        f"{one['positions']:,} are"
    )
    for group in one["groups"]:
        yield (
            f"  features of {group['site']}: {group['features']:,}, L0 {group['l0']:.1f}, dead "
            f"{number(group['dead'])}"
        )
    for name in dict.fromkeys([*one["explained_variance"], *one["loss"]]):
        loss, said = one["loss"].get(name), []
        if name in one["explained_variance"]:
            said.append(f"explained variance {number(one['explained_variance'][name])}")
        if loss is not None:
            said.append(
                f"loss {loss['spliced']:.4f} (clean {one['loss_clean']:.4f}, mean in its place "
                f"{loss['ablated']:.4f}): recovered {number(loss['recovered'])}"
            )
        yield f"  {name}: {', '.join(said)}"
    for layer in one["layers"]:
        yield (
            f"  attention of layer {layer['layer']}: scores "
            f"{number(layer['feature_share_counted'])}, centred "
            f"{number(layer['feature_share_counted_centred'])}, outputs "
            f"{number(layer['output_share'])}; of all edges, those of positions that swallow "
            f"attention too: {number(layer['feature_share'])}, centred "
            f"{number(layer['feature_share_centred'])}"
        )
    if one["layers_without_basis"] and not one["layers"]:
        yield "  no layer that was asked for has it as a basis: attention is not judged"
    for prompt, reason in one["failed"].items():
        yield f"  set aside: prompt {prompt}: {reason}"


def number(value: float | None) -> str:
    """Three decimals; `-` where there is none."""
    return "-" if value is None else f"{value:.3f}"


def render_labelled(answer: Mapping[str, Any]) -> str:
    """The answer of `dictionaries label`."""
    lines = [
        f"{found['labelled']:,} of {found['features']:,} features have a label, in {found['out']}"
        for found in answer["written"]
    ]
    lines += [f"  set aside: line {a['line']}: {a['reason']}" for a in answer["set_aside"]]
    return "\n".join(lines)
