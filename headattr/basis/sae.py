"""A residual SAE: x_i = scale_i (a_i W_dec + b_dec) + mean_i + e_i.

With the dictionary's own activations. scale_i and mean_i undo what it does to its input: a fixed
factor (expected_average_only_in), the norm of x_i (constant_norm_rescale), its mean and deviation
(layer_norm), its mean (a centred stream).
"""

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.component import (
    ACTIVATIONS,
    ActiveFeatures,
    Components,
    Reads,
    SourceInfo,
    active_by_parts,
    check_numbers,
    decompose,
)
from headattr.basis.formats import saelens
from headattr.basis.site import check_site
from headattr.errors import DictionaryError
from headattr.model.capture import PromptCapture
from headattr.model.load import hash_tensors

_LAYER_NORM_EPS = 1e-5  # what sae_lens adds to the deviation of its input


class _Frame(NamedTuple):
    """How the dictionary sees each position: u = read_scale (x - mean), x ~ scale * output +
    mean."""

    scale: Float[Tensor, "pos"]
    read_scale: Float[Tensor, "pos"]
    mean: Float[Tensor, "pos"]


@dataclass(frozen=True)
class SaeBasis:
    """A sae_lens SAE on the residual stream before `layer`."""

    layer: int
    sae: Any
    config: saelens.SaeConfig
    about: SourceInfo

    @property
    def directions(self) -> Float[Tensor, "features d_model"]:
        """W_dec, unit rows where the activations already carry the decoder norm."""
        W_dec = self.sae.W_dec.detach()
        rescaled = self.config.fields.get("rescale_acts_by_decoder_norm", False)
        return W_dec / W_dec.norm(dim=-1, keepdim=True) if rescaled else W_dec

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """The dictionary's own activations."""
        x, width = prompt.resid[self.layer], self.config.fields["d_sae"]
        return active_by_parts(lambda some: self._encode(x[some]), len(x), width, numbers)

    def components(self, prompt: PromptCapture, active: ActiveFeatures) -> Components:
        """Features, bias and error of resid_pre; they sum to it."""
        x = prompt.resid[self.layer]
        frame = self._frame(x)
        bias = frame.scale[:, None] * self._b_dec() + frame.mean[:, None]
        return decompose(x, active, frame.scale, self.directions, bias)

    def reads(self, prompt: PromptCapture, active: ActiveFeatures, read: str) -> Reads:
        """Directions by which each active feature reads the stream: encoder rows, or a_t d_t."""
        self.check_read(read)
        frame = self._frame(prompt.resid[self.layer])
        if read == "decoder":
            scale = active.acts * frame.scale[active.positions]
            return Reads(active, self.read_rows(read), scale, None, read)
        scale = frame.read_scale
        return Reads(active, self.read_rows(read), scale[active.positions], scale, read)

    def read_rows(self, read: str) -> Float[Tensor, "features d_model"]:
        """Encoder rows, centred where the dictionary sees a centred stream, or directions."""
        return self.directions if read == "decoder" else self._read_rows

    @cached_property
    def _read_rows(self) -> Float[Tensor, "features d_model"]:
        rows = self._encoder_rows()
        if self.config.centred or self.config.fields["normalize_activations"] == "layer_norm":
            rows = rows - rows.mean(-1, keepdim=True)
        return rows.contiguous()

    def check_read(self, read: str) -> None:
        """Raises DictionaryError where there is no linear encoder to read with."""
        if read == "encoder" and self.config.architecture == "matching_pursuit":
            raise DictionaryError(
                f"{self.about.name}: a matching_pursuit dictionary has no linear encoder to read "
                "with; use --read decoder"
            )

    def _encode(self, x: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos d_sae"]:
        if self.config.centred:
            x = x - x.mean(-1, keepdim=True)
        with torch.no_grad():
            acts = self.sae.encode(x * self.config.input_scale)
        return acts.to_dense() if acts.is_sparse else acts

    def _frame(self, x: Float[Tensor, "pos d_model"]) -> _Frame:
        kind, factor = self.config.fields["normalize_activations"], self.config.input_scale
        mean, ones = x.mean(-1), torch.ones_like(x[:, 0])
        if kind == "layer_norm":
            std = (x - mean[:, None]).std(-1)
            return _Frame(std, 1 / (std + _LAYER_NORM_EPS), mean)
        centred = self.config.centred
        mean = mean if centred else torch.zeros_like(mean)
        if kind == "constant_norm_rescale":
            scale = (x - mean[:, None]).norm(dim=-1) / x.shape[-1] ** 0.5
            return _Frame(scale, 1 / scale, mean)
        return _Frame(ones / factor, ones * factor, mean)

    def _b_dec(self) -> Float[Tensor, "d_model"]:
        b_dec = self.sae.b_dec.detach()
        unused = (
            self.config.architecture == "matching_pursuit"
            and not self.config.fields["apply_b_dec_to_input"]
        )
        return torch.zeros_like(b_dec) if unused else b_dec

    def _encoder_rows(self) -> Float[Tensor, "features d_model"]:
        W_enc = self.sae.W_enc.detach()
        if self.config.architecture == "gated":
            W_enc = W_enc * self.sae.r_mag.detach().exp()
        if self.config.fields.get("rescale_acts_by_decoder_norm", False):
            W_enc = W_enc * self.sae.W_dec.detach().norm(dim=-1)
        return W_enc.T


def load_sae(
    folder: Path, layer: int, *, d_model: int, dtype: torch.dtype, device: torch.device
) -> SaeBasis:
    """An SAE from a SAELens folder; refused if its site is not `layer` or its width not
    `d_model`."""
    config = saelens.read_config(folder)
    check_fit(config, layer, d_model, str(folder))
    sae, digest = saelens.load_weights(folder, config, dtype, device)
    labels = folder / "labels.jsonl"
    about = _about(
        config, layer, folder.name, str(folder), digest, str(labels) if labels.exists() else None
    )
    return _with_convention(SaeBasis(layer, sae, config, about))


def from_object(
    sae: Any, layer: int, *, d_model: int, dtype: torch.dtype, device: torch.device
) -> SaeBasis:
    """A copy of a `sae_lens.SAE` in memory."""
    raw = sae.cfg.to_dict() if hasattr(sae.cfg, "to_dict") else dict(vars(sae.cfg))
    metadata = raw.get("metadata")
    raw["metadata"] = (
        metadata if isinstance(metadata, dict) else dict(vars(metadata) if metadata else {})
    )
    raw["architecture"] = sae.cfg.architecture()
    name = type(sae).__name__
    config = saelens.interpret(raw, Path(name))
    check_fit(config, layer, d_model, name)
    check_numbers(sae.state_dict(), name)
    settings = (sorted(config.fields.items()), config.input_scale, config.centred)
    digest = hash_tensors(sae.state_dict().items(), repr(settings))
    sae = copy.deepcopy(sae).to(device=device, dtype=dtype).eval()
    about = _about(config, layer, name, None, digest, None)
    return _with_convention(SaeBasis(layer, sae, config, about))


def _with_convention(basis: SaeBasis) -> SaeBasis:
    """The basis, with a record of what an activation of 1 stands for."""
    norms = basis.directions.norm(dim=-1)
    low, high = float(norms.min()), float(norms.max())
    unit = 0.999 < low <= high < 1.001
    size = "norm 1" if unit else f"norms {low:.3g} to {high:.3g} (not folded)"
    said = f"activations multiply decoder rows of {size}"
    return replace(basis, about=basis.about._replace(assumed=(*basis.about.assumed, said)))


def check_fit(config: saelens.SaeConfig, layer: int, d_model: int | None, where: str) -> None:
    """Refuse another site or another width, naming both."""
    if config.hook_name is not None:
        check_site(config.hook_name, layer, where)
    if d_model is not None and config.fields["d_in"] != d_model:
        raise DictionaryError(
            f"{where} decomposes vectors of width {config.fields['d_in']}; the model's "
            "residual stream has "
            f"{d_model}: it belongs to another model"
        )


def _about(
    config: saelens.SaeConfig,
    layer: int,
    name: str,
    path: str | None,
    digest: str,
    labels: str | None,
) -> SourceInfo:
    kind = config.architecture
    if "k" in config.fields:
        kind = f"{kind} k={config.fields['k']}"
    assumed = config.assumed
    if config.architecture == "gated":
        assumed = (*assumed, "encoder reads use the magnitude row of the gated encoder")
    return SourceInfo(
        "sae",
        layer,
        name,
        path,
        config.fields["d_sae"],
        kind,
        digest,
        assumed,
        config.prepend_bos,
        labels,
    )
