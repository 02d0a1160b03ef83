"""Is a safetensors file whole? Answered from its header, before anything heavy is imported."""

import json
from pathlib import Path

from headattr.errors import HeadattrError

_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_safetensors(path: Path) -> set[str]:
    """The types of the tensors in `path`, as torch names them; raises HeadattrError with both
    sizes if it is not whole."""
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
            types = {str(entry["dtype"]) for entry in tensors.values()}
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
    return {_TORCH_NAMES.get(name, name) for name in types}
