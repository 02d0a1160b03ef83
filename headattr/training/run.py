"""A recipe -> a folder with dictionaries: harvest, train, score, label; resumable.

Beside the result, in `<out>.part`, lie what is harvested (where it is too large for memory), a
checkpoint of each training and what is finished; the same command goes on from there. The result
appears under its name when it is complete.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from headattr.errors import UsageError
from headattr.model.load import LoadedModel, load_model
from headattr.model.sites import Site
from headattr.training.calibration import calibration_positions
from headattr.training.harvest import Activations, Rows, Wanted, bytes_of, harvest, width_of
from headattr.training.jobs import Job, jobs_of
from headattr.training.lock import alone
from headattr.training.loop import Checkpoint, moments, train
from headattr.training.recipe import KINDS, Recipe, read_recipe
from headattr.training.results import (
    CARD,
    HELD_OUT,
    LABELS,
    join_files,
    write_card,
    write_feature_labels,
    write_prompts,
)
from headattr.training.scores import coders_of, score
from headattr.training.textset import Windows, counted_positions, make_windows, token_texts

CHECKPOINTS = 2
"""What checkpoints and finished jobs hold; counts up with each change."""
GIGABYTE = 1e9
Say = Callable[[str], None]


def train_file(path: Path, kind: str, out: Path | None, say: Say) -> dict[str, Any]:
    """Train what a recipe file of a kind (sae, transcoder, crosscoder) says; `out` overrides its
    own. Gives the card, with "out". Raises as `read_recipe` and `train_dictionaries`."""
    recipe = read_recipe(path, kind)
    if out is None and not recipe.out:
        raise UsageError(f"{path} names no `out`; give --out FOLDER")
    folder = Path(recipe.out) if out is None else out
    return train_dictionaries(recipe, folder.expanduser(), base=path.parent, say=say)


def train_dictionaries(
    recipe: Recipe, out: Path, *, base: Path, model: Any = None, say: Say = lambda _: None
) -> dict[str, Any]:
    """Train what a recipe says into the folder `out`; gives its card, with "out".

    `base`: the folder of the recipe's relative paths. `model`: one in memory, in place of the one
    that is named. A folder of the same recipe, model and texts is left as it is. Raises UsageError
    for a folder of another, HeadattrError where the model or the texts cannot be used, or where
    another process is training into `out`.
    """
    folder = out.with_name(f"{out.name}.part")
    with nullcontext() if out.exists() else alone(folder, out):
        return {**_trained(recipe, out, folder, base, model, say), "out": str(out)}


def render_training(card: dict[str, Any]) -> str:
    """The card as text for a terminal."""
    lines = [f"{card['out']}: {card['kind']}, {card['features']} features"]
    for name, found in card["dictionaries"].items():
        explained = ", ".join(f"{s} {v:.4f}" for s, v in found["explained_variance"].items())
        lines.append(
            f"  {name}: L0 {found['l0']:.1f}, dead {found['dead_share']:.1%}, dense "
            f"{found['dense_share']:.1%}; explained variance: {explained}"
        )
    seconds = card["seconds"]
    lines.append(
        f"  {seconds['harvest']:.0f} s of harvest, {seconds['training']:.0f} s of training"
    )
    return "\n".join(lines)


def _trained(
    recipe: Recipe, out: Path, folder: Path, base: Path, model: Any, say: Say
) -> dict[str, Any]:
    named = base / recipe.model if recipe.model.startswith(("./", "../")) else recipe.model
    loaded = load_model(named if model is None else model)
    jobs = jobs_of(recipe, loaded)
    windows = make_windows(recipe, loaded, base)
    identity = _identity(recipe, loaded, windows)
    if (found := _finished(out, identity, recipe)) is not None:
        say(f"{out} is complete: nothing to do")
        return found
    say(
        f"{out}: {windows.train.numel():,} tokens to train on, {windows.held_out.numel():,} held "
        "out; where this is stopped, the same command goes on"
    )
    work = _Work(recipe, loaded, windows, folder, identity, say)
    for some in work.at_once(jobs):
        work.run(some)
    return work.finish(jobs, out)


@dataclass(frozen=True)
class _Work:
    """One recipe under way."""

    recipe: Recipe
    model: LoadedModel
    windows: Windows
    folder: Path
    identity: str
    say: Say

    @property
    def result(self) -> Path:
        """What becomes the folder of the result."""
        return self.folder / "result"

    def at_once(self, jobs: Sequence[Job]) -> list[Sequence[Job]]:
        """Jobs that one harvest serves. Raises UsageError for one that is too large."""
        rows = len(self.windows.train) * self.recipe.context_size
        sizes = [
            bytes_of([width_of(self.model, s) for s in job.sites], rows, self.recipe.storage)
            for job in jobs
        ]
        most = max(self.recipe.memory_gb, self.recipe.disk_gb) * GIGABYTE
        if max(sizes) > most:
            raise UsageError(
                f"the activations of {jobs[0].name} take {max(sizes) / GIGABYTE:.1f} GB; raise "
                f'disk_gb ({self.recipe.disk_gb:g}), lower tokens, or set storage = "bfloat16"'
            )
        step = max(1, int(most // max(sizes)))
        return [jobs[i : i + step] for i in range(0, len(jobs), step)]

    def run(self, jobs: Sequence[Job]) -> None:
        """Harvest for some jobs and train each that is not finished."""
        if all(self._is_done(job) for job in jobs):
            return
        sites = tuple(dict.fromkeys(site for job in jobs for site in job.sites))
        data = self._harvest(self.windows.train, sites, None)
        held_out = self._harvest(self.windows.held_out, sites, data.limits)
        for job in jobs:
            if not self._is_done(job):
                self._train(job, data, held_out)
        for files in self.folder.glob("activations-*"):
            shutil.rmtree(files)

    def _harvest(self, ids: Tensor, sites: tuple[Site, ...], limits: Any) -> Activations:
        recipe = self.recipe
        counted: Bool[Tensor, "window pos"] = counted_positions(ids, recipe, self.model)
        limit = recipe.memory_gb * GIGABYTE
        wanted = Wanted(sites, recipe.storage, recipe.norm_limit, limit)
        return harvest(self.model, ids, counted, wanted, self.folder, self.say, limits)

    def _train(self, job: Job, data: Activations, held_out: Activations) -> None:
        """One job, from its first step to its scores."""
        rows = data.rows_for(job.sites)
        trainee = job.make(moments(rows))
        path = self.folder / f"checkpoint-{job.name}.safetensors"
        identity = self._identity(job)
        kept = Checkpoint(path, identity, self.recipe.checkpoint_every)
        seconds = train(trainee, rows, self.recipe, kept, job.name, self.say)
        self.result.mkdir(parents=True, exist_ok=True)
        job.write(trainee, self.result)
        coders = coders_of(job.read(self.result))
        if self.recipe.labels:
            self.say(f"{job.name}: labels")
            texts, ids = token_texts(self.model), self.windows.train
            write_feature_labels(self._labels(job), coders, rows, ids, texts, job.first)
        scores = score(coders, held_out.rows_for(job.sites))
        found = {
            "identity": identity,
            "scores": scores._asdict(),
            "trained_positions": len(rows),
            "threshold_positions": self._calibrated(rows),
            "seconds": {"harvest": data.seconds + held_out.seconds, "training": seconds},
        }
        partial = self._done(job).with_suffix(".part")
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(self._done(job))
        path.unlink(missing_ok=True)

    def _calibrated(self, rows: Rows) -> int | None:
        """How many positions decided the threshold; None where it was learnt, or there is none."""
        return calibration_positions(rows) if self.recipe.activation == "batchtopk" else None

    def finish(self, jobs: Sequence[Job], out: Path) -> dict[str, Any]:
        """Complete the result and give it its name."""
        if self.recipe.labels:
            join_files([self._labels(job) for job in jobs], self.result / LABELS)
        write_prompts(self.windows.held_out, self.result / HELD_OUT)
        card = self._card(jobs)
        write_card(self.result, card)
        out.parent.mkdir(parents=True, exist_ok=True)
        self.result.rename(out)
        shutil.rmtree(self.folder)
        return json.loads((out / CARD).read_text(encoding="utf-8"))

    def _card(self, jobs: Sequence[Job]) -> dict[str, Any]:
        found = {job.name: json.loads(self._done(job).read_text(encoding="utf-8")) for job in jobs}
        harvests = {f["seconds"]["harvest"] for f in found.values()}  # one number a harvest
        kind = next(name for name, recipe in KINDS.items() if type(self.recipe) is recipe)
        recipe = {key: value for key, value in asdict(self.recipe).items() if key != "out"}
        return {
            "kind": kind,
            "identity": self.identity,
            "recipe": recipe,
            "tokens": self.windows.train.numel(),
            "held_out_tokens": self.windows.held_out.numel(),
            "trained_positions": {name: f["trained_positions"] for name, f in found.items()},
            "threshold_positions": {name: f["threshold_positions"] for name, f in found.items()},
            "features": sum(job.features for job in jobs),
            "dictionaries": {name: f["scores"] for name, f in found.items()},
            "seconds": {
                "harvest": sum(harvests),
                "training": sum(f["seconds"]["training"] for f in found.values()),
            },
            "versions": _versions(),
        }

    def _identity(self, job: Job) -> str:
        return f"{self.identity} {job.name} {CHECKPOINTS}"

    def _is_done(self, job: Job) -> bool:
        """Raises UsageError for what is finished of another recipe, model or texts."""
        path = self._done(job)
        if not path.is_file():
            return False
        if json.loads(path.read_text(encoding="utf-8")).get("identity") != self._identity(job):
            raise UsageError(
                f"{path} is of another recipe, model or texts; remove {self.folder}, or choose "
                "another --out"
            )
        return True

    def _done(self, job: Job) -> Path:
        return self.folder / f"{job.name}.json"

    def _labels(self, job: Job) -> Path:
        return self.folder / f"labels-{job.name}.jsonl"


def _identity(recipe: Recipe, model: LoadedModel, windows: Windows) -> str:
    """Of all that decides the result."""
    said = [type(recipe).__name__, recipe.numbers(), windows.hash, model.hash()]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _finished(out: Path, identity: str, recipe: Recipe) -> dict[str, Any] | None:
    """The card of a result that is there already. Raises UsageError for something else there."""
    if not out.exists():
        return None
    card = out / CARD
    if not card.is_file():
        raise UsageError(
            f"{out} is there, without the {CARD} of `headattr train`; choose another --out, or "
            "remove it"
        )
    found = json.loads(card.read_text(encoding="utf-8"))
    if found.get("identity") != identity:
        raise UsageError(
            f"{out} was trained with another recipe, model or texts ({_unlike(found, recipe)}); "
            "choose another --out, or remove it"
        )
    return found


def _unlike(card: dict[str, Any], recipe: Recipe) -> str:
    """What the recipe of a card has otherwise than this one."""
    before, now = card.get("recipe", {}), json.loads(json.dumps(recipe.numbers()))
    unlike = [
        f"{name} {before.get(name)!r}, here {value!r}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    same = "the same numbers, of another model or other texts: `stdlib` is this Python's own"
    return "; ".join(unlike) or same


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("headattr", "torch", "sae-lens")}
