"""Is a safetensors file whole? Answered from its header, before anything heavy is imported."""

import json
from pathlib import Path
from typing import Any

from headattr.errors import HeadattrError

_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_safetensors(path: Path) -> set[str]:
    """The types of the tensors in `path`, as torch names them; raises HeadattrError with both
    sizes if it is not whole."""
    found = {str(entry["dtype"]) for entry in safetensors_header(path).values()}
    return {_TORCH_NAMES.get(name, name) for name in found}


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {"dtype", "shape", "data_offsets"} of a whole file; raises HeadattrError with
    both sizes if it is not whole."""
    actual = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if actual < 8 or length > min(actual - 8, 100_000_000):
            raise HeadattrError(
                f"{path} is not a safetensors file, or is cut in its header ({actual} bytes)"
            )
        try:
            header = json.loads(file.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            if not all("dtype" in entry and "shape" in entry for entry in tensors.values()):
                raise KeyError
            required = 8 + length + max((e["data_offsets"][1] for e in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise HeadattrError(
                f"{path} is not a safetensors file: its header does not parse"
            ) from error
    if actual != required:
        raise HeadattrError(
            f"{path} is {actual} bytes, its header requires {required}: it is truncated or was "
            "appended to; "
            "copy it again"
        )
    return tensors
