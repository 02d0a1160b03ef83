"""How numbers and slots are kept: the rounding of a column, and the code of values that fall.

Everything here is stated in FORMAT.md; nothing else changes a number on its way to the disk.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headattr.errors import StoreError

PAIR_BITS = 10
"""Mantissa bits of the numbers of pairs that are not kept as falling codes: off by 2**-11."""
COARSE_BITS = 7
"""Mantissa bits of measured errors; in a compact store also of contrasts and ablations of features,
and of norms of what they write: off by 2**-8."""
SUM_BITS = 16
"""In a compact store, of reads and of parts that add up to a contrast: 2**-17."""
ROUGH_BITS = 6
"""In a compact store, of contrasts of pairs and of the parts of a read: 2**-7."""
STEPS_AN_OCTAVE = 720
"""Steps of a falling code that halve a value: relative error at most 2**-11."""
_NOTHING = 0x7FFF
"""The step of a value that is 0, and so of all behind it."""


def slot_type(longest: int) -> np.dtype[Any]:
    """The smallest type of a slot when lists have up to `longest` entries; its largest value means
    none."""
    return next(np.dtype(t) for t in (np.uint8, np.uint16, np.uint32) if longest < np.iinfo(t).max)


def encode_slots(slots: NDArray[np.integer], dtype: np.dtype[Any]) -> NDArray[np.unsignedinteger]:
    """Slots with -1 as the type's largest value."""
    return np.where(slots < 0, np.iinfo(dtype).max, slots).astype(dtype)


def decode_slots(stored: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
    """Stored slots with -1 for none."""
    slots = stored.astype(np.int64)
    return np.where(slots == np.iinfo(stored.dtype).max, -1, slots)


def round_values(values: NDArray[np.floating], bits: int = PAIR_BITS) -> NDArray[np.float32]:
    """Round to nearest at `bits` bits of mantissa, as float32: relative error at most
    2**-(bits + 1). Values that would become infinite, or below 2**-126, are kept as they are."""
    dropped = 23 - bits
    exact = np.ascontiguousarray(values, np.float32)
    whole = exact.view(np.uint32).astype(np.uint64)
    whole = (whole + (1 << (dropped - 1)) - 1 + ((whole >> dropped) & 1)) & ~np.uint64(
        (1 << dropped) - 1
    )
    rounded = whole.astype(np.uint32).view(np.float32)
    normal = np.isfinite(exact + rounded) & (np.abs(exact) >= np.finfo(np.float32).tiny)
    return np.where(normal, rounded, exact)


def falling_codes(
    values: NDArray[np.floating],
) -> tuple[NDArray[np.int32], NDArray[np.uint16]]:
    """Codes of rows [row, k] whose sizes fall: where each row begins, and how it goes on.

    |values[i, n]| is about 2**((first[i] - sum of steps[i, :n + 1]) / 720), with step and sign in
    one code: 2 * step + (value < 0). Raises StoreError where sizes do not fall.
    """
    sizes = np.abs(np.asarray(values, np.float32)).astype(np.float64)
    if not np.isfinite(sizes).all():
        raise StoreError(
            "pairs have non-finite values, which are never written: please report this"
        )
    some = sizes > 0
    octaves = np.log2(np.where(some, sizes, 1.0))
    most = np.floor(np.log2(np.float64(np.finfo(np.float32).max)) * STEPS_AN_OCTAVE)
    height = np.minimum(np.rint(octaves * STEPS_AN_OCTAVE), most).astype(np.int64)
    first = np.where(some[:, :1], height[:, :1], 0)
    steps = -np.diff(np.concatenate([first, height], axis=1), axis=1)
    kept = np.logical_and.accumulate(some & (steps < _NOTHING), axis=1)
    if (steps[kept] < 0).any() or (some & ~np.logical_and.accumulate(some, axis=1)).any():
        raise StoreError("values are not in falling order of their size: please report this")
    steps = np.where(kept, steps, _NOTHING)
    codes = 2 * steps + (kept & (np.asarray(values) < 0))
    return first[:, 0].astype(np.int32), codes.astype(np.uint16)


def falling_values(first: NDArray[np.integer], codes: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values [..., k] of codes and where they begin [...]."""
    steps = (codes >> 1).astype(np.int64)
    none = np.logical_or.accumulate(steps == _NOTHING, axis=-1)
    height = np.asarray(first)[..., None] - np.cumsum(np.where(none, 0, steps), axis=-1)
    sizes = np.where(none, 0.0, np.exp2(height / STEPS_AN_OCTAVE))
    return np.where(codes & 1, -sizes, sizes).astype(np.float32)


def falling_problem(first: NDArray[np.integer], codes: NDArray[np.uint16]) -> str | None:
    """What no writer writes: a code that does not begin with its first size, or goes on behind the
    end, or a size that is not finite."""
    nothing = codes >> 1 == _NOTHING
    with np.errstate(over="ignore"):
        values = falling_values(first, codes)
    if not np.isfinite(values).all():
        return "has non-finite values"
    if (np.diff(nothing.astype(np.int8)) < 0).any() or (codes[nothing] & 1).any():
        return "goes on behind its end"
    if codes.shape[1] and ((codes[:, 0] >> 1 != 0) & ~nothing[:, 0]).any():
        return "does not begin with its first size"
    return None
