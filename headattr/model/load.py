"""A model, ready to be explained: from a folder, a hub id, a GGUF file, a name, or an object in
memory.

Weights run in float32 or float64, whatever they are stored as; what was converted is in `notes`.
"""

import copy
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headattr.errors import HeadattrError, UnsupportedModelError
from headattr.model.embedded import cache_folder, embedded_folder
from headattr.model.family import Family, family_of
from headattr.model.weights_file import check_safetensors

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class LoadedModel:
    """A Hugging Face model with its family, its tokenizer and what was assumed about it."""

    hf: Any
    """The model, in eval mode and in `dtype`."""
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
        """The longest prompt, in tokens."""
        return self.config.max_position_embeddings

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model embeds."""
        return len(self.family.embedding(self.hf).W_E)

    def hash(self) -> str:
        """SHA-256 over names, types, shapes and bytes of all tensors, and the tokenizer."""
        return hash_tensors(self.hf.state_dict().items(), tokenizer_text(self.tokenizer))


def load_model(
    model: Any,
    *,
    tokenizer: Any | None = None,
    device: str = "auto",
    dtype: Literal["float32", "float64"] = "float32",
) -> LoadedModel:
    """Load `model`, a Hugging Face object, folder, hub id, `.gguf` file, `demo` or `smollm2`.

    An object in another dtype is copied, never changed. Raises UnsupportedModelError for a family
    that has no proven adapter or for weights that are packed, HeadattrError for files that are
    missing or broken.
    """
    if isinstance(model, nn.Module):
        hf, notes = _converted(model, DTYPES[dtype])
        name = type(model).__name__
    else:
        hf, tokenizer, notes = _from_files(str(model), tokenizer, DTYPES[dtype])
        name = str(model)
    family = family_of(hf)
    _refuse_packed(hf)
    if device == "auto" and not isinstance(model, nn.Module):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "auto":
        hf = hf.to(device)
    return LoadedModel(hf.eval(), family, tokenizer, name, tuple(notes))


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
    return copy.deepcopy(model).to(dtype), [
        f"the {'/'.join(sorted(found))} model runs as a {wanted} copy"
    ]


def _from_files(name: str, tokenizer: Any | None, dtype: torch.dtype) -> tuple[Any, Any, list[str]]:
    folder, gguf = _locate(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    options: dict[str, Any] = {}
    notes: list[str] = []
    if gguf:
        options["gguf_file"] = gguf
        quantization = {"quantization_config": _gguf_config()}
        notes.append(
            f"the GGUF weights of {gguf} run dequantised, as {str(dtype).removeprefix('torch.')}"
        )
    else:
        quantization = {}
        stored = _stored_dtype(folder)
        if stored and stored != str(dtype).removeprefix("torch."):
            notes.append(
                f"the {stored} checkpoint runs as a {str(dtype).removeprefix('torch.')} copy"
            )
    try:
        hf = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=None if gguf else True,
            **options,
            **quantization,
        )
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        raise HeadattrError(
            f"cannot load the model {name!r}: {first}; expected a folder with config.json and "
            ".safetensors "
            "weights, a .gguf file, a hub id, or one of: demo, smollm2"
        ) from error
    moved: Any = hf
    return moved.to(dtype), tokenizer, notes


def _locate(name: str) -> tuple[str, str | None]:
    """Folder or hub id, and the GGUF file in it if that is what was named."""
    if name == "demo":
        return str(embedded_folder() / "demo" / "model"), None
    if name == "smollm2":
        folder = cache_folder() / "smollm2"
        if not (folder / "config.json").exists():
            raise HeadattrError(f"smollm2 is not in {cache_folder()}; run `make smollm2` once")
        return str(folder), None
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise HeadattrError(f"no such file: {path}; expected a GGUF model")
        return str(path.parent), path.name
    if path.is_dir():
        _check_folder(path)
        return str(path), None
    if path.exists() or name.startswith((".", "/", "~")):
        raise HeadattrError(
            f"{name} is not a model folder; expected one with config.json, or a .gguf file"
        )
    return name, None


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise HeadattrError(f"{folder} has no config.json; expected a Hugging Face model folder")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        found = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise HeadattrError(
            f"{folder} has no .safetensors weights (found: {found}); convert them first"
        )
    for path in weights:
        check_safetensors(path)


def _stored_dtype(folder: str) -> str | None:
    path = Path(folder) / "config.json"
    if not path.exists():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    return config.get("dtype") or config.get("torch_dtype")


def _gguf_config() -> Any:
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        from transformers import GgufConfig
    except ImportError as error:
        raise HeadattrError(
            f"a GGUF file needs the packages gguf and accelerate ({error}); install headattr[gguf]"
        ) from error
    return GgufConfig(dequantize=True)


def _refuse_packed(hf: nn.Module) -> None:
    for name, parameter in hf.named_parameters():
        if not parameter.dtype.is_floating_point:
            raise UnsupportedModelError(
                f"{name} is packed as {parameter.dtype}; expected plain floating-point "
                "weights: dequantise first"
            )
