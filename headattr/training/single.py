"""SAEs in training: sae_lens' own classes, at the scale that training likes."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headattr.training.blocks import PRE_ACT, Moments, Passed, Sparsity, kth_of_batch
from headattr.training.calibration import Largest

_BANDWIDTH = 0.05


class SingleCoder(nn.Module):
    """An SAE of one site in training."""

    def __init__(
        self, features: int, moments: Moments, sparsity: Sparsity, seed: int, about: dict[str, Any]
    ) -> None:
        """`about`: the metadata of cfg.json. The caller's random state is left alone."""
        super().__init__()
        (self.scale,), (mean,) = moments.scales, moments.means
        self.sparsity = sparsity
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.sae = _training_sae(len(mean), features, sparsity, about)
        self.sae.b_dec.data = mean * self.scale
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    @property
    def features(self) -> int:
        """Of the SAE."""
        return self.sae.cfg.d_sae

    @torch.no_grad()
    def prepare(self, batch: Sequence[Float[Tensor, "b d"]]) -> None:
        """Thresholds of jumprelu begin where the first batch has k features a position."""
        if self.sparsity.kind == "jumprelu":
            pre = self.sae.encode_with_hidden_pre(batch[0] * self.scale)[1]
            self.sae.threshold.fill_(kth_of_batch(pre, self.sparsity.k))

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Sequence[Float[Tensor, "b d"]]], positions: int) -> None:
        """The threshold of batchtopk becomes the one at which these have k features a position."""
        largest = Largest(self.sparsity.k * positions)
        for batch in batches:
            largest.add(self.sae.encode_with_hidden_pre(batch[0] * self.scale)[1])
        self.sae.topk_threshold.fill_(largest.threshold())

    def forward(
        self,
        batch: Sequence[Float[Tensor, "b d"]],
        dead: Bool[Tensor, "features"],
        warm: float,
    ) -> Passed:
        """sae_lens' training pass. `warm`: share of the sparsity loss that counts."""
        from sae_lens.saes.sae import TrainStepInput

        x = batch[0] * self.scale
        coefficients = {"l0": self.sparsity.coefficient * warm}
        found = self.sae.training_forward_pass(
            TrainStepInput(
                sae_in=x,
                coefficients=coefficients,
                dead_neuron_mask=dead,
                n_training_steps=int(self.steps),
                is_logging_step=False,
            )
        )
        with torch.no_grad():
            self.steps += 1
            active = found.feature_acts > 0
            missed = (x - found.sae_out).square().sum() / (x - x.mean(0)).square().sum()
        l0 = float(active.sum() / len(active))
        return Passed(found.loss, active.any(0), l0, 1 - float(missed))

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write the inference form, scale folded and decoder rows of norm 1, as SAELens files.

        Once: the weights are folded in place.
        """
        from sae_lens import SAE

        self.sae.eval()
        self.sae.fold_activation_norm_scaling_factor(self.scale)
        self.sae.save_inference_model(folder)
        sae = SAE.load_from_disk(folder)
        if self.sparsity.kind == "jumprelu":
            sae.fold_W_dec_norm()
        if self.sparsity.kind == "topk":
            sae.cfg.rescale_acts_by_decoder_norm = False  # rows have norm 1 by now
        weights = {name: part.detach().clone() for name, part in sae.state_dict().items()}
        _write(sae, weights, folder)


def _write(sae: Any, weights: dict[str, Tensor], folder: Path) -> None:
    import json

    from safetensors.torch import save_file

    path = folder / "sae_weights.safetensors"
    path.unlink()  # what was loaded may be a map of this very file
    save_file({name: part.contiguous() for name, part in weights.items()}, path)
    path.chmod(0o644)  # safetensors makes files that only their owner can read
    said = json.dumps(sae.cfg.to_dict(), indent=1)
    (folder / "cfg.json").write_text(f"{said}\n", encoding="utf-8")


def _training_sae(d_in: int, features: int, sparsity: Sparsity, about: dict[str, Any]) -> Any:
    import sae_lens
    from sae_lens.saes.sae import SAEMetadata

    shared: dict[str, Any] = {
        "d_in": d_in,
        "d_sae": features,
        "normalize_activations": "expected_average_only_in",
        "metadata": SAEMetadata(**about),
    }
    if sparsity.kind == "jumprelu":
        config = sae_lens.JumpReLUTrainingSAEConfig(
            **shared,
            jumprelu_sparsity_loss_mode="quadratic",
            target_l0=float(sparsity.k),
            jumprelu_bandwidth=_BANDWIDTH,
            l0_coefficient=sparsity.coefficient,
            pre_act_loss_coefficient=PRE_ACT * sparsity.aux,
        )
        return sae_lens.JumpReLUTrainingSAE(config)
    shared |= {"aux_loss_coefficient": sparsity.aux}
    if sparsity.kind == "topk":
        config = sae_lens.TopKTrainingSAEConfig(**shared, k=sparsity.k)
        return sae_lens.TopKTrainingSAE(config)
    config = sae_lens.BatchTopKTrainingSAEConfig(**shared, k=float(sparsity.k))
    return sae_lens.BatchTopKTrainingSAE(config)
