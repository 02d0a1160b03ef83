"""Tiny random models and dictionaries with nothing trivial about them: gains, biases, groups, odd
widths."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY, CONTEXT = 50, 64


def roughen(model: Any, seed: int) -> Any:
    """Make norms, biases and attention of a fresh model non-trivial."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            elif "wpe" in name or "wte" in name or "embed" in name:
                parameter.copy_(noise * (0.3 if "wpe" in name else 1.0))
            else:
                parameter.copy_(0.25 * noise)
    return model.eval()


def gpt2(**changes: Any) -> Any:
    options = {
        "vocab_size": VOCABULARY,
        "n_embd": 24,
        "n_layer": 3,
        "n_head": 3,
        "n_positions": CONTEXT,
        "scale_attn_by_inverse_layer_idx": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return roughen(GPT2LMHeadModel(GPT2Config(**{**options, **changes})), 1)


def llama(**changes: Any) -> Any:
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": CONTEXT,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    }
    return roughen(LlamaForCausalLM(LlamaConfig(**{**options, **changes})), 2)


MODELS = {"gpt2": gpt2, "llama": llama}


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def sae(
    architecture: str = "topk",
    d_in: int = 24,
    d_sae: int = 40,
    *,
    layer: int = 1,
    seed: int = 0,
    **fields: Any,
) -> Any:
    """A random sae_lens SAE with a declared site."""
    from sae_lens.registry import SAE_CLASS_REGISTRY
    from sae_lens.saes.sae import SAEMetadata

    sae_class, config_class = SAE_CLASS_REGISTRY[architecture]
    if architecture in ("topk", "abstopk"):
        fields = {"k": 6, **fields}
    if architecture == "matching_pursuit":
        fields = {"max_iterations": 6, **fields}
    metadata = SAEMetadata(hook_name=f"blocks.{layer}.hook_resid_pre", prepend_bos=False)
    built = sae_class(config_class(d_in=d_in, d_sae=d_sae, metadata=metadata, **fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            value = 0.4 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(value.abs() if name == "threshold" else value)
    return built.eval()


def byte_tokenizer(*, bos: str | None = None, adds_bos: bool = False) -> Any:
    """One token a byte, ids in the order of the byte alphabet, then the BOS token (id 256)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos is not None:
        backend.add_special_tokens([bos])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, 256)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos)


BYTES = 260
"""Vocabulary of a model that goes with `byte_tokenizer`."""
