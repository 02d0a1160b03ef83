"""A run of SmolLM2 split into its stages, timed from outside: the run's own functions, wrapped."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from clock import ROUNDS, median, say, seconds
from report import Section, number, table

PROMPTS = ((128, 2), (512, 1))
"""Tokens, and how many prompts of them."""
STAGES = ("forward", "encode", "project", "attribute", "write", "rest")
LAYER = 12


class Stages:
    """Process time by stage: that of a wrapped function, less what is wrapped within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        """Whatever runs in here belongs to `stage`."""
        self._turn()
        self._open.append(stage)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def wrapped(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.at(stage):
                return function(*arguments, **options)

        return timed


@contextmanager
def replaced(owner: Any, name: str, stages: Stages, stage: str) -> Iterator[None]:
    """A function of a module or class, timed as long as this lasts."""
    original = getattr(owner, name)
    setattr(owner, name, stages.wrapped(original, stage))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def watched(stages: Stages, sources: list[Any]) -> Iterator[None]:
    """Every function of the run that is a stage, or begins one."""
    from headattr import batch, pipeline
    from headattr.attribution import layer
    from headattr.attribution.ov import OutputSide
    from headattr.attribution.prepared import Prepared
    from headattr.attribution.pushed import Pushed
    from headattr.attribution.sides import Side
    from headattr.store.writer import ShardWriter

    kinds = {type(source) for source in sources}
    places = [(batch, "capture", "forward"), *((kind, "active", "encode") for kind in kinds)]
    places += [(layer, "prepare", "project"), (layer, "project", "project")]
    places += [(Prepared, "pushed", "project"), (OutputSide, "pushed", "project")]
    places += [(Pushed, "table", "project")]
    places += [(Side, "at", "project"), (batch, "stream_layer", "attribute")]
    places += [(ShardWriter, f"add_{what}", "write") for what in ("prompt", "edges", "layer")]
    places += [(ShardWriter, "finish", "write")]
    with ExitStack() as stack:
        for owner, name, stage in places:
            stack.enter_context(replaced(owner, name, stages, stage))
        stack.enter_context(_publishing(pipeline, stages))
        yield


@contextmanager
def _publishing(pipeline: Any, stages: Stages) -> Iterator[None]:
    """Opening a shard and publishing it are writing too."""
    original = pipeline.new_shard

    @contextmanager
    def new_shard(*arguments: Any, **options: Any) -> Iterator[Any]:
        shard = original(*arguments, **options)
        with stages.at("write"):
            writer = shard.__enter__()
        try:
            yield writer
        except BaseException as error:
            if not shard.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            with stages.at("write"):
                shard.__exit__(None, None, None)

    pipeline.new_shard = new_shard
    try:
        yield
    finally:
        pipeline.new_shard = original


def missing() -> list[Path]:
    """What is not there of the model and its dictionaries."""
    from headattr.model.embedded import cache_folder

    cache = cache_folder()
    saes = [cache / "smollm2-saes" / f"resid_pre_{at}" for at in (LAYER, LAYER + 1)]
    return [path for path in (cache / "smollm2", *saes) if not path.exists()]


def section(rounds: int = ROUNDS) -> Section:
    title = "A run of SmolLM2, end to end"
    if lacking := missing():
        names = ", ".join(str(path) for path in lacking)
        return Section(title, [f"Not measured, missing: {names} (`make smollm2-saes`)."], {})
    from headattr.model.load import load_model

    model = load_model("smollm2")
    rows, verdict, figures = [], [], {}
    for length, count in PROMPTS:
        found = figures[str(length)] = measure(model, length, count, rounds)
        each = [found["stages"][stage] / count for stage in STAGES]
        shares = [f"{1000 * s:.0f} ({s / sum(each):.0%})" for s in each]
        whole = f"{1000 * found['whole'] / count:.0f}"
        rows.append([str(length), str(count), str(found["edges"]), *shares, whole])
        verdict += _verdicts(length, found)
    about = (
        f"`run --basis 12=.../resid_pre_12 --basis 13=.../resid_pre_13 --heads L{LAYER}H* --edges "
        f"top:4` on CPython's documentation; float32. Milliseconds of a prompt (share of the run), "
        f"medians of {rounds}. Forward is the run's own, which stops behind layer {LAYER}; the "
        "whole model's, with logits, stands beside it. Project: prepare, project, pushed, and the "
        "features of positions where they are asked for; write: the shard, published."
    )
    head = ("tokens", "prompts", "edges", *STAGES, "whole model")
    return Section(title, [about, "", *table(head, rows), "", *verdict], figures)


def _verdicts(length: int, found: dict[str, Any]) -> list[str]:
    stages = found["stages"]
    work = stages["attribute"] + stages["write"]
    lines = []
    for name, forward in (
        ("the run's own", stages["forward"]),
        ("the whole model's", found["whole"]),
    ):
        word = "less" if work < forward else "MORE"
        with_project = number((work + stages["project"]) / forward)
        lines.append(
            f"- {length} tokens: attribute and write cost {word} than {name} forward pass "
            f"({number(work / forward)} of it; with project {with_project})"
        )
    return lines


def measure(model: Any, length: int, count: int, rounds: int) -> dict[str, Any]:
    """Seconds of every stage and of the whole model's forward pass, by turns."""
    from headattr.model.capture import pad
    from headattr.model.embedded import cache_folder
    from headattr.model.forward import run_model
    from headattr.plan import make_run

    prompts = token_ids(model.tokenizer, length, count)
    saes = cache_folder() / "smollm2-saes"
    basis = [f"{at}={saes / f'resid_pre_{at}'}" for at in (LAYER, LAYER + 1)]
    taken: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "whole")}
    with TemporaryDirectory(prefix="headattr-bench-") as folder:
        run = make_run(*_inputs(model, basis, prompts, f"{folder}/0"), every_layer=False)

        @torch.no_grad()
        def whole() -> None:
            run_model(run.model, *pad(prompts), logits=True)

        for turn in range(rounds + 1):  # the first warms up
            say(f"end to end: {length} tokens, round {turn} of {rounds}")
            config = replace(run.config, out=f"{folder}/{turn}")
            stages, edges = one_run(replace(run, config=config))
            forward = seconds(whole)
            if turn:
                for stage in STAGES:
                    taken[stage].append(stages.seconds.get(stage, 0.0))
                taken["whole"].append(forward)
    middle = {stage: median(found) for stage, found in taken.items()}
    forward = middle.pop("whole")
    return {"edges": edges, "prompts": count, "stages": middle, "whole": forward}


def _inputs(model: Any, basis: list[str], prompts: list[list[int]], out: str) -> Any:
    from headattr.inputs import inputs_from_memory

    options = {"heads": f"L{LAYER}H*", "edges": "top:4", "bos": "no"}
    return inputs_from_memory(model.hf, basis, (), prompts, out, model.tokenizer, options)


def one_run(run: Any) -> tuple[Stages, int]:
    """The run from its checked inputs to its store, and how many edges it kept."""
    from headattr.pipeline import execute

    stages = Stages()
    with watched(stages, run.source_list), stages.at("rest"):
        execute(run)
    sidecars = sorted(Path(run.config.out, "shards").glob("*.json"))
    return stages, sum(_edges(path) for path in sidecars)


def _edges(sidecar: Path) -> int:
    return json.loads(sidecar.read_text(encoding="utf-8"))["edges"]


def token_ids(tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """Stretches of CPython's documentation, one after the other."""
    from pydoc_data.topics import topics

    text = "\n\n".join(text for _, text in sorted(topics.items()))[: 40 * length * count]
    ids = tokenizer(text)["input_ids"]
    return [ids[i * length : (i + 1) * length] for i in range(count)]
