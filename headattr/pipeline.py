"""The whole run, top to bottom: texts -> model -> basis -> attribution -> store.

1 plan: check every input, load the model and its dictionaries, fix what each layer does
2 begin: write the manifest, or find the same one there
3 for every shard that is not finished: capture, decompose, attribute, publish
4 where there are many shards, one index over all
"""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from headattr.batch import Advance, Batch, FailedPrompts, rows_of_prompt
from headattr.errors import PromptError
from headattr.inputs import inputs_from_memory
from headattr.layers import Layers, budget_of
from headattr.model.tokens import Prompt
from headattr.plan import Run, label_lines, make_run
from headattr.store.format import SHARDS
from headattr.store.manifest import begin
from headattr.store.merge import WORTH, make_index
from headattr.store.published import finished_shards
from headattr.store.reader import Store
from headattr.store.writer import ShardWriter, new_shard
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
    """Steps 2 to 4. Finished shards are kept whatever happens; the same call resumes.

    Raises UsageError, before anything is written, for prompts that the budget cannot hold.
    """
    folder = Path(run.config.out)
    labels = {i: label_lines(source, run.model) for i, source in enumerate(run.source_list)}
    by_id = {prompt.id: prompt for prompt in run.prompts}
    shards = [
        (entry["index"], [by_id[prompt] for prompt in entry["prompts"]])
        for entry in run.manifest["shards"]
    ]
    done = set(finished_shards(folder, run.manifest))
    layers = Layers(run, budget_of(run))
    left = [prompt for index, prompts in shards if index not in done for prompt in prompts]
    layers.budget.check({prompt.id: len(prompt.tokens) for prompt in left})
    begin(folder, run.manifest, labels)
    with _progress(run) as told, _interrupts() as interrupted:

        def advance(rows: int) -> None:
            interrupted()
            told(rows)

        for index, prompts in shards:
            if index not in done:
                with new_shard(
                    folder / SHARDS,
                    index,
                    run.plans,
                    manifest_hash=run.manifest["hash"],
                    longest=max((len(prompt.tokens) for prompt in prompts), default=0),
                    rank=run.config.rank,
                    filters="gzip" if run.config.portable else "zstd",
                    compact=run.config.compact,
                ) as shard:
                    attribute_prompts(layers, prompts, shard, advance)
            else:
                advance(sum(rows_of_prompt(run, prompt) for prompt in prompts))
        store = Store(folder)
        if len(store.shards) >= WORTH and store.merged is None:
            make_index(store)
            store.refresh()
        interrupted()
    return store


def attribute_prompts(
    layers: Layers, prompts: Sequence[Prompt], shard: ShardWriter, advance: Advance
) -> None:
    """Capture, decompose and attribute some prompts; one that cannot be run is set aside."""
    run, budget = layers.run, layers.budget

    def set_aside(prompt: Prompt, error: PromptError) -> None:
        shard.set_aside.append(SetAside(prompt.id, str(error)).as_dict())
        advance(rows_of_prompt(run, prompt))

    lengths = [len(prompt.tokens) for prompt in prompts]
    for batch in budget.batches(lengths, run.config.batch_size):
        left = [prompts[i] for i in batch]
        while left:
            before, work = len(shard.prompts), Batch(layers, left, shard, advance)
            try:
                work.attribute()
                break
            except FailedPrompts as failed:  # the others are done again without them
                shard.cut(before)
                advance(-work.advanced)
                for i, error in failed.errors.items():
                    set_aside(left[i], error)
                left = [prompt for i, prompt in enumerate(left) if i not in failed.errors]


@contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """Ctrl-C inside interrupts as ever. Python drops what is raised in the callback of a weak
    reference, of which HDF5's objects have many: what is given raises an interrupt that was lost
    so."""
    came = False

    def interrupt(*_: object) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def interrupted() -> None:
        if came:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and current_thread() is main_thread()
    if ours:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


class _progress:
    """A bar on standard error, over the rows of attention to attribute: one a query and head."""

    def __init__(self, run: Run) -> None:
        from tqdm import tqdm

        self.bar = tqdm(
            total=sum(rows_of_prompt(run, prompt) for prompt in run.prompts),
            unit=" rows",
            file=sys.stderr,
            disable=not run.config.progress,
            leave=False,
        )

    def __enter__(self) -> Any:
        return self.bar.update

    def __exit__(self, *_: object) -> None:
        self.bar.close()
