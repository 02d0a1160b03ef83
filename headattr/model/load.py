"""A model, ready to be explained.

From a folder, a hub id, a GGUF file, a name, or an object in memory. Weights run in float32 or
float64, whatever they are stored as; what was converted is in `notes`.
"""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headattr.errors import HeadattrError, UnsupportedModelError, UsageError
from headattr.model.family import Family, family_of
from headattr.model.files import from_files

DTYPES = {"float32": torch.float32, "float64": torch.float64}
_NO_NUMBERS = {
    "_name_or_path",
    "architectures",
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "transformers_version",
    "use_cache",
}
"""Keys of a configuration that change no number."""


@dataclass(frozen=True)
class LoadedModel:
    """A Hugging Face model with its family, its tokenizer and what was assumed about it."""

    hf: Any
    """The model, in `dtype`; a capture puts it in eval mode for as long as it takes."""
    family: Family
    tokenizer: Any | None
    name: str
    """As the user named it; for an object, its class."""
    notes: tuple[str, ...] = field(default=())
    """What was converted or assumed, in sentences."""

    @property
    def config(self) -> Any:
        """The Hugging Face configuration."""
        return self.hf.config

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        return list(self.family.layers(self.hf))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.hf.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return next(self.hf.parameters()).dtype

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden_size

    @property
    def n_heads(self) -> int:
        """Query heads a layer."""
        return self.config.num_attention_heads

    @property
    def context(self) -> int:
        """The longest prompt, in tokens; dynamic rotary scaling stretches it by its factor."""
        stretches = [
            rotary.get("factor", 1)
            for rotary in self.rotary_parameters
            if rotary.get("rope_type") == "dynamic"
        ]
        return int(self.config.max_position_embeddings * min(stretches, default=1))

    @property
    def rotary_parameters(self) -> list[dict[str, Any]]:
        """The rotary settings of the configuration: none, one, or one a kind of layer."""
        found = getattr(self.config, "rope_parameters", None) or {}
        nested = [value for value in found.values() if isinstance(value, dict)]
        return nested or [found]

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model embeds."""
        return self.hf.get_input_embeddings().num_embeddings

    def hash(self) -> str:
        """SHA-256 over names, types, shapes and bytes of all tensors, the configuration and the
        tokenizer; the same for a folder and for its model in memory."""
        config = {k: v for k, v in self.config.to_dict().items() if k not in _NO_NUMBERS}
        return hash_tensors(
            self.hf.state_dict().items(),
            json.dumps(config, sort_keys=True, default=str),
            tokenizer_text(self.tokenizer),
        )


def load_model(
    model: Any,
    *,
    tokenizer: Any | None = None,
    device: str = "auto",
    dtype: Literal["float32", "float64"] = "float32",
) -> LoadedModel:
    """Load `model`: a Hugging Face object, folder, hub id, `.gguf` file, or a name (`demo`,
    `smollm2`, `gemma3-270m`).

    What was loaded already is given back as it is, if it is in `dtype` and on `device`. An object
    in another dtype or on another device is copied, never changed. Raises
    UnsupportedModelError for a family that has no proven adapter or for weights that are packed,
    HeadattrError for files that are missing or broken.
    """
    _check_device(device)
    if isinstance(model, LoadedModel):
        return _again(model, tokenizer, device, DTYPES[dtype])
    if isinstance(model, nn.Module):
        family = family_of(model)
        hf, notes = _converted(model, DTYPES[dtype])
        name = type(model).__name__
    elif isinstance(model, str | Path):
        hf, tokenizer, notes = from_files(str(model), tokenizer, DTYPES[dtype])
        family = family_of(hf.eval())
        name = str(model)
    else:
        raise UnsupportedModelError(
            f"found {type(model).__name__!r}; expected a Hugging Face model in memory, a folder, "
            "a hub id, a .gguf file or a name"
        )
    _refuse_packed(hf)
    if device == "auto" and hf is not model:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "auto" and torch.device(device).type != next(hf.parameters()).device.type:
        hf = (copy.deepcopy(hf) if hf is model else hf).to(device)
    return LoadedModel(hf, family, tokenizer, name, tuple(notes))


def _again(
    model: LoadedModel, tokenizer: Any | None, device: str, dtype: torch.dtype
) -> LoadedModel:
    """What was loaded before, if it is as it is asked for now."""
    if model.dtype != dtype:
        raise UsageError(
            f"the loaded model is in {model.dtype}, and {dtype} is asked for; load it in that"
        )
    if device != "auto" and torch.device(device).type != model.device.type:
        raise UsageError(
            f"the loaded model is on {model.device}, and {device} is asked for; load it there"
        )
    return model if tokenizer is None else dataclasses.replace(model, tokenizer=tokenizer)


def hash_tensors(named: Iterable[tuple[str, Tensor]], *texts: str) -> str:
    """SHA-256 (hex) over tensors, in name order, and texts."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        tensor = tensor.detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()


def tokenizer_text(tokenizer: Any | None) -> str:
    """The whole definition of a tokenizer as text, for hashing; empty without one."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return (
        backend.to_str()
        if backend is not None
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )


def _converted(model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, list[str]]:
    found = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    wanted = str(dtype).removeprefix("torch.")
    if found == {wanted}:
        return model, []
    copied = copy.deepcopy(model).to(dtype)
    for before, module in zip(model.modules(), copied.modules(), strict=True):
        if any(buffer.dtype.itemsize < 4 for buffer in before.buffers(recurse=False)):
            _compute_buffers_again(module)
    return copied, [f"the {'/'.join(sorted(found))} model runs as a {wanted} copy"]


def _compute_buffers_again(module: Any) -> None:
    """Replace what a cast of the whole model has rounded (0.4 % in bfloat16): rotary frequencies,
    and the factor of scaled embeddings."""
    if hasattr(module, "rope_type"):
        for name, exact in type(module)(module.config).named_buffers():
            module.register_buffer(name, exact.to(getattr(module, name)), persistent=False)
    if hasattr(module, "scalar_embed_scale"):
        module.embed_scale.fill_(module.scalar_embed_scale)


def _refuse_packed(hf: nn.Module) -> None:
    for name, parameter in hf.named_parameters():
        if parameter.is_meta:
            raise HeadattrError(f"{name} is on the meta device; expected loaded weights")
        if not parameter.dtype.is_floating_point:
            raise UnsupportedModelError(
                f"{name} is packed as {parameter.dtype}; expected plain floating-point "
                "weights: dequantise first"
            )


def _check_device(device: str) -> None:
    try:
        kind = torch.device("cpu" if device == "auto" else device).type
    except RuntimeError as error:
        raise UsageError(f"--device {device}: expected cpu, cuda or auto") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch sees no GPU here; use --device cpu")
