"""What a set of transcoders has to be, before its tensors are read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headattr.basis.coder import Coder
from headattr.basis.dictionary import Dictionary, Release
from headattr.basis.sae import check_width
from headattr.edges import layer_ranges
from headattr.errors import DictionaryError
from headattr.model.sites import MLP_READS, Site


def layer_of(dictionary: Dictionary) -> int:
    """The layer of the MLP whose input a transcoder reads."""
    site = dictionary.reads[0]
    assert site is not None
    return site.layer


def check_transcoders(release: Release, d_model: int | None, n_layers: int | None) -> None:
    """Refuse what does not read and write MLPs of such a model."""
    where, seen = release.path or release.name, set()
    for d in release.dictionaries:
        read = d.reads[0]
        if read is None or len(d.reads) != 1 or read.kind not in MLP_READS:
            raise DictionaryError(
                f"{where} reads {d.hook_name or read or 'a site that it does not name'}; expected "
                "the input of an MLP: blocks.N.mlp.hook_in, blocks.N.ln2.hook_normalized or "
                "blocks.N.hook_resid_mid"
            )
        if d.frame.centred:
            raise DictionaryError(
                f"{where} says center_writing_weights; expected a transcoder of what the MLP reads "
                "and writes as the model gives it"
            )
        for site in d.writes:
            if site is None or site.kind != "mlp_out" or site.layer < read.layer:
                raise DictionaryError(
                    f"{where}: features that read {read} write {site or 'a site without a name'}; "
                    "expected outputs of MLPs from that layer on"
                )
        if n_layers is not None and read.layer >= n_layers:
            raise DictionaryError(
                f"{where} reads {read}; the model's layers are 0 to {n_layers - 1}"
            )
        if read.layer in seen:
            raise DictionaryError(
                f"{where} has two transcoders of layer {read.layer}; expected one"
            )
        if seen and read.layer < max(seen):
            raise DictionaryError(
                f"{where} has its transcoders out of order; expected them by layer"
            )
        seen.add(read.layer)
        check_width(d, d.d_in, d_model)
        check_width(d, d.d_out, d_model)


def gap_of(dictionaries: Sequence[Dictionary], layers: Iterable[int] | None = None) -> str | None:
    """What is missing between the transcoders of a set, in words, with the files where their names
    tell; None where nothing is. `layers`: those whose basis is asked for, by default any."""
    found = {d.reads[0].layer: d for d in dictionaries if d.reads[0] is not None}
    top = max(found, default=0)
    deepest = [layer - 1 for layer in layers] if layers is not None else [top]
    within = [layer for layer in deepest if layer <= top]
    gone = [layer for layer in range(max(within, default=-1) + 1) if layer not in found]
    if not gone:
        return None
    files = [name for layer in gone if (name := _file_of(layer, found))]
    missing = ", ".join(files) if len(files) == len(gone) else f"layers {layer_ranges(gone)}"
    deep = max(within) + 1
    needs = layer_ranges(range(deep))
    return (
        f"it has transcoders of layers {layer_ranges(found)}; the basis of layer {deep} needs those"
        f" of {needs}, and {missing} {'is' if len(gone) == 1 else 'are'} missing"
    )


def why_without(sources: Iterable[Any], layers: Sequence[int]) -> str | None:
    """What the transcoder sets of a run lack of being the basis of some layers, and what to do;
    None where that is not why there is none."""
    for source in sources:
        if source.about.kind != "transcoders":
            continue
        dictionaries = [coder.dictionary for coder in source.coders]
        for layer in layers:
            if gap := gap_of(dictionaries, [layer]):
                where = source.about.path or source.about.name
                return (
                    f"{where}: {gap}; complete the set, or add --basis {layer}={where}, which "
                    "takes MLPs without a transcoder as one component each"
                )
    return None


def _file_of(layer: int, found: Mapping[int, Dictionary]) -> str | None:
    """The name that the file of a layer would have, by those that are there."""
    names = set()
    for there, d in found.items():
        name = Path(d.path).name if d.path else ""
        changed, count = re.subn(rf"(?<!\d){there}(?!\d)", str(layer), name)
        names.add(changed if count == 1 else None)
    return names.pop() if len(names) == 1 else None


def read_site(coder: Coder) -> Site:
    """What a transcoder reads."""
    site = coder.dictionary.reads[0]
    assert site is not None
    return site
