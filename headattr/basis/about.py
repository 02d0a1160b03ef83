"""What a run says of its dictionaries."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from headattr.basis.coder import Coder
from headattr.basis.component import Group, SourceInfo
from headattr.basis.dictionary import Release
from headattr.basis.formats.files import labels_of
from headattr.basis.rows import Matrix
from headattr.config import canonical_hash


def about_coder(coder: Coder, kind: str, layer: int) -> SourceInfo:
    """Where a dictionary came from and what was assumed, with what an activation of 1 stands
    for."""
    dictionary = coder.dictionary
    return SourceInfo(
        kind,
        layer,
        dictionary.name,
        dictionary.path,
        dictionary.features,
        dictionary.shown,
        coder.hash,
        _notes([coder]),
        dictionary.prepend_bos,
        dictionary.labels,
    )


def _notes(coders: Sequence[Coder]) -> tuple[str, ...]:
    """What was assumed, and what an activation of 1 stands for."""
    notes = [note for coder in coders for note in coder.dictionary.assumed]
    if any(coder.dictionary.activation.kind == "gated" for coder in coders):
        notes.append("encoder reads use the magnitude row of the gated encoder")
    norms = [_norms(coder.directions()) for coder in coders]
    low, high = min(float(n.min()) for n in norms), max(float(n.max()) for n in norms)
    unit = 0.999 < low <= high < 1.001
    size = "norm 1" if unit else f"norms {low:.3g} to {high:.3g} (not folded)"
    notes.append(f"activations multiply decoder rows of {size}")
    return tuple(dict.fromkeys(notes))


def _norms(rows: Matrix) -> Tensor:
    """Of all rows, or of the first of many."""
    return (rows if isinstance(rows, Tensor) else rows[: 1 << 12]).norm(dim=-1)


def labels_of_release(release: Release) -> str | None:
    """Path of the labels.jsonl of all dictionaries together: those of one alone, among several,
    would be off."""
    if len(release.dictionaries) == 1:
        return release.dictionaries[0].labels
    root = Path(release.path) if release.path else None
    return labels_of(root) if root is not None and root.is_dir() else None


def joined_about(coders: Sequence[Coder], release: Release, kind: str, layer: int) -> SourceInfo:
    """What is known of several dictionaries that are one source."""
    groups = [
        Group(site.layer if site else layer, str(site), d.features)
        for d in release.dictionaries
        for site in [d.reads[0] if len(d.reads) == 1 else None]
    ]
    bos = {d.prepend_bos for d in release.dictionaries}
    return SourceInfo(
        kind=kind,
        layer=layer,
        name=release.name,
        path=release.path,
        n_features=release.features,
        activation=" and ".join(dict.fromkeys(d.shown for d in release.dictionaries)),
        hash=canonical_hash([coder.hash for coder in coders]),
        assumed=_notes(coders),
        prepend_bos=bos.pop() if len(bos) == 1 else None,
        groups=tuple(groups),
        labels=labels_of_release(release),
    )
