"""Prompts through a model some at a time, for what judges dictionaries: batches by the memory there
is, positions that count, prompts that cannot run set aside."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from headattr.attribution.task import swallow_attention
from headattr.basis.report import stream_of
from headattr.basis.whole import check_whole
from headattr.budget import Budget, Shape, budget_for, widest_layer
from headattr.errors import PromptError, UsageError
from headattr.inputs import NamedRelease
from headattr.judging import OnTexts
from headattr.layers import slots_of
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.load import LoadedModel, load_model
from headattr.model.sites import Site
from headattr.model.tokens import Bos, Prompt, decide_bos, tokenize
from headattr.texts import SetAside, Texts, read_texts


class Given(NamedTuple):
    """A model and the prompts that it is run on."""

    model: LoadedModel
    prompts: list[Prompt]
    set_aside: list[SetAside]
    left: int
    """Prompts beyond --max-tokens, which are not run."""
    bos: Bos

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def about(self) -> dict[str, Any]:
        """{"model", "prompts", "tokens", "left", "bos", "set_aside"}."""
        return {
            "model": self.model.name,
            "prompts": len(self.prompts),
            "tokens": self.tokens,
            "left": self.left,
            "bos": self.bos._asdict(),
            "set_aside": [entry.as_dict() for entry in self.set_aside],
        }


def given(asked: OnTexts, named: Sequence[NamedRelease]) -> Given:
    """The model, and the prompts as the dictionaries want them.

    Raises HeadattrError where texts or model cannot be read, where a dictionary is of another
    model, where they disagree on BOS, or where no prompt can run.
    """
    texts, model = _texts(asked), _fitting_model(asked, named)
    return _prompts(asked, texts, model, named)


def given_each(asked: OnTexts, named: Sequence[NamedRelease]) -> list[Given]:
    """The model, and prompts for each dictionary: the same ones for all, or where they were not all
    trained with BOS, or all without, as each of them was. Raises as `given`."""
    texts, model = _texts(asked), _fitting_model(asked, named)
    if len({bos for one in named for bos in _declared([one]).values()}) < 2:
        return [_prompts(asked, texts, model, named)] * len(named)
    return [_prompts(asked, texts, model, [one]) for one in named]


def _texts(asked: OnTexts) -> Texts:
    return read_texts(Path(asked.texts), paragraphs=asked.paragraphs)


def _fitting_model(asked: OnTexts, named: Sequence[NamedRelease]) -> LoadedModel:
    """The model, with dictionaries that fit it as far as their files tell."""
    model = load_model(asked.model, device=asked.device, dtype=asked.dtype)
    for one in named:
        check_whole(one.release, model, one.layer)
    return model


def _declared(named: Sequence[NamedRelease]) -> dict[str, bool]:
    """With or without BOS, as each dictionary that says so was trained."""
    dictionaries = [d for one in named for d in one.release.dictionaries]
    return {d.name: d.prepend_bos for d in dictionaries if d.prepend_bos is not None}


def _prompts(
    asked: OnTexts, texts: Texts, model: LoadedModel, named: Sequence[NamedRelease]
) -> Given:
    bos = decide_bos(model.tokenizer, asked.bos, _declared(named))
    prompts, aside = tokenize(model, texts.prompts, bos, truncate=asked.truncate)
    kept = first_tokens(prompts, asked.max_tokens)
    if not kept:
        reasons = "; ".join(f"line {a.id + 1}: {a.reason}" for a in (*texts.set_aside, *aside)[:3])
        raise UsageError(
            f"--texts {asked.texts}: no prompt can run ({reasons or 'there is none'}); expected "
            "one at least"
        )
    return Given(model, kept, [*texts.set_aside, *aside], len(prompts) - len(kept), bos)


def first_tokens(prompts: Sequence[Prompt], most: int | None) -> list[Prompt]:
    """Prompts, in order, of at most `most` tokens together, one at least."""
    if most is None:
        return list(prompts)
    kept, tokens = [], 0
    for prompt in prompts:
        tokens += len(prompt.tokens)
        if kept and tokens > most:
            break
        kept.append(prompt)
    return kept


class Passes:
    """Forward passes over some prompts for one source, under a budget."""

    def __init__(
        self,
        model: LoadedModel,
        prompts: Sequence[Prompt],
        source: Any,
        sites: Iterable[Site],
        *,
        layers: int = 1,
        batch_size: int = 8,
        memory: str | None = None,
    ) -> None:
        """`sites`: that are kept at once; `layers`: whose attention is kept."""
        self.model, self.prompts, self.batch_size = model, list(prompts), batch_size
        self.failed: dict[int, str] = {}
        """By prompt id: why it could not run. It is left out from then on."""
        self.budget = _budget(model, source, len(set(sites)), layers, memory)

    def batches(self, more: int = 0) -> Iterator[list[Prompt]]:
        """Prompts of one forward pass each, in order; `more`: bytes that a token takes on top of
        what is captured."""
        prompts = [prompt for prompt in self.prompts if prompt.id not in self.failed]
        lengths = [len(prompt.tokens) for prompt in prompts]
        for some in self.budget.batches(lengths, self.batch_size, more):
            yield [prompts[i] for i in some]

    def captured(
        self, prompts: Sequence[Prompt], layers: Sequence[int], sites: Iterable[Site]
    ) -> dict[int, PromptCapture]:
        """By prompt id; those that fail are left out and named in `failed`."""
        found = capture(
            self.model,
            *pad([prompt.tokens for prompt in prompts]),
            layers=layers,
            sites=sorted(set(sites)),
            ids_in_run=[prompt.id for prompt in prompts],
            numbers=self.budget.attention_numbers(),
        )
        for prompt, one in zip(prompts, found, strict=True):
            if isinstance(one, PromptError):
                self.failed[prompt.id] = str(one)
        return {one.id: one for one in found if isinstance(one, PromptCapture)}


def counted_of(source: Any, prompt: PromptCapture) -> Bool[Tensor, "pos"]:
    """The positions that do not swallow attention."""
    x = prompt.at(stream_of(source))
    return torch.from_numpy(~swallow_attention(x)).to(x.device)


def bar(total: int, what: str, *, shown: bool) -> tuple[Callable[[int], Any], Callable[[], None]]:
    """A progress bar over tokens on standard error: how to advance it, and how to close it."""
    from tqdm import tqdm

    made = tqdm(
        total=total, desc=what, unit=" tokens", file=sys.stderr, disable=not shown, leave=False
    )
    return made.update, made.close


def _budget(model: LoadedModel, source: Any, sites: int, layers: int, memory: str | None) -> Budget:
    weights = model.family.head_weights(model.hf, 0)
    shape = Shape(
        number=model.dtype.itemsize,
        d_model=model.d_model,
        d_mlp=widest_layer(model.config),
        d_head=weights.W_Q.shape[-1],
        n_heads=model.n_heads,
        n_kv_heads=len(weights.W_K),
        slots=slots_of(source),
        reads=0,
        features=source.about.n_features,
        layers=max(1, layers),
        sites=sites,
    )
    total = None
    if memory is None and model.device.type == "cuda":
        total = torch.cuda.mem_get_info(model.device)[0] // 2
    return budget_for(shape, memory, total)
