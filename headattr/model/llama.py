"""Llama: RMSNorm, grouped-query attention, half-split rotary of any scaling."""

from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from headattr.model.family import Embedding, Family, Mlp, Unembedding
from headattr.model.head import HeadWeights, Norm


def rms_norm(module: Any) -> Norm:
    """An RMSNorm whose gain is its weight."""
    return Norm("rms", module.weight.detach(), None, module.variance_epsilon)


def projection(linear: Any, d_head: int) -> tuple[Tensor, Tensor]:
    """Weight [heads, d_model, d_head] and bias [heads, d_head] of a q, k or v projection."""
    W = rearrange(linear.weight.detach(), "(head d) d_model -> head d_model d", d=d_head)
    if linear.bias is None:
        return W, torch.zeros(W.shape[0], d_head, dtype=W.dtype, device=W.device)
    return W, rearrange(linear.bias.detach(), "(head d) -> head d", d=d_head)


def decoder_weights(
    model: Any, layer: int, norm: Callable[[Any], Norm], **facts: Any
) -> HeadWeights:
    """The facts of a layer with q_proj, k_proj, v_proj and o_proj behind an input_layernorm, which
    `norm` reads; `facts` are what the family adds."""
    block = model.model.layers[layer]
    attention = block.self_attn
    (W_Q, b_Q), (W_K, b_K), (W_V, b_V) = (
        projection(linear, attention.head_dim)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    out = attention.o_proj
    W_O = rearrange(out.weight.detach(), "d_model (head d) -> head d d_model", d=attention.head_dim)
    b_O = torch.zeros_like(W_O[0, 0]) if out.bias is None else out.bias.detach()
    pre = norm(block.input_layernorm)
    scale = float(attention.scaling)
    return HeadWeights(layer, pre, W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O, scale, **facts)


def decoder_family(
    name: str,
    model_class: str,
    special: str,
    since: str,
    head_weights: Callable[[Any, int], HeadWeights],
    *,
    norm: Callable[[Any], Norm] = rms_norm,
    **facts: Any,
) -> Family:
    """A family whose parts have the names that Llama gave them; `facts` replace what differs."""
    parts: dict[str, Any] = {
        "model_type": name,
        "refuse": lambda config: None,
        "trunk": lambda model: model.model,
        "layers": lambda model: model.model.layers,
        "attention": lambda block: block.self_attn,
        "added": lambda block: block.self_attn,
        "embedding": lambda model: Embedding(model.model.embed_tokens.weight.detach()),
        "unembedding": lambda model: Unembedding(
            norm(model.model.norm), model.lm_head.weight.detach()
        ),
        "mlp": lambda block: Mlp(
            block.post_attention_layernorm,
            norm(block.post_attention_layernorm),
            block.mlp,
            block.mlp,
        ),
    }
    return Family(
        name=name,
        model_class=model_class,
        special=special,
        since=since,
        head_weights=head_weights,
        **{**parts, **facts},
    )


FAMILY = decoder_family(
    "llama",
    "LlamaForCausalLM",
    "RMSNorm, grouped-query attention, rotary with any scaling, optional biases",
    "0.1.0",
    lambda model, layer: decoder_weights(model, layer, rms_norm),
)
