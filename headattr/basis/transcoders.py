"""Transcoders of the MLPs below a layer: resid_pre as the sum of all that was added to it.

    x_i of layer L = embedding + position + sum over l < L of (attention_l + mlp_l)
    mlp_l = sum_f a_if d_f,l + b_l + skip_l + e_l           features of all transcoders that write l

Per-layer, skip and cross-layer transcoders alike. Features are the transcoders'; the embedding, the
position embedding, each attention output (its heads apart on request), skips and the error of each
MLP are named components: never lumped, never smeared over features, never dropped. An MLP without a
transcoder is a component of its own. What float addition in the model lost is the part `rounding`
of the error (Ameisen et al. 2025, "Circuit Tracing").
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.about import joined_about
from headattr.basis.active import ACTIVATIONS, ActiveFeatures, merged, within
from headattr.basis.coder import Coder
from headattr.basis.component import (
    Components,
    Part,
    SourceInfo,
    sparse_sum,
    sum_dtype,
)
from headattr.basis.dictionary import Release
from headattr.basis.rows import JoinedRows, Matrix, SummedRows
from headattr.basis.transcoder_checks import check_transcoders, gap_of, layer_of, read_site
from headattr.errors import DictionaryError
from headattr.model.capture import PromptCapture
from headattr.model.family import Embedding
from headattr.model.head import HeadWeights
from headattr.model.load import LoadedModel
from headattr.model.sites import Site


@dataclass(frozen=True)
class Transcoders:
    """A set of transcoders in a run: which features are active in all of its layers."""

    coders: tuple[Coder, ...]
    """By the layer of the MLP whose input they read."""
    model: LoadedModel
    about: SourceInfo
    depth: int
    """The deepest layer that is decomposed by it: transcoders of layers below it are used."""
    heads_apart: bool = False

    @property
    def used(self) -> list[Coder]:
        """Those that write before the deepest layer."""
        return [coder for coder in self.coders if layer_of(coder.dictionary) < self.depth]

    @property
    def sites(self) -> tuple[Site, ...]:
        """What they read, and the stream whose norms say which positions count."""
        return (*(read_site(coder) for coder in self.used), Site("resid_pre", self.depth))

    @property
    def writes(self) -> tuple[Site, ...]:
        """What they reconstruct: the MLP outputs of the layers that are used."""
        return tuple(Site("mlp_out", layer_of(coder.dictionary)) for coder in self.used)

    @cached_property
    def counts(self) -> list[int]:
        """Features by transcoder."""
        return [coder.dictionary.features for coder in self.coders]

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """The features of all transcoders below the deepest layer."""
        parts = [coder.encode([prompt.at(read_site(coder))], numbers) for coder in self.used]
        if not parts:
            x = prompt.at(self.sites[-1])
            none = torch.zeros(len(x) + 1, dtype=torch.long, device=x.device)
            return ActiveFeatures(none, none[:0], x[:0, 0])
        return merged(parts, self.counts[: len(parts)])

    def before(self, layer: int) -> int:
        """How many features belong to transcoders of the layers below one."""
        pairs = zip(self.coders, self.counts, strict=True)
        return sum(count for coder, count in pairs if layer_of(coder.dictionary) < layer)

    def written(
        self, prompt: PromptCapture, active: ActiveFeatures, layer: int
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """What is written to one MLP's output, float64: by features, as bias, by skips; None where
        no transcoder writes there."""
        site, start = Site("mlp_out", layer), 0
        features, bias, skip = None, None, None
        for coder, count in zip(self.coders, self.counts, strict=True):
            targets = list(coder.dictionary.writes)
            if site in targets:
                index = targets.index(site)
                here = within(active, start, start + count)
                local = ActiveFeatures(here.ptr, here.ids - start, here.acts)
                found = sparse_sum(local, local.acts, coder.directions(index))
                features = found if features is None else features + found
                b_dec = coder.b_dec[index]
                if b_dec is not None:
                    bias = b_dec.to(found) if bias is None else bias + b_dec.to(found)
                if layer == layer_of(coder.dictionary):
                    skip = coder.skip(prompt.at(read_site(coder)))
            start += count
        if features is None:
            return None
        bias = torch.zeros_like(features[0]) if bias is None else bias
        skip = None if skip is None else skip.to(features)
        return features, bias.expand_as(features), skip

    def reconstruct(
        self, prompt: PromptCapture, active: ActiveFeatures
    ) -> dict[Site, Float[Tensor, "pos d_model"]]:
        """What they make of every MLP's output."""
        found = {}
        for coder in self.used:
            layer = layer_of(coder.dictionary)
            parts = self.written(prompt, active, layer)
            assert parts is not None
            total = parts[0] + parts[1] if parts[2] is None else parts[0] + parts[1] + parts[2]
            found[Site("mlp_out", layer)] = total.to(prompt.at(read_site(coder)))
        return found


@dataclass(frozen=True)
class TranscodersAt:
    """A transcoder set as basis of one layer."""

    source: Transcoders
    layer: int

    @property
    def about(self) -> SourceInfo:
        """Of the whole set."""
        return self.source.about

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it needs of a prompt: all that was added to the stream."""
        needed = [Site("resid_pre", 0), Site("resid_pre", self.layer)]
        needed += [read_site(c) for c in self.source.coders if layer_of(c.dictionary) < self.layer]
        for layer in range(self.layer):
            needed += [Site("attn_out", layer), Site("mlp_out", layer)]
            if self.source.heads_apart:
                needed.append(Site("z", layer))
        return tuple(dict.fromkeys(needed))

    @property
    def n_parts(self) -> int:
        """Named components that are members of a kind."""
        attention = self.source.model.n_heads + 1 if self.source.heads_apart else 1
        return self.layer * (attention + 2) + 1

    @cached_property
    def directions(self) -> Matrix:
        """What each feature writes to the stream before this layer, by all MLPs that it writes."""
        parts = []
        for coder in self.source.coders:
            targets = [
                i for i, s in enumerate(coder.dictionary.writes) if s and s.layer < self.layer
            ]
            rows = [coder.directions(i) for i in targets]
            parts.append(None if not rows else rows[0] if len(rows) == 1 else SummedRows(rows))
        first = self.source.coders[0]
        width = first.dictionary.d_out
        return JoinedRows(parts, self.source.counts, width, first.dtype, first.device)

    def components(self, prompt: PromptCapture, active: ActiveFeatures) -> Components:
        """Features, and every named component; they sum to resid_pre of the layer."""
        source, x = self.source, prompt.at(Site("resid_pre", self.layer))
        active = within(active, 0, source.before(self.layer))
        exact = sum_dtype(x.device)
        total = torch.zeros_like(x, dtype=exact)
        named = {"bias": torch.zeros_like(total), **self._embedded(prompt, exact)}
        parts: list[Part] = []
        for layer in range(self.layer):
            parts += self._attention(prompt, layer)
            out = prompt.at(Site("mlp_out", layer)).to(exact)
            written = source.written(prompt, active, layer)
            if written is None:
                parts.append(Part("mlp", f"MLP L{layer}", out.to(x)))
                continue
            features, bias, skip = written
            total += features
            named["bias"] = named["bias"] + bias
            error = out - features - bias
            if skip is not None:
                error = error - skip
                parts.append(Part("skip", f"skip L{layer}", skip.to(x)))
            parts.append(Part("error", f"MLP error L{layer}", error.to(x)))
        for part in parts:
            named[part.kind] = named.get(part.kind, 0) + part.vectors.to(exact)
        rounding = x.to(exact) - total - sum(named.values())
        _check_rounding(rounding, (x, *(part.vectors for part in parts)), self.layer)
        parts.append(Part("error", "rounding", rounding.to(x)))
        named["error"] = named.get("error", 0) + rounding
        ones = torch.ones_like(x[:, 0])
        return Components("feature", active, ones, active.acts, total, named, tuple(parts))

    def _embedded(self, prompt: PromptCapture, exact: torch.dtype) -> dict[str, Tensor]:
        """Token and position embedding of resid_pre 0."""
        x = prompt.at(Site("resid_pre", 0)).to(exact)
        embedding: Embedding = self.source.model.family.embedding(self.source.model.hf)
        if embedding.W_pos is None:
            return {"embedding": x}
        position = embedding.W_pos[: len(x)].to(exact)
        return {"embedding": x - position, "position": position}

    def _attention(self, prompt: PromptCapture, layer: int) -> Iterable[Part]:
        """What one layer's attention added, its heads apart where asked."""
        out = prompt.at(Site("attn_out", layer))
        if not self.source.heads_apart:
            return [Part("attention", f"attention L{layer}", out)]
        model = self.source.model
        weights = model.family.head_weights(model.hf, layer)
        z = prompt.at(Site("z", layer)).unflatten(1, (weights.n_heads, -1))
        scale = _post_scale(weights, z)
        heads = [scale * (z[:, h] @ weights.writes.written[h]) for h in range(weights.n_heads)]
        rest = out - torch.stack(heads).sum(0)
        return [
            *(Part("attention", f"attention L{layer}H{h}", x) for h, x in enumerate(heads)),
            Part("attention", f"attention bias L{layer}", rest),
        ]


def load_transcoders(
    release: Release, model: LoadedModel, depth: int, *, heads_apart: bool = False
) -> Transcoders:
    """A set of transcoders as basis, up to the layer `depth`.

    Raises DictionaryError for what does not read and write MLPs of this model, or two transcoders
    of one MLP.
    """
    check_transcoders(release, model.d_model, len(model.layers))
    fit = model.dtype, model.device, release.numbers
    coders = tuple(Coder(d, *fit) for d in release.dictionaries)
    about = joined_about(coders, release, "transcoders", depth)
    layers = {layer_of(d) for d in release.dictionaries}
    missing = [layer for layer in range(depth) if layer not in layers]
    if missing:
        note = f"no transcoder of layers {missing}: their MLPs are components as a whole"
        about = about._replace(assumed=(*about.assumed, note))
    elif gap := gap_of(release.dictionaries):
        about = about._replace(assumed=(*about.assumed, gap))
    return Transcoders(coders, model, about, depth, heads_apart)


def _post_scale(weights: HeadWeights, z: Float[Tensor, "pos head d_head"]) -> Tensor:
    """What the norm after attention multiplies each row by, [pos, 1]."""
    summed = weights.b_O + sum(z[:, h] @ weights.W_O[h] for h in range(weights.n_heads))
    return weights.writes.output_scale(summed)[:, None]


def _check_rounding(rounding: Tensor, parts: Iterable[Tensor], layer: int) -> None:
    """What a model adds to its stream is attention and MLPs, up to rounding."""
    most = 1e-4 * max(float(part.norm(dim=-1).max()) for part in parts)
    gap = float(rounding.norm(dim=-1).max())
    if not gap <= most:
        raise DictionaryError(
            f"resid_pre {layer} is not the sum of the embedding and the outputs of attention and "
            f"MLPs below it (gap {gap:.1e}, expected rounding); use an SAE there"
        )
