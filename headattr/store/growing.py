"""A dataset that rows are appended to, written chunk by chunk and compressed.

What does not fill a chunk yet is held in memory; so a chunk is compressed once, and memory does not
grow with the rows.
"""

from typing import Any, Literal

import h5py
import hdf5plugin
import numpy as np
from numpy.typing import NDArray

from headattr.errors import StoreError
from headattr.store.coding import decode_slots, encode_slots, round_values

Filter = Literal["zstd", "gzip", "checked"]
"""How chunks are compressed: zstd needs the package hdf5plugin, gzip HDF5 alone; checked is zstd
with a checksum, for a file that has no sidecar with its hash."""

_HELD = 4096
"""Rows that are held at least before some are written: few large writes are faster."""


class Growing:
    """One dataset of a group, by rows."""

    def __init__(
        self,
        group: h5py.Group,
        name: str,
        chunk: int,
        filters: Filter,
        *,
        bits: int | None = None,
    ) -> None:
        """`chunk`: rows of a chunk; `bits`: of mantissa that floats are rounded to."""
        self.group, self.name, self.chunk, self.bits = group, name, chunk, bits
        self.filters: Filter = filters
        self.slots: np.dtype[Any] | None = None
        """The type of slots, of a dataset of slots."""
        self._held: list[NDArray[Any]] = []
        self._count = self._written = 0
        """Rows that are held, and in the file."""

    def __len__(self) -> int:
        """Rows so far."""
        return self._written + self._count

    def append(self, rows: NDArray[Any]) -> None:
        """Add rows; slots with -1 for none."""
        if not len(self._held) or len(rows):
            self._held.append(rows)
            self._count += len(rows)
        if self._count >= max(_HELD, 2 * self.chunk):
            self._flush(self._count - self._count % self.chunk)

    def finish(self) -> None:
        """Write what is held; at least one append must have said how wide rows are. Raises
        StoreError for what is not finite, as append does."""
        self._flush(self._count)

    def cut(self, rows: int) -> None:
        """Forget everything behind the first `rows` rows."""
        if rows < self._written:
            dataset, whole = self._dataset(), rows - rows % self.chunk
            tail = dataset[whole:rows]
            self._held = [tail if self.slots is None else decode_slots(tail).astype(np.int32)]
            dataset.resize(whole, axis=0)
            if not whole:
                del self.group[self.name]
            self._written, self._count = whole, rows - whole
            return
        if self._held:
            self._held = [np.concatenate(self._held)[: rows - self._written]]
            self._count = len(self._held[0])

    def widen(self, slots: np.dtype[Any]) -> None:
        """Hold slots of this type from now on; what is there is written again if it is narrower."""
        if slots == self.slots:
            return
        before, self.slots = self.slots, slots
        if before is None or not self._written:
            return
        old = self._dataset()
        self.group.move(self.name, f"{self.name}.narrow")
        new = self._create(self._written, old.shape[1:], slots)
        for start in range(0, self._written, self.chunk):
            part = slice(start, start + self.chunk)
            new[part] = encode_slots(decode_slots(old[part]), slots)
        del self.group[f"{self.name}.narrow"]

    def _flush(self, rows: int) -> None:
        held = np.concatenate(self._held)
        now, later = self._encoded(held[:rows]), held[rows:]
        if not self._written:
            if not rows:
                self.group.create_dataset(self.name, data=now)
                return
            self._create(rows, now.shape[1:], now.dtype)
        dataset = self._dataset()
        dataset.resize(self._written + rows, axis=0)
        dataset[self._written :] = now
        self._written += rows
        self._held, self._count = [later.copy()], len(later)

    def _encoded(self, rows: NDArray[Any]) -> NDArray[Any]:
        if self.slots is not None:
            return encode_slots(rows, self.slots)
        if rows.dtype.kind == "f" and not np.isfinite(rows).all():
            raise StoreError(
                f"{self.name} has non-finite values, which are never written: please report this"
            )
        return rows if self.bits is None else round_values(rows, self.bits)

    def _create(self, rows: int, shape: tuple[int, ...], dtype: Any) -> h5py.Dataset:
        return self.group.create_dataset(
            self.name,
            (rows, *shape),
            dtype,
            maxshape=(None, *shape),
            chunks=(min(self.chunk, rows), *shape),
            **self._compression(),
        )

    def _compression(self) -> dict[str, Any]:
        if self.filters == "gzip":
            return {"shuffle": True, "compression": "gzip", "compression_opts": 1}
        if self.filters == "checked":
            return {"shuffle": True, "fletcher32": True, **hdf5plugin.Zstd(clevel=3)}
        if self.bits is not None:  # what is left of a rounded float is no whole number of bytes
            return dict(hdf5plugin.Bitshuffle(cname="zstd", clevel=3))
        return {"shuffle": True, **hdf5plugin.Zstd(clevel=3)}

    def _dataset(self) -> Any:
        return self.group[self.name]
