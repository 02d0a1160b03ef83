"""The command line: parse, call, print. No logic; nothing heavy is imported before it is needed."""

import json as jsonlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headattr.arguments import merge_repeats, parse
from headattr.asking import (
    Index,
    QueryDiff,
    QueryFeature,
    QueryHead,
    QueryPair,
    QueryPrompt,
    QueryRow,
    QuerySpan,
)
from headattr.commands import (
    Check,
    Demo,
    DictionariesList,
    Estimate,
    ExportCsv,
    ExportParquet,
    Models,
    QueryEdge,
    Repair,
    Sql,
    TrainCrosscoder,
    TrainSae,
    TrainTranscoder,
    _Train,
)
from headattr.config import RunConfig
from headattr.errors import HeadattrError, StoreError, UsageError
from headattr.judging import Evaluate, Inspect, Label

COMMANDS: dict[str, type[Any]] = {
    "demo": Demo,
    "run": RunConfig,
    "estimate": Estimate,
    "evaluate": Evaluate,
    "query edge": QueryEdge,
    "query row": QueryRow,
    "query span": QuerySpan,
    "query prompt": QueryPrompt,
    "query feature": QueryFeature,
    "query pair": QueryPair,
    "query head": QueryHead,
    "query diff": QueryDiff,
    "index": Index,
    "export parquet": ExportParquet,
    "export csv": ExportCsv,
    "sql": Sql,
    "check": Check,
    "repair": Repair,
    "models": Models,
    "dictionaries list": DictionariesList,
    "dictionaries inspect": Inspect,
    "dictionaries label": Label,
    "train sae": TrainSae,
    "train transcoder": TrainTranscoder,
    "train crosscoder": TrainCrosscoder,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 usage, 3 some prompts were set
    aside."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((n for n in COMMANDS if arguments[: len(n.split())] == n.split()), None)
    if name is None:
        return _no_command(arguments)
    rest = merge_repeats(arguments[len(name.split()) :], ("--basis", "--output"))
    try:
        command = parse(COMMANDS[name], f"headattr {name}", rest)
        return _RUN[type(command)](command)
    except SystemExit as stop:
        return int(stop.code or 0)
    except HeadattrError as error:
        print(f"headattr: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "headattr: interrupted; what is finished is kept, the same command goes on",
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"headattr: {error}", file=sys.stderr)
        return 1


def run_and_exit() -> None:
    """The console script."""
    sys.exit(main())


def _no_command(arguments: list[str]) -> int:
    """The commands, those that begin as asked first; exit code 2 for what is none."""
    if arguments[:1] == ["--version"]:
        from importlib.metadata import version

        print(f"headattr {version('headattr')}")
        return 0
    words = [word for word in arguments if not word.startswith("-")]
    named = {n: c for n, c in COMMANDS.items() if words and n.split()[0] == words[0]}
    asked = not arguments or (bool({"-h", "--help"} & set(arguments)) and len(words) <= len(named))
    out = sys.stdout if asked else sys.stderr
    if not asked:
        print(
            f"headattr: there is no command {' '.join(arguments[:2])!r}; expected one of:", file=out
        )
    else:
        print(
            "Why an attention head looks where it looks, and what it moves from there.\n", file=out
        )
    for name, command in {**named, **COMMANDS}.items():
        print(f"  headattr {name:18} {(command.__doc__ or '').splitlines()[0]}", file=out)
    print("\n`headattr COMMAND --help` says more, with an example.", file=out)
    if words[:1] == ["train"]:
        print("`headattr train sae --help` (or another kind) lists the keys of a recipe.", file=out)
    return 0 if asked else 2


def _demo(command: Demo) -> int:
    import torch

    from headattr.demo import render_demo, run_demo

    _quiet()
    torch.set_num_threads(1)  # its matrices are small: threads would only wait for each other
    answer = run_demo(command.out)
    _print(answer, command.json, render_demo)
    return 0


def _run(config: RunConfig) -> int:
    from headattr.summary import render_run, run

    _quiet()
    answer = run(config)
    _print(answer, config.json, render_run)
    if answer["problems"]:
        return 1
    return 3 if answer["set_aside"] else 0


def _estimate(config: Estimate) -> int:
    from headattr.estimate import estimate_run
    from headattr.viewers.text import render_estimate

    _quiet()
    _print(estimate_run(config), config.json, render_estimate)
    return 0


def _opened(path: Path) -> Any:
    """A result; what is none is said to be what it is."""
    from headattr.store.reader import open_store

    try:
        return open_store(path)
    except StoreError:
        from headattr.inputs import check_result

        check_result(path)
        raise


def _query_edge(command: QueryEdge) -> int:
    from headattr import query
    from headattr.viewers.text import render_edge

    for name in ("pairs", "features"):
        if getattr(command, name) < 0:
            raise UsageError(f"--{name} is {getattr(command, name)}; expected at least 0")
    with _opened(command.store) as store:
        answer = query.query_edge(store, command.prompt, command.head, command.q, command.k)
        _warn(store.problems)
    shown = {"pairs": command.pairs, "features": command.features}
    _print(answer, command.json, lambda found: render_edge(found, **shown))
    return 0


def _ask(command: Any) -> int:
    from headattr.answering import ANSWERS

    ask, render = ANSWERS[type(command)]
    with _opened(command.store) as store:
        answer = ask(store, command)
        _warn(store.problems)
    _print(answer, command.json, render)
    return 0


def _index(command: Index) -> int:
    from headattr.store.merge import make_index

    with _opened(command.store) as store:
        path = make_index(store)
        answer = {"index": str(path), "shards": len(store.shards), "bytes": path.stat().st_size}
        _warn(store.problems)
    _print(
        answer,
        command.json,
        lambda made: "{index}: {shards} shards, {bytes:,} bytes".format(**made),
    )
    return 0


def _check(command: Check) -> int:
    from headattr.export.check import check_export, render_export_check
    from headattr.export.folder import is_export
    from headattr.store.check import check_store, render_check

    if is_export(command.store):
        answer = check_export(command.store)
        _print(answer, command.json, render_export_check)
        return 0 if answer["ok"] else 1
    with _opened(command.store) as store:
        answer = check_store(store)
    _print(answer, command.json, render_check)
    return 0 if answer["ok"] else 1


def _repair(command: Repair) -> int:
    from headattr.store.repair import render_repair, repair_store

    with _opened(command.store) as store:
        answer = repair_store(store, dry_run=command.dry_run)
    _print(answer, command.json, render_repair)
    return 0 if answer["ok"] else 1


def _export(command: ExportParquet | ExportCsv, kind: str) -> int:
    from headattr.export.run import export_store, render_export

    names = ("store", "out", "tables", "heads", "prompts", "max_file")
    options = {name: getattr(command, name) for name in names}
    answer = export_store(**options, kind=kind, say=_say)
    _print(answer, command.json, render_export)
    return 0 if answer["complete"] else 3


def _sql(command: Sql) -> int:
    from headattr.export.sql import render_sql, sql

    answer = sql(command.store, command.query, limit=command.limit, say=_say)
    _print(answer, command.json, render_sql)
    return 0 if answer["complete"] else 3


def _models(command: Models) -> int:
    from headattr.model.table import model_table, render_models

    _print(model_table(), command.json, render_models)
    return 0


def _dictionaries_list(command: DictionariesList) -> int:
    from headattr.basis.listing import list_dictionaries, render_dictionaries

    _print(list_dictionaries(), command.json, render_dictionaries)
    return 0


def _about_dictionaries(command: Any) -> int:
    from importlib import import_module

    from headattr.viewers import dictionaries

    module, ask, render = {
        Evaluate: ("headattr.evaluate", "evaluate", dictionaries.render_evaluation),
        Inspect: ("headattr.inspection", "inspect", dictionaries.render_inspection),
        Label: ("headattr.labelling", "label", dictionaries.render_labelled),
    }[type(command)]
    _quiet()
    _print(getattr(import_module(module), ask)(command), command.json, render)
    return 0


def _train(command: _Train) -> int:
    from headattr.training.run import render_training, train_file

    _quiet()
    say = _say if command.progress else _silent
    answer = train_file(command.recipe, command.kind, command.out, say)
    _print(answer, command.json, render_training)
    return 0


_RUN: dict[type[Any], Callable[[Any], int]] = {
    Demo: _demo,
    RunConfig: _run,
    Estimate: _estimate,
    QueryEdge: _query_edge,
    **dict.fromkeys(
        (QueryRow, QuerySpan, QueryPrompt, QueryFeature, QueryPair, QueryHead, QueryDiff), _ask
    ),
    Index: _index,
    ExportParquet: lambda command: _export(command, "parquet"),
    ExportCsv: lambda command: _export(command, "csv"),
    Sql: _sql,
    Check: _check,
    Repair: _repair,
    Models: _models,
    DictionariesList: _dictionaries_list,
    Evaluate: _about_dictionaries,
    Inspect: _about_dictionaries,
    Label: _about_dictionaries,
    TrainSae: _train,
    TrainTranscoder: _train,
    TrainCrosscoder: _train,
}


def _print(answer: Any, as_json: bool, render: Callable[[Any], str]) -> None:
    def text(*, ascii_only: bool) -> str:
        if as_json:
            return jsonlib.dumps(answer, ensure_ascii=ascii_only, allow_nan=False, indent=1)
        shown = render(answer)
        return shown.encode("ascii", "backslashreplace").decode() if ascii_only else shown

    try:
        print(text(ascii_only=False), flush=True)
    except UnicodeEncodeError:  # an output that is not UTF-8
        print(text(ascii_only=True), flush=True)


def _say(said: str) -> None:
    print(said, file=sys.stderr, flush=True)


def _silent(said: str) -> None:
    """Nothing."""


def _warn(problems: list[str]) -> None:
    for problem in problems:
        print(f"headattr: {problem}", file=sys.stderr)


def _quiet() -> None:
    """Other libraries' chatter is not part of the answer."""
    import logging
    import warnings

    warnings.filterwarnings("ignore", module="(torch|transformers|sae_lens|transformer_lens).*")
    logging.getLogger("transformers").setLevel(logging.ERROR)
