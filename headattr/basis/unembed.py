"""The unembedding as an output: its "features" are tokens, read through the frozen final norm.

r_t = (gamma * W_U[t], centred for LayerNorm) / sigma_i          direct logit attribution

Where the model caps its logits, these are the logits before the cap.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headattr.basis.active import ACTIVATIONS, ActiveFeatures, joined
from headattr.basis.component import Place, Reads, SourceInfo
from headattr.model.capture import PromptCapture
from headattr.model.family import Unembedding
from headattr.model.load import LoadedModel
from headattr.model.sites import Site

N_PREDICTED = 16
"""A position's active tokens: the model's strongest predictions, and the token that follows."""


@dataclass(frozen=True)
class UnembedOutput:
    """Logits as an output; `layer` is the number of layers, so that it follows every head."""

    layer: int
    unembedding: Unembedding
    about: SourceInfo

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it needs of a prompt."""
        return (Site("resid_pre", self.layer),)

    @property
    def place(self) -> Place:
        """Behind all heads."""
        return Place(self.layer + 1, 0)

    @property
    def source(self) -> "UnembedOutput":
        """Itself."""
        return self

    @cached_property
    def rows(self) -> Float[Tensor, "vocab d_model"]:
        """W_U with the final norm's gain and centring folded in."""
        return self.unembedding.norm.fold(self.unembedding.W_U.T).T.contiguous()

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """The tokens that the model predicts most and the one that follows; activation is the
        logit."""
        x, step = prompt.resid[self.layer], max(1, numbers // len(self.rows))
        parts = (slice(i, i + step) for i in range(0, len(x), step))
        following = prompt.tokens[1:]
        return joined([_predicted(self._logits(x[some]), following[some]) for some in parts])

    def _logits(self, x: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos vocab"]:
        norm, W_U, b_U = self.unembedding
        logits = x @ self.rows.T / norm.sigma(x)[:, None] + norm.constant(W_U.T)
        return logits if b_U is None else logits + b_U

    def check_read(self, read: str) -> None:
        """Whatever is asked for: the unembedding has one read, its rows."""

    def read_rows(self, read: str) -> Float[Tensor, "vocab d_model"]:
        """Token rows, whatever `read` says."""
        return self.rows

    def reads(self, prompt: PromptCapture, active: ActiveFeatures, read: str) -> Reads:
        """Token rows over the frozen final scale; the same whatever `read` says."""
        sigma = self.unembedding.norm.sigma(prompt.resid[self.layer])
        return Reads(active, self.rows, 1 / sigma[active.positions], 1 / sigma, "unembed")


def unembed_output(model: LoadedModel) -> UnembedOutput:
    """The unembedding of a model."""
    unembedding = model.family.unembedding(model.hf)
    activation = f"the {N_PREDICTED} strongest predictions and the token that follows"
    about = SourceInfo(
        "unembed",
        len(model.layers),
        "unembed",
        None,
        len(unembedding.W_U),
        activation,
        "unembed",
        (),
        None,
        None,
    )
    return UnembedOutput(len(model.layers), unembedding, about)


def _largest(logits: Float[Tensor, "pos vocab"], count: int) -> Int[Tensor, "pos count"]:
    """The tokens of the largest logits, the lower ids of equal ones on every device."""
    count = min(count, logits.shape[1])
    top, ids = logits.topk(min(count + 1, logits.shape[1]), -1)
    tied = (top[:, count - 1] == top[:, -1]).nonzero().flatten() if count < top.shape[1] else []
    ids = ids[:, :count].contiguous()
    if len(tied):
        ids[tied] = logits[tied].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return ids


def _predicted(
    logits: Float[Tensor, "pos vocab"], following: Int[Tensor, "some"]
) -> ActiveFeatures:
    """Of some positions; `following`: the tokens behind each, one fewer where the prompt ends."""
    ids = [row.sort().values for row in _largest(logits, N_PREDICTED)]
    for i, token in enumerate(following):
        ids[i] = torch.cat([ids[i], token[None]]).unique()
    counts = torch.tensor([len(row) for row in ids], device=logits.device)
    ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    positions = torch.arange(len(ids), device=logits.device).repeat_interleave(counts)
    flat = torch.cat(ids)
    return ActiveFeatures(ptr, flat, logits[positions, flat])
