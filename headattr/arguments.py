"""Arguments -> one command as an object; what is off is said in one line."""

import contextlib
import inspect
import io
from typing import Any

import tyro

from headattr.errors import UsageError


def parse(command: type[Any], name: str, arguments: list[str]) -> Any:
    """The command called `name`; raises UsageError, one line, where tyro would print a box."""
    said, about = io.StringIO(), inspect.getdoc(command)
    if {"-h", "--help"} & set(arguments) and hasattr(command, "more_help"):
        about = f"{about}\n\n{command.more_help()}"
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(command, prog=name, args=arguments, description=about)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(f"{_one_line(said.getvalue())} (`{name} --help`)") from None


def merge_repeats(arguments: list[str], repeatable: tuple[str, ...]) -> list[str]:
    """`--basis A --basis B` as `--basis A B`: a repeated flag adds, it never replaces."""
    kept: list[str] = []
    values: dict[str, list[str]] = {}
    flag = None
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in repeatable:
            flag = name
            values.setdefault(flag, []).extend([value] if equals else [])
        elif flag and not argument.startswith("--"):
            values[flag].append(argument)
        else:
            flag = None
            kept.append(argument)
    return kept + [part for name, found in values.items() for part in (name, *found)]


def _one_line(box: str) -> str:
    """What a box of tyro says, without its frame, titles of arguments only."""
    kept: list[str] = []
    for drawn in box.splitlines():
        line = drawn.replace("\u2502", " ")  # a frame of spaces where the output is not UTF-8
        text = line.strip()
        if text.startswith(("For full helptext", "Argument helptext")):
            break
        if line.startswith("  ") and text.strip("\u2500-") and not line.startswith(" " * 10):
            kept.append(text)
    return " ".join(kept or box.split()).replace(" Perhaps you meant: ", "; perhaps you meant: ")
