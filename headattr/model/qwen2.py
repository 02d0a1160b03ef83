"""Qwen2 and Qwen2.5: as Llama, with query, key and value biases; later layers may have a window."""

from typing import Any

from headattr.model.head import HeadWeights
from headattr.model.llama import decoder_family, decoder_weights, rms_norm


def _head_weights(model: Any, layer: int) -> HeadWeights:
    window = model.model.layers[layer].self_attn.sliding_window
    return decoder_weights(model, layer, rms_norm, window=window)


FAMILY = decoder_family(
    "qwen2",
    "Qwen2ForCausalLM",
    "as Llama, with biases on query, key and value; a window on some layers",
    "0.1.0",
    _head_weights,
)
