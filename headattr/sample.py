"""A first look at how dictionaries fit: what they make of the first few prompts."""

from collections.abc import Sequence
from typing import Any

import torch

from headattr.attribution.task import swallow_attention
from headattr.basis.report import measure, stream_of
from headattr.errors import PromptError
from headattr.model.capture import capture, pad
from headattr.model.load import LoadedModel
from headattr.model.tokens import Prompt

PROMPTS, TOKENS = 4, 256
"""At most so many prompts, each of at most so many tokens."""
_CAPTURED = 1 << 25  # numbers that are kept of them: 128 MiB of float32
_ENCODED = 1 << 22  # activations at once


def sample_reports(
    model: LoadedModel, sources: Sequence[Any], prompts: Sequence[Prompt]
) -> list[dict[str, Any] | None]:
    """The report of every source (`Tally.report`), from one pass over a few prompts.

    None for what reconstructs nothing that could be measured (tokens, the unembedding, plain
    directions), and where no prompt can run.
    """
    measured = [source for source in sources if hasattr(source, "reconstruct")]
    sites = {site for source in measured for site in (*source.sites, *source.writes)}
    if not measured or not prompts:
        return [None for _ in sources]
    some = prompts[:PROMPTS]
    most = _CAPTURED // (len(some) * len(sites) * model.d_model)
    tokens = [prompt.tokens[: max(16, min(TOKENS, most))] for prompt in some]
    ids = [prompt.id for prompt in some]
    found = capture(model, *pad(tokens), layers=[], sites=sorted(sites), ids_in_run=ids)
    kept = [prompt for prompt in found if not isinstance(prompt, PromptError)]
    if not kept:
        return [None for _ in sources]
    reports: list[dict[str, Any] | None] = []
    for source in sources:
        if not hasattr(source, "reconstruct"):
            reports.append(None)
            continue
        stream = stream_of(source)
        counted = {
            prompt.id: torch.from_numpy(~swallow_attention(prompt.at(stream))).to(model.device)
            for prompt in kept
        }
        reports.append(measure(source, kept, counted, _ENCODED).report)
    return reports
