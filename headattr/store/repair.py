"""Set damaged shards aside, so that the same command makes them again; nothing else is touched."""

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from headattr.config import RunConfig
from headattr.errors import StoreError
from headattr.store.check import Problem, examine, lost_labels, unfinished
from headattr.store.format import LABELS, SHARDS, shard_name, sync_folder
from headattr.store.manifest import stale_files
from headattr.store.reader import Store


def repair_store(store: Store, *, dry_run: bool = False) -> dict[str, Any]:
    """Check a store, and set aside every shard that is damaged.

    {"ok" (nothing is left that the same command cannot mend), "dry_run", "set_aside": [{"shard",
    "files" (where they are now), "problems"}], "removed" (temporary files of processes that are
    gone), "to_make" (shards), "labels" (files that the same command writes again), "problems"
    (what cannot be mended so), "command"}. Raises StoreError if a file cannot be moved.
    """
    found = examine(store)
    problems = [problem for problem in found.problems if not _unfinished(problem, store)]
    damaged = sorted({p.shard for p in problems if p.shard is not None})
    folder = store.path / SHARDS
    try:
        aside = [
            {
                "shard": index,
                "files": _set_aside(folder, index, dry_run=dry_run),
                "problems": [problem.text for problem in problems if problem.shard == index],
            }
            for index in damaged
        ]
        stale = [p for f in (store.path, folder, store.path / LABELS) for p in stale_files(f)]
        for path in stale if not dry_run else ():
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot set shards of {store.path} aside: {error}") from error
    left = [problem.text for problem in problems if problem.shard is None]
    waiting = unfinished(store)
    if not dry_run:
        store.refresh()
    return {
        "ok": not left,
        "dry_run": dry_run,
        "set_aside": aside,
        "removed": [str(path.relative_to(store.path)) for path in stale],
        "to_make": len(waiting) + len(damaged),
        "labels": [f"{LABELS}/{name}" for name in lost_labels(store)],
        "problems": left,
        "command": run_command(store),
    }


def _unfinished(problem: Problem, store: Store) -> bool:
    """What is not there yet, and so needs no repair: the same command makes it."""
    if problem.shard is not None:
        return False
    names = [f"{SHARDS}/{shard_name(index)}.h5" for index in unfinished(store)]
    names += [f"{LABELS}/{name}" for name in lost_labels(store)]
    return problem.text.startswith(tuple(names))


def _set_aside(folder: Path, index: int, *, dry_run: bool) -> list[str]:
    """Rename the sidecar, then the file, to names that are never read; where they are then."""
    name, moved = shard_name(index), []
    number = 1 + max(
        (int(n) for p in folder.glob(f"{name}.*.bad-*") if (n := p.name.split("-")[-1]).isdigit()),
        default=0,
    )
    for ending in ("json", "h5"):
        path = folder / f"{name}.{ending}"
        if not path.exists():
            continue
        aside = path.with_name(f"{path.name}.bad-{number}")
        if not dry_run:
            path.rename(aside)
            sync_folder(folder)
        moved.append(f"{SHARDS}/{aside.name}")
    return moved


def run_command(store: Store) -> str:
    """The command of the run as far as the manifest knows it: no path is kept in a store."""
    manifest = store.manifest
    given = ["headattr", "run", "--model", str(manifest["model"].get("name") or "MODEL")]
    sources = manifest["sources"]
    plans = manifest["layers"]
    bases = [f"{p['layer']}={_spec(sources[p['basis']])}" for p in plans]
    outputs = {p["output"] for p in plans if p["output"] is not None}
    outputs -= {p["basis"] for p in plans}
    heard = [
        "unembed" if (s := sources[i])["kind"] == "unembed" else f"{s['layer']}={_spec(s)}"
        for i in sorted(outputs)
    ]
    given += ["--basis", *bases, *(["--output", *heard] if heard else []), "--texts", "TEXTS"]
    usual = {field.name: field.default for field in fields(RunConfig)}
    for name, value in manifest["config"].items():
        if value != usual.get(name):
            given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join([*given, "--out", str(store.path)])


def _spec(source: dict[str, Any]) -> str:
    return "tokens" if source["kind"] == "tokens" else str(source.get("name") or "PATH")


def render_repair(answer: dict[str, Any]) -> str:
    """A repair as text for a terminal."""
    would = "would be " if answer["dry_run"] else ""
    lines = []
    for entry in answer["set_aside"]:
        lines += [f"problem: {problem}" for problem in entry["problems"]]
        files = ", ".join(entry["files"]) or "nothing to move"
        lines.append(f"  shard {entry['shard']} {would}set aside: {files}")
    lines += [f"{path} {would}removed: its process is gone" for path in answer["removed"]]
    lines += [f"{name} is missing: the same command writes it" for name in answer["labels"]]
    lines += [f"cannot be mended so: {problem}" for problem in answer["problems"]]
    if answer["to_make"] or answer["labels"]:
        lines.append(f"{answer['to_make']} shards are to be made: run the same command again,")
        lines.append(f"  {answer['command']}")
        lines.append("  (paths are not kept in a store: put in your own)")
    return "\n".join(lines or ["nothing to repair"])
