"""One forward pass of the model itself with a tap in its attention, and everything put back.

The model runs unchanged, with its own eager attention; what a tap keeps or changes there is up to
it. Nothing here knows a family.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headattr.errors import ProofError
from headattr.model.load import LoadedModel

Attend = Callable[..., Tensor]
"""What stands in for a layer's attention: (eager, module, query, key, value, mask, **kwargs) -> the
output [batch, pos, head, d_head]. Queries and keys are rotated, all are [batch, head, pos, d_head],
the mask says where a query may look (`as_bias` makes it what eager attention takes), and `eager` is
the module's own eager attention."""

_ATTEND: ContextVar[Attend] = ContextVar("headattr_attend")


class Enough(Exception):
    """Raised by a hook that has seen all that is wanted: the rest of the model does not run."""


@contextmanager
def listening(model: LoadedModel, attend: Attend) -> Iterator[ExitStack]:
    """Run the model's own eager attention through `attend`, in eval mode, in its own precision.

    Gives a stack on which hooks may put their removal; leaving puts all back.
    """
    _reset_rotary(model)
    with ExitStack() as stack:
        stack.callback(_reset_rotary, model)
        stack.enter_context(_tapped(model.hf, attend))
        stack.enter_context(_evaluating(model.hf))
        stack.enter_context(torch.autocast(model.device.type, enabled=False))
        if model.dtype == torch.float64:
            stack.enter_context(_Float64())
        yield stack


def run_model(
    model: LoadedModel,
    ids: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"],
    *,
    logits: bool = False,
) -> Any:
    """One forward pass, positions counted from each prompt's first token; the trunk alone unless
    `logits`. None if a hook has had enough."""
    mask = mask.to(model.device)
    module = model.hf if logits else model.family.trunk(model.hf)
    try:
        return module(
            input_ids=ids.to(model.device),
            attention_mask=mask.long(),
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        )
    except Enough:
        return None


def first_of(output: Any) -> Tensor:
    """What a module gives, where it gives a tuple the first of it."""
    return output[0] if isinstance(output, tuple) else output


def rotary_depends_on_length(model: LoadedModel) -> bool:
    """Does the rotary frequency of a position depend on the longest position of the batch?"""
    kinds = [str(rotary.get("rope_type")) for rotary in model.rotary_parameters]
    return any(kind in found for found in kinds for kind in ("dynamic", "longrope"))


def _reset_rotary(model: LoadedModel) -> None:
    if not rotary_depends_on_length(model):
        return
    for module in model.hf.modules():
        for name, frequencies in list(module.named_buffers(recurse=False)):
            if name.endswith("original_inv_freq"):
                kind = name.removesuffix("original_inv_freq")
                module.register_buffer(f"{kind}inv_freq", frequencies.clone(), persistent=False)
                setattr(module, f"{kind}max_seq_len_cached", module.original_max_seq_len)


@contextmanager
def _tapped(hf: Any, attend: Attend) -> Iterator[None]:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("headattr", _through_tap)
    AttentionMaskInterface.register("headattr", _mask)
    before = hf.config._attn_implementation
    token = _ATTEND.set(attend)
    try:
        hf.set_attn_implementation("headattr")
        yield
    finally:
        hf.set_attn_implementation(before)
        _ATTEND.reset(token)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """What a model makes its mask with: one bit a query and key, even where all could be skipped
    but that later keys are not seen; None where they are."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def as_bias(
    mask: Bool[Tensor, "batch 1 q_pos k_pos"] | None, dtype: torch.dtype
) -> Float[Tensor, "batch 1 q_pos k_pos"] | None:
    """What eager attention adds to its scores: 0, or the lowest number where a query may not
    look."""
    if mask is None:
        return None
    return torch.where(
        mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min
    )


def eager_in_blocks(
    eager: Any,
    module: Any,
    query: Float[Tensor, "batch head pos d"],
    key: Float[Tensor, "batch kv_head pos d"],
    value: Float[Tensor, "batch kv_head pos d_v"],
    mask: Bool[Tensor, "batch 1 pos pos"] | None,
    *,
    rows: Int[Tensor, "batch row"],
    numbers: int,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch pos head d_v"], Float[Tensor, "batch head row pos"]]:
    """The module's own eager attention, and some rows of its pattern.

    Queries some at a time, so that at most `numbers` numbers of a matrix are there (one row of each
    head at least); keys beyond the last query of a block are left out, since no query sees them:
    ProofError where one does.
    """
    batch, heads, length = query.shape[:3]
    step = length if mask is None else max(1, numbers // (batch * heads * length))
    found = query.new_zeros(batch, heads, rows.shape[1], length)
    at, outputs = torch.arange(batch, device=query.device), []
    for start in range(0, length, step):
        stop = min(start + step, length)
        # in one piece it is the very call that the model makes
        seen = length if step >= length else stop
        part = None if mask is None else mask[:, :, start:stop, :seen]
        if mask is not None and bool(mask[:, :, start:stop, seen:].any()):
            raise ProofError(
                "the mask lets a query see later keys; expected a causal model, this one is "
                "changed and is refused"
            )
        bias = as_bias(part, query.dtype)
        some = query[:, :, start:stop], key[:, :, :seen], value[:, :, :seen]
        output, pattern = eager(module, *some, bias, **kwargs)
        outputs.append(output)
        for row, positions in enumerate(rows.T):
            here = (positions >= start) & (positions < stop)
            found[at[here], :, row, :seen] = pattern[at[here], :, positions[here] - start]
    return torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0], found


def _through_tap(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    eager = _eager_of(module)
    return _ATTEND.get()(eager, module, query, key, value, attention_mask, **kwargs), None


def scale_of(query: Tensor, kwargs: dict[str, Any]) -> float:
    """What the model multiplies its products by."""
    scaling = kwargs.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else float(scaling)


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
def _evaluating(hf: nn.Module) -> Iterator[None]:
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
