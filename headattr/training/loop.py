"""The training loop: Adam over shuffled positions, with checkpoints that it goes on from exactly.

The order of positions depends on the seed and the epoch alone, the learning rate on the step alone;
with weights, Adam's moments and the time since each feature fired a checkpoint holds all the rest.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headattr.errors import HeadattrError, UsageError
from headattr.training.blocks import Moments, Passed
from headattr.training.calibration import calibration_batches, calibration_positions
from headattr.training.harvest import Rows
from headattr.training.recipe import Recipe

MAX_GRAD_NORM = 1.0
"""As sae_lens."""
THRESHOLDS = 10.0
"""Thresholds of jumprelu learn faster by this: they have to follow activations that grow."""
_REPORT_SECONDS = 10.0
_POSITIONS_AT_ONCE = 4096


class Trainee(Protocol):
    """What is trained: a module with these."""

    features: int

    def prepare(self, batch: Sequence[Float[Tensor, "b d"]]) -> None:
        """Look at the first batch before training begins."""
        ...

    def calibrate(self, batches: Iterable[Sequence[Float[Tensor, "b d"]]], positions: int) -> None:
        """Set what is fixed when training is over."""
        ...

    def __call__(
        self, batch: Sequence[Float[Tensor, "b d"]], dead: Bool[Tensor, "features"], warm: float
    ) -> Passed:
        """One batch."""
        ...


class Schedule(NamedTuple):
    """How many steps, and at which rate."""

    steps: int
    warm_up: int
    decay: int
    learning_rate: float

    def warm(self, step: int) -> float:
        """The share, up to 1, that has been warmed up."""
        return min(1.0, (step + 1) / (self.warm_up + 1))

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        left = (self.steps - step) / self.decay if self.decay else 1.0
        return self.learning_rate * self.warm(step) * min(1.0, left)


class Checkpoint(NamedTuple):
    """Where a training is kept, and of which recipe, data and dictionary it is."""

    path: Path
    identity: str
    every: int


def schedule_of(recipe: Recipe, positions: int) -> Schedule:
    """Steps of a recipe. Raises UsageError for fewer positions than a batch."""
    if positions < recipe.batch_size:
        raise UsageError(
            f"{positions} positions are left to train on; expected a batch of {recipe.batch_size} "
            "at least: give more tokens or lower batch_size"
        )
    steps = max(1, round(recipe.epochs * positions / recipe.batch_size))
    return Schedule(
        steps, min(recipe.warm_up, steps // 10), round(recipe.decay * steps), recipe.learning_rate
    )


@torch.no_grad()
def moments(rows: Rows) -> Moments:
    """Mean, and sqrt(d) / mean norm, of every site."""
    widths = [part.shape[1] for part in rows.values]
    sums = [torch.zeros(width, dtype=torch.float64) for width in widths]
    norms = [0.0 for _ in widths]
    for chosen in torch.arange(len(rows)).split(_POSITIONS_AT_ONCE):
        for i, x in enumerate(rows.batch(chosen)):
            sums[i] += x.double().sum(0)
            norms[i] += float(x.double().norm(dim=1).sum())
    if not all(norm > 0 and math.isfinite(norm) for norm in norms):
        raise HeadattrError(f"activations at {rows.sites} are all zero, or not finite")
    n = len(rows)
    scales = tuple(width**0.5 * n / norm for width, norm in zip(widths, norms, strict=True))
    return Moments(scales, tuple((part / n).float() for part in sums))


def train(
    trainee: Any,
    rows: Rows,
    recipe: Recipe,
    kept: Checkpoint,
    name: str,
    say: Callable[[str], None],
) -> float:
    """Train a module (a `Trainee`) in place; gives the seconds it took, those before a checkpoint
    included.

    When training is over the threshold of batchtopk is set on positions that were trained on
    (`calibration.POSITIONS`). Ctrl-C leaves a checkpoint behind the step that runs. Raises
    UsageError for a checkpoint of another recipe, HeadattrError where the loss is no longer finite.
    """
    state = _State(trainee, schedule_of(recipe, len(rows)), kept)
    start = state.load()
    reported = began = time.monotonic() - state.seconds
    if start == 0:
        with torch.no_grad():
            trainee.prepare(rows.batch(_chosen(rows, recipe, 0)))
    trainee.train()
    with torch.enable_grad(), _interruptions() as interrupted:
        for step in range(start, state.schedule.steps):
            passed = state.step(rows.batch(_chosen(rows, recipe, step)), recipe, step)
            state.seconds = time.monotonic() - began
            last = step + 1 == state.schedule.steps
            if time.monotonic() - reported > _REPORT_SECONDS or last:
                reported = time.monotonic()
                say(f"{name}: {_report(state, passed, step + 1, recipe)}")
            stopped = interrupted()
            if stopped or last or (step + 1) % kept.every == 0:
                state.save(step + 1)
            if stopped:
                raise KeyboardInterrupt
    trainee.eval()
    if recipe.activation == "batchtopk":
        trainee.calibrate(calibration_batches(rows, recipe), calibration_positions(rows))
    return state.seconds


def _chosen(rows: Rows, recipe: Recipe, step: int) -> Int[Tensor, "b"]:
    """The positions of a step; an epoch's last short batch is left out."""
    size = recipe.batch_size
    epoch, index = divmod(step, len(rows) // size)
    return _order(len(rows), recipe.seed, epoch)[index * size : (index + 1) * size]


@lru_cache(maxsize=1)
def _order(n: int, seed: int, epoch: int) -> Int[Tensor, "n"]:
    """All positions once, in an order that seed and epoch decide."""
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    return torch.randperm(n, generator=generator)


class _State:
    """Weights, Adam and dead features between two steps."""

    def __init__(self, trainee: nn.Module, schedule: Schedule, kept: Checkpoint) -> None:
        self.trainee, self.schedule, self.kept = trainee, schedule, kept
        self.parameters = dict(trainee.named_parameters())
        self.adam = torch.optim.Adam([{"params": [p]} for p in self.parameters.values()])
        self.silent = torch.zeros(trainee.features, dtype=torch.long)  # type: ignore[arg-type]
        """Positions since each feature fired."""
        self.seconds = 0.0

    def step(self, batch: Sequence[Tensor], recipe: Recipe, step: int) -> Passed:
        """One optimiser step."""
        dead = self.silent > recipe.dead_after
        passed = self.trainee(batch, dead, self.schedule.warm(step))
        if not bool(passed.loss.isfinite()):
            raise HeadattrError(
                f"the loss of step {step} is {passed.loss.item()}: lower learning_rate"
            )
        passed.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), MAX_GRAD_NORM)
        for name, group in zip(self.parameters, self.adam.param_groups, strict=True):
            faster = THRESHOLDS if name.endswith("threshold") else 1.0
            group["lr"] = faster * self.schedule.rate(step)
        self.adam.step()
        self.adam.zero_grad()
        self.silent = (self.silent + len(batch[0])).masked_fill(passed.fired, 0)
        return passed

    def save(self, step: int) -> None:
        """Write a checkpoint under a temporary name, then give it its own."""
        from safetensors.torch import save_file

        tensors = {f"module.{name}": part for name, part in self.trainee.state_dict().items()}
        for name, parameter in self.parameters.items():
            for key, part in self.adam.state[parameter].items():
                tensors[f"adam.{key}.{name}"] = part
        tensors |= {"silent": self.silent, "step": torch.tensor(step)}
        tensors["seconds"] = torch.tensor(self.seconds, dtype=torch.float64)
        partial = self.kept.path.with_name(f"{self.kept.path.name}.part")
        partial.parent.mkdir(parents=True, exist_ok=True)
        whole = {name: part.detach().contiguous().clone() for name, part in tensors.items()}
        save_file(whole, partial, metadata={"identity": self.kept.identity})
        partial.replace(self.kept.path)

    def load(self) -> int:
        """Go back to the checkpoint, if there is one; gives the steps that are done."""
        from safetensors import safe_open

        path = self.kept.path
        if not path.is_file():
            return 0
        with safe_open(path, "pt") as file:
            found = (file.metadata() or {}).get("identity")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if found != self.kept.identity:
            raise UsageError(
                f"{path} is the checkpoint of another recipe, model or texts; remove "
                f"{path.parent}, or choose another --out"
            )
        state = {
            n.removeprefix("module."): t for n, t in tensors.items() if n.startswith("module.")
        }
        self.trainee.load_state_dict(state)
        for name, parameter in self.parameters.items():
            keys = ("step", "exp_avg", "exp_avg_sq")
            self.adam.state[parameter] = {key: tensors[f"adam.{key}.{name}"] for key in keys}
        self.silent, self.seconds = tensors["silent"], float(tensors["seconds"])
        return int(tensors["step"])


def _report(state: _State, passed: Passed, done: int, recipe: Recipe) -> str:
    dead = float((state.silent > recipe.dead_after).float().mean())
    return (
        f"step {done} of {state.schedule.steps}, loss {passed.loss.item():.4g}, "
        f"L0 {passed.l0:.1f}, explained variance {passed.explained_variance:.4f}, "
        f"dead {dead:.1%}"
    )


@contextmanager
def _interruptions() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is asked for between steps, so that none is left half done; a second one is not."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def heard(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, heard)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
