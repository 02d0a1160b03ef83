"""A dictionary of what one layer's attention gives, as output: its heads' outputs before W_O
(hook_z) or their sum as it is added to the stream (attn_out). It reads its own layer's heads alone.
"""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from headattr.basis.about import about_coder
from headattr.basis.active import ACTIVATIONS, ActiveFeatures
from headattr.basis.coder import Coder
from headattr.basis.component import Place, Reads, SourceInfo, sparse_sum
from headattr.basis.dictionary import Dictionary, Release
from headattr.basis.rows import Matrix
from headattr.basis.sae import check_linear, check_width
from headattr.errors import DictionaryError
from headattr.model.capture import PromptCapture
from headattr.model.load import LoadedModel
from headattr.model.sites import Site


@dataclass(frozen=True)
class AttentionOutput:
    """An SAE of attention's output, as output of its layer's heads."""

    coder: Coder
    site: Site
    about: SourceInfo

    @property
    def layer(self) -> int:
        """Of the attention."""
        return self.site.layer

    @property
    def place(self) -> Place:
        """What its own layer's heads give."""
        return Place(self.layer, 1)

    @property
    def source(self) -> "AttentionOutput":
        """Itself."""
        return self

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it reads, and the stream whose norms say which positions count."""
        return (self.site, Site("resid_pre", self.layer))

    @property
    def writes(self) -> tuple[Site, ...]:
        """What it reconstructs."""
        return (self.site,)

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """The dictionary's own activations."""
        return self.coder.encode([prompt.at(self.site)], numbers)

    def reads(self, prompt: PromptCapture, active: ActiveFeatures, read: str) -> Reads:
        """Encoder rows, or a_t d_t; of the heads' outputs side by side where it is a hook_z SAE."""
        self.check_read(read)
        x = prompt.at(self.site)
        seen, block = self.coder.seen(x), x if self.site.kind == "z" else None
        rows = self.read_rows(read)
        if read == "decoder":
            scale = active.acts * seen.scale[active.positions]
            return Reads(active, rows, scale, None, read, block)
        scale = seen.read_scale
        return Reads(active, rows, scale[active.positions], scale, read, block)

    def read_rows(self, read: str) -> Matrix:
        """Encoder rows, or directions."""
        return self.coder.directions() if read == "decoder" else self._read_rows

    @cached_property
    def _read_rows(self) -> Matrix:
        return self.coder.read_rows()

    def check_read(self, read: str) -> None:
        """Raises DictionaryError where there is no linear encoder to read with."""
        if read == "encoder":
            check_linear(self.coder.dictionary, self.about.name)

    def reconstruct(
        self, prompt: PromptCapture, active: ActiveFeatures
    ) -> dict[Site, Float[Tensor, "pos d"]]:
        """What it makes of its site."""
        x = prompt.at(self.site)
        coefs = active.acts * self.coder.seen(x).scale[active.positions]
        made = sparse_sum(active, coefs, self.coder.directions()) + self.coder.bias(0, x)
        return {self.site: made.to(x)}


def load_attention_output(release: Release, layer: int, model: LoadedModel) -> AttentionOutput:
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
    return AttentionOutput(coder, site, about_coder(coder, "attention", layer))


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
