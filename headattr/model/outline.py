"""What a model is made of, without its weights: for plans and estimates."""

from typing import Any

import torch

from headattr.errors import HeadattrError
from headattr.model.family import family_of
from headattr.model.files import locate, may_have_tokenizer
from headattr.model.load import DTYPES, LoadedModel


def outline_model(name: str, dtype: str = "float32") -> LoadedModel:
    """The model that `name` says with every tensor on the meta device, and its tokenizer.

    Reads its configuration and tokenizer only. Raises as `load_model` does where these are missing
    or the family is not supported.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder, gguf = locate(name)
    options: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
        tokenizer = None
        if gguf or may_have_tokenizer(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        said = " ".join(str(error).split())[:300]
        raise HeadattrError(f"cannot read the configuration of {name!r}: {said}") from error
    return LoadedModel(hf, family_of(hf), tokenizer, name)
