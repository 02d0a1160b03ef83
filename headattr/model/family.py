"""A family of models, and how it is found.

Every module of this package that has a FAMILY is one; a third party adds one with an entry point in
the group `headattr.families` that names a `Family`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from headattr.errors import UnsupportedModelError
from headattr.model.head import HeadWeights, Norm


class Embedding(NamedTuple):
    """How tokens enter the residual stream: resid_pre 0 = W_E[token] (+ W_pos[position])."""

    W_E: Float[Tensor, "vocab d_model"]
    """With any factor of the model's own in it."""
    W_pos: Float[Tensor, "n_ctx d_model"] | None = None


class Mlp(NamedTuple):
    """The modules of a layer's MLP and the norm before it."""

    norm_module: nn.Module
    norm: Norm
    module: nn.Module
    """What is given the normed stream."""
    added: nn.Module
    """The module whose output is added to the stream: the MLP, or the norm behind it."""


class Unembedding(NamedTuple):
    """How logits leave it, before any cap: logits = norm(x) @ W_U.T + b_U."""

    norm: Norm
    W_U: Float[Tensor, "vocab d_model"]
    b_U: Float[Tensor, "vocab"] | None = None


@dataclass(frozen=True)
class Family:
    """The facts of one family, as functions of a Hugging Face model. One file a family."""

    name: str
    model_type: str
    """`config.model_type` of the models it handles."""
    model_class: str
    """Name of the class that it handles."""
    special: str
    """What is special about its attention, for `headattr models`."""
    since: str
    """The version of headattr that first proved it."""
    refuse: Callable[[Any], str | None]
    """A reason why this configuration is not handled exactly, or None."""
    trunk: Callable[[Any], nn.Module]
    """The model without its LM head."""
    layers: Callable[[Any], Sequence[nn.Module]]
    attention: Callable[[Any], nn.Module]
    """The attention module of a layer; its first output is what the heads and b_O sum to."""
    added: Callable[[Any], nn.Module]
    """The module of a layer whose output attention adds to the stream: the attention module, or the
    norm behind it."""
    head_weights: Callable[[Any, int], HeadWeights]
    embedding: Callable[[Any], Embedding]
    unembedding: Callable[[Any], Unembedding]
    mlp: Callable[[Any], Mlp] | None = None
    """Of a layer; None: dictionaries of MLPs are refused."""
    parallel: Callable[[Any], bool] = lambda config: False
    """Do attention and MLP read the same stream, side by side?"""


@cache
def families() -> tuple[Family, ...]:
    """Every known family, by name."""
    package = importlib.import_module("headattr.model")
    found = [
        module.FAMILY
        for info in pkgutil.iter_modules(package.__path__)
        if hasattr(module := importlib.import_module(f"headattr.model.{info.name}"), "FAMILY")
    ]
    found += [entry.load() for entry in entry_points(group="headattr.families")]
    return tuple(sorted(found, key=lambda family: family.name))


def family_of(model: Any) -> Family:
    """The family of a Hugging Face model.

    Raises UnsupportedModelError, naming the class and what is supported, for every other model.
    """
    found = type(model).__name__
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    for family in families():
        if model_type == family.model_type and found == family.model_class:
            if reason := family.refuse(model.config):
                raise UnsupportedModelError(f"{found}: {reason}")
            return family
    known = ", ".join(f"{f.model_class} ({f.model_type})" for f in families())
    raise UnsupportedModelError(
        f"found a {found} (model_type {model_type!r}), which has no proven adapter; expected "
        "one of: "
        f"{known}; see `headattr models`"
    )
