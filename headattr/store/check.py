"""Is a store whole and does it add up? Every problem by name.

Hashes, structure, ranges, indexes, duplicates, and the errors that every edge carries.
"""

from typing import Any, NamedTuple

from headattr.config import canonical_hash
from headattr.errors import StoreError
from headattr.store.check_layer import Errors, layer_problems, no_errors
from headattr.store.check_lists import list_problems
from headattr.store.format import LABELS, SHARDS, file_hash, shard_name
from headattr.store.manifest import content_hash
from headattr.store.reader import Store
from headattr.store.shard import Shard

TOLERANCE = {"float32": 1e-5, "float64": 1e-9}


class Problem(NamedTuple):
    """Something that is wrong."""

    text: str
    """Names the file."""
    shard: int | None = None
    """The shard that is damaged: made again, it would be whole."""


class Examined(NamedTuple):
    """What was found in a store."""

    errors: Errors
    problems: list[Problem]


def check_store(store: Store) -> dict[str, Any]:
    """{"ok", "shards", "edges", "completeness", "contrast_completeness", "ov", "pattern_error",
    "set_aside", "problems"}.

    Errors are worst and median over all edges; null where there are none. Every problem names its
    file.
    """
    found = examine(store)
    errors = found.errors
    return {
        "ok": not found.problems,
        "shards": len(store.shards),
        "edges": sum(errors.edges),
        "completeness": errors.completeness.as_dict(),
        "contrast_completeness": errors.contrast.as_dict(),
        "ov": {
            "completeness": errors.ov_completeness.as_dict(),
            "block_completeness": {"worst": errors.block.worst},
        },
        "pattern_error": {"worst": errors.pattern.worst},
        "set_aside": len(store.set_aside),
        "problems": [problem.text for problem in found.problems],
    }


def examine(store: Store) -> Examined:
    """Read all of a store, and say what is wrong with which shard."""
    broken = [Problem(text, index) for index, text in store.broken.items()]
    found = Examined(no_errors(), broken)
    found.problems.extend(_manifest_problems(store))
    for shard in store.shards:
        index, name = shard.sidecar["shard"], f"{SHARDS}/{shard.path.name}"
        problems = _shard_problems(shard, store.manifest, name, found.errors)
        found.problems.extend(Problem(problem, index) for problem in problems)
    found.problems.extend(_duplicates(store))
    found.problems.extend(
        _error_problems(found.errors, TOLERANCE[store.manifest["config"]["dtype"]])
    )
    return found


def _shard_problems(shard: Shard, manifest: dict[str, Any], name: str, errors: Errors) -> list[str]:
    """What is wrong with one shard; a wrong hash says it all."""
    problems: list[str] = []
    try:
        with shard.reading():
            if file_hash(shard.path) != shard.sidecar["sha256"]:
                return [f"{name} does not have the hash of its sidecar: delete it and run again"]
            problems += _sidecar_problems(shard, manifest, name)
            problems += [f"{name} {problem}" for problem in list_problems(shard, manifest)]
            for plan in manifest["layers"] if shard.ids else ():
                where = f"{name} layer {plan['layer']}"
                layer = layer_problems(shard, plan, manifest["config"]["rank"], where, errors)
                problems += [f"{where}: {problem}" for problem in layer]
    except StoreError as error:
        problems.append(f"{name} is damaged: {error}")
    return problems


def _manifest_problems(store: Store) -> list[Problem]:
    """A manifest that was changed, shards that are not finished, labels that are gone."""
    manifest, problems = store.manifest, []
    if (
        manifest["hash"] != canonical_hash(manifest["identity"])
        or manifest.get("content_hash") != content_hash(manifest)
        or manifest["layers"] != manifest["identity"].get("layers")
    ):
        problems.append("manifest.json was changed: its hashes are not those of its content")
    missing = [f"{SHARDS}/{shard_name(index)}.h5" for index in unfinished(store)]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        problems.append(f"{missing[0]}{more} not finished: run the same command again")
    problems += [
        f"{LABELS}/{name} is missing: run the same command again" for name in lost_labels(store)
    ]
    return [Problem(text) for text in problems]


def unfinished(store: Store) -> list[int]:
    """Shards that are not there yet, nor broken."""
    there = {shard.sidecar["shard"] for shard in store.shards} | store.broken.keys()
    return [e["index"] for e in store.manifest["shards"] if e["index"] not in there]


def lost_labels(store: Store) -> list[str]:
    """Files of labels that should be there."""
    named = [source["labels"] for source in store.manifest["sources"] if source["labels"]]
    return [name for name in named if not (store.path / LABELS / name).is_file()]


def _duplicates(store: Store) -> list[Problem]:
    """Prompts that are in two shards; the shard that should not have one is damaged."""
    planned = {p: e["index"] for e in store.manifest["shards"] for p in e["prompts"]}
    first: dict[int, int] = {}
    problems = []
    for shard in store.shards:
        index = shard.sidecar["shard"]
        for prompt in shard.ids:
            other = first.setdefault(prompt, index)
            if other != index:
                wrong = index if planned.get(prompt) != index else other
                one, two = (f"{SHARDS}/{shard_name(i)}.h5" for i in (other, index))
                problems.append(Problem(f"prompt {prompt} is in {one} and in {two}", wrong))
    return problems


def _sidecar_problems(shard: Shard, manifest: dict[str, Any], name: str) -> list[str]:
    """Does the sidecar say what is in the shard, and is it what the manifest planned?"""
    sidecar, file = shard.sidecar, shard.file
    planned = next(e["prompts"] for e in manifest["shards"] if e["index"] == sidecar["shard"])
    held = file["prompt/id"][:].tolist()
    problems = []
    if held != sidecar["prompts"]:
        problems.append(f"{name} holds prompts {held}, its sidecar says {sidecar['prompts']}")
    if sorted(held + [entry["prompt"] for entry in sidecar["set_aside"]]) != sorted(planned):
        problems.append(f"{name} and its sidecar do not account for prompts {planned}")
    edges = sum(len(group["key"]) for group in file.get("layer", {}).values())
    if edges != sidecar["edges"]:
        problems.append(f"{name} holds {edges} edges, its sidecar says {sidecar['edges']}")
    return problems


def _error_problems(found: Errors, tolerance: float) -> list[Problem]:
    problems = []
    for name, spread in (
        ("completeness", found.completeness),
        ("contrast completeness", found.contrast),
        ("OV completeness", found.ov_completeness),
        ("block completeness", found.block),
        ("pattern error", found.pattern),
    ):
        worst = spread.worst
        if worst is not None and not worst <= tolerance:
            text = f"worst {name} is {worst:.1e}; expected at most {tolerance:.0e}"
            problems.append(Problem(text))
    return problems


def render_check(answer: dict[str, Any]) -> str:
    """A check as text for a terminal."""

    def shown(value: float | None) -> str:
        return "none" if value is None else f"{value:.1e}"

    ov = answer["ov"]
    lines = [
        f"{'ok' if answer['ok'] else 'NOT OK'}: {answer['shards']} shards, {answer['edges']:,} "
        "edges, "
        f"{answer['set_aside']} prompts set aside",
        f"  QK completeness: worst {shown(answer['completeness']['worst'])}, "
        f"median {shown(answer['completeness']['median'])}; contrasts: worst "
        f"{shown(answer['contrast_completeness']['worst'])}",
        f"  OV completeness: worst {shown(ov['completeness']['worst'])}, median "
        f"{shown(ov['completeness']['median'])}; "
        f"whole block: worst {shown(ov['block_completeness']['worst'])}",
        f"  pattern against the model: worst {shown(answer['pattern_error']['worst'])}",
    ]
    return "\n".join([*lines, *(f"  problem: {problem}" for problem in answer["problems"])])
