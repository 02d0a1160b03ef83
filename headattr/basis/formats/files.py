"""What the formats share: files that are checked before they are read, and layouts."""

import json
from pathlib import Path
from typing import Any

from headattr.errors import DictionaryError, HeadattrError
from headattr.model.weights_file import check_safetensors, safetensors_header


def check_file(path: Path) -> None:
    """Refuse a weights file that is not there, or not whole, naming it."""
    if not path.is_file():
        listed = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        raise DictionaryError(
            f"{path.parent} has no {path.name} (found: {', '.join(listed) or 'nothing'})"
        )
    if path.suffix == ".safetensors":
        try:
            check_safetensors(path)
        except HeadattrError as error:
            raise DictionaryError(str(error)) from error


def tensors_of(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, mapped: what is not used is not read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_file(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DictionaryError(f"{path} cannot be read: {error}") from error


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a safetensors file, from its header alone."""
    check_file(path)
    return {name: tuple(entry["shape"]) for name, entry in safetensors_header(path).items()}


def json_object(path: Path) -> dict[str, Any]:
    """A JSON object; DictionaryError names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DictionaryError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DictionaryError(f"{path} holds a JSON {type(found).__name__}; expected an object")
    return found


def labels_of(folder: Path) -> str | None:
    """The labels.jsonl of a folder."""
    path = folder / "labels.jsonl"
    return str(path) if path.is_file() else None


def oriented(tensor: Any, expected: tuple[int, int], what: str, has_layout: bool) -> Any:
    """A matrix as [rows, columns] of `expected`, turned where it is stored the other way around.

    Raises DictionaryError for a square one, not the same both ways, whose file does not say which
    way it is stored.
    """
    found = tuple(tensor.shape)
    square = found == expected and expected[0] == expected[1]
    if square and not has_layout and not bool((tensor == tensor.T).all()):
        raise DictionaryError(
            f"{what} is square ({found[0]}x{found[0]}), so that its layout cannot be told from its "
            'shape; expected a configuration that says it: "layout": "features_first" for W_dec '
            "[d_sae, d_in] and W_enc [d_in, d_sae]"
        )
    return tensor.T if found == expected[::-1] and found != expected else tensor
