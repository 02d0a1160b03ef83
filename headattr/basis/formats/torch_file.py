"""Tensors of a file that `torch.save` wrote. Nothing else in it is ever unpickled: a pickle may run
any code that its writer chose."""

import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from torch import Tensor

from headattr.basis.formats.files import check_file
from headattr.errors import DictionaryError

_ZIP = b"PK\x03\x04"
_LOOKED_AT = 1 << 20  # bytes of a file without an index that are searched for names
_HARMLESS = re.compile(r"torch\b.*|collections OrderedDict|_codecs encode")
_BROKEN = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
    OSError,
)


def torch_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict by name, on the CPU, mapped where the file allows it.

    Raises DictionaryError for a file that holds more than tensors, naming the modules that it asks
    for, and for one that is cut or is no such file, naming its size.
    """
    import torch

    check_file(path)
    with path.open("rb") as file:
        mapped = file.read(len(_ZIP)) == _ZIP
    try:
        with warnings.catch_warnings(action="ignore"):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except _BROKEN as error:
        raise DictionaryError(_reason(path)) from error
    if not isinstance(found, dict) or not found:
        raise DictionaryError(
            f"{path} holds a {type(found).__name__}; expected a state dict: tensors by name"
        )
    for name, part in found.items():
        if not isinstance(name, str) or not isinstance(part, Tensor):
            raise DictionaryError(
                f"{path}: {name!r} is a {type(part).__name__}; expected tensors by name alone"
            )
    return {name: part.detach() for name, part in found.items()}


def _reason(path: Path) -> str:
    """Why a file is refused, and what to do."""
    asked = [name for name in dict.fromkeys(_names(path)) if not _HARMLESS.fullmatch(name)]
    if not asked:
        return (
            f"{path} ({path.stat().st_size} bytes) cannot be read as tensors: it is cut, or was "
            "not written by torch.save; copy it again, or save its state_dict as "
            f"{path.with_suffix('.safetensors').name} with safetensors.torch.save_file"
        )
    modules = ", ".join(dict.fromkeys(name.partition(" ")[0] for name in asked))
    return (
        f"{path} pickles {asked[0].replace(' ', '.')} and needs {modules}, which headattr does not "
        "import (a pickle may run any code); expected tensors alone: where that is installed, load "
        f"the file and save its state_dict as {path.with_suffix('.safetensors').name} with "
        "safetensors.torch.save_file"
    )


def _names(path: Path) -> Iterator[str]:
    """`module name` of what the pickles of a file ask for, which are read and not run."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            stream = BytesIO(archive.read(inside))
    except (zipfile.BadZipFile, StopIteration):
        with path.open("rb") as file:
            stream = BytesIO(file.read(_LOOKED_AT))
    words: list[str] = []
    try:
        while stream.tell() < len(stream.getbuffer()):
            for code, value, _ in pickletools.genops(stream):
                if code.name == "GLOBAL":
                    yield str(value)
                elif code.name == "STACK_GLOBAL" and len(words) > 1:
                    yield " ".join(words[-2:])
                elif isinstance(value, str):
                    words.append(value)
    except (ValueError, IndexError, EOFError, UnicodeDecodeError):
        return
