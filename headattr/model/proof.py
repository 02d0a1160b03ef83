"""Does the adapter rebuild what the model computed? At load, and on some rows of every prompt.

Errors: scores relative to scale |Q_i| |K_j|, pattern absolute, block outputs relative to the row's
norm.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import einsum

from headattr.errors import PromptError, ProofError
from headattr.model.capture import LayerCapture, capture, pad
from headattr.model.head import HeadWeights
from headattr.model.load import LoadedModel

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
PROOF_LENGTHS = (12, 7)


class Errors(NamedTuple):
    """The worst of each kind."""

    scores: float
    pattern: float
    output: float

    @property
    def worst(self) -> float:
        """The largest of the three; NaN if one is."""
        return math.nan if any(map(math.isnan, self)) else max(self)


def prove(model: LoadedModel, layers: Sequence[int] | None = None) -> Errors:
    """Rebuild scores, pattern and block outputs of two random prompts of unequal length.

    `layers`: which; None is all. Raises ProofError, naming the layer and the error, above 1e-5
    (float32) or 1e-9 (float64), or where a weight is not finite.
    """
    layers = range(len(model.layers)) if layers is None else layers
    for name, parameter in model.hf.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ProofError(
                f"{model.name}: {name} holds non-finite numbers; the weights are broken"
            )
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, model.context) for length in PROOF_LENGTHS]
    prompts = [torch.randint(model.vocabulary, (n,), generator=generator).tolist() for n in lengths]
    worst = Errors(0.0, 0.0, 0.0)
    for side in ("left", "right"):
        for result in capture(model, *pad(prompts, side), layers=list(layers), rows=None):
            if isinstance(result, PromptError):
                raise ProofError(
                    f"{model.name}: {result}, on a random prompt; the weights are broken"
                )
            for layer, kept in result.layers.items():
                errors = layer_errors(model.family.head_weights(model.hf, layer), kept)
                if not errors.worst <= TOLERANCE[model.dtype]:
                    raise ProofError(_refusal(model, layer, errors))
                worst = Errors(*map(max, zip(worst, errors, strict=True)))
    return worst


def layer_errors(weights: HeadWeights, kept: LayerCapture) -> Errors:
    """Rebuilt from resid_pre against the model's own, on the rows whose pattern was kept."""
    Q, K, V = (
        weights.vectors(side, kept.resid_pre, kept.rotary) for side in ("query", "key", "value")
    )
    rows = kept.rows
    allowed = weights.allowed(rows, len(K))
    scores = weights.scores(Q[rows], K)
    group = weights.n_heads // K.shape[1]
    own = kept.scale * einsum(
        kept.Q[rows],
        kept.K.repeat_interleave(group, 1),
        "q_pos head d, k_pos head d -> head q_pos k_pos",
    )
    size = kept.scale * einsum(
        kept.Q[rows].norm(dim=-1),
        kept.K.norm(dim=-1).repeat_interleave(group, 1),
        "q_pos head, k_pos head -> head q_pos k_pos",
    )
    pattern = weights.pattern(scores, allowed)
    output = einsum(
        pattern,
        V.repeat_interleave(group, 1),
        weights.writes.written,
        "head q_pos k_pos, k_pos head d, head d d_model -> q_pos d_model",
    )
    frozen = weights.writes.output_scale(kept.attn_out[rows])
    output = output * frozen[:, None] + weights.writes.block_constant(frozen)
    block = kept.block[rows]
    return Errors(
        float(_ratio((scores - own).abs(), size).masked_fill(~allowed, 0).max()),
        float((pattern - kept.pattern).abs().max()),
        float(_ratio((output - block).norm(dim=-1), block.norm(dim=-1)).max()),
    )


def _ratio(error: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """error / size, and 0 where both are 0."""
    return torch.where(error == 0, 0.0, error / size)


def _refusal(model: LoadedModel, layer: int, errors: Errors) -> str:
    named = ", ".join(f"{name} {error:.1e}" for name, error in errors._asdict().items())
    return (
        f"{model.name}: layer {layer} is not what the {model.family.name} adapter rebuilds "
        f"({named}; expected "
        f"at most {TOLERANCE[model.dtype]:.0e}): this model is changed from the family and is "
        "refused"
    )
