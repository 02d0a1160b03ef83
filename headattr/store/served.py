"""Which shards of a store are served: those that are finished, as of when they were looked for."""

from pathlib import Path
from typing import Any

from headattr.store.format import shard_name
from headattr.store.opened import Handles
from headattr.store.published import Found, read_sidecar, sidecar_stamp
from headattr.store.shard import Shard


class Served:
    """The finished shards of a folder, none of them open yet."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Reads every sidecar: 10,000 take half a second or so."""
        self.folder, self.manifest, self.handles = folder, manifest, Handles()
        self._found: dict[int, Found] = {}
        self._shards: dict[int, Shard] = {}
        self._look()

    def again(self) -> "Served":
        """The same folder now; shards that are as they were stay open."""
        other = object.__new__(Served)
        other.folder, other.manifest, other.handles = self.folder, self.manifest, self.handles
        other._found, other._shards = dict(self._found), dict(self._shards)
        other._look()
        return other

    def _look(self) -> None:
        """Read what is new or was replaced. A broken shard is read again in any case: its file
        may have been mended beside the same sidecar."""
        folder = str(self.folder)
        for index in (entry["index"] for entry in self.manifest["shards"]):
            known = self._found.get(index)
            if known and known.sidecar and known.stamp == sidecar_stamp(folder, index):
                continue
            found = self._found[index] = read_sidecar(folder, index, self.manifest["hash"])
            if (old := self._shards.pop(index, None)) is not None:
                self.handles.gone(old)
                old.forget()
            if found.sidecar is not None:
                path = self.folder / f"{shard_name(index)}.h5"
                self._shards[index] = Shard(path, found.sidecar, self.handles)
        self.shards = [shard for _, shard in sorted(self._shards.items())]
        self.where = {prompt: shard for shard in self.shards for prompt in shard.ids}
        self.broken = {i: found.problem for i, found in self._found.items() if found.problem}
