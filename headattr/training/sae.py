"""Train a TopK sparse autoencoder on residual-stream activations; out comes a SAELens dictionary.

    x ≈ acts @ W_dec + b_dec,   acts = relu(topk((x - b_dec) @ W_enc + b_enc, k))

(Gao et al. 2024), in the inference form: decoder rows have unit norm, nothing is left to rescale.
The training itself is sae_lens' `SAETrainer`; decided here is what it is fed
(`trainable_positions`, one shuffle an epoch), how it starts (b_dec at the mean) and what is written
beside the weights.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headattr.errors import HeadattrError

if TYPE_CHECKING:
    from sae_lens import SAE, SAETrainer

    AnySAE = SAE[Any]
    AnyTrainer = SAETrainer[Any, Any]
else:  # sae_lens takes seconds to import: the functions that use it do so themselves
    AnySAE = AnyTrainer = Any


@dataclass(frozen=True)
class SAERecipe:
    """How a dictionary is trained; with the activations it fixes the result on one machine."""

    d_sae: int = 1024
    """Number of features."""
    k: int = 16
    """Features active at a position: L0 is at most this."""
    epochs: float = 1.0
    """How often each activation is seen; may be a fraction."""
    batch_size: int = 1024
    """Positions in one optimiser step."""
    learning_rate: float = 3e-3
    """Adam's, constant for `1 - decay_share` of the run and then linear to zero."""
    decay_share: float = 0.3
    """Share of the steps, at the end, over which the learning rate falls."""
    warm_up_steps: int = 50
    """Optimiser steps over which the learning rate rises; at most a tenth of the run."""
    dead_after: int = 100_000
    """Positions without firing after which a feature gets the auxiliary loss that revives it."""
    aux_loss_coefficient: float = 1.0
    """Weight of that auxiliary loss."""
    seed: int = 0
    """Of the initial weights and of the order of the activations."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be trained."""
        if not 0 < self.k <= self.d_sae:
            raise HeadattrError(f"k = {self.k} with d_sae = {self.d_sae}; expected 1 <= k <= d_sae")
        for name in ("epochs", "batch_size", "learning_rate", "dead_after"):
            if not getattr(self, name) > 0:
                raise HeadattrError(f"{name} = {getattr(self, name)}; it must be positive")
        if not 0 <= self.decay_share <= 0.9:
            raise HeadattrError(f"decay_share = {self.decay_share}; expected 0 to 0.9 of the run")


class Site(NamedTuple):
    """Where the activations come from: what the saved dictionary says about its input."""

    layer: int
    """The activations are resid_pre of this layer."""
    model_name: str
    """A hub id, or any name that says which weights were meant."""
    prepend_bos: bool
    """Whether every training window began with the BOS token."""
    context_size: int
    """Tokens in a training window, BOS included."""
    norm_limit: float = 10.0
    """Positions with more than this many median norms were left out, as was position 0."""
    dataset: str | None = None
    """What text it was, in words."""

    @property
    def hook_name(self) -> str:
        """The site's TransformerLens name, `blocks.L.hook_resid_pre`."""
        return f"blocks.{self.layer}.hook_resid_pre"


class SAEScores(NamedTuple):
    """A dictionary on activations that it was not trained on."""

    explained_variance: float
    """1 - |x - reconstruction|^2 / |x - mean|^2, both summed over all positions."""
    l0: float
    """Mean number of active features at a position."""
    dead_share: float
    """Share of the features that were active nowhere."""
    positions: int
    """Number of activations measured."""


def trainable_positions(
    resid_pre: Float[Tensor, "window pos d_model"], norm_limit: float = 10.0
) -> Bool[Tensor, "window pos"]:
    """True where a dictionary should be trained: not at position 0, nor at outlying norms.

    Outlying is a norm beyond `norm_limit` medians. An attention sink carries a residual a hundred
    times as long as the others; one of them outweighs a whole batch.
    """
    norms = resid_pre.float().norm(dim=-1)
    if norms.shape[1] < 2:
        raise HeadattrError("windows of one token: two are needed, the first is never used")
    keep = norms <= norm_limit * norms[:, 1:].median()
    keep[:, 0] = False
    return keep


def train_sae(activations: Float[Tensor, "pos d_model"], recipe: SAERecipe, site: Site) -> AnySAE:
    """A TopK SAE of `activations`, trained in float32, in sae_lens' inference form.

    The same recipe, activations and machine give the same weights; the caller's random state is
    left alone. HeadattrError where there are fewer activations than a batch, or one is not finite.
    """
    _check_activations(activations, recipe)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(recipe.seed)
        trained = _make_trainer(activations, recipe, site).fit()
    return _inference_form(trained)


def save_sae(sae: AnySAE, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write cfg.json and sae_weights.safetensors, which `SAE.load_from_disk` reads.

    `dtype` is that of the file only: cfg.json still says float32, so that a dictionary stored as
    bfloat16 is upcast when loaded. `folder` appears when it is complete; an older one is replaced.
    """
    from safetensors.torch import load_file, save_file

    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    weights, cfg = sae.save_model(partial)
    cfg.write_text(json.dumps(json.loads(cfg.read_text()), indent=1) + "\n", encoding="utf-8")
    # A copy: what load_file returns may be a map of the very file that is written over.
    tensors = {name: tensor.to(dtype, copy=True) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights)
    weights.chmod(0o644)  # safetensors makes files that only their owner can read
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


@torch.no_grad()
def evaluate_sae(
    sae: AnySAE, activations: Float[Tensor, "pos d_model"], batch_size: int = 4096
) -> SAEScores:
    """Explained variance, mean L0 and share of dead features on held-out `activations`."""
    mean = activations.float().mean(0)
    missed = total = active = 0.0
    ever = torch.zeros(sae.cfg.d_sae, dtype=torch.bool)
    for batch in activations.split(batch_size):
        x = batch.float()
        acts = sae.encode(x)
        missed += (x - sae.decode(acts)).square().sum().item()
        total += (x - mean).square().sum().item()
        active += (acts != 0).sum().item()
        ever |= (acts != 0).any(0)
    dead_share = 1 - ever.float().mean().item()
    return SAEScores(1 - missed / total, active / len(activations), dead_share, len(activations))


def _check_activations(activations: Tensor, recipe: SAERecipe) -> None:
    if activations.dim() != 2 or len(activations) < recipe.batch_size:
        raise HeadattrError(
            f"activations of shape {tuple(activations.shape)}; expected [pos, d_model] "
            f"with at least one batch of {recipe.batch_size} positions"
        )
    if not activations.isfinite().all():
        raise HeadattrError("some activations are infinite or NaN; leave those positions out")


def _make_trainer(activations: Tensor, recipe: SAERecipe, site: Site) -> AnyTrainer:
    """sae_lens' trainer, with the mean in b_dec and the input scaled to norm sqrt(d_model)."""
    from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.saes.sae import SAEMetadata

    d_model = activations.shape[1]
    steps = max(1, round(recipe.epochs * len(activations) / recipe.batch_size))
    sae = TopKTrainingSAE(
        TopKTrainingSAEConfig(
            d_in=d_model,
            d_sae=recipe.d_sae,
            k=recipe.k,
            aux_loss_coefficient=recipe.aux_loss_coefficient,
            normalize_activations="expected_average_only_in",
            metadata=SAEMetadata(**_metadata(site, recipe)),
        )
    )
    trainer = SAETrainer(
        SAETrainerConfig(
            total_training_samples=steps * recipe.batch_size,
            train_batch_size_samples=recipe.batch_size,
            lr=recipe.learning_rate,
            lr_end=0.0,
            lr_warm_up_steps=min(recipe.warm_up_steps, steps // 20 * 2),
            lr_decay_steps=round(recipe.decay_share * steps),
            dead_feature_window=max(1, recipe.dead_after // recipe.batch_size),
        ),
        sae,
        _shuffled_batches(activations, recipe),
    )
    # Measured here on everything, not by the trainer on the first batches; fit() folds it in.
    scale = d_model**0.5 / activations.float().norm(dim=-1).mean().item()
    trainer.activation_scaler.scaling_factor = scale
    sae.b_dec.data = activations.float().mean(0) * scale
    return trainer


def _metadata(site: Site, recipe: SAERecipe) -> dict[str, Any]:
    """What cfg.json says of the training; `seqpos_slice` is sae_lens' way to say not position 0."""
    return {
        "model_name": site.model_name,
        "hook_name": site.hook_name,
        "prepend_bos": site.prepend_bos,
        "context_size": site.context_size,
        "dataset_path": site.dataset,
        "seqpos_slice": [1, None],
        "excluded_above_median_norm": site.norm_limit,
        "training_epochs": recipe.epochs,
        "training_seed": recipe.seed,
    }


def _shuffled_batches(activations: Tensor, recipe: SAERecipe) -> Iterator[Tensor]:
    """Endless float32 batches; every epoch in a new order, its last short batch left out."""
    generator = torch.Generator().manual_seed(recipe.seed)
    while True:
        order = torch.randperm(len(activations), generator=generator)
        for chosen in order.split(recipe.batch_size):
            if len(chosen) == recipe.batch_size:
                yield activations[chosen].float()


def _inference_form(trained: Any) -> AnySAE:
    """`trained` as sae_lens would load it from disk, decoder norms folded into the encoder."""
    from sae_lens import SAE

    with tempfile.TemporaryDirectory() as folder:
        trained.save_inference_model(folder)
        sae = SAE.load_from_disk(folder)
    # Rows of W_dec have unit norm by now; left on, bfloat16 rounding would count as a rescaling.
    sae.cfg.rescale_acts_by_decoder_norm = False
    return sae.eval().requires_grad_(False)
