"""What a weights file holds against what its format has there: names, shapes, which way round."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from headattr.errors import DictionaryError

Shape = tuple[int, ...]


def turned(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], where: str
) -> tuple[str, ...]:
    """Names of the matrices that are stored with rows and columns exchanged.

    Raises DictionaryError, with both lists, where a tensor is missing, does not belong or has
    another shape.
    """
    names = tuple(
        name
        for name, shape in expected.items()
        if len(shape) == 2 and found.get(name) == shape[::-1] != shape
    )
    seen = {name: shape[::-1] if name in names else shape for name, shape in found.items()}
    if seen != dict(expected):
        raise DictionaryError(
            f"{where} has tensors {listed(found)}; expected {listed(expected)}: a tensor is "
            "missing, does not belong or has another shape"
        )
    return names


def as_expected(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of a file, those of `turned` the right way round (no copy)."""
    exchanged = set(names)
    return {name: part.T if name in exchanged else part for name, part in state.items()}


def notes(found: Mapping[str, Shape], names: Iterable[str]) -> tuple[str, ...]:
    """What is assumed of matrices that are turned, in words."""
    return tuple(f"{name} is stored as {found[name]} and is turned" for name in names)


def listed(shapes: Mapping[str, Shape]) -> str:
    """`W_dec 32x16, b_dec 16`."""
    shown = (f"{name} {'x'.join(map(str, shape))}" for name, shape in sorted(shapes.items()))
    return ", ".join(part.strip() for part in shown) or "nothing"
