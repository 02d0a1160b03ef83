"""GPT-2: learned positions, LayerNorm, fused Conv1D projections with biases, no rotary."""

from typing import Any

import torch
from einops import rearrange

from headattr.model.family import Embedding, Family, Mlp, Unembedding
from headattr.model.head import HeadWeights, Norm


def _refuse(config: Any) -> str | None:
    if config.add_cross_attention:
        return "add_cross_attention is on; expected a decoder without cross-attention"
    return None


def _norm(module: Any) -> Norm:
    return Norm("layer", module.weight.detach(), module.bias.detach(), module.eps)


def _head_weights(model: Any, layer: int) -> HeadWeights:
    block = model.transformer.h[layer]
    attention = block.attn
    heads = attention.num_heads
    weight, bias = attention.c_attn.weight.detach(), attention.c_attn.bias.detach()
    W_Q, W_K, W_V = rearrange(
        weight, "d_model (three head d) -> three head d_model d", three=3, head=heads
    )
    b_Q, b_K, b_V = rearrange(bias, "(three head d) -> three head d", three=3, head=heads)
    W_O = rearrange(
        attention.c_proj.weight.detach(), "(head d) d_model -> head d d_model", head=heads
    )
    return HeadWeights(
        layer,
        _norm(block.ln_1),
        W_Q,
        W_K,
        W_V,
        W_O,
        b_Q,
        b_K,
        b_V,
        attention.c_proj.bias.detach(),
        float(attention.scaling),
    )


def _embedding(model: Any) -> Embedding:
    return Embedding(model.transformer.wte.weight.detach(), model.transformer.wpe.weight.detach())


def _unembedding(model: Any) -> Unembedding:
    bias = model.lm_head.bias
    return Unembedding(
        _norm(model.transformer.ln_f),
        model.lm_head.weight.detach(),
        bias.detach() if isinstance(bias, torch.Tensor) else None,
    )


FAMILY = Family(
    name="gpt2",
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    special="learned positions, LayerNorm, biases everywhere, scale may fall with the layer",
    since="0.1.0",
    refuse=_refuse,
    trunk=lambda model: model.transformer,
    layers=lambda model: model.transformer.h,
    attention=lambda block: block.attn,
    added=lambda block: block.attn,
    head_weights=_head_weights,
    embedding=_embedding,
    unembedding=_unembedding,
    mlp=lambda block: Mlp(block.ln_2, _norm(block.ln_2), block.mlp, block.mlp),
)
