"""Listening to a model's own eager attention while it runs, and putting everything back."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headattr.errors import ProofError


@dataclass
class Tap:
    """What to keep of a forward pass, and what has been kept."""

    layers: frozenset[int]
    query_rows: Tensor
    """Rows of the pattern to keep, [batch, row]."""
    found: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By layer: Q, K, V, scale, pattern, rotary, block."""


_TAP: ContextVar[Tap] = ContextVar("headattr_tap")


@contextmanager
def tapped(hf: Any, tap: Tap) -> Iterator[None]:
    """Run the model's own eager attention through the tap; put its attention back afterwards."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionInterface.register("headattr", _eager_with_tap)
    AttentionMaskInterface.register("headattr", eager_mask)
    before = hf.config._attn_implementation
    token = _TAP.set(tap)
    try:
        hf.set_attn_implementation("headattr")
        yield
    finally:
        hf.set_attn_implementation(before)
        _TAP.reset(token)


def _eager_with_tap(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    output, pattern = _eager_of(module)(module, query, key, value, attention_mask, **kwargs)
    tap = _TAP.get()
    if module.layer_idx in tap.layers:
        scaling = kwargs.get("scaling")
        batch = torch.arange(len(pattern), device=pattern.device)[:, None]
        tap.found.setdefault(module.layer_idx, {}).update(
            Q=query,
            K=key,
            V=value,
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            pattern=pattern[batch, :, tap.query_rows].transpose(1, 2),
        )
    return output, None


def _eager_of(module: Any) -> Any:
    """The eager attention of the file that defines an attention class or what it inherits from."""
    for parent in type(module).__mro__:
        found = getattr(sys.modules[parent.__module__], "eager_attention_forward", None)
        if found is not None:
            return found
    raise ProofError(
        f"found attention of class {type(module).__name__}, which has no eager form; expected "
        "an attention module of transformers"
    )


@contextmanager
def evaluating(hf: nn.Module) -> Iterator[None]:
    """Without dropout; the modules that were training train again afterwards."""
    training = [module for module in hf.modules() if module.training]
    hf.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Float64(TorchFunctionMode):
    """Hugging Face computes norms, softmax and rotary angles in float32 even in a float64 model;
    not here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if double and func is Tensor.float:
            return args[0]
        if double and func in (
            Tensor.to,
            torch.softmax,
            torch.nn.functional.softmax,
            Tensor.softmax,
        ):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def keep_float64() -> TorchFunctionMode:
    """A context in which a float64 model computes in float64 throughout."""
    return _Float64()
