"""All edges of one layer of one prompt, block by block of queries; the only loop over heads.

Whatever grows with the square of the prompt, or with the edges, is there for one block of queries
of one head at a time: scores, pattern, what a row's keys share, and the results, which are handed
on as they come.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headattr.attribution.blocks import Blocks, Sizes, blocks_of
from headattr.attribution.columns import as_numpy, columns_of
from headattr.attribution.contrast import Ends, rows_of
from headattr.attribution.ov import OvHead, block_completeness, output_side, ov_edges, ov_head
from headattr.attribution.prepared import Prepared, prepare
from headattr.attribution.qk import (
    QkBlock,
    contrast_pairs,
    contrasts_of,
    lengths,
    qk_edges,
    value_pairs,
)
from headattr.attribution.shares import Rows, checked_pattern
from headattr.attribution.sides import Side, project
from headattr.attribution.task import Keep, LayerTask, swallow_attention
from headattr.kernels.pair_topk import batched
from headattr.kernels.pair_topk.batched import PairTopK
from headattr.kernels.pair_topk.dispatch import path_of
from headattr.model.head import Side as SideName
from headattr.tables import (
    EdgePart,
    LayerFacts,
    LayerTable,
    table_of,
)

_WORTH_THREADS = 1 << 29
"""Multiplications of one projection from which more than one thread pays."""


def attribute_layer(task: LayerTask) -> LayerTable:
    """The table of one layer of one prompt, whole."""
    parts: list[EdgePart] = []
    facts = stream_layer(task, parts.append, lambda rows: None)
    return table_of(facts, parts)


def stream_layer(task: LayerTask, keep: Keep, advance: Callable[[int], Any]) -> LayerFacts:
    """Attribute one layer of one prompt, edges by head, then q_pos, then k_pos, handed to `keep` a
    block at a time; what is left is what the prompt has once.

    `advance` is told of the rows, one a query and head, as they are done. Raises PromptError where
    the pattern is not the model's.
    """
    error = checked_pattern(task.weights, task.kept, task.tolerance)
    given = task.components, task.directions, task.kept.resid_pre, task.memory
    prepared = prepare(task.weights, *given)
    with _threads(len(prepared.used) * task.weights.W_Q[0].numel()):
        return _Layer(task, prepared, error, advance).stream(keep)


@contextmanager
def _threads(multiplications: int) -> Iterator[None]:
    """One CPU thread while matrices are small: on a shared machine more would wait for each other,
    and be ten times slower."""
    before = torch.get_num_threads()
    if multiplications < _WORTH_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Layer:
    """One layer of one prompt at work."""

    def __init__(
        self, task: LayerTask, prepared: Prepared, error: float, advance: Callable[[int], Any]
    ) -> None:
        self.task, self.prepared, self.error, self.advance = task, prepared, error, advance
        self.length, device = len(task.kept.resid_pre), task.kept.resid_pre.device
        self.flagged = swallow_attention(task.kept.resid_pre)
        self.on_flagged = torch.from_numpy(self.flagged).to(device)
        heads = None if task.output is None else task.output.block
        self.writes = task.weights.writes if heads is None else task.weights.side_by_side
        self.block = task.kept.block if heads is None else heads
        self.scale = self.writes.output_scale(task.kept.attn_out)
        self.output = (
            None if task.output is None else output_side(task.output, every=task.every_output)
        )
        self.sink_share = np.zeros((len(task.heads), self.length), np.float64)
        self.share_sums = np.zeros((len(task.heads), 4), np.float64)
        self.n_nonfinite, self.has_edges = 0, False
        self.blocks = self._blocks()
        self.rebuilt = torch.zeros_like(self.block, dtype=prepared.sigma.dtype)

    def stream(self, keep: Keep) -> LayerFacts:
        """Every head, its groups one after the other."""
        weights = self.task.weights
        for group in range(len(weights.W_K)):
            heads = [h for h in range(weights.n_heads) if weights.kv_head(h) == group]
            asked = [head for head in heads if head in self.task.heads]
            if asked or self.output is not None:
                self._group(group, heads, asked, keep)
        return self._facts()

    def _group(self, group: int, heads: list[int], asked: list[int], keep: Keep) -> None:
        """The heads that share one key and value head."""
        task, kept = self.task, self.task.kept
        exact = self.prepared.sigma.dtype
        K = kept.K[:, group].to(exact)
        key = self._side("key", group) if asked else None
        value = None if self.output is None else self._side("value", group)
        for head in heads:
            Q = kept.Q[:, head].to(exact)
            query = ov = None
            if head in asked:
                query = self._side("query", head)
                if value is not None and self.output is not None:
                    own, table = kept.V[:, group], None
                    if task.pushed_output is not None:
                        table = task.pushed_output.table(("output", head), self.output.used)
                    ov = ov_head(self.writes, head, value, own, self.output, self.scale, table)
            for start in range(0, self.length, step := self.blocks.rows):
                stop = min(start + step, self.length)
                rows = Rows(task.weights, kept.scale, Q, K, start, stop)
                if value is not None:
                    written = self.writes.written[head].to(exact)
                    self.rebuilt[start:stop] += rows.pattern @ value.whole[:stop] @ written
                if query is not None and key is not None:
                    self._attribute(head, query, key, ov, (Q, K), rows, keep)
                    self.advance(stop - start)

    def _side(self, name: SideName, head: int) -> Side:
        """One side of one head (of one group, for keys and values)."""
        task, table = self.task, None
        if task.pushed is not None:
            table = task.pushed.table((name, head), self.prepared.used)
        return project(task.weights, name, head, self.prepared, task.kept.rotary, table)

    def _attribute(
        self,
        head: int,
        query: Side,
        key: Side,
        ov: OvHead | None,
        own: tuple[Tensor, Tensor],
        rows: Rows,
        keep: Keep,
    ) -> None:
        """What is known of every row, then the edges that are kept of them."""
        task, weights, scale = self.task, self.task.weights, self.task.kept.scale
        at, (start, stop) = task.heads.index(head), (rows.start, rows.stop)
        self.share_sums[at] += rows.share_sums(query, key).cpu().numpy()
        on_sinks = rows.pattern[:, self.on_flagged[:stop]].sum(-1)
        self.sink_share[at, start:stop] = on_sinks.cpu().numpy()
        chosen = task.select(head, range(start, stop), rows.pattern.cpu().numpy())
        q_pos, k_pos = (torch.from_numpy(pos).to(self.on_flagged.device) for pos in chosen)
        last = stop == self.length and head == task.heads[-1]
        if not len(q_pos) and (self.has_edges or not last):
            return  # a layer without edges has one empty part, which says how wide columns are
        self.has_edges = True
        (Q, K), eps = own, torch.finfo(self.prepared.dtype).eps
        here = query.at(rows.positions)
        shared = rows_of(weights, here, key, start, scale, rows.scores, rows.pattern)
        norms = lengths(Q, eps)[start:stop], lengths(K, eps)
        block = QkBlock(weights, here, key, Q[start:stop], K, *norms, scale, shared)
        parts = q_pos.split(self.blocks.kept), k_pos.split(self.blocks.kept)
        for q_part, k_part in zip(*parts, strict=True):
            pattern = rows.pattern[q_part - start, k_part]
            keep(self._part(head, block, ov, pattern, q_part, k_part))

    def _part(
        self, head: int, block: QkBlock, ov: OvHead | None, pattern: Tensor, q: Tensor, k: Tensor
    ) -> EdgePart:
        """Some edges in chunks, those of one key together, put back in order."""
        task = self.task
        order = k.argsort(stable=True)
        qk, moved, pairs = [], [], []
        for some in order.split(self.blocks.edges):
            q_pos, k_pos = q[some], k[some]
            keys, k_at = k_pos.unique(return_inverse=True)
            ends, key = Ends(q_pos, k_pos, q_pos - block.rows.start, k_at), block.key.at(keys)
            qk.append(qk_edges(block, ends, key, top_marginals=task.top_marginals, rank=task.rank))
            if task.rank == "value":
                pairs.append(value_pairs(block, ends, key, task.topk))
            if ov is not None:
                weight = pattern[some].to(self.prepared.dtype)
                sizes = {"topk": task.topk, "top_marginals": task.top_marginals}
                moved.append(ov_edges(ov, weight, q_pos, k_pos, **sizes))
        back = order.argsort()
        columns = columns_of(qk, back)
        columns |= self._pairs(block, Ends(q, k, q - block.rows.start, k), pairs, back)
        self.n_nonfinite += int(columns.pop("n_nonfinite").sum())
        columns |= {"q_pos": as_numpy(q), "k_pos": as_numpy(k), "pattern": as_numpy(pattern)}
        if not moved:
            return EdgePart(head, columns, None)
        written = columns_of([edges._replace(pairs=None) for edges in moved], back)
        written |= columns_of([edges.pairs for edges in moved], back, "v_slots", "o_slots")
        del written["n_nonfinite"]
        return EdgePart(head, columns, written)

    def _pairs(
        self, block: QkBlock, ends: Ends, found: list[PairTopK], back: Tensor
    ) -> dict[str, Any]:
        """Pairs and their contrasts, edges in their own order: by query."""
        if found:
            whole = PairTopK(*(torch.cat(parts)[back] for parts in zip(*found, strict=True)))
            return columns_of([whole], None, "q_slots", "k_slots") | {
                "pair_contrasts": as_numpy(contrasts_of(block, ends, whole.left, whole.right))
            }
        step = self.blocks.edges
        parts = [
            contrast_pairs(block, Ends(*some), self.task.topk)
            for some in zip(*(part.split(step) for part in ends), strict=True)
        ]
        contrasts = torch.cat([contrasts for _, contrasts in parts])
        names = [pairs for pairs, _ in parts], None, "q_slots", "k_slots"
        return columns_of(*names) | {"pair_contrasts": as_numpy(contrasts)}

    def _blocks(self) -> Blocks:
        """How much is at work at once."""
        task, components = self.task, self.prepared.components
        reads = 0
        if task.output is not None:
            every = len(task.output.rows) if task.every_output else 0
            reads = max(1, every, int(task.output.active.counts.max()))
        return blocks_of(
            Sizes(
                length=self.length,
                used=len(self.prepared.used),
                slots=int(components.active.counts.max()),
                reads=reads,
                every=task.every_output,
                d_head=task.weights.W_Q.shape[-1],
                kinds=len(components.kinds),
                parts=len(components.parts),
                topk=task.topk,
                top_marginals=task.top_marginals,
                rank=task.rank,
                products=path_of(self.on_flagged.device, self.prepared.dtype, task.topk) is batched,
            ),
            task.memory,
        )

    def _facts(self) -> LayerFacts:
        task, weights = self.task, self.task.weights
        whole = None
        if self.output is not None:
            exact = self.rebuilt.dtype
            constant = self.writes.block_constant(self.scale).to(exact)
            rebuilt = (self.rebuilt * self.scale[:, None].to(exact) + constant).to(self.block)
            whole = as_numpy(block_completeness(rebuilt, self.block, self.output))
        return LayerFacts(
            layer=weights.layer,
            heads=np.array(task.heads, np.int32),
            kinds=task.components.kinds,
            parts=tuple((part.kind, part.name) for part in task.components.parts),
            n_nonfinite=self.n_nonfinite,
            flagged=self.flagged,
            sink_share=self.sink_share,
            share_sums=self.share_sums,
            pattern_error=self.error,
            block_completeness=whole,
        )
