"""What is put in at a site is what the model goes on with, and nothing else changes."""

from typing import Any

import pytest
import tiny
import torch

from headattr.errors import DictionaryError, PromptError, UsageError
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.load import LoadedModel, load_model
from headattr.model.sites import Site
from headattr.model.splice import SPLICED, run_spliced

FAMILIES = ("gpt2", "llama", "gpt_neox", "gemma2", "gemma3_text", "qwen3")


def batch_of(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    return pad(tiny.prompts(*lengths))


def captured(model: LoadedModel, ids: Any, mask: Any, sites: list[Site]) -> list[PromptCapture]:
    found = capture(model, ids, mask, layers=[], sites=sites)
    assert not any(isinstance(one, PromptError) for one in found)
    return [one for one in found if isinstance(one, PromptCapture)]


def stacked(found: list[PromptCapture], site: Site, length: int) -> torch.Tensor:
    parts = [prompt.at(site) for prompt in found]
    out = parts[0].new_zeros(len(parts), length, parts[0].shape[1])
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return out


def sites_of(model: LoadedModel) -> list[Site]:
    n = len(model.layers)
    return [Site(kind, 1) for kind in SPLICED] + [Site("resid_pre", 0), Site("resid_pre", n)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_model_has_there_anyway_changes_no_bit(family: str) -> None:
    model = load_model(tiny.MODELS[family]())
    ids, mask = batch_of(9, 5)
    clean = run_spliced(model, ids, mask, {}, mask)
    for site in sites_of(model):
        put = {site: stacked(captured(model, ids, mask, [site]), site, ids.shape[1])}
        assert torch.equal(run_spliced(model, ids, mask, put, mask), clean), site
    together = {
        site: stacked(captured(model, ids, mask, [site]), site, ids.shape[1])
        for site in sites_of(model)
    }
    assert torch.equal(run_spliced(model, ids, mask, together, mask), clean)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_nothing_put_in_the_logits_are_those_of_the_model(family: str) -> None:
    model = load_model(tiny.MODELS[family]())
    ids, mask = batch_of(9)
    model.hf.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model.hf(input_ids=ids, use_cache=False).logits
    assert torch.equal(run_spliced(model, ids, mask, {}, mask), plain)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
@pytest.mark.parametrize("kind", SPLICED)
def test_another_vector_is_there_from_its_position_on(family: str, kind: Any) -> None:
    model = load_model(tiny.MODELS[family]())
    ids, mask = batch_of(8)
    site, where = Site(kind, 1), torch.arange(8)[None] == 5
    put = {site: torch.randn(captured(model, ids, mask, [site])[0].at(site).shape)[None]}
    clean = run_spliced(model, ids, mask, {}, mask)
    changed = run_spliced(model, ids, mask, put, where)
    assert torch.equal(changed[:, :5], clean[:, :5])
    assert not torch.allclose(changed[:, 5], clean[:, 5])
    again = run_spliced(model, ids, mask, {}, mask)
    assert torch.equal(again, clean)  # all hooks are gone


def test_a_stream_put_in_before_the_final_norm_decides_the_logits() -> None:
    model = load_model(tiny.llama())
    ids, mask = batch_of(6)
    x = torch.randn(1, 6, 24)
    found = run_spliced(model, ids, mask, {Site("resid_pre", 3): x}, mask)
    torch.testing.assert_close(found, model.hf.lm_head(model.hf.model.norm(x)))


def test_long_attention_some_queries_at_a_time_gives_the_same_logits() -> None:
    model = load_model(tiny.mistral())
    ids, mask = batch_of(30, 17)
    put = {Site("z", 1): torch.zeros(2, 30, 40)}
    whole = run_spliced(model, ids, mask, put, mask)
    found = run_spliced(model, ids, mask, put, mask, numbers=300)
    torch.testing.assert_close(found[mask], whole[mask])


@pytest.mark.parametrize(
    ("site", "error"),
    [
        (Site("resid_mid", 1), UsageError),
        (Site("mlp_in", 1), UsageError),
        (Site("resid_pre", 4), DictionaryError),
    ],
)
def test_other_sites_are_refused_by_name(site: Site, error: type[Exception]) -> None:
    model = load_model(tiny.llama())
    ids, mask = batch_of(4)
    with pytest.raises(error, match=str(site)):
        run_spliced(model, ids, mask, {site: torch.zeros(1, 4, 24)}, mask)
