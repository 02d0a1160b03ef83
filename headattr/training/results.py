"""What is written when a training is done: the files of each format, labels and the card."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from headattr.basis.coder import Coder
from headattr.basis.dictionary import Activation, Tensors
from headattr.basis.formats.crosscoder import CrosscoderConfig, write_crosscoder
from headattr.training.harvest import Rows
from headattr.training.labels import FeatureLabel, label_features, top_windows, write_labels
from headattr.training.recipe import Recipe
from headattr.training.scores import windows_of

CARD, LABELS = "card.json", "labels.jsonl"
HELD_OUT = "held_out.jsonl"
"""Windows that were not trained on, as prompts."""


def write_transcoder(folder: Path, layer: int, tensors: Tensors) -> None:
    """`layer_{i}.safetensors` of a circuit-tracer set."""
    from safetensors.torch import save_file

    named = {
        "W_enc": tensors.W_enc[0],
        "W_dec": tensors.W_dec[0],
        "b_enc": tensors.b_enc,
        "b_dec": tensors.b_dec[0],
        "activation_function.threshold": tensors.threshold,
    }
    kept = {name: part.contiguous() for name, part in named.items() if part is not None}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"layer_{layer}.safetensors"
    partial = path.with_name(f"{path.name}.part")
    save_file(kept, partial)
    partial.chmod(0o644)  # safetensors makes files that only their owner can read
    partial.replace(path)


def write_set(folder: Path, recipe: Recipe) -> None:
    """config.yaml of a circuit-tracer set."""
    said = {
        "model_name": recipe.model,
        "model_kind": "transcoder_set",
        "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "hook_mlp_out",
        "activation": "jumprelu",
        "scan": f"{Path(recipe.model).name}-transcoders",
        "prepend_bos": recipe.prepend_bos,
        "trained_on": trained_on(recipe),
    }
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in said.items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("".join(lines), encoding="utf-8")


def write_groups(
    folder: Path, recipe: Any, hooks: Sequence[str], groups: Sequence[Tensors], kind: Activation
) -> None:
    """A crosscoder in headattr's own format; `recipe`: a CrosscoderRecipe."""
    config = CrosscoderConfig(
        recipe.model,
        tuple(hooks),
        recipe.causal,
        groups[0].W_enc[0].shape[1],
        tuple(group.W_enc[0].shape[0] for group in groups),
        kind,
        recipe.prepend_bos,
        trained_on(recipe),
    )
    write_crosscoder(folder, config, groups)


def metadata(recipe: Recipe, hook: str) -> dict[str, Any]:
    """What cfg.json of an SAE says of its training."""
    said: dict[str, Any] = {
        "model_name": recipe.model,
        "hook_name": hook,
        "prepend_bos": recipe.prepend_bos,
        "context_size": recipe.context_size,
        "excluded_above_median_norm": recipe.norm_limit,
        "exclude_special_tokens": recipe.leave_out_special,
        "training_seed": recipe.seed,
    }
    if recipe.leave_out_first:
        said["seqpos_slice"] = [1, None]
    return said


def trained_on(recipe: Recipe) -> str:
    """Positions, in words."""
    said = [f"contexts of {recipe.context_size} tokens"]
    said += ["without the first position"] if recipe.leave_out_first else []
    said += ["without special tokens"] if recipe.leave_out_special else []
    said.append(f"norms up to {recipe.norm_limit:g} medians")
    return ", ".join(said)


def write_feature_labels(
    path: Path,
    coders: Sequence[Coder],
    rows: Rows,
    windows: Int[Tensor, "window pos"],
    token_text: Sequence[str],
    start: int = 0,
) -> None:
    """labels.jsonl of some dictionaries; ids run through them from `start` on."""
    write_labels(_labels(coders, rows, windows, token_text, start), path)


def _labels(
    coders: Sequence[Coder],
    rows: Rows,
    windows: Tensor,
    token_text: Sequence[str],
    start: int,
) -> Iterator[FeatureLabel]:
    for coder in coders:
        top = top_windows(windows_of(coder, rows))
        for label in label_features(top, windows, token_text):
            yield label._replace(id=label.id + start)
        start += coder.dictionary.features


def write_prompts(windows: Int[Tensor, "window pos"], path: Path) -> None:
    """Windows as prompts of token ids, a line each: what `evaluate --texts` takes."""
    lines = [json.dumps({"tokens": window}, separators=(",", ":")) for window in windows.tolist()]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_card(folder: Path, card: dict[str, Any]) -> None:
    """card.json; fractions keep six digits."""
    text = json.dumps(_rounded(card), indent=1, ensure_ascii=False)
    (folder / CARD).write_text(f"{text}\n", encoding="utf-8")


def join_files(paths: Iterable[Path], to: Path) -> None:
    """One text file after the other."""
    with to.open("w", encoding="utf-8") as out:
        for path in paths:
            out.write(path.read_text(encoding="utf-8"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value
