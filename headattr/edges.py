"""Edges, heads, and which of them a run keeps."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.errors import UsageError


class Edge(NamedTuple):
    """Query position `q_pos` attends to key position `k_pos` in one head of one layer."""

    layer: int
    head: int
    q_pos: int
    k_pos: int


class HeadId(NamedTuple):
    """One head; prints as L5H1."""

    layer: int
    head: int

    def __str__(self) -> str:
        """As users write it."""
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True)
class EdgeRule:
    """Which edges of a head are kept."""

    kind: str
    """top (M keys a query, without positions that swallow attention), threshold, all or file."""
    m: int = 0
    threshold: float = 0.0
    path: str = ""


def parse_edge_rule(text: str) -> EdgeRule:
    """`top:M`, `threshold:P`, `all` or `file:PATH`; raises UsageError for anything else."""
    kind, _, value = text.partition(":")
    try:
        if text == "all":
            return EdgeRule("all")
        if kind == "top" and int(value) >= 1:
            return EdgeRule("top", m=int(value))
        if kind == "threshold" and 0 <= float(value) <= 1:
            return EdgeRule("threshold", threshold=float(value))
        if kind == "file" and value:
            return EdgeRule("file", path=value)
    except ValueError:
        pass
    raise UsageError(f"--edges {text!r}: expected top:M, threshold:P (0 to 1), all or file:PATH")


def parse_head(text: str | HeadId) -> HeadId:
    """One head, written L5H1 (or found already); raises UsageError for anything else."""
    if isinstance(text, HeadId):
        return text
    match = re.fullmatch(r"L(\d+)H(\d+)", text.strip())
    if not match:
        raise UsageError(f"head {text!r}: expected one head, such as L5H1")
    return HeadId(int(match[1]), int(match[2]))


def parse_heads(text: str, n_layers: int, n_heads: int) -> list[HeadId]:
    """`all`, or a comma-separated list of L5H1 and L3H*; raises UsageError for a head that does not
    exist."""
    if text == "all":
        return [HeadId(layer, head) for layer in range(n_layers) for head in range(n_heads)]
    found: set[HeadId] = set()
    for part in text.split(","):
        match = re.fullmatch(r"L(\d+)H(\d+|\*)", part.strip())
        if not match:
            raise UsageError(f"--heads {part.strip()!r}: expected all, or a list such as L5H1,L3H*")
        layer = int(match[1])
        heads = range(n_heads) if match[2] == "*" else [int(match[2])]
        if layer >= n_layers or max(heads) >= n_heads:
            raise UsageError(
                f"--heads {part.strip()}: the model has layers 0 to {n_layers - 1} and heads 0 "
                f"to {n_heads - 1}"
            )
        found.update(HeadId(layer, head) for head in heads)
    return sorted(found)


def parse_layers(text: str, n_layers: int) -> list[int]:
    """`all`, or a list of layers and ranges such as 1,3-5; raises UsageError for a layer that does
    not exist."""
    if text == "all":
        return list(range(n_layers))
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise UsageError(f"--layers {part.strip()!r}: expected all, or a list such as 1,3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < n_layers:
            raise UsageError(f"--layers {part.strip()}: the model has layers 0 to {n_layers - 1}")
        found.update(range(first, last + 1))
    return sorted(found)


def layer_ranges(layers: Iterable[int]) -> str:
    """Layers as `parse_layers` reads them: 1,3-5."""
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def listed_edges(
    path: Path,
    lengths: Mapping[int, int],
    heads: Sequence[HeadId],
    windows: Mapping[int, int | None],
) -> dict[tuple[int, HeadId], list[tuple[int, int]]]:
    """Edges of a JSONL file of {"prompt", "layer", "head", "q_pos", "k_pos"}, by prompt and head.

    `lengths`: tokens of every prompt that runs; `windows`: of every layer. Each list is in order,
    without repetitions. Raises UsageError, with the line, for an edge that does not exist, is
    masked, or is of a head that is not attributed.
    """
    if not path.is_file():
        raise UsageError(f"--edges file:{path}: no such file; expected a JSONL file of edges")
    found: dict[tuple[int, HeadId], set[tuple[int, int]]] = {}
    known = set(heads)
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        prompt, layer, head, q_pos, k_pos = _listed_edge(line, f"{path} line {number}")
        problem = None
        if prompt not in lengths:
            problem = "it is not in the texts, or was set aside"
        elif HeadId(layer, head) not in known:
            problem = (
                f"head {HeadId(layer, head)} is not among the heads of this run (it needs --heads "
                "and a --basis)"
            )
        else:
            problem = position_problem(q_pos, k_pos, lengths[prompt], windows[layer])
        if problem:
            raise UsageError(f"{path} line {number}: prompt {prompt}: {problem}")
        found.setdefault((prompt, HeadId(layer, head)), set()).add((q_pos, k_pos))
    return {key: sorted(edges) for key, edges in sorted(found.items())}


def _listed_edge(line: bytes, where: str) -> list[int]:
    names = ("prompt", "layer", "head", "q_pos", "k_pos")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    found = {name: record.get(name) for name in names} if isinstance(record, dict) else {}
    values = [value for value in found.values() if type(value) is int]
    if len(values) < len(names):
        shown = line.decode("utf-8", "replace").strip()[:120]
        raise UsageError(f"{where}: {shown}; expected {', '.join(names)} as integers")
    return values


def position_problem(q_pos: int, k_pos: int, length: int, window: int | None = None) -> str | None:
    """Why an edge cannot exist in a prompt of `length` tokens, or None; `window`: how many keys a
    query sees, None being all before it."""
    if not (0 <= q_pos < length and 0 <= k_pos < length):
        return (
            f"edge q {q_pos}, k {k_pos} is beyond the prompt; its positions are 0 to {length - 1}"
        )
    if k_pos > q_pos:
        return (
            f"edge q {q_pos}, k {k_pos} is masked: a query sees keys at or before its own position"
        )
    if window is not None and q_pos - k_pos >= window:
        return (
            f"edge q {q_pos}, k {k_pos} is masked: the layer's window is {window} keys, so this "
            f"query sees keys {q_pos - window + 1} to {q_pos}"
        )
    return None


def token_filter(text: str | None, tokens: Sequence[str]) -> NDArray[np.bool_]:
    """Which positions' tokens match: the exact text, or a regular expression between slashes."""
    if text is None:
        return np.ones(len(tokens), bool)
    if len(text) >= 2 and text[0] == text[-1] == "/":
        try:
            pattern = re.compile(text[1:-1])
        except re.error as error:
            raise UsageError(f"token filter {text}: not a regular expression ({error})") from error
        return np.array([bool(pattern.search(token)) for token in tokens], bool)
    return np.array([token == text for token in tokens], bool)


def select_edges(
    pattern: NDArray[np.floating],
    rule: EdgeRule,
    *,
    flagged: NDArray[np.bool_],
    keep_sinks: bool,
    q_allowed: NDArray[np.bool_],
    k_allowed: NDArray[np.bool_],
    mask: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Query and key positions of the kept edges of one head, in order; of the rows given.

    `pattern` and `mask` (what may be attended) are [q_pos, k_pos]. `top` leaves flagged keys out,
    unless `keep_sinks`; ties go to the earlier key.
    """
    kept = mask.copy()
    if rule.kind == "threshold":
        kept &= pattern >= rule.threshold
    elif rule.kind == "top":
        if not keep_sinks:
            kept &= ~flagged[None]
        if rule.m < kept.shape[1]:
            kept &= _largest(np.where(kept, pattern, -1.0), rule.m)
    kept &= q_allowed[:, None] & k_allowed[None]
    q_pos, k_pos = np.nonzero(kept)
    return q_pos, k_pos


def _largest(numbers: NDArray[np.floating], m: int) -> NDArray[np.bool_]:
    """Which of each row are its m largest, the earlier of equal ones; rows are longer than m."""
    last = np.partition(numbers, -m, axis=1)[:, -m, None]
    above, equal = numbers > last, numbers == last
    missing = m - above.sum(1, keepdims=True)
    return above | (equal & (np.cumsum(equal, axis=1) <= missing))


def same_edges(
    q_pos: NDArray[np.int64], k_pos: NDArray[np.int64]
) -> Callable[[int, range, NDArray[np.floating]], tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Selects these edges, which are in order, in every head."""

    def select(
        head: int, rows: range, pattern: NDArray[np.floating]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        here = (q_pos >= rows.start) & (q_pos < rows.stop)
        return q_pos[here], k_pos[here]

    return select
