"""What the formats of JumpReLU dictionaries share: shapes and the names of a path."""

import os
from collections.abc import Mapping
from pathlib import Path

from headattr.basis.dictionary import Activation
from headattr.errors import DictionaryError

JUMPRELU = Activation("jumprelu")
Shapes = Mapping[str, tuple[int, ...]]


def listed(shapes: Shapes) -> str:
    """`b_dec 24, w_enc 24x40`, in the order of names."""
    named = (
        f"{name} {'x'.join(map(str, shape))}".strip() for name, shape in sorted(shapes.items())
    )
    return ", ".join(named) or "nothing"


def names_of(folder: Path) -> tuple[str, ...]:
    """The names in a folder's path, links as they are named: dictionaries are published under
    names that say their sites."""
    return Path(os.path.normpath(folder.absolute())).parts


def check_keys(where: Path, found: Shapes, needed: set[str], known: set[str]) -> None:
    """Refuse a file that lacks tensors, or has some that its format does not know."""
    missing, odd = sorted(needed - found.keys()), sorted(found.keys() - needed - known)
    if missing or odd:
        said = [f"lacks {', '.join(missing)}"] if missing else []
        said += [f"has {', '.join(odd)}, which its format does not know"] if odd else []
        raise DictionaryError(
            f"{where} {' and '.join(said)} (found {listed(found)}); expected "
            f"{', '.join(sorted(needed))}"
        )


def check_shapes(where: Path, found: Shapes, expected: Shapes) -> None:
    """Refuse tensors whose shapes do not belong together, naming all of both."""
    if dict(found) != dict(expected):
        raise DictionaryError(
            f"{where} has tensors {listed(found)}; expected {listed(expected)}: they do not belong "
            "together, or are stored the other way around"
        )


def size_of(where: Path, found: Shapes, name: str, axis: int, ndim: int) -> int:
    """One length of one tensor, which has to have so many axes."""
    shape = found[name]
    if len(shape) != ndim or min(shape) < 1:
        raise DictionaryError(
            f"{where}: {name} is {'x'.join(map(str, shape)) or 'one number'}; expected "
            f"{ndim} axes, none of them empty"
        )
    return shape[axis]
