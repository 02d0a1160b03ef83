"""The command `run`: do it, then say what was done, what was assumed, and how it adds up."""

import time
from pathlib import Path
from typing import Any

from headattr.config import RunConfig
from headattr.edges import layer_ranges
from headattr.inputs import inputs_of
from headattr.pipeline import execute
from headattr.plan import make_run
from headattr.store.check import check_store
from headattr.store.published import finished_shards
from headattr.viewers.dictionaries import render_report

_CHECKED = ("completeness", "contrast_completeness", "ov", "pattern_error", "problems")


def run(config: RunConfig) -> dict[str, Any]:
    """The command `run`: attribute, and say what was done and how it adds up.

    {"out", "prompts", "edges", "shards": {"all", "finished_before"}, "set_aside": [...],
    "completeness", "contrast_completeness", "ov", "pattern_error", "problems", "model_notes",
    "bos",
    "sources": [{"kind", "name", "layer", "activation", "mean_l0", "decomposes", "reads_heads_of"
    (layers), "assumed", "report": {"positions", "left_out", "l0", "explained_variance": {site: a
    number or null}}}], "layers_without_basis",
    "no_output", "seconds"}. `report` is of the first few prompts; null for what reconstructs
    nothing.
    """
    started = time.monotonic()
    planned = make_run(config, inputs_of(config))
    folder = Path(config.out)
    reused = len(finished_shards(folder, planned.manifest)) if folder.exists() else 0
    with execute(planned) as store:
        checked = check_store(store)
        manifest = store.manifest
        return {
            "out": str(store.path),
            "prompts": len(store.prompt_ids),
            "edges": checked["edges"],
            "shards": {"all": len(manifest["shards"]), "finished_before": reused},
            "set_aside": store.set_aside,
            **{name: checked[name] for name in _CHECKED},
            "model_notes": manifest["model"]["notes"],
            "bos": manifest["bos"],
            "sources": [
                {
                    **{key: s[key] for key in ("kind", "name", "layer", "activation", "assumed")},
                    "mean_l0": store.mean_l0(i),
                    "decomposes": [p["layer"] for p in manifest["layers"] if p["basis"] == i],
                    "reads_heads_of": [p["layer"] for p in manifest["layers"] if p["output"] == i],
                    "report": s.get("report"),
                }
                for i, s in enumerate(manifest["sources"])
            ],
            "layers_without_basis": manifest["layers_without_basis"],
            "no_output": {p["layer"]: p["ov_reason"] for p in manifest["layers"] if p["ov_reason"]},
            "seconds": round(time.monotonic() - started, 1),
        }


def render_run(answer: dict[str, Any]) -> str:
    """The answer of `run` as text for a terminal."""
    lines = [
        f"{answer['edges']:,} edges of {answer['prompts']} prompts in {answer['out']} "
        f"({answer['seconds']} s)",
        f"  worst error: QK {_error(answer['completeness']['worst'])}, OV "
        f"{_error(answer['ov']['completeness']['worst'])}, "
        f"whole block {_error(answer['ov']['block_completeness']['worst'])}, "
        f"pattern {_error(answer['pattern_error']['worst'])}",
        f"  BOS: {'prepended' if answer['bos']['prepend'] else 'not prepended'} "
        f"({answer['bos']['why']})",
    ]
    if answer["shards"]["finished_before"]:
        lines.append(
            "  {finished_before} of {all} shards were there already".format(**answer["shards"])
        )
    if answer["prompts"] and not answer["edges"]:
        lines.append("  no edge was kept: do --edges, --q-token and --k-token say what is meant?")
    for source in answer["sources"]:
        l0 = "" if source["mean_l0"] is None else f", mean L0 {source['mean_l0']:.1f}"
        about = f"{source['kind']}, {source['activation']}{l0}"
        uses = [
            f"{use} {layer_ranges(source[key])}"
            for use, key in (("decomposes", "decomposes"), ("reads heads of", "reads_heads_of"))
            if source[key]
        ]
        lines.append(f"  {_place(source)}: {source['name']} ({about}) {', '.join(uses)}")
        if source["report"] is not None:
            lines += [f"    {line}" for line in render_report(source["report"])]
        lines += [f"    assumed: {assumed}" for assumed in source["assumed"]]
    lines += [f"  {note}" for note in answer["model_notes"]]
    if answer["layers_without_basis"]:
        lines.append(
            f"  left out for want of a basis: layers {layer_ranges(answer['layers_without_basis'])}"
        )
    lines += [
        f"  layer {layer} has no output: {reason}" for layer, reason in answer["no_output"].items()
    ]
    lines += [
        f"  set aside: line {entry['line']}: {entry['reason']}" for entry in answer["set_aside"]
    ]
    lines += [f"  problem: {problem}" for problem in answer["problems"]]
    return "\n".join(lines)


def _place(source: dict[str, Any]) -> str:
    """Where a dictionary is: a crosscoder, or a set that decomposes several layers, at all of
    them."""
    layers = source["decomposes"]
    if len(layers) > 1:
        return f"layers {layer_ranges(layers)}"
    return f"layer {source['layer']}"


def _error(value: float | None) -> str:
    return "none" if value is None else f"{value:.1e}"
