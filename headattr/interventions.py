"""Change something inside the model, run the rest, and read what follows.

    outcome = headattr.intervene(
        model, text, [RemoveFeature(3, pos=6, feature=17)], basis={3: sae}, heads=["L3H0"]
    )[0]
    outcome.scores[3, 0][17, 6]

What can be changed is in `changes.py`. Asking nothing changes nothing, bit for bit.

What removing a feature from the stream at a query (or key) does to a score is the `ablation` of the
tables. So is what removing it from that head's query (key) alone does, except on the diagonal,
where the stream changes both. In all of these norms respond; a `marginal` has them frozen.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headattr.basis.load import declared_bos, load_sources
from headattr.changes import (
    AddFeature,
    AddVector,
    Change,
    EditScore,
    ForcePattern,
    RemoveFeature,
    ScaleFeature,
    SwapFeature,
)
from headattr.edges import HeadId, parse_heads
from headattr.errors import UsageError
from headattr.inputs import specs_from_memory
from headattr.model.edits import ModelEdit, Outcome, run_edited
from headattr.model.load import DTYPES, LoadedModel, load_model
from headattr.model.tokens import decide_bos, tokenize
from headattr.planner import Planner, whole_number
from headattr.texts import texts_from_memory

__all__ = [
    "AddFeature",
    "AddVector",
    "Change",
    "EditScore",
    "ForcePattern",
    "Outcome",
    "RemoveFeature",
    "ScaleFeature",
    "SwapFeature",
    "intervene",
]


def intervene(
    model: Any,
    prompt: Any,
    interventions: Iterable[Change | Iterable[Change]],
    *,
    basis: Any = (),
    heads: Any = (),
    sites: Iterable[int] = (),
    logits: bool = False,
    tokenizer: Any | None = None,
    bos: str = "auto",
    device: str = "auto",
    dtype: Any = None,
    batch_size: int = 16,
) -> list[Outcome]:
    """Run the model once for every intervention - one change, or several at once - in batches.

    `model` as in `attribute`, or what `load_model` gives, which saves loading it again; `dtype` is
    float32 by default, or that of the loaded model. `prompt`: a text, or token ids, which are taken
    as they are. `basis` as in `attribute`, for changes that name features.

    What is read: scores and pattern of `heads` (["L5H1", "L3H*"], or "all"), the residual stream at
    `sites` (L: resid_pre of layer L; the number of layers: the last output), and `logits`. Returns
    one `Outcome` an intervention, in order; that of an empty list is the clean run. Raises
    UsageError, before anything changed runs, for a change that cannot be made: a position beyond
    the prompt, a feature that is not active, an edge that is masked.
    """
    loaded = model.dtype if isinstance(model, LoadedModel) else torch.float32
    dtype = str(loaded).removeprefix("torch.") if dtype is None else dtype
    _check(bos=(bos, ("auto", "yes", "no")), dtype=(dtype, tuple(DTYPES)))
    if whole_number(batch_size, 1 << 31) in (None, 0):
        raise UsageError(f"batch_size is {batch_size!r}; expected a whole number, at least 1")
    model = load_model(model, tokenizer=tokenizer, device=device, dtype=dtype)
    bases = load_sources(model, specs_from_memory(basis, "basis"), []).bases
    tokens = torch.tensor(_tokens(model, prompt, bos, bases), device=model.device)
    planner = Planner(model, tokens, bases)
    runs = [planner.edits(changes) for changes in _lists(interventions)]
    reads = {"heads": _heads(model, heads), "sites": _sites(model, sites), "logits": logits}
    return _run_all(model, tokens, runs, int(batch_size), reads)


def _run_all(
    model: LoadedModel,
    tokens: Tensor,
    runs: list[list[ModelEdit]],
    batch_size: int,
    reads: dict[str, Any],
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    clean = [i for i, run in enumerate(runs) if not run]
    if clean:  # alone, so that not even the size of a batch differs from the model's own run
        outcomes |= dict.fromkeys(clean, run_edited(model, tokens, [[]], **reads)[0])
    changed = [i for i, run in enumerate(runs) if run]
    for start in range(0, len(changed), batch_size):
        some = changed[start : start + batch_size]
        found = run_edited(model, tokens, [runs[i] for i in some], **reads)
        outcomes |= dict(zip(some, found, strict=True))
    return [outcomes[i] for i in range(len(runs))]


def _check(**given: tuple[Any, tuple[str, ...]]) -> None:
    for name, (value, choices) in given.items():
        if not isinstance(value, str) or value not in choices:
            raise UsageError(f"{name} is {value!r}; expected {' or '.join(choices)}")


def _tokens(model: LoadedModel, prompt: Any, bos: str, bases: dict[int, Any]) -> tuple[int, ...]:
    texts = texts_from_memory([prompt])
    decided = decide_bos(
        model.tokenizer, bos, declared_bos(basis.source for basis in bases.values())
    )
    found, aside = tokenize(model, texts.prompts, decided, truncate=False)
    if problems := [*texts.set_aside, *aside]:
        raise UsageError(f"the prompt cannot run: {problems[0].reason}")
    return found[0].tokens


def _lists(interventions: Any) -> list[list[Any]]:
    """Each intervention as a list of changes."""
    if isinstance(interventions, Change) or not isinstance(interventions, Iterable):
        raise UsageError(
            f"interventions are {interventions!r}; expected a list: one outcome an item"
        )
    return [
        list(item) if isinstance(item, Iterable) and not isinstance(item, str) else [item]
        for item in interventions
    ]


def _heads(model: LoadedModel, heads: Any) -> list[HeadId]:
    text = ",".join(map(str, heads)) if isinstance(heads, list | tuple) else str(heads)
    return parse_heads(text, len(model.layers), model.n_heads) if text else []


def _sites(model: LoadedModel, sites: Any) -> list[int]:
    count = len(model.layers) + 1
    expected = f"expected a list of whole numbers, 0 to {count - 1}"
    if not isinstance(sites, Iterable):
        raise UsageError(f"sites are {sites!r}; {expected}")
    found: set[int] = set()
    for site in sites:
        number = whole_number(site, count)
        if number is None:
            raise UsageError(f"there is no site {site!r}; {expected}")
        found.add(number)
    return sorted(found)
