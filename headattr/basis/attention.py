"""A dictionary of what one layer's attention gives, as output: its heads' outputs before W_O
(hook_z) or their sum as it is added to the stream (attn_out). It reads its own layer's heads alone.
"""

from headattr.basis.about import about_coder
from headattr.basis.coder import Coder
from headattr.basis.dictionary import Dictionary, Release
from headattr.basis.sae import SaeBasis, check_width
from headattr.errors import DictionaryError
from headattr.model.load import LoadedModel
from headattr.model.sites import Site


def load_attention_output(release: Release, layer: int, model: LoadedModel) -> SaeBasis:
    """The dictionary of one layer's attention output."""
    dictionary = release.dictionaries[0]
    site = check_attention(dictionary, layer)
    width = model.d_model
    if site.kind == "z":
        W_O = model.family.head_weights(model.hf, layer).W_O
        width = W_O.shape[0] * W_O.shape[1]
    if dictionary.frame.centred:
        raise DictionaryError(
            f"{dictionary.path or dictionary.name}: center_writing_weights on {site} is not built; "
            "expected a dictionary of the output as the model gives it"
        )
    check_width(dictionary, dictionary.d_in, width)
    coder = Coder(dictionary, model.dtype, model.device)
    return SaeBasis(site, coder, about_coder(coder, "attention", layer))


def check_attention(dictionary: Dictionary, layer: int) -> Site:
    """The site of a dictionary of attention's output, which has to be of this layer."""
    site, where = dictionary.reads[0], dictionary.path or dictionary.name
    if site is None or site.kind not in ("z", "attn_out"):
        raise DictionaryError(
            f"{where}: the dictionary's site is {dictionary.hook_name or site!r}; expected "
            "attention's output, blocks.N.hook_attn_out or blocks.N.attn.hook_z"
        )
    if site.layer != layer:
        raise DictionaryError(
            f"{where} was trained on {site}; it was given for layer {layer}: use "
            f"{site.layer}={where}"
        )
    return site
