"""Is a safetensors file whole? Answered from its header, before anything heavy is imported."""

import json
from pathlib import Path

from headattr.errors import HeadattrError


def check_safetensors(path: Path) -> dict[str, list[int]]:
    """The shape of every tensor in `path`; raises HeadattrError with both sizes if it is not
    whole."""
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
    return {name: entry["shape"] for name, entry in tensors.items()}
