"""One edge in memory: the same answer as a store's, with every active feature."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headattr.attribution.layer import attribute_layer
from headattr.basis.active import ActiveFeatures
from headattr.batch import check_finite, layer_task
from headattr.edges import Edge, HeadId, parse_head, position_problem, same_edges
from headattr.errors import PromptError, UsageError
from headattr.inputs import inputs_from_memory
from headattr.model.capture import capture, pad
from headattr.model.proof import TOLERANCE
from headattr.model.tokens import Prompt
from headattr.plan import Run, label_lines, make_run
from headattr.query import SourceNames, edge_answer, source_names
from headattr.store.columns import Column, edge_columns, ov_columns
from headattr.store.rows import Active, EdgeRow, OvRow
from headattr.tables import LayerTable, OvTable


def explain_edge(
    model: Any,
    basis: Any,
    text: str | Sequence[int],
    head: str | HeadId,
    q_pos: int,
    k_pos: int,
    *,
    output: Any = (),
    tokenizer: Any | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Why one edge is there, in memory: the answer of `query edge` with every active feature of
    both sides, and the `topk` strongest pairs (an option of `RunConfig`, 32).

    `head` is written as L5H1; `notes` say what was converted. Densities are null: there is no run
    to count over. Raises UsageError for an edge that cannot exist.
    """
    options = {"heads": str(parse_head(head)), **options}
    inputs = inputs_from_memory(model, basis, output, [text], "", tokenizer, options)
    run = make_run(*inputs, every_layer=False)
    if not run.prompts:
        raise UsageError(f"the text cannot run: {run.manifest['set_aside'][0]['reason']}")
    prompt, layer_plan = run.prompts[0], run.plans[0]
    edge = Edge(layer_plan.layer, layer_plan.heads[0], q_pos, k_pos)
    if problem := position_problem(q_pos, k_pos, len(prompt.tokens), layer_plan.window):
        raise UsageError(problem)
    used = [*run.source_list, run.sources.bases[edge.layer], *run.outputs.values()]
    sites = sorted({site for one in used for site in one.sites})
    captured = capture(run.model, *pad([prompt.tokens]), layers=[edge.layer], sites=sites)[0]
    if isinstance(captured, PromptError):
        raise captured
    actives = {i: source.active(captured) for i, source in enumerate(run.source_list)}
    widest = max(int(active.counts.max()) for active in actives.values())
    if layer_plan.every_output and layer_plan.output is not None:
        widest = max(widest, run.source_list[layer_plan.output].about.n_features)
    weights = run.model.family.head_weights(run.model.hf, edge.layer)
    task = layer_task(run, layer_plan, weights, prompt, captured, actives, top_marginals=widest)
    task = replace(task, select=same_edges(np.array([q_pos]), np.array([k_pos])))
    table = attribute_layer(replace(task, tolerance=TOLERANCE[run.model.dtype]))
    for columns in (table, table.ov):
        check_finite(edge.layer, {} if columns is None else columns._asdict())
    return _answer(run, prompt, edge, table, actives)


def _answer(
    run: Run, prompt: Prompt, edge: Edge, table: LayerTable, actives: Mapping[int, ActiveFeatures]
) -> dict[str, Any]:
    layer_plan = run.plans[0]
    at = [(_at(active, edge.q_pos), _at(active, edge.k_pos)) for active in actives.values()]
    output = layer_plan.output
    row = _row_of(
        table,
        edge,
        (prompt.token_texts[edge.q_pos], prompt.token_texts[edge.k_pos]),
        *at[layer_plan.basis],
        None if output is None or layer_plan.every_output else at[output][0],
    )
    return edge_answer(
        row,
        None,
        basis=_names(run, layer_plan.basis),
        output=None if output is None else _names(run, output),
        read=layer_plan.read,
        ov_reason=layer_plan.ov_reason,
        notes=run.model.notes,
    )


def _at(active: ActiveFeatures, pos: int) -> Active:
    start, stop = active.ptr[pos : pos + 2].tolist()
    return Active(active.ids[start:stop].cpu().numpy(), active.acts[start:stop].cpu().numpy())


def _names(run: Run, source: int) -> SourceNames:
    entry, text = run.manifest["sources"][source], label_lines(run.source_list[source], run.model)
    lines = [] if text is None else text.split("\n")[:-1]
    return source_names(
        entry,
        lambda feature: json.loads(lines[feature])["label"] if feature < len(lines) else None,
        lambda feature: None,
    )


def _row_of(
    table: LayerTable,
    edge: Edge,
    tokens: tuple[str, str],
    q_active: Active,
    k_active: Active,
    o_active: Active | None,
) -> EdgeRow:
    """The only edge of a table, as the reader gives a stored one."""
    ov = None
    if table.ov is not None:
        whole = float(table.ov.block_completeness[edge.q_pos])
        ov = OvRow(block_completeness=whole, **_cells(table.ov, ov_columns(parts=True)))
    return EdgeRow(
        edge=edge,
        tokens=tokens,
        flagged=bool(table.flagged[edge.k_pos]),
        kinds=table.kinds,
        parts=table.parts,
        q_active=q_active,
        k_active=k_active,
        o_active=o_active,
        ov=ov,
        **_cells(table, edge_columns(capped=True, parts=True, rank="value")),
    )


def _cells(table: LayerTable | OvTable, columns: dict[str, Column]) -> dict[str, Any]:
    """The first row of every column."""
    rows = {name: getattr(table, name)[0] for name in columns}
    scalars = [name for name, column in columns.items() if column.kind == "scalar"]
    return rows | {name: float(rows[name]) for name in scalars}
