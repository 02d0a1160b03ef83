"""Llama: RMSNorm, grouped-query attention, half-split rotary of any scaling."""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from headattr.model.family import Embedding, Family, Unembedding
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


def _head_weights(model: Any, layer: int) -> HeadWeights:
    block = model.model.layers[layer]
    attention = block.self_attn
    (W_Q, b_Q), (W_K, b_K), (W_V, b_V) = (
        projection(linear, attention.head_dim)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    out = attention.o_proj
    W_O = rearrange(out.weight.detach(), "d_model (head d) -> head d d_model", d=attention.head_dim)
    b_O = torch.zeros_like(W_O[0, 0]) if out.bias is None else out.bias.detach()
    norm = rms_norm(block.input_layernorm)
    return HeadWeights(
        layer, norm, W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O, float(attention.scaling)
    )


FAMILY = Family(
    name="llama",
    model_type="llama",
    model_class="LlamaForCausalLM",
    special="RMSNorm, grouped-query attention, rotary with any scaling, optional biases",
    since="0.1.0",
    refuse=lambda config: None,
    trunk=lambda model: model.model,
    layers=lambda model: model.model.layers,
    attention=lambda block: block.self_attn,
    head_weights=_head_weights,
    embedding=lambda model: Embedding(model.model.embed_tokens.weight.detach(), None),
    unembedding=lambda model: Unembedding(
        rms_norm(model.model.norm), model.lm_head.weight.detach(), None
    ),
)
