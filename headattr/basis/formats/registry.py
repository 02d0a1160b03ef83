"""The formats that headattr reads: every module of this package that has a FORMAT is one; a third
party adds one with an entry point in the group `headattr.formats` that names a `Format`."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

from headattr.basis.dictionary import Release
from headattr.edges import layer_ranges
from headattr.errors import DictionaryError, UsageError


class Format(NamedTuple):
    """One file format."""

    name: str
    matches: Callable[[Path], bool]
    """Does a path look like it, by the names of its files (and keys of its configuration, where two
    formats share names)? At most one format may say yes."""
    read: Callable[[Path], Release]
    """Its dictionaries, from configurations and headers alone. Raises DictionaryError."""
    files: str
    """What it looks like, in words."""


@cache
def formats() -> tuple[Format, ...]:
    """Every known format, by name."""
    package = importlib.import_module("headattr.basis.formats")
    found = [
        module.FORMAT
        for info in pkgutil.iter_modules(package.__path__)
        if hasattr(
            module := importlib.import_module(f"headattr.basis.formats.{info.name}"), "FORMAT"
        )
    ]
    found += [entry.load() for entry in entry_points(group="headattr.formats")]
    return tuple(sorted(found, key=lambda known: known.name))


def format_of(path: Path) -> str | None:
    """The name of the format that a folder or file looks like; None for none."""
    return next((known.name for known in formats() if known.matches(path)), None)


def open_release(path: Path) -> Release:
    """The dictionaries of a folder (or of the folders in it, where they are transcoders that belong
    together), whatever their format.

    Raises DictionaryError where no format fits, or more than one.
    """
    found = open_releases(path)
    if len(found) > 1:
        listed = ", ".join(f"{release.name} ({release.kind})" for release in found)
        raise DictionaryError(
            f"{path} holds several dictionaries: {listed}; expected one (give its own folder), or "
            "a set of transcoders"
        )
    return found[0]


def open_releases(path: Path) -> list[Release]:
    """What a folder holds: one release, or dictionaries side by side in folders of their own,
    transcoders among them as one set.

    Raises DictionaryError where no format fits, or more than one.
    """
    if not path.exists():
        raise DictionaryError(f"{path} does not exist; expected the folder of a dictionary")
    fitting = [known for known in formats() if known.matches(path)]
    if len(fitting) > 1:
        names = " and ".join(known.name for known in fitting)
        raise DictionaryError(f"{path} looks like {names}; expected the files of one format")
    if fitting:
        return [fitting[0].read(path)]
    inside = sorted(path.iterdir()) if path.is_dir() else []
    parts = _folders_in(path, 3)
    if not parts:
        known = "; ".join(f"{known.name}: {known.files}" for known in formats())
        listed = ", ".join(part.name for part in inside[:8]) or "nothing"
        raise DictionaryError(f"{path} is no dictionary (found {listed}); expected {known}")
    found = [open_release(part) for part in parts]
    stack = [release for release in found if release.kind == "transcoders"]
    others = [release for release in found if release.kind != "transcoders"]
    return others + ([_together(path, stack)] if stack else [])


def check_apart(
    path: Path, releases: Sequence[Release], layers: Sequence[Sequence[int]], role: str
) -> None:
    """Refuse, with UsageError, a folder of several dictionaries of one layer; `layers`: those that
    each is a basis (or an output) of."""
    every = [layer for some in layers for layer in some]
    if len(set(every)) == len(every):
        return
    pairs = zip(releases, layers, strict=True)
    listed = ", ".join(f"{one.name} (layers {layer_ranges(some)})" for one, some in pairs)
    raise UsageError(
        f"--{role} {path}: it is no dictionary, but holds these: {listed}; give one, as "
        f"{releases[0].path}"
    )


def _folders_in(path: Path, depth: int) -> list[Path]:
    """The folders of dictionaries inside a folder, at most so deep."""
    found: list[Path] = []
    for part in sorted(path.iterdir()) if path.is_dir() and depth else []:
        if part.is_dir() and any(known.matches(part) for known in formats()):
            found.append(part)
        elif part.is_dir():
            found += _folders_in(part, depth - 1)
    return found


def _together(path: Path, releases: list[Release]) -> Release:
    """Transcoders in folders side by side are one set."""
    dictionaries = [d for release in releases for d in release.dictionaries]
    unplaced = [d.name for d in dictionaries if d.reads[0] is None]
    if unplaced:
        raise DictionaryError(
            f"{path}: {', '.join(unplaced)} does not name its site; expected a hook_name each"
        )
    dictionaries.sort(key=lambda d: d.reads[0].layer if d.reads[0] else -1)
    return Release("transcoders", path.name, str(path), tuple(dictionaries))
