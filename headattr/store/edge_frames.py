"""Some edges of a layer as rows of a table: edges, pairs, moved, features, parts. Columns at once,
never a loop over rows."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headattr.store.columns import Column
from headattr.store.view import LayerView, Where

Frame = dict[str, Any]
"""Columns of one length: numpy arrays, masked where a row may lack a value; texts are objects."""


class Naming(NamedTuple):
    """What the rows of a store need of its manifest."""

    kinds: tuple[str, ...]
    """Kinds of all chosen layers."""
    sources: tuple[str, ...]
    """Names."""
    first: tuple[int, ...]
    """What the ids of each source are counted from."""


class Block:
    """Some rows of a layer: those whose (prompt, head) is chosen."""

    def __init__(
        self, view: LayerView, rows: slice, chosen: NDArray[np.bool_], naming: Naming
    ) -> None:
        """`chosen`: by group. Raises ValueError where an edge is beyond its prompt."""
        where = view.where(rows)
        self.keep = chosen[where.prompt * len(view.heads) + where.head]
        self.view, self.rows, self.naming = view, rows, naming
        self.where = Where(*(part[self.keep] for part in where))
        lengths = np.diff(view.prompt_ptr)[self.where.prompt]
        if (self.where.q_pos >= lengths).any() or (self.where.k_pos > self.where.q_pos).any():
            raise ValueError("an edge is masked or beyond its prompt")
        self.q_at = self.where.begin + self.where.q_pos
        self.k_at = self.where.begin + self.where.k_pos

    def __len__(self) -> int:
        """Edges."""
        return len(self.q_at)

    @cached_property
    def ids(self) -> Frame:
        """Which edge each row is."""
        where, view = self.where, self.view
        return {
            "prompt": view.file["prompt/id"][:].astype(np.int64)[where.prompt],
            "layer": np.full(len(self), view.layer, np.int32),
            "head": np.array(view.heads, np.int32)[where.head],
            "q_pos": where.q_pos,
            "k_pos": where.k_pos,
        }

    def read(self, column: Column) -> NDArray[Any]:
        """Rows of a column; raises ValueError where a number is not finite."""
        found = self.view.read(column, self.rows)[self.keep]
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise ValueError(f"{column.dataset} has non-finite values")
        return found

    def at(self, name: str, positions: NDArray[np.int64]) -> NDArray[Any]:
        """A dataset of positions, for each edge: only the stretch that these edges need is read."""
        dataset = self.view.file[name]
        if not len(positions):
            return dataset[:0]
        low = int(positions.min())
        stretch = dataset[low : int(positions.max()) + 1]
        return (decoded(stretch) if stretch.dtype == object else stretch)[positions - low]

    def source(self, column: Column) -> int:
        """The source whose slots a column holds."""
        output = self.view.output
        return output if column.kind == "o" and output is not None else self.view.basis

    def features(self, column: Column) -> "_Slots":
        """Ids of the slots of a column; raises ValueError for slots beyond an active list."""
        slots, source = self.read(column), self.source(column)
        at = self.k_at if column.kind == "k" else self.q_at
        by_id = column.kind == "o" and bool(self.view.attrs["every_output"])
        if by_id:
            ids = slots
        else:
            active = self.view.source(source)
            if (slots.max(1, initial=-1) >= np.diff(active.ptr)[at]).any():
                raise ValueError(f"{column.dataset} points beyond an active list")
            ids = active.ids(slots, at)
        return _Slots(slots, ids + self.naming.first[source], source, None if by_id else at)

    def activations(self, found: "_Slots") -> NDArray[np.float32]:
        """Activations of slots; NaN where there is none, or where ids are no slots."""
        if found.at is None or not (found.slots >= 0).any():
            return np.full(found.slots.shape, np.nan, np.float32)
        active = self.view.source(found.source)
        places = active.ptr[found.at][:, None] + np.maximum(found.slots, 0)
        low = int(places[found.slots >= 0].min())
        acts = active.act[low : int(places[found.slots >= 0].max()) + 1]
        if not np.isfinite(acts).all():
            raise ValueError(f"source/{found.source}/act has non-finite values")
        here = acts[np.clip(places - low, 0, len(acts) - 1)]
        return np.where(found.slots < 0, np.float32(np.nan), here)

    def name(self, source: int, rows: int) -> NDArray[np.object_]:
        """The name of a source, for each row."""
        return np.full(rows, self.naming.sources[source], object)


class _Slots(NamedTuple):
    slots: NDArray[np.int64]
    """-1 for none."""
    ids: NDArray[np.int64]
    """As answers have them; of no meaning where there is none."""
    source: int
    at: NDArray[np.int64] | None
    """Positions whose lists these are."""


def edge_rows(block: Block) -> Frame:
    """One row an edge."""
    view, columns = block.view, block.view.edge_columns
    frame = dict(block.ids)
    for side, at in (("q", block.q_at), ("k", block.k_at)):
        frame[f"{side}_token"] = block.at("prompt/token_text", at)
    for name in ("score", "score_contrast", "pattern", "feature_share", "completeness"):
        frame[name] = block.read(columns[name])
    frame["contrast_completeness"] = block.read(columns["contrast_completeness"])
    capped = "score_capped" in columns
    frame["score_capped"] = block.read(columns["score_capped"]) if capped else frame["score"]
    frame["flagged"] = block.at(f"layer/{view.layer}/flagged", block.k_at)
    moved = view.output is not None
    frame["ov_completeness"] = _optional(
        block, moved and block.read(view.ov_columns["completeness"])
    )
    whole = f"layer/{view.layer}/ov/block_completeness"
    frame["block_completeness"] = _optional(block, moved and block.at(whole, block.q_at))
    return frame | _by_kind(block)


def _optional(block: Block, found: Any) -> NDArray[np.float32]:
    return np.full(len(block), np.nan, np.float32) if found is False else found


def _by_kind(block: Block) -> Frame:
    """Totals and contrasts of a side, a column a kind; NaN where the layer has no such kind."""
    view = block.view
    if unknown := set(view.kinds) - set(block.naming.kinds):
        raise ValueError(f"kinds {', '.join(sorted(unknown))} that other shards do not have")
    read = {name: block.read(view.edge_columns[name]) for name in _BY_KIND}
    none, place = _optional(block, False), {kind: i for i, kind in enumerate(view.kinds)}
    frame: Frame = {}
    for q in block.naming.kinds:
        for k in block.naming.kinds:
            both = q in place and k in place
            frame[f"total_{q}_{k}"] = read["totals"][:, place[q], place[k]] if both else none
    for side in ("q", "k"):
        parts = read[f"{side}_contrast_totals"]
        for kind in block.naming.kinds:
            frame[f"{side}_contrast_{kind}"] = parts[:, place[kind]] if kind in place else none
    frame["k_contrast_elsewhere"] = read["k_contrast_totals"][:, len(view.kinds)]
    return frame


_BY_KIND = ("totals", "q_contrast_totals", "k_contrast_totals")


def pair_rows(block: Block) -> Frame:
    """One row a kept pair of a query and a key feature."""
    columns = block.view.edge_columns
    q, k = (block.features(columns[name]) for name in ("q_slots", "k_slots"))
    values = {"value": block.read(columns["values"])}
    values["contrast"] = block.read(columns["pair_contrasts"])
    frame = _long(block, _both(q, k), {"q_feature": q.ids, "k_feature": k.ids, **values})
    return frame | {"source": block.name(q.source, len(frame["place"]))}


def moved_rows(block: Block) -> Frame | None:
    """One row a kept pair of a value and an output feature; None without an output."""
    columns = block.view.ov_columns
    if not columns:
        return None
    v, o = (block.features(columns[name]) for name in ("v_slots", "o_slots"))
    values = {"v_feature": v.ids, "o_feature": o.ids, "value": block.read(columns["values"])}
    frame = _long(block, _both(v, o), values)
    rows = len(frame["place"])
    return frame | {"source": block.name(v.source, rows), "output": block.name(o.source, rows)}


def _both(one: _Slots, other: _Slots) -> NDArray[np.bool_]:
    some = one.slots >= 0
    if (some != (other.slots >= 0)).any():
        raise ValueError("a pair has only one feature")
    return some


_SIDE = ("marginal", "contrast", "ablation")


def feature_rows(block: Block) -> Frame:
    """One row a feature among the strongest of an edge, by role."""
    view, made = block.view, list[tuple[str, NDArray[np.bool_], Frame]]()
    for role in view.roles:
        columns = view.edge_columns if role.table == "qk" else view.ov_columns
        found = block.features(columns[role.top])
        cells: Frame = {"feature": found.ids, "activation": block.activations(found)}
        if role.table == "qk":
            cells |= {name: block.read(columns[f"{role.name}_{name}s"]) for name in _SIDE}
        elif role.name == "v":
            cells["norm"] = block.read(columns["v_norms"])
        else:
            cells["read"] = block.read(columns["o_reads"])
        cells["source"] = np.full(found.slots.shape, block.naming.sources[found.source], object)
        made.append((role.name, found.slots >= 0, cells))
    return _by_role(block, made, (*_SIDE, "norm", "read"))


def part_rows(block: Block) -> Frame | None:
    """One row a member of a kind among the strongest of an edge, by role; None where kinds have
    none."""
    view, made = block.view, list[tuple[str, NDArray[np.bool_], Frame]]()
    if not view.parts:
        return None
    kinds, names = (np.array(column, object) for column in zip(*view.parts, strict=True))
    for role in (role.name for role in view.roles if role.name != "o"):
        columns = view.ov_columns if role == "v" else view.edge_columns
        places = block.read(columns[f"{role}_parts"])
        if (places >= len(view.parts)).any():
            raise ValueError(f"{columns[f'{role}_parts'].dataset} points beyond the parts")
        fields = ("norm",) if role == "v" else ("marginal", "contrast")
        cells = {name: block.read(columns[f"{role}_part_{name}s"]) for name in fields}
        made.append((role, places >= 0, {"kind": kinds[places], "name": names[places], **cells}))
    return _by_role(block, made, ("marginal", "contrast", "norm"))


def _by_role(
    block: Block, made: list[tuple[str, NDArray[np.bool_], Frame]], numbers: tuple[str, ...]
) -> Frame:
    """Roles side by side; `numbers` that a role has not are NaN."""
    some = np.concatenate([found for _, found, _ in made], 1)
    none = [np.full(found.shape, np.nan, np.float32) for _, found, _ in made]
    names = dict.fromkeys((*(name for _, _, cells in made for name in cells), *numbers))
    values = {
        name: np.concatenate([cells.get(name, none[i]) for i, (*_, cells) in enumerate(made)], 1)
        for name in names
    }
    values["role"] = np.concatenate([np.full(found.shape, r, object) for r, found, _ in made], 1)
    places = np.concatenate([np.arange(found.shape[1]) for _, found, _ in made])
    return _long(block, some, values, places)


def _long(
    block: Block,
    some: NDArray[np.bool_],
    values: Frame,
    places: NDArray[np.int64] | None = None,
) -> Frame:
    """[edge, n] values as rows, where there is some; `places`: what each of n is called."""
    edge, place = np.nonzero(some)
    found = place if places is None else places[place]
    ids = {name: column[edge] for name, column in block.ids.items()}
    return ids | {"place": found.astype(np.int32)} | {n: v[some] for n, v in values.items()}


def decoded(texts: NDArray[np.object_]) -> NDArray[np.object_]:
    """Bytes as text."""
    made = np.empty(len(texts), object)
    made[:] = [text.decode() for text in texts]
    return made


ROWS: dict[str, Callable[[Block], Frame | None]] = {
    "edges": edge_rows,
    "pairs": pair_rows,
    "moved": moved_rows,
    "features": feature_rows,
    "parts": part_rows,
}
