"""Tiny random models and dictionaries with nothing trivial about them: gains, biases, groups, odd
widths."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

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


WINDOW = 4
"""Of every sliding layer: far shorter than most test prompts."""


def decoder(model_type: str, seed: int, **changes: Any) -> Any:
    """A model with q_proj, k_proj, v_proj, o_proj and d_head apart from d_model / heads; `head_dim`
    and `num_key_value_heads` None: as the family has them."""
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        **changes,
    }
    for name in ("head_dim", "num_key_value_heads"):
        if options[name] is None:
            del options[name]
    return roughen(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options)), seed
    )


def neox(**changes: Any) -> Any:
    options = {"head_dim": None, "num_key_value_heads": None, "rotary_pct": 0.5}
    return decoder("gpt_neox", 3, **{**options, **changes})


def mistral(**changes: Any) -> Any:
    return decoder("mistral", 4, **{"sliding_window": WINDOW, **changes})


def qwen2(**changes: Any) -> Any:
    options = {
        "head_dim": None,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    }
    return decoder("qwen2", 5, **{**options, **changes})


def qwen3(**changes: Any) -> Any:
    options = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return decoder("qwen3", 6, **{**options, **changes})


def gemma2(**changes: Any) -> Any:
    options = {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 13,
        "attn_logit_softcapping": 2.0,
        "attention_bias": True,
    }
    return decoder("gemma2", 7, **{**options, **changes})


def gemma3(**changes: Any) -> Any:
    options = {"sliding_window": WINDOW, "query_pre_attn_scalar": 13, "sliding_window_pattern": 2}
    return decoder("gemma3_text", 8, **{**options, **changes})


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "gpt_neox": neox,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
}


def by_hand(
    family: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    **changes: Any,
) -> Any:
    """One layer in which token t has query q[t], key k[t] and value v[t], each [token, head,
    d_head], before any QK-norm and rotation; norms have unit gain."""
    (tokens, heads, d_head), kv_heads = q.shape, k.shape[1]
    own_width = family in ("gpt2", "gpt_neox", "qwen2")  # d_head is d_model / heads
    d_model = changes.pop("d_model", heads * d_head if own_width else 16)
    names = ("n_layer", "n_head", "n_embd") if family == "gpt2" else _WIDTHS
    options = {**dict(zip(names, (1, heads, d_model), strict=True)), **changes}
    if family not in ("gpt2", "gpt_neox"):
        options["num_key_value_heads"] = kv_heads
        options["head_dim"] = None if own_width else d_head
    model = MODELS[family](**options)
    embed = model.get_input_embeddings()
    base, layer = _trunk(model)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "norm" in name or "ln_" in name:
                one = name.endswith("weight") and "gemma" not in family
                parameter.fill_(1.0 if one else 0.0)
        if family == "gpt2":
            base.wpe.weight.zero_()
        embed.weight[:tokens] = 10 * torch.eye(tokens, d_model)
        norm = layer.ln_1 if family == "gpt2" else layer.input_layernorm
        seen = norm(embed(torch.arange(tokens))).double()
        v = torch.zeros_like(k) if v is None else v
        # the weights that send what the norm gives for each token to its q, k and v
        maps = [torch.linalg.pinv(seen) @ part.double().flatten(1) for part in (q, k, v)]
        _set_projections(family, layer, [part.float() for part in maps], heads)
    return model


_WIDTHS = ("num_hidden_layers", "num_attention_heads", "hidden_size")


def _trunk(model: Any) -> tuple[Any, Any]:
    """The model without its head, and its first layer."""
    name = next(n for n in ("transformer", "gpt_neox", "model") if hasattr(model, n))
    base = getattr(model, name)
    return base, (base.h if name == "transformer" else base.layers)[0]


def _set_projections(family: str, layer: Any, maps: list[torch.Tensor], heads: int) -> None:
    """`maps` [d_model, heads * d_head] of query, key and value, as the family keeps them."""
    if family == "gpt2":
        layer.attn.c_attn.weight.copy_(torch.cat(maps, 1))
        layer.attn.c_attn.bias.zero_()
    elif family == "gpt_neox":
        fused = torch.stack([part.T.unflatten(0, (heads, -1)) for part in maps], 1)
        layer.attention.query_key_value.weight.copy_(fused.flatten(0, 2))
        layer.attention.query_key_value.bias.zero_()
    else:
        attention = layer.self_attn
        for name, part in zip(("q_proj", "k_proj", "v_proj"), maps, strict=True):
            getattr(attention, name).weight.copy_(part.T)
            if getattr(attention, name).bias is not None:
                getattr(attention, name).bias.zero_()


def outputs_of(model: Any) -> Any:
    """The weight of the first layer's output projection, as W_O [heads * d_head, d_model]."""
    layer = _trunk(model)[1]
    if hasattr(layer, "attn"):
        return layer.attn.c_proj.weight
    module = layer.attention.dense if hasattr(layer, "attention") else layer.self_attn.o_proj
    return module.weight.T


def still(model: Any) -> Any:
    """The same model without rotation: every frequency is 0."""
    for name, buffer in _trunk(model)[0].named_buffers():
        if name.endswith("inv_freq"):
            buffer.zero_()
    return model


WINDOWS: dict[str, tuple[int | None, ...]] = {
    "mistral": (WINDOW, WINDOW, WINDOW),
    "qwen2": (None, None, WINDOW),
    "qwen3": (None, WINDOW, WINDOW),
    "gemma2": (WINDOW, None, WINDOW),
    "gemma3_text": (WINDOW, None, WINDOW),
}
"""Of the layers of each family's tiny model, by its configuration; the others have none."""


def n_edges(length: int, window: int | None = None) -> int:
    """How many edges a head has: every query sees the keys up to itself, `window` at most."""
    return sum(min(q_pos + 1, window or length) for q_pos in range(length))


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
