"""Arrays of an npz file as tensors: checked, never unpickled, bfloat16 where it was saved."""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headattr.basis.formats.files import check_file
from headattr.errors import DictionaryError

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_BROKEN = (zipfile.BadZipFile, EOFError, ValueError, zlib.error, NotImplementedError, OSError)
_LOCAL = struct.Struct("<4s5H3I2H")  # signature .. method, time, date; crc, sizes; lengths
_UNSIZED, _ZIP64 = 0xFFFFFFFF, 1


def npz_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the arrays of an npz file, from their headers alone.

    Raises DictionaryError for a file that is not whole (with its size and the one that it needs),
    and for arrays that are no floating-point numbers.
    """
    found = {}
    with _opened(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                if version not in _HEADERS:
                    raise ValueError(f"{info.filename} is of npy version {version}")
                shape, _, dtype = _HEADERS[version](member)
            name = info.filename.removesuffix(".npy")
            _check_type(path, name, dtype)
            found[name] = tuple(shape)
    return found


def npz_tensors(path: Path) -> dict[str, Any]:
    """Name -> tensor, in the type of the file; what numpy only knows as 2 bytes is bfloat16.

    Raises DictionaryError as `npz_shapes` does, and where a checksum does not hold.
    """
    found = {}
    with _opened(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as member:
                array = _array(member)
            name = info.filename.removesuffix(".npy")
            _check_type(path, name, array.dtype)
            found[name] = tensor_of(array)
    return found


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """A numpy array of numbers as a tensor; an opaque one of 2 bytes is bfloat16, which numpy does
    not have."""
    if array.dtype.kind == "V":
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="))))


def _array(member: Any) -> np.ndarray:
    array = np.lib.format.read_array(member, allow_pickle=False)
    member.read()  # up to its end, where its checksum is compared
    return array


def _check_type(path: Path, name: str, dtype: np.dtype) -> None:
    half = dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None
    if not half and (dtype.kind != "f" or dtype.itemsize > 8):
        raise DictionaryError(
            f"{path}: {name} is of type {dtype}; expected floating-point numbers (Python objects "
            "are never unpickled: save it again as float32)"
        )


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive; whatever is wrong with it is a DictionaryError."""
    check_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except _BROKEN as error:
        raise DictionaryError(f"{path} {_cut(path) or f'cannot be read: {error}'}") from error


def _cut(path: Path) -> str | None:
    """How a truncated archive is too short, if it is."""
    actual, end, name = path.stat().st_size, 0, ""
    with path.open("rb") as file:
        while len(head := file.read(_LOCAL.size)) == _LOCAL.size:
            signature, _, flags, *_, size, _, n_name, n_extra = _LOCAL.unpack(head)
            if signature != b"PK\x03\x04" or flags & 8:  # flags 8: sizes stand behind the data
                break
            name = file.read(n_name).decode("utf-8", "replace")
            size = _long_size(file.read(n_extra)) if size == _UNSIZED else size
            end = file.tell() + size
            file.seek(end)
    if actual < end:
        return f"is {actual} bytes, {name} alone requires {end}: it is truncated; copy it again"
    if end and not zipfile.is_zipfile(path):
        return (
            f"is {actual} bytes, its arrays end at {end} and the list of them behind it is not "
            "whole: it is truncated; copy it again"
        )
    return None


def _long_size(extra: bytes) -> int:
    """The stored size of a member whose sizes stand in the zip64 field."""
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<2H", extra)
        if kind == _ZIP64 and length >= 16:
            return struct.unpack_from("<Q", extra, 12)[0]
        extra = extra[4 + length :]
    return 0
