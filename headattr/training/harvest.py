"""Windows -> the model's activations at some sites, in memory or, if they are too many, in files.

A row a position, in the order of the windows, which were drawn at random; training draws its rows
at random too, anew in every epoch. Harvested files get their names when they are whole: a second
call with the same windows, model and sites reads them.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from headattr.errors import HeadattrError
from headattr.model.capture import PromptCapture, capture
from headattr.model.load import LoadedModel
from headattr.model.sites import Site

TOKENS_AT_ONCE = 4096
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_REPORT_SECONDS = 10.0
Say = Callable[[str], None]


class Wanted(NamedTuple):
    """What is harvested, and how it is kept."""

    sites: tuple[Site, ...]
    storage: str
    norm_limit: float
    memory_bytes: float
    """Above this it is kept in files."""


@dataclass(frozen=True)
class Activations:
    """A harvest."""

    sites: tuple[Site, ...]
    values: tuple[Shaped[Tensor, "row d"], ...]
    """Of each site, as kept."""
    within: Bool[Tensor, "row site"]
    """Is the norm within the limit?"""
    counted: Bool[Tensor, "window pos"]
    """Which positions have a row."""
    limits: tuple[float, ...]
    """Norms, by site."""
    seconds: float

    def rows_for(self, sites: Sequence[Site]) -> "Rows":
        """The positions that count at all of some sites. Raises HeadattrError for none."""
        indexes = [self.sites.index(site) for site in sites]
        kept = self.within[:, indexes].all(1).nonzero().flatten()
        if not len(kept):
            raise HeadattrError(
                f"no position is left at {', '.join(map(str, sites))}: raise norm_limit or give "
                "more texts"
            )
        return Rows(tuple(sites), tuple(self.values[i] for i in indexes), kept, self.counted)


class Rows(NamedTuple):
    """What one dictionary sees."""

    sites: tuple[Site, ...]
    values: tuple[Shaped[Tensor, "row d"], ...]
    kept: Int[Tensor, "n"]
    """The rows that count."""
    counted: Bool[Tensor, "window pos"]
    """Which positions of the windows have a row, counted or not."""

    def batch(self, chosen: Int[Tensor, "b"]) -> tuple[Float[Tensor, "b d"], ...]:
        """float32 vectors of each site at some of the counted positions."""
        index = self.kept[chosen.sort().values]
        return tuple(part[index].float() for part in self.values)

    def __len__(self) -> int:  # type: ignore[override]
        """Number of counted positions."""
        return len(self.kept)


def bytes_of(widths: Sequence[int], rows: int, storage: str) -> int:
    """What a harvest takes."""
    return sum(widths) * rows * _DTYPES[storage].itemsize


def width_of(model: LoadedModel, site: Site) -> int:
    """Width of what is captured at a site."""
    if site.kind != "z":
        return model.d_model
    weights = model.family.head_weights(model.hf, site.layer)
    return weights.W_O.shape[0] * weights.W_O.shape[1]


def harvest(
    model: LoadedModel,
    windows: Int[Tensor, "window pos"],
    counted: Bool[Tensor, "window pos"],
    wanted: Wanted,
    folder: Path,
    say: Say,
    limits: Sequence[float] | None = None,
) -> Activations:
    """Activations at every counted position; files, where they are needed, go into `folder`.

    `limits`: norms above which a position does not count, by site; by default `norm_limit` medians
    of the first batch of windows. What is in `folder` already, of the same windows, model and
    sites, is not harvested again. Raises HeadattrError for activations that are not finite.
    """
    rows = int(counted.sum())
    widths = [width_of(model, site) for site in wanted.sites]
    if bytes_of(widths, rows, wanted.storage) <= wanted.memory_bytes:
        dtype = _DTYPES[wanted.storage]
        values = [torch.empty(rows, width, dtype=dtype) for width in widths]
        return _fill(model, windows, counted, wanted, values, say, limits)
    key = _key(model, windows, counted, wanted, limits)
    place = folder / f"activations-{key[:16]}"
    if not (place / "done.json").is_file():
        part = folder / f"{place.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            values = _mapped(part, wanted, widths, rows)
            found = _fill(model, windows, counted, wanted, values, say, limits)
            _write_about(found, part)
            del values, found
            part.rename(place)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return _read(place, wanted, widths, counted)


def _fill(
    model: LoadedModel,
    windows: Tensor,
    counted: Tensor,
    wanted: Wanted,
    values: list[Tensor],
    say: Say,
    limits: Sequence[float] | None,
) -> Activations:
    """Run the model over all windows."""
    started = reported = time.monotonic()
    step, filled = max(1, TOKENS_AT_ONCE // windows.shape[1]), 0
    within = torch.zeros(len(values[0]), len(wanted.sites), dtype=torch.bool)
    for start in range(0, len(windows), step):
        found = _captured(model, windows[start : start + step], wanted.sites)
        keep = counted[start : start + step]
        parts = [part[keep] for part in found]
        norms = torch.stack([part.norm(dim=-1) for part in parts], 1)
        if limits is None:
            limits = (wanted.norm_limit * norms.median(0).values).tolist()
        here = slice(filled, filled + len(norms))
        within[here] = norms <= torch.tensor(list(limits))
        for value, part in zip(values, parts, strict=True):
            value[here] = part.to(value.dtype)
        filled = here.stop
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            share = min(len(windows), start + step) / len(windows)
            rate = share * windows.numel() / (reported - started)
            say(f"harvest: {share:.0%} of {windows.numel():,} tokens, {rate:,.0f} a second")
    seconds = time.monotonic() - started
    return Activations(wanted.sites, tuple(values), within, counted, tuple(limits or ()), seconds)


def _captured(model: LoadedModel, ids: Tensor, sites: tuple[Site, ...]) -> list[Tensor]:
    """[window, pos, d] of each site, float32 or wider, on the CPU."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    results = capture(model, ids, mask, layers=[], sites=sites)
    found: list[PromptCapture] = []
    for result in results:
        if not isinstance(result, PromptCapture):
            raise HeadattrError(f"harvest: {result}; leave this text out")
        found.append(result)
    return [torch.stack([one.at(site) for one in found]).cpu() for site in sites]


def _mapped(part: Path, wanted: Wanted, widths: list[int], rows: int) -> list[Tensor]:
    """Empty files of the right size."""
    dtype, values = _DTYPES[wanted.storage], []
    for index, width in enumerate(widths):
        path = part / f"{index}.bin"
        with path.open("wb") as file:
            file.truncate(rows * width * dtype.itemsize)
        values.append(_map(path, rows, width, dtype))
    return values


def _map(path: Path, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    flat = torch.from_file(str(path), shared=True, size=rows * width, dtype=dtype)
    return flat.view(rows, width)


def _write_about(found: Activations, part: Path) -> None:
    from safetensors.torch import save_file

    save_file({"within": found.within.clone()}, part / "within.safetensors")
    about = {"limits": found.limits, "seconds": found.seconds}
    (part / "done.json").write_text(json.dumps(about), encoding="utf-8")


def _read(place: Path, wanted: Wanted, widths: list[int], counted: Tensor) -> Activations:
    """A finished harvest."""
    from safetensors.torch import load_file

    about = json.loads((place / "done.json").read_text(encoding="utf-8"))
    dtype, rows = _DTYPES[wanted.storage], int(counted.sum())
    values = tuple(_map(place / f"{i}.bin", rows, w, dtype) for i, w in enumerate(widths))
    within = load_file(place / "within.safetensors")["within"]
    limits = tuple(about["limits"])
    return Activations(wanted.sites, values, within, counted, limits, about["seconds"])


def _key(
    model: LoadedModel,
    windows: Tensor,
    counted: Tensor,
    wanted: Wanted,
    limits: Sequence[float] | None,
) -> str:
    """What decides a harvest."""
    said: list[Any] = [model.hash(), wanted.sites, wanted.storage, wanted.norm_limit, limits]
    digest = hashlib.sha256(json.dumps(said).encode())
    digest.update(windows.numpy().tobytes())
    digest.update(counted.numpy().tobytes())
    return digest.hexdigest()
