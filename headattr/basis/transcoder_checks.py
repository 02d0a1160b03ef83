"""What a set of transcoders has to be, before its tensors are read."""

from headattr.basis.coder import Coder
from headattr.basis.dictionary import Dictionary, Release
from headattr.basis.sae import check_width
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


def read_site(coder: Coder) -> Site:
    """What a transcoder reads."""
    site = coder.dictionary.reads[0]
    assert site is not None
    return site
