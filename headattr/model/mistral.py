"""Mistral: as Llama, with a sliding window on every layer where the configuration sets one."""

from typing import Any

from headattr.model.head import HeadWeights
from headattr.model.llama import decoder_family, decoder_weights, rms_norm


def _head_weights(model: Any, layer: int) -> HeadWeights:
    return decoder_weights(model, layer, rms_norm, window=model.config.sliding_window)


FAMILY = decoder_family(
    "mistral",
    "MistralForCausalLM",
    "as Llama, with a sliding window on every layer where there is one",
    "0.1.0",
    _head_weights,
)
