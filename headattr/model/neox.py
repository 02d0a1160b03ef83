"""GPT-NeoX and Pythia: LayerNorm, fused projections by head, rotary on part of each head, attention
and MLP side by side."""

from typing import Any

from einops import rearrange
from torch import Tensor

from headattr.model.family import Embedding, Family, Mlp, Unembedding
from headattr.model.head import HeadWeights, Norm


def _norm(module: Any) -> Norm:
    return Norm("layer", module.weight.detach(), module.bias.detach(), module.eps)


def _bias(linear: Any) -> Tensor:
    """The bias of a projection, zero where it has none."""
    weight = linear.weight
    return weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()


def _head_weights(model: Any, layer: int) -> HeadWeights:
    block = model.gpt_neox.layers[layer]
    attention, heads = block.attention, model.config.num_attention_heads
    fused = attention.query_key_value
    W_Q, W_K, W_V = rearrange(
        fused.weight.detach(),
        "(head three d) d_model -> three head d_model d",
        three=3,
        head=heads,
    )
    b_Q, b_K, b_V = rearrange(_bias(fused), "(head three d) -> three head d", three=3, head=heads)
    out = attention.dense
    W_O = rearrange(out.weight.detach(), "d_model (head d) -> head d d_model", head=heads)
    norm, scale = _norm(block.input_layernorm), float(attention.scaling)
    return HeadWeights(layer, norm, W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, _bias(out), scale)


FAMILY = Family(
    name="gpt_neox",
    model_type="gpt_neox",
    model_class="GPTNeoXForCausalLM",
    special="LayerNorm, rotary on part of each head, attention and MLP side by side, biases",
    since="0.1.0",
    refuse=lambda config: None,
    trunk=lambda model: model.gpt_neox,
    layers=lambda model: model.gpt_neox.layers,
    attention=lambda block: block.attention,
    added=lambda block: block.attention,
    head_weights=_head_weights,
    embedding=lambda model: Embedding(model.gpt_neox.embed_in.weight.detach()),
    unembedding=lambda model: Unembedding(
        _norm(model.gpt_neox.final_layer_norm), model.lm_head.weight.detach()
    ),
    mlp=lambda block: Mlp(
        block.post_attention_layernorm,
        _norm(block.post_attention_layernorm),
        block.mlp,
        block.mlp,
    ),
    parallel=lambda config: config.use_parallel_residual,
)
