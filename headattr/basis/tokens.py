"""resid_pre 0 as tokens: each token's embedding is a feature of activation 1.

Its position, where the model learns positions, is a component; there is no error.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from headattr.basis.active import ACTIVATIONS, ActiveFeatures
from headattr.basis.component import Components, SourceInfo, sum_dtype
from headattr.errors import DictionaryError
from headattr.model.capture import PromptCapture
from headattr.model.family import Embedding
from headattr.model.load import LoadedModel
from headattr.model.sites import Site


@dataclass(frozen=True)
class TokenBasis:
    """The embedding of a model as a dictionary; exact, no error component."""

    embedding: Embedding
    about: SourceInfo
    layer: int = 0

    @property
    def sites(self) -> tuple[Site, ...]:
        """What it needs of a prompt."""
        return (Site("resid_pre", 0),)

    @property
    def source(self) -> "TokenBasis":
        """Itself."""
        return self

    @property
    def directions(self) -> Float[Tensor, "features d_model"]:
        """W_E."""
        return self.embedding.W_E

    def active(self, prompt: PromptCapture, numbers: int = ACTIVATIONS) -> ActiveFeatures:
        """Each position's token, with activation 1."""
        tokens = prompt.tokens
        ones = torch.ones(len(tokens), dtype=self.embedding.W_E.dtype, device=tokens.device)
        return ActiveFeatures(torch.arange(len(tokens) + 1, device=tokens.device), tokens, ones)

    def components(self, prompt: PromptCapture, active: ActiveFeatures) -> Components:
        """Token, bias (of the norm and the head alone) and, where there is one, position."""
        x, tokens = prompt.resid[0], prompt.tokens
        exact = sum_dtype(x.device)
        embedded = self.embedding.W_E[tokens].to(exact)
        named = {"bias": torch.zeros_like(embedded)}
        if self.embedding.W_pos is not None:
            named["position"] = self.embedding.W_pos[: len(tokens)].to(exact)
        gap = float((embedded + sum(named.values()) - x).norm(dim=-1).max())
        if not gap <= 1e-6 * float(x.norm(dim=-1).max()):
            raise DictionaryError(
                f"resid_pre 0 is not the sum of token and position embeddings (gap {gap:.1e}); "
                "expected equality: use an SAE at layer 0"
            )
        return Components("token", active, active.acts, active.acts, embedded, named)


def token_basis(model: LoadedModel) -> TokenBasis:
    """The token basis of a model."""
    embedding = model.family.embedding(model.hf)
    about = SourceInfo(
        "tokens",
        0,
        "tokens",
        None,
        len(embedding.W_E),
        "one token a position",
        "tokens",
        (),
        None,
        None,
    )
    return TokenBasis(embedding, about)
