"""Gemma 2: RMSNorm of gain 1 + weight before and after attention, capped scores, a window on every
other layer, a scale that is not d_head^-1/2, scaled embeddings."""

from typing import Any

from headattr.model.family import Embedding, Mlp
from headattr.model.head import HeadWeights, Norm
from headattr.model.llama import decoder_family, decoder_weights


def gemma_norm(module: Any) -> Norm:
    """An RMSNorm whose gain is 1 + its weight."""
    return Norm("rms", 1 + module.weight.detach(), None, module.eps)


def gemma_embedding(model: Any) -> Embedding:
    """Token embeddings times sqrt(d_model), as the model itself multiplies them: a copy."""
    tokens = model.model.embed_tokens
    return Embedding(tokens.weight.detach() * tokens.embed_scale.to(tokens.weight))


def gemma_mlp(block: Any) -> Mlp:
    """An MLP with a norm before and behind it."""
    norm = block.pre_feedforward_layernorm
    return Mlp(norm, gemma_norm(norm), block.mlp, block.post_feedforward_layernorm)


def refuse_bidirectional(config: Any) -> str | None:
    """A reason to refuse a configuration in which tokens see later ones, or None."""
    if config.use_bidirectional_attention:
        return "use_bidirectional_attention is on; expected a causal decoder"
    return None


def _head_weights(model: Any, layer: int) -> HeadWeights:
    block = model.model.layers[layer]
    return decoder_weights(
        model,
        layer,
        gemma_norm,
        softcap=block.self_attn.attn_logit_softcapping,
        window=block.self_attn.sliding_window,
        post_norm=gemma_norm(block.post_attention_layernorm),
    )


FAMILY = decoder_family(
    "gemma2",
    "Gemma2ForCausalLM",
    "capped scores, a norm after attention, a window on every other layer, own score scale",
    "0.1.0",
    _head_weights,
    norm=gemma_norm,
    refuse=refuse_bidirectional,
    added=lambda block: block.post_attention_layernorm,
    embedding=gemma_embedding,
    mlp=gemma_mlp,
)
