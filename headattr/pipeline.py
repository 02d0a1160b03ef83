"""The whole run, top to bottom: texts -> model -> basis -> attribution -> store.

1 plan: check every input, load the model and its dictionaries, fix what each layer does
2 begin: write the manifest, or find the same one there
3 for every shard that is not finished: capture, decompose, attribute, publish
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headattr.attribution.layer import LayerTask, attribute_layer, swallow_attention
from headattr.basis.component import ActiveFeatures
from headattr.edges import HeadId, parse_edge_rule, select_edges, token_filter
from headattr.errors import PromptError
from headattr.inputs import inputs_from_memory
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.head import HeadWeights
from headattr.model.proof import TOLERANCE
from headattr.model.tokens import Prompt
from headattr.plan import Run, label_lines, make_run
from headattr.store.manifest import begin
from headattr.store.published import read_sidecar
from headattr.store.reader import Store
from headattr.store.writer import ActiveLists, LayerPlan, PromptResult, write_shard
from headattr.tables import LayerTable, as_float32, non_finite_column
from headattr.texts import SetAside


def attribute(
    model: Any,
    basis: Any,
    texts: str | Path | Sequence[str | Sequence[int]] | Mapping[str, Any],
    out: str | Path,
    *,
    output: Any = (),
    tokenizer: Any | None = None,
    **options: Any,
) -> Store:
    """Attribute the heads of `model` over `texts`, keep the result in the folder `out`, and open
    it.

    `model`: a name, folder, hub id, `.gguf` file or a Hugging Face model in memory (then give its
    `tokenizer`, or texts as token ids). `basis` and `output`: a SPEC or several, as on the command
    line, or a dict from layer to a folder, a `sae_lens.SAE`, a `PlainDictionary` or "tokens".
    `texts`: a file, strings, lists of token ids, or a tokenizer's padded batch. `options`: fields
    of `RunConfig`. Raises HeadattrError before any work.
    """
    return execute(
        make_run(*inputs_from_memory(model, basis, output, texts, out, tokenizer, options))
    )


def execute(run: Run) -> Store:
    """Steps 2 and 3. Finished shards are kept whatever happens; the same call resumes."""
    folder = Path(run.config.out)
    labels = {i: label_lines(source, run.model) for i, source in enumerate(run.source_list)}
    begin(folder, run.manifest, labels)
    by_id = {prompt.id: prompt for prompt in run.prompts}
    with _progress(run) as advance:
        for entry in run.manifest["shards"]:
            prompts = [by_id[prompt] for prompt in entry["prompts"]]
            path = folder / "shards" / f"{entry['index']:05d}.h5"
            if read_sidecar(path, run.manifest["hash"])[0] is None:
                results, aside = attribute_prompts(run, prompts, advance)
                write_shard(
                    path.parent,
                    entry["index"],
                    results,
                    run.plans,
                    manifest_hash=run.manifest["hash"],
                    set_aside=[item.as_dict() for item in aside],
                )
            else:
                advance(len(prompts) * len(run.plans))
    return Store(folder)


def attribute_prompts(
    run: Run, prompts: Sequence[Prompt], advance: Any
) -> tuple[list[PromptResult], list[SetAside]]:
    """Capture, decompose and attribute some prompts; a prompt that cannot be run is set aside."""
    results: list[PromptResult] = []
    aside: list[SetAside] = []
    layers = [layer_plan.layer for layer_plan in run.plans]
    sites = sorted({source.layer for source in run.source_list})
    for start in range(0, len(prompts), run.config.batch_size):
        batch = prompts[start : start + run.config.batch_size]
        found = capture(
            run.model,
            *pad([prompt.tokens for prompt in batch]),
            layers=layers,
            sites=sites,
            ids_in_run=[prompt.id for prompt in batch],
        )
        for prompt, result in zip(batch, _attribute_batch(run, batch, found, advance), strict=True):
            if isinstance(result, PromptError):
                aside.append(SetAside(prompt.id, str(result)))
            else:
                results.append(result)
    return results, aside


def _attribute_batch(
    run: Run,
    batch: Sequence[Prompt],
    found: Sequence[PromptCapture | PromptError],
    advance: Any,
) -> list[PromptResult | PromptError]:
    """One result a prompt. The layers are the outer loop: their folded weights are made once."""
    tables: list[dict[int, LayerTable]] = [{} for _ in batch]
    failed = {i: item for i, item in enumerate(found) if isinstance(item, PromptError)}
    captures = {i: item for i, item in enumerate(found) if isinstance(item, PromptCapture)}
    actives = {i: [s.active(captured) for s in run.source_list] for i, captured in captures.items()}
    for layer_plan in run.plans:
        weights = run.model.family.head_weights(run.model.hf, layer_plan.layer)
        advance(len(batch) - len(captures))
        for i, captured in captures.items():
            advance(1)
            if i in failed:
                continue
            task = layer_task(run, layer_plan, weights, batch[i], captured, actives[i])
            try:
                table = checked_table(task, TOLERANCE[run.model.dtype])
                tables[i][layer_plan.layer] = as_float32(table)
            except PromptError as error:
                failed[i] = error
    return [
        failed[i] if i in failed else _result(run, batch[i], captures[i], actives[i], tables[i])
        for i in range(len(batch))
    ]


def _result(
    run: Run,
    prompt: Prompt,
    captured: PromptCapture,
    actives: Sequence[ActiveFeatures],
    tables: dict[int, LayerTable],
) -> PromptResult:
    pairs = zip(actives, run.source_list, strict=True)
    lists = {i: _lists(active, captured, source) for i, (active, source) in enumerate(pairs)}
    return PromptResult(
        prompt.id,
        prompt.tokens,
        prompt.token_texts,
        prompt.text,
        prompt.extra,
        prompt.truncated,
        lists,
        tables,
    )


def checked_table(task: LayerTask, tolerance: float) -> LayerTable:
    """The table of one layer of one prompt; PromptError where it is not the model's, or not
    finite."""
    table = attribute_layer(task)
    if not table.pattern_error <= tolerance:
        raise PromptError(
            f"the pattern of layer {table.layer} is off by {table.pattern_error:.1e} from the "
            f"model's own; expected at most {tolerance:.0e}"
        )
    if name := non_finite_column(table):
        raise PromptError(
            f"non-finite numbers: {name} of layer {table.layer}; its activations are too large "
            "for float32"
        )
    return table


def layer_task(
    run: Run,
    layer_plan: LayerPlan,
    weights: HeadWeights,
    prompt: Prompt,
    captured: PromptCapture,
    actives: Sequence[ActiveFeatures],
    **options: Any,
) -> LayerTask:
    """What to attribute in one layer of one prompt."""
    layer, sources = layer_plan.layer, run.source_list
    basis = sources[layer_plan.basis]
    reads = None
    if layer_plan.output is not None:
        output = sources[layer_plan.output]
        reads = output.reads(captured, actives[layer_plan.output], run.config.read)
    return LayerTask(
        weights,
        captured.layers[layer],
        basis.components(captured, actives[layer_plan.basis]),
        basis.directions,
        reads,
        layer_plan.every_output,
        tuple(layer_plan.heads),
        _selector(run, layer_plan, prompt, swallow_attention(captured.layers[layer].resid_pre)),
        run.config.topk,
        run.config.rank,
        **options,
    )


def _selector(run: Run, layer_plan: LayerPlan, prompt: Prompt, flagged: NDArray[np.bool_]) -> Any:
    rule = parse_edge_rule(run.config.edges)
    q_allowed = token_filter(run.config.q_token, prompt.token_texts)
    k_allowed = token_filter(run.config.k_token, prompt.token_texts)
    mask = np.tri(len(prompt.tokens), dtype=bool)
    if layer_plan.window is not None:
        mask &= ~np.tri(len(prompt.tokens), k=-layer_plan.window, dtype=bool)

    def select(
        head: int, pattern: NDArray[np.floating]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        allowed = mask
        if rule.kind == "file":
            allowed = np.zeros_like(mask)
            for q_pos, k_pos in run.listed.get((prompt.id, HeadId(layer_plan.layer, head)), []):
                allowed[q_pos, k_pos] = True
        return select_edges(
            pattern,
            rule,
            flagged=flagged,
            keep_sinks=run.config.keep_sinks,
            q_allowed=q_allowed,
            k_allowed=k_allowed,
            mask=allowed,
        )

    return select


def _lists(active: ActiveFeatures, captured: PromptCapture, source: Any) -> ActiveLists:
    counted = ~swallow_attention(captured.resid[source.layer])
    ptr, ids, acts = (part.cpu().numpy() for part in (active.ptr, active.ids, active.acts))
    return ActiveLists(ptr, ids, acts, counted)


class _progress:
    """A bar on standard error, over the tables to fill: one a prompt and layer."""

    def __init__(self, run: Run) -> None:
        from tqdm import tqdm

        self.bar = tqdm(
            total=len(run.prompts) * len(run.plans),
            unit=" tables",
            file=sys.stderr,
            disable=not run.config.progress,
            leave=False,
        )

    def __enter__(self) -> Any:
        return self.bar.update

    def __exit__(self, *_: object) -> None:
        self.bar.close()
