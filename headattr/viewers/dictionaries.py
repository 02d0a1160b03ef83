"""What is known of dictionaries, in words and tables, for a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_COLUMNS = ("L0", "dead", "dense", "EV", "recovered", "scores", "centred", "outputs")
_LEGEND = (
    "L0: active features a position; dead, dense: share of the features that are active nowhere",
    "here, at over 10 % of the positions; EV: explained variance; recovered: share of the loss,",
    "spliced in against the mean (none where the mean costs nothing); scores, centred, outputs:",
    "share of attention scores (with and without row means) and of head outputs that is features",
    "alone, neither bias nor error; positions that swallow attention are left out of all",
)


def render_report(report: Mapping[str, Any]) -> list[str]:
    """A load report in lines; what speaks against the dictionary in lines of its own."""
    found = report["explained_variance"]
    shown = ", ".join(f"{number(ev)} at {site}" for site, ev in found.items())
    lines = [
        f"first {report['positions']} positions: L0 {report['l0']:.1f}"
        + (f", explained variance {shown}" if shown else "")
    ]
    return lines + [
        f"explained variance at {site} is below 0: its scaling, or its site, is probably wrong"
        for site, ev in found.items()
        if ev is not None and ev < 0
    ]


def render_inspection(answer: Sequence[Mapping[str, Any]]) -> str:
    """The answer of `dictionaries inspect`."""
    lines: list[str] = []
    for release in answer:
        lines.append(f"{release['name']}: {release['kind']}, {release['features']:,} features")
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
    width = max(len(one["name"]) for one in found)
    left = f", {answer['left']} left for --max-tokens" if answer["left"] else ""
    lines = [
        f"{answer['prompts']} prompts of {answer['tokens']:,} tokens{left}",
        *(f"  set aside: line {a['line']}: {a['reason']}" for a in answer["set_aside"]),
        f"{'dictionary':{width}} " + "".join(f"{name:>11}" for name in _COLUMNS),
        *(f"{one['name']:{width}} {_cells(_row(one))}" for one in found),
        *_LEGEND,
    ]
    for one in found:
        lines += _details(one)
    return "\n".join(lines)


def _row(one: Mapping[str, Any]) -> list[str]:
    """Of one dictionary: means over its sites and layers."""
    loss = one["loss"]
    together = [loss["together"]] if "together" in loss else list(loss.values())
    shares = [
        number(_mean(layer[key] for layer in one["layers"]))
        for key in ("feature_share_counted", "feature_share_counted_centred", "output_share")
    ]
    return [
        f"{one['l0']:.1f}",
        number(one["dead"]),
        number(one["dense"]),
        number(_mean(one["explained_variance"].values())),
        number(_mean(part["recovered"] for part in together)),
        *shares,
    ]


def _details(one: Mapping[str, Any]) -> Iterable[str]:
    """What the row of a dictionary is the mean of."""
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


def _cells(cells: Iterable[str]) -> str:
    return "".join(f"{cell:>11}" for cell in cells)


def _mean(numbers: Iterable[float | None]) -> float | None:
    kept = [one for one in numbers if one is not None]
    return sum(kept) / len(kept) if kept else None


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
