"""A model from a folder, a hub id, a GGUF file or a name; incomplete files are refused, and GGUF
files that say more than transformers reads."""

import struct
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from headattr.errors import HeadattrError, UnsupportedModelError, UsageError
from headattr.model.embedded import cache_folder, embedded_folder
from headattr.model.weights_file import check_safetensors

FETCHED = {
    "smollm2": "make smollm2",
    "gemma3-270m": "make gemma3 ACCEPT=--accept-gemma-terms",
}
"""Models in the cache folder, by name, and the command that puts each there."""
_GGUF_NUMBERS = "BbHhIif?  Qqd"
"""How numbers are packed, by type; 8 is text, 9 an array."""


def from_files(name: str, tokenizer: Any | None, dtype: torch.dtype) -> tuple[Any, Any, list[str]]:
    """The model that `name` says, its tokenizer if it has one, and what was converted or left out.

    Raises HeadattrError, naming the file or the tensor, for whatever is missing or broken.
    """
    folder, gguf = locate(name)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    options = {"gguf_file": gguf} if gguf else {}
    quantization = {"quantization_config": _gguf_config()} if gguf else {}
    wanted = str(dtype).removeprefix("torch.")
    try:
        said, tensors = _gguf_header(Path(folder, gguf)) if gguf else ({}, [])
        _refuse_unread(name, said, tensors)
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
        if tokenizer is None and (gguf or may_have_tokenizer(folder)):
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except HeadattrError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise HeadattrError(
            f"cannot load the model {name!r}: {reason}; expected a folder with config.json and "
            ".safetensors "
            f"weights, a .gguf file, a hub id, or one of: demo, {', '.join(FETCHED)}"
        ) from error
    hf, report = loaded
    notes = []
    if gguf:
        _refuse_misread(name, said, hf)
        notes.append(f"the GGUF weights of {gguf} run dequantised, as {wanted}")
        if (unused := len(tensors) - len(list(hf.parameters()))) > 0:
            notes.append(f"not used by a {type(hf).__name__}: {unused} tensors of {gguf}")
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


def may_have_tokenizer(folder: str) -> bool:
    """Not a local folder, or one with the files of a tokenizer."""
    path = Path(folder)
    patterns = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "spiece*")
    return not path.is_dir() or any(any(path.glob(pattern)) for pattern in patterns)


def locate(name: str) -> tuple[str, str | None]:
    """Folder or hub id, and the GGUF file in it if that is what was named."""
    if name == "demo":
        return str(embedded_folder() / "demo" / "model"), None
    if name in FETCHED:
        folder = cache_folder() / name
        if not (folder / "config.json").exists():
            raise HeadattrError(f"{name} is not in {cache_folder()}; run `{FETCHED[name]}` once")
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
    close = get_close_matches(name, ["demo", *FETCHED], n=1, cutoff=0.8)
    if close and "/" not in name:
        raise UsageError(
            f"there is no model {name!r} here; did you mean {close[0]}? Expected a folder, a .gguf "
            f"file, a hub id (org/name), or one of: demo, {', '.join(FETCHED)}"
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


def _gguf_header(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What a GGUF file says, by key, and the names of its tensors."""
    with path.open("rb") as file:

        def numbers(letter: str, count: int = 1) -> list[Any]:
            packed = f"<{count}{letter}"
            return list(struct.unpack(packed, file.read(struct.calcsize(packed))))

        def texts(count: int = 1) -> list[Any]:
            return [file.read(*numbers("Q")).decode("utf-8", "replace") for _ in range(count)]

        def values() -> Any:
            (kind,), count = numbers("I"), 1
            if array := kind == 9:
                (kind,), (count,) = numbers("I"), numbers("Q")
            found = texts(count) if kind == 8 else numbers(_GGUF_NUMBERS[kind], count)
            return found if array else found[0]

        if file.read(4) != b"GGUF" or numbers("I")[0] not in (2, 3):
            raise HeadattrError(f"{path} is not a GGUF file of version 2 or 3")
        n_tensors, n_keys = numbers("Q", 2)
        said = {texts()[0]: values() for _ in range(n_keys)}
        tensors: list[str] = []
        for _ in range(n_tensors):
            tensors += texts()
            numbers("Q", *numbers("I"))  # its shape; then its type and its place
            numbers("I")
            numbers("Q")
    return said, tensors


def _refuse_unread(name: str, said: dict[str, Any], tensors: list[str]) -> None:
    """Refuse scaled rotary in a GGUF: transformers leaves it out, and would run another model."""
    family = said.get("general.architecture")
    unread = [
        f"{key} = {value}"
        for key, value in said.items()
        if key.startswith(f"{family}.rope.scal") and value not in ("none", "linear", 0, 1)
    ]
    unread += [tensor for tensor in tensors if tensor.startswith("rope_")]
    if unread:
        raise UnsupportedModelError(
            f"{name} scales its rotary embedding ({', '.join(unread)}), which transformers does "
            "not read from a GGUF; expected none: use the Hugging Face folder of this model"
        )


def _refuse_misread(name: str, said: dict[str, Any], hf: Any) -> None:
    """Refuse a GGUF that says something else than what transformers assumed for it."""
    config, family = hf.config, said.get("general.architecture")
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    windows = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or []]
    rotary = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention") or {}
    facts = {
        "attention.key_length": d_head,
        "attention.value_length": d_head,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attention.sliding_window_pattern": windows,
        "rope.freq_base_swa": rotary.get("rope_theta"),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }
    for key, assumed in facts.items():
        found = said.get(f"{family}.{key}", assumed)
        if isinstance(found, int) and key.endswith("pattern"):
            found = [bool((layer + 1) % found) for layer in range(len(windows))]
        if found != assumed:
            raise UnsupportedModelError(
                f"{name} says {family}.{key} = {found}, and transformers runs {assumed}; expected "
                "the same: use the Hugging Face folder of this model"
            )
    if getattr(config, "query_pre_attn_scalar", d_head) != d_head:
        raise UnsupportedModelError(
            f"{name} does not say its score scale, and its heads are {d_head} wide; expected "
            f"{config.query_pre_attn_scalar}: use the Hugging Face folder of this model"
        )
