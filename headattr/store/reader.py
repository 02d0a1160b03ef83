"""Open a store and read rows of it; no torch, no locks, safe beside a running job.

Only shards whose sidecar is there and whose size agrees are served; what is wrong with the others
is in `Store.problems`, naming the file. A store can be used after a fork, and sent to a process.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headattr.edges import Edge, HeadId, parse_head, position_problem
from headattr.errors import StoreError, UsageError
from headattr.store.columns import OV_PARTS, PARTS, Column
from headattr.store.format import LABELS, SHARDS, make_keys, shard_name, split_keys
from headattr.store.merged import Merged, open_merged
from headattr.store.opened import here
from headattr.store.published import read_manifest
from headattr.store.rows import EdgeRow, OvRow, fault
from headattr.store.served import Served
from headattr.store.shard import Shard
from headattr.store.view import LayerView


class Store:
    """A result folder, open for reading."""

    def __init__(self, path: str | Path) -> None:
        """Raises StoreError if `path` holds no store, or one of a newer version."""
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self._labels: dict[int, list[str]] = {}
        self._see(Served(self.path / SHARDS, self.manifest))

    def _see(self, served: Served) -> None:
        self._served, self.shards, self._where = served, served.shards, served.where
        self.broken, self.problems = served.broken, list(served.broken.values())
        self._counted: dict[int, tuple[NDArray[np.int64], NDArray[np.int64], int]] = {}
        self.named: dict[int, Any] = {}
        """What `query.names_of` remembers of each source."""
        self._merged: tuple[int, Merged | None] | None = None

    def refresh(self) -> list[int]:
        """See what a running job has finished since, and what was set aside; returns the prompts
        that are new. Answers given before stay as they were."""
        before = self._where.keys()
        self._see(self._served.again())
        return sorted(self._where.keys() - before)

    def __reduce__(self) -> tuple[type["Store"], tuple[Path]]:
        """Only where it is: another process opens its own files."""
        return Store, (self.path.absolute(),)

    @property
    def heads(self) -> list[HeadId]:
        """The heads that were attributed."""
        return [
            HeadId(plan["layer"], head)
            for plan in self.manifest["layers"]
            for head in plan["heads"]
        ]

    @property
    def prompt_ids(self) -> list[int]:
        """Prompts that are finished, in order."""
        return sorted(self._where)

    @property
    def set_aside(self) -> list[dict[str, Any]]:
        """Prompts that were not run: {"prompt", "line", "reason"}."""
        later = [entry for shard in self.shards for entry in shard.sidecar["set_aside"]]
        return sorted([*self.manifest["set_aside"], *later], key=lambda entry: entry["prompt"])

    def heads_in(self, layer: int) -> list[int]:
        """The heads of a layer that were attributed; none of a layer that was not."""
        plans = [plan for plan in self.manifest["layers"] if plan["layer"] == layer]
        return plans[0]["heads"] if plans else []

    @property
    def merged(self) -> Merged | None:
        """The index over all shards; None where there is none that was made from just these."""
        if self._merged is None or self._merged[0] != here():
            self._merged = here(), open_merged(self.path, self.manifest["hash"], self.shards)
        return self._merged[1]

    @contextmanager
    def tolerating(self, shard: Shard) -> Iterator[None]:
        """A shard that turns out to be damaged inside is a problem, and passed over."""
        try:
            with shard.reading():
                yield
        except StoreError as error:
            self.problems += [str(error)] if str(error) not in self.problems else []

    def token_texts(self, prompt: int) -> list[str]:
        """What each position of a prompt shows."""
        with self._reading(prompt):
            shard, start, stop = self._span(prompt)
            return [text.decode() for text in shard.file["prompt/token_text"][start:stop]]

    def tokens(self, prompt: int) -> list[int]:
        """Token ids of a prompt."""
        with self._reading(prompt):
            shard, start, stop = self._span(prompt)
            return shard.file["prompt/token"][start:stop].tolist()

    def facts(self, prompt: int) -> dict[str, Any]:
        """{"text" (None for one given as tokens), "truncated", "extra"} of a prompt."""
        with self._reading(prompt):
            shard = self._span(prompt)[0]
            at, group = shard.ids.index(prompt), shard.file["prompt"]
            text = group["text"][at].decode()
            return {
                "text": text or None,
                "truncated": bool(group["truncated"][at]),
                "extra": json.loads(group["extra"][at].decode()),
            }

    def sink_share(self, prompt: int, head: HeadId, q_pos: int) -> float:
        """Pattern mass that a query gives to positions that swallow attention."""
        with self._reading(prompt):
            shard, start, _ = self._span(prompt)
            view = shard.layer(head.layer)
            place = view.heads.index(head.head)
            return float(view.dataset("sink_share")[start + q_pos, place])

    def edges(self, prompt: int, head: HeadId | str) -> dict[str, NDArray[Any]]:
        """Columns of a head's edges in one prompt: q_pos, k_pos, score, pattern, completeness,
        feature_share."""
        head = parse_head(head)
        names = ("score", "pattern", "completeness", "feature_share")
        with self._reading(prompt):
            shard, start, stop = self.group(prompt, head)
            view = shard.layer(head.layer)
            q_pos, k_pos = split_keys(view.dataset("key")[start:stop])
            return {"q_pos": q_pos, "k_pos": k_pos} | {
                n: view.dataset(n)[start:stop] for n in names
            }

    def edge(self, prompt: int, edge: Edge) -> EdgeRow:
        """Everything kept of one edge.

        Raises UsageError if the edge cannot exist (masked, beyond the prompt), StoreError if it was
        not kept.
        """
        with self._reading(prompt):
            row = self._find(prompt, edge)
            if row is not None and (found := fault(row)):
                raise ValueError(f"{edge}: {found}")
        if row is None:
            raise StoreError(self._not_kept(prompt, edge))
        return row

    def _find(self, prompt: int, edge: Edge) -> EdgeRow | None:
        shard, begin, end = self._span(prompt)
        window = self.plan(HeadId(edge.layer, edge.head))["window"]
        if problem := position_problem(edge.q_pos, edge.k_pos, end - begin, window):
            raise UsageError(f"prompt {prompt}: {problem}")
        start, stop = self.group(prompt, HeadId(edge.layer, edge.head))[1:]
        keys = shard.layer(edge.layer).dataset("key")
        if stop > start:
            wanted = make_keys(np.array([edge.q_pos]), np.array([edge.k_pos]), keys.dtype)[0]
            found = keys[start:stop]
            at = int(np.searchsorted(found, wanted))
            if at < len(found) and found[at] == wanted:
                return self._row(shard, begin, start + at, edge)
        return None

    def _row(self, shard: Shard, begin: int, row: int, edge: Edge) -> EdgeRow:
        view = shard.layer(edge.layer)
        q_at, k_at = begin + edge.q_pos, begin + edge.k_pos
        cells = _cells(view, view.edge_columns, row)
        cells.setdefault("score_capped", cells["score"])
        none: dict[str, Any] = dict.fromkeys(PARTS, np.empty(0, np.float32))
        cells = none | cells
        ov = None
        if view.output is not None:
            whole = float(view.dataset("ov/block_completeness")[q_at])
            moved: dict[str, Any] = dict.fromkeys(OV_PARTS, np.empty(0, np.float32))
            moved |= _cells(view, view.ov_columns, row)
            ov = OvRow(block_completeness=whole, o_reads=view.reads(row), **moved)
        by_id = view.output is None or bool(view.attrs["every_output"])
        return EdgeRow(
            edge=edge,
            tokens=(shard.token_text[q_at].decode(), shard.token_text[k_at].decode()),
            flagged=bool(view.dataset("flagged")[k_at]),
            kinds=view.kinds,
            parts=view.parts,
            q_active=shard.active(view.basis, q_at),
            k_active=shard.active(view.basis, k_at),
            o_active=None if by_id else shard.active(int(view.attrs["output"]), q_at),
            ov=ov,
            **cells,
        )

    def density(self, source: int, feature: int) -> float | None:
        """Share of the run's positions that do not swallow attention where a feature is active."""
        features, times, positions = self._counts(source)
        if positions == 0:
            return None
        at = int(np.searchsorted(features, feature))
        return int(times[at]) / positions if at < len(features) and features[at] == feature else 0.0

    def mean_l0(self, source: int) -> float | None:
        """Mean number of active features at positions that do not swallow attention."""
        _, times, positions = self._counts(source)
        return int(times.sum()) / positions if positions else None

    def _counts(self, source: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Features that are active somewhere, ascending, how often, and over how many positions."""
        if source not in self._counted:
            every, times = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
            positions = 0
            for shard in self.shards:
                with self.tolerating(shard):
                    present, count, counted = shard.counts(source)
                    every.append(present)
                    times.append(count)
                    positions += counted
            features, inverse = np.unique(np.concatenate(every), return_inverse=True)
            total = np.zeros(len(features), np.int64)
            np.add.at(total, inverse, np.concatenate(times))
            self._counted[source] = features, total, positions
        return self._counted[source]

    def label(self, source: int, feature: int) -> str | None:
        """The label of a feature, from the labels copied into the store."""
        lines = self._label_lines(source)
        if feature >= len(lines):
            return None
        record = json.loads(lines[feature])
        return record["label"] if record["id"] == feature else None

    def _label_lines(self, source: int) -> list[str]:
        if source not in self._labels:
            name = self.manifest["sources"][source]["labels"]
            path = None if name is None else self.path / LABELS / name
            found = path is not None and path.is_file()
            self._labels[source] = (
                path.read_text(encoding="utf-8").split("\n")[:-1] if path and found else []
            )
        return self._labels[source]

    def _reading(self, prompt: int) -> AbstractContextManager[None]:
        shard = self._where.get(prompt)
        return nullcontext() if shard is None else shard.reading()

    def _span(self, prompt: int) -> tuple[Shard, int, int]:
        shard = self._where.get(prompt)
        if shard is None:
            raise self._no_prompt(prompt)
        at = shard.ids.index(prompt)
        return shard, int(shard.ptr[at]), int(shard.ptr[at + 1])

    def group(self, prompt: int, head: HeadId) -> tuple[Shard, int, int]:
        """The shard of a prompt, and which rows of the layer are a head's edges in it."""
        shard, plan = self._span(prompt)[0], self.plan(head)
        group = shard.ids.index(prompt) * len(plan["heads"]) + plan["heads"].index(head.head)
        start, stop = shard.layer(head.layer).group_ptr[group : group + 2]
        return shard, int(start), int(stop)

    def plan(self, head: HeadId) -> dict[str, Any]:
        """What the manifest says of a head's layer; raises UsageError for a head that is not
        there."""
        plan = next((p for p in self.manifest["layers"] if p["layer"] == head.layer), None)
        if plan is None or head.head not in plan["heads"]:
            raise UsageError(
                f"head {head} is not in this store; it holds {', '.join(map(str, self.heads))}"
            )
        return plan

    def _no_prompt(self, prompt: int) -> Exception:
        for entry in self.set_aside:
            if entry["prompt"] == prompt:
                return StoreError(
                    f"prompt {prompt} (line {entry['line']}) was set aside: {entry['reason']}"
                )
        for entry in self.manifest["shards"]:
            if prompt in entry["prompts"]:
                name = f"{SHARDS}/{shard_name(entry['index'])}.h5"
                broken = [p for p in self.problems if name in p]
                return StoreError(
                    broken[0]
                    if broken
                    else f"prompt {prompt} is in {name}, which is not finished yet"
                )
        known = self.prompt_ids
        some = f"{known[0]} to {known[-1]}" if known else "none yet"
        if known and known[0] < prompt < known[-1]:
            some += f", and line {prompt + 1} of its texts is blank"
        return UsageError(f"prompt {prompt} is not in this store; it holds {some}")

    def _not_kept(self, prompt: int, edge: Edge) -> str:
        kept = self.edges(prompt, HeadId(edge.layer, edge.head))
        keys = kept["k_pos"][kept["q_pos"] == edge.q_pos].tolist()
        config = self.manifest["config"]
        rules = [f"--edges {config['edges']}"]
        for name in ("q_token", "k_token"):
            if config[name] is not None:
                rules.append(f"--{name.replace('_', '-')} {config[name]}")
        return (
            f"edge q {edge.q_pos}, k {edge.k_pos} of {HeadId(edge.layer, edge.head)} was not kept "
            f"({' '.join(rules)}); kept keys of this query: {keys or 'none'}"
        )

    def __repr__(self) -> str:
        """Where it is and how much it holds."""
        return f"Store({str(self.path)!r}, {len(self._where)} prompts, {len(self.heads)} heads)"

    def close(self) -> None:
        """Close the files."""
        for shard in self.shards:
            shard.close()
        if self._merged is not None and self._merged[0] == here() and self._merged[1] is not None:
            self._merged[1].file.close()
        self._merged = None

    def __enter__(self) -> "Store":
        """The store itself; `with` closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()

    def __iter__(self) -> Iterator[int]:
        """Finished prompt ids."""
        return iter(self.prompt_ids)


def _cells(view: LayerView, columns: dict[str, Column], row: int) -> dict[str, Any]:
    """One row of every column: floats, arrays, and slots with -1 for none."""
    cells = {name: view.read(column, row) for name, column in columns.items()}
    scalars = [name for name, column in columns.items() if column.kind == "scalar"]
    return cells | {name: float(cells[name]) for name in scalars}


def open_store(path: str | Path) -> Store:
    """Open a result folder. Raises StoreError if it holds no store."""
    return Store(path)
