"""Gemma 3, text: as Gemma 2 without the cap, with QK-norm and one rotary a kind of layer."""

from typing import Any

from headattr.model.gemma2 import gemma_embedding, gemma_mlp, gemma_norm, refuse_bidirectional
from headattr.model.head import HeadWeights
from headattr.model.llama import decoder_family, decoder_weights


def _head_weights(model: Any, layer: int) -> HeadWeights:
    block = model.model.layers[layer]
    attention = block.self_attn
    return decoder_weights(
        model,
        layer,
        gemma_norm,
        q_norm=gemma_norm(attention.q_norm),
        k_norm=gemma_norm(attention.k_norm),
        window=attention.sliding_window,
        post_norm=gemma_norm(block.post_attention_layernorm),
    )


FAMILY = decoder_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "QK-norm, a norm after attention, windows and their own rotary on five layers of six",
    "0.1.0",
    _head_weights,
    norm=gemma_norm,
    refuse=refuse_bidirectional,
    added=lambda block: block.post_attention_layernorm,
    embedding=gemma_embedding,
    mlp=gemma_mlp,
)
