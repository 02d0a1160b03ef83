"""What a run says of its dictionaries."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from headattr.basis.coder import Coder
from headattr.basis.component import Group, SourceInfo
from headattr.basis.dictionary import Release
from headattr.basis.formats.files import labels_of
from headattr.config import canonical_hash


def about_coder(coder: Coder, kind: str, layer: int) -> SourceInfo:
    """Where a dictionary came from and what was assumed, with what an activation of 1 stands
    for."""
    dictionary, rows = coder.dictionary, coder.directions()
    assumed = dictionary.assumed
    if dictionary.activation.kind == "gated":
        assumed = (*assumed, "encoder reads use the magnitude row of the gated encoder")
    norms = (rows if isinstance(rows, Tensor) else rows[: 1 << 12]).norm(dim=-1)
    low, high = float(norms.min()), float(norms.max())
    unit = 0.999 < low <= high < 1.001
    size = "norm 1" if unit else f"norms {low:.3g} to {high:.3g} (not folded)"
    said = f"activations multiply decoder rows of {size}"
    return SourceInfo(
        kind,
        layer,
        dictionary.name,
        dictionary.path,
        dictionary.features,
        dictionary.shown,
        coder.hash,
        (*assumed, said),
        dictionary.prepend_bos,
        dictionary.labels,
    )


def joined_about(
    abouts: Sequence[SourceInfo], release: Release, kind: str, layer: int
) -> SourceInfo:
    """What is known of several dictionaries that are one source."""
    first = abouts[0]
    assumed = dict.fromkeys(note for about in abouts for note in about.assumed)
    groups = [
        Group(site.layer if site else layer, str(site), d.features)
        for d in release.dictionaries
        for site in [d.reads[0] if len(d.reads) == 1 else None]
    ]
    root = Path(release.path) if release.path else None
    labels = labels_of(root) if root is not None and root.is_dir() else first.labels
    kinds = " and ".join(dict.fromkeys(about.activation for about in abouts))
    bos = {about.prepend_bos for about in abouts}
    return first._replace(
        kind=kind,
        layer=layer,
        name=release.name,
        path=release.path,
        n_features=release.features,
        activation=kinds,
        hash=canonical_hash([about.hash for about in abouts]),
        assumed=tuple(assumed),
        prepend_bos=bos.pop() if len(bos) == 1 else None,
        groups=tuple(groups),
        labels=labels,
    )
