"""Qwen3: QK-norm over each head before rotary, a d_head of its own, a window on some layers."""

from typing import Any

from headattr.model.head import HeadWeights
from headattr.model.llama import decoder_family, decoder_weights, rms_norm


def _head_weights(model: Any, layer: int) -> HeadWeights:
    attention = model.model.layers[layer].self_attn
    return decoder_weights(
        model,
        layer,
        rms_norm,
        q_norm=rms_norm(attention.q_norm),
        k_norm=rms_norm(attention.k_norm),
        window=attention.sliding_window,
    )


FAMILY = decoder_family(
    "qwen3",
    "Qwen3ForCausalLM",
    "QK-norm, d_head apart from d_model / heads, a window on some layers",
    "0.1.0",
    _head_weights,
)
