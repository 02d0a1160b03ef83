"""A model from a folder, a hub id, a GGUF file or a name; incomplete files are refused."""

import struct
from pathlib import Path
from typing import Any

import torch

from headattr.errors import HeadattrError
from headattr.model.embedded import cache_folder, embedded_folder
from headattr.model.weights_file import check_safetensors


def from_files(name: str, tokenizer: Any | None, dtype: torch.dtype) -> tuple[Any, Any, list[str]]:
    """The model that `name` says, its tokenizer if it has one, and what was converted or left out.

    Raises HeadattrError, naming the file or the tensor, for whatever is missing or broken.
    """
    folder, gguf = _locate(name)
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    options = {"gguf_file": gguf} if gguf else {}
    quantization = {"quantization_config": _gguf_config()} if gguf else {}
    wanted = str(dtype).removeprefix("torch.")
    broken = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError)
    try:
        stored = {"GGUF"} if gguf else _stored_dtypes(folder, AutoConfig)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=None if gguf else True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
            **quantization,
        )
        if tokenizer is None and (gguf or _may_have_tokenizer(folder)):
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (*broken, RuntimeError, struct.error, SafetensorError, StrictDataclassError) as error:
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise HeadattrError(
            f"cannot load the model {name!r}: {said}; expected a folder with config.json and "
            ".safetensors "
            "weights, a .gguf file, a hub id, or one of: demo, smollm2"
        ) from error
    hf, report = loaded
    notes = []
    if gguf:
        notes.append(f"the GGUF weights of {gguf} run dequantised, as {wanted}")
    elif stored and stored != {wanted}:
        notes.append(f"the {'/'.join(sorted(stored))} checkpoint runs as a {wanted} copy")
    return hf.to(dtype), tokenizer, [*notes, *_left_over(name, hf, report)]


def _left_over(name: str, hf: Any, report: Any) -> list[str]:
    """Refuse weights that would be random; say which of the file's are not used."""
    for tensor, found, expected in sorted(report["mismatched_keys"]):
        raise HeadattrError(
            f"{name}: {tensor} is {tuple(found)}; expected {tuple(expected)} by its config.json"
        )
    if missing := sorted(report["missing_keys"]):
        raise HeadattrError(
            f"{name} lacks {len(missing)} tensors of a {type(hf).__name__}, {missing[0]} the "
            "first; expected all of them: copy the weights again"
        )
    unused = sorted(report["unexpected_keys"])
    return [f"not used by a {type(hf).__name__}: {', '.join(unused)}"] if unused else []


def _may_have_tokenizer(folder: str) -> bool:
    """Not a local folder, or one with the files of a tokenizer."""
    path = Path(folder)
    patterns = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "spiece*")
    return not path.is_dir() or any(any(path.glob(pattern)) for pattern in patterns)


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


def _stored_dtypes(folder: str, configs: Any) -> set[str]:
    """Types of the weights in a local folder, or what the hub's configuration says."""
    path = Path(folder)
    if path.is_dir():
        return set().union(*(check_safetensors(file) for file in path.glob("*.safetensors")))
    declared = configs.from_pretrained(folder).dtype
    return set() if declared is None else {str(declared).removeprefix("torch.")}


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
