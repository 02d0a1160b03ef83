"""A crosscoder at one of its residual sites: x_i,s = sum_f a_if d_f,s + b_s + e_i,s.

One activation a feature, a decoder direction for every site that it writes. Weakly causal: a
feature that reads site m writes sites >= m only, so that at an earlier site it is not there.
Acausal: every feature reads and writes all sites. Features are numbered by the site that they read
(Kamath et al. 2025; Lindsey et al. 2024, "Sparse Crosscoders").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.about import joined_about
from headattr.basis.active import ACTIVATIONS, ActiveFeatures, merged, within
from headattr.basis.coder import Coder
from headattr.basis.component import Components, Place, Reads, SourceInfo, decompose
from headattr.basis.dictionary import Frame, Release
from headattr.basis.rows import JoinedRows, Matrix
from headattr.basis.sae import check_linear, check_width
from headattr.errors import DictionaryError
from headattr.model.capture import PromptCapture
from headattr.model.sites import Site


@dataclass(frozen=True)
class Crosscoder:
    """A crosscoder in a run: which features are active, whatever the site."""

    coders: tuple[Coder, ...]
    """By the site that they read; one group alone where it is acausal."""
    residual: tuple[Site, ...]
    """Its sites, ascending."""
    about: SourceInfo

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it reads."""
        return tuple(dict.fromkeys(site for coder in self.coders for site in _reads(coder)))

    @property
    def writes(self) -> tuple[Site, ...]:
        """What it reconstructs."""
        return self.residual

    @cached_property
    def counts(self) -> list[int]:
        """Features by group."""
        return [coder.dictionary.features for coder in self.coders]

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """The features of all groups."""
        parts = [
            coder.encode([prompt.at(site) for site in _reads(coder)], numbers)
            for coder in self.coders
        ]
        return merged(parts, self.counts)

    def reconstruct(
        self, prompt: PromptCapture, active: ActiveFeatures
    ) -> dict[Site, Float[Tensor, "pos d_model"]]:
        """What it makes of every site."""
        found = {}
        for site in self.residual:
            view = CrosscoderAt(self, site)
            parts = view.components(prompt, active)
            found[site] = (parts.sparse_sum + parts.named["bias"]).to(prompt.at(site))
        return found


@dataclass(frozen=True)
class CrosscoderAt:
    """A crosscoder at one site."""

    source: Crosscoder
    site: Site

    @property
    def layer(self) -> int:
        """The layer whose resid_pre it decomposes."""
        return self.site.layer

    @property
    def about(self) -> SourceInfo:
        """Of the whole crosscoder."""
        return self.source.about

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it needs of a prompt."""
        return (self.site,)

    @cached_property
    def directions(self) -> Matrix:
        """What each feature writes here; zeros for those that do not."""
        parts = [
            coder.directions(_writes(coder).index(self.site))
            if self.site in _writes(coder)
            else None
            for coder in self.source.coders
        ]
        return self._joined(parts)

    def components(self, prompt: PromptCapture, active: ActiveFeatures) -> Components:
        """Features that write here, bias and error."""
        x = prompt.at(self.site)
        bias = torch.zeros_like(x)
        for coder in self.source.coders:
            if self.site in _writes(coder):
                bias = bias + coder.bias(_writes(coder).index(self.site), x)
        here = self.writing(active)
        return decompose(x, here, torch.ones_like(x[:, 0]), self.directions, bias)

    @cached_property
    def encoder_rows(self) -> Matrix:
        """What each feature reads of this site; zeros for features that read another."""
        parts = [
            coder.read_rows(_reads(coder).index(self.site)) if self.site in _reads(coder) else None
            for coder in self.source.coders
        ]
        return self._joined(parts)

    def as_output(self, read: str) -> "CrosscoderOutput":
        """The same site as an output."""
        return CrosscoderOutput(self, read)

    def check_read(self, read: str) -> None:
        """Raises DictionaryError where there is no linear encoder to read with."""
        if read == "encoder":
            for coder in self.source.coders:
                check_linear(coder.dictionary, self.about.name)

    def writing(self, active: ActiveFeatures) -> ActiveFeatures:
        """Those that write here: the groups up to this site."""
        counts = self.source.counts
        last = max(i for i, c in enumerate(self.source.coders) if self.site in _writes(c))
        return within(active, 0, sum(counts[: last + 1]))

    def reading(self, active: ActiveFeatures) -> ActiveFeatures:
        """Those that read here."""
        counts = self.source.counts
        groups = [i for i, c in enumerate(self.source.coders) if self.site in _reads(c)]
        if not groups:
            return within(active, 0, 0)
        return within(active, sum(counts[: groups[0]]), sum(counts[: groups[-1] + 1]))

    def _joined(self, parts: Sequence[Matrix | None]) -> Matrix:
        if len(parts) == 1 and parts[0] is not None:
            return parts[0]
        first = self.source.coders[0]
        width = first.dictionary.d_out
        return JoinedRows(parts, self.source.counts, width, first.dtype, first.device)


@dataclass(frozen=True)
class CrosscoderOutput:
    """A crosscoder at one site as output: the features whose encoder reads it, or with decoder
    reads all that write it."""

    at: CrosscoderAt
    read: str
    """What it is asked to be read by: it decides which features it has."""

    @property
    def layer(self) -> int:
        """The layer before which it reads."""
        return self.at.layer

    @property
    def about(self) -> SourceInfo:
        """Of the crosscoder at this site."""
        return self.at.about._replace(layer=self.layer)

    @property
    def place(self) -> Place:
        """Where it reads."""
        return Place(self.layer, 0)

    @property
    def source(self) -> "CrosscoderOutput":
        """Itself: its lists hold its own features alone."""
        return self

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it needs of a prompt."""
        return tuple(dict.fromkeys([*self.at.source.sites, self.at.site]))

    @property
    def writes(self) -> tuple[Site, ...]:
        """Nothing: that is the whole crosscoder's."""
        return ()

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """Those that it has."""
        found = self.at.source.active(prompt, numbers)
        return self.at.writing(found) if self.read == "decoder" else self.at.reading(found)

    def reads(self, prompt: PromptCapture, active: ActiveFeatures, read: str) -> Reads:
        """Encoder rows of this site, or a_t d_t here."""
        self.check_read(read)
        if read == "decoder":
            return Reads(active, self.read_rows(read), active.acts, None, read)
        ones = torch.ones_like(prompt.at(self.at.site)[:, 0])
        return Reads(active, self.read_rows(read), ones[active.positions], ones, read)

    def read_rows(self, read: str) -> Matrix:
        """Encoder rows of this site, zeros for features that read another, or directions."""
        return self.at.directions if read == "decoder" else self.at.encoder_rows

    def check_read(self, read: str) -> None:
        """Raises DictionaryError where there is no linear encoder to read with."""
        self.at.check_read(read)

    def reconstruct(
        self, prompt: PromptCapture, active: ActiveFeatures
    ) -> dict[Site, Float[Tensor, "pos d_model"]]:
        """Nothing: what the crosscoder makes of its sites is asked of the whole."""
        return {}


def load_crosscoder(
    release: Release, *, d_model: int, dtype: torch.dtype, device: torch.device
) -> Crosscoder:
    """A crosscoder with all its groups.

    Raises DictionaryError for sites that are no residual streams, another width, a frame of its own
    (sites differ in scale: a format folds it), or a feature that writes before it reads.
    """
    check_crosscoder(release, d_model)
    coders = tuple(Coder(d, dtype, device, release.numbers) for d in release.dictionaries)
    sites = crosscoder_sites(release)
    about = joined_about(coders, release, "crosscoder", sites[-1].layer)
    return Crosscoder(coders, sites, about)


def crosscoder_sites(release: Release) -> tuple[Site, ...]:
    """The residual sites that a crosscoder writes, ascending."""
    written = {site for d in release.dictionaries for site in d.writes if site is not None}
    return tuple(sorted(written))


def check_crosscoder(release: Release, d_model: int | None) -> None:
    """Refuse what is no crosscoder of residual streams of this width."""
    where = release.path or release.name
    for d in release.dictionaries:
        if None in d.reads or None in d.writes:
            raise DictionaryError(f"{where} does not name its sites; expected the layer of each")
        sites = [site for site in (*d.reads, *d.writes) if site is not None]
        odd = [str(site) for site in sites if site.kind != "resid_pre"]
        if odd:
            raise DictionaryError(
                f"{where} reads or writes {', '.join(odd)}; expected a crosscoder of the residual "
                "stream between blocks"
            )
        if d.frame._replace(undone=True) != Frame():
            raise DictionaryError(
                f"{where}: a crosscoder whose input is normalised ({d.frame}) is not built; "
                "expected scales that are folded into its weights, site by site"
            )
        if list(d.reads) != list(d.writes) and min(d.writes) < min(d.reads):  # type: ignore[type-var]
            raise DictionaryError(
                f"{where}: features that read {d.reads[0]} write {min(d.writes)}; "  # type: ignore[type-var]
                "expected those of a weakly causal crosscoder to write no earlier site"
            )
        check_width(d, d.d_in, d_model)
    firsts = [min(d.reads) for d in release.dictionaries]  # type: ignore[type-var]
    if firsts != sorted(firsts):  # type: ignore[type-var]
        raise DictionaryError(
            f"{where}: its groups read {', '.join(map(str, firsts))}; expected them in this order, "
            "by the site that they read"
        )
    many = [d for d in release.dictionaries if d.activation.kind in ("topk", "abstopk")]
    if len(release.dictionaries) > 1 and many:
        raise DictionaryError(
            f"{where}: a {many[0].shown} crosscoder whose features read different sites chooses "
            "them over all sites; expected its inference form, with thresholds"
        )


def _reads(coder: Coder) -> list[Site]:
    return [site for site in coder.dictionary.reads if site is not None]


def _writes(coder: Coder) -> list[Site]:
    return [site for site in coder.dictionary.writes if site is not None]
