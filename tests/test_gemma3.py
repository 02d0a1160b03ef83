"""The second real model: Gemma 3 270M from its GGUF. QK-norm, norms after attention, windows.

Opt-in: `make gemma3` puts it in the cache, under the Gemma Terms of Use; without it the slow tests
here are skipped. The fast ones write tiny GGUF files themselves.
"""

import json
import math
import pydoc_data.topics
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import torch

import headattr
from headattr.cli import main
from headattr.errors import UnsupportedModelError, UsageError
from headattr.model.capture import PromptCapture, capture, pad
from headattr.model.embedded import cache_folder
from headattr.model.files import FETCHED
from headattr.model.load import LoadedModel, load_model
from headattr.model.proof import layer_errors, prove

NAME = "gemma3-270m"
WINDOW, LONG = 512, 600
FULL = [5, 11, 17]
"""The layers without a window."""
TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""The parts of a layer: what a GGUF calls them, and what transformers does."""


def _need(path: Path) -> None:
    if not path.exists():
        pytest.skip(f"{path} is missing: read the Gemma Terms of Use and run `{FETCHED[NAME]}`")


@pytest.fixture(scope="module")
def gemma() -> LoadedModel:
    _need(cache_folder() / NAME / "config.json")
    return load_model(NAME)


@pytest.fixture(scope="module")
def long_text(gemma: LoadedModel) -> str:
    """English of LONG tokens, BOS included, from CPython's own documentation."""
    topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    parts = [re.sub(r"\s+", " ", part).strip() for part in topics.split("\n\n")]
    prose = " ".join(part for part in parts if len(part) > 300 and part[0].isalpha())
    text = gemma.tokenizer.decode(gemma.tokenizer(prose[:6000]).input_ids[1:LONG])
    assert len(gemma.tokenizer(text).input_ids) == LONG
    return text


@pytest.fixture(scope="module")
def store(
    gemma: LoadedModel, long_text: str, tmp_path_factory: pytest.TempPathFactory
) -> headattr.Store:
    """Layer 0, whose window is shorter than the text."""
    return headattr.attribute(
        gemma.hf,
        {0: "tokens"},
        [long_text],
        tmp_path_factory.mktemp("gemma3") / "store",
        output="unembed",
        tokenizer=gemma.tokenizer,
        edges="top:4",
    )


def _checked(store: headattr.Store, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The answer of `headattr check`, whose every error is at most 1e-5."""
    assert main(["check", str(store.path), "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["ok"]
    for error in (
        checked["completeness"],
        checked["contrast_completeness"],
        checked["ov"]["completeness"],
        checked["ov"]["block_completeness"],
        checked["pattern_error"],
    ):
        assert error["worst"] <= 1e-5
    return checked


# ---- the model --------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_layer_is_proven_on_the_real_model(gemma: LoadedModel) -> None:
    assert len(gemma.layers) == 18
    assert prove(gemma).worst <= 1e-5


@pytest.mark.slow
def test_every_layer_is_rebuilt_beyond_the_window(gemma: LoadedModel, long_text: str) -> None:
    tokens = gemma.tokenizer(long_text).input_ids
    found = capture(gemma, *pad([tokens]), layers=range(18))[0]
    assert isinstance(found, PromptCapture)
    for layer, kept in found.layers.items():
        weights = gemma.family.head_weights(gemma.hf, layer)
        assert weights.window == (None if layer in FULL else WINDOW)
        assert layer_errors(weights, kept).worst <= 1e-5
        assert kept.rows[-1] == LONG - 1
        outside = kept.pattern[:, -1, : LONG - WINDOW]
        assert (outside > 0).all() if layer in FULL else (outside == 0).all()


@pytest.mark.slow
def test_what_the_gguf_does_not_say_is_as_published(gemma: LoadedModel) -> None:
    config = gemma.config
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == FULL
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert {rotary["rope_type"] for rotary in gemma.rotary_parameters} == {"default"}
    assert {block.self_attn.scaling for block in gemma.layers} == {256**-0.5}
    assert config.attn_logit_softcapping is None
    assert config.sliding_window == WINDOW
    assert gemma.hf.lm_head.weight is gemma.hf.model.embed_tokens.weight


@pytest.mark.slow
def test_the_gguf_itself_gives_the_converted_model(gemma: LoadedModel) -> None:
    path = cache_folder() / f"{NAME}.gguf"
    _need(path)
    direct = load_model(path)
    assert "dequantised" in direct.notes[0]
    assert len(direct.notes) == 1
    found, expected = direct.hf.state_dict(), gemma.hf.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    settings = ("layer_types", "rope_parameters", "sliding_window", "query_pre_attn_scalar")
    for setting in settings:
        assert getattr(direct.config, setting) == getattr(gemma.config, setting)
    text = "The  quick\n\n\tbrown fox, 12 naïve 日本語 😀"
    assert direct.tokenizer(text).input_ids == gemma.tokenizer(text).input_ids


@pytest.mark.slow
def test_it_is_a_language_model(gemma: LoadedModel) -> None:
    """Its perplexity on CPython's help topics is that of a trained model: about 16."""
    text = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    bos, *ids = gemma.tokenizer(text[:200_000]).input_ids
    losses = []
    for start in range(0, 40_000, 5000):
        window = torch.tensor([[bos, *ids[start : start + 255]]])
        with torch.no_grad():
            logits = gemma.hf(window).logits[0, :-1].log_softmax(-1)
        losses.append(float(-logits.gather(-1, window[0, 1:, None]).mean()))
    assert math.exp(np.mean(losses)) < 20


@pytest.mark.slow
def test_l5h1_is_an_induction_head(gemma: LoadedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    segment, length = torch.randint(1000, 200_000, (2, 64), generator=generator), 64
    prompts = [[2, *row, *row] for row in segment.tolist()]
    second = torch.arange(length) + 1 + length
    for found in capture(gemma, *pad(prompts), layers=[5], rows=None):
        assert isinstance(found, PromptCapture)
        pattern = found.layers[5].pattern[:, second, second - length + 1].mean(-1)
        assert pattern.argmax() == 1
        assert pattern[1] > 0.7


# ---- attribution ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_text_longer_than_the_window_checks_ok(
    store: headattr.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = _checked(store, capsys)
    assert checked["set_aside"] == 0
    assert len(store.heads) == 4
    for head in store.heads:
        edges = store.edges(store.prompt_ids[0], head)
        back = edges["q_pos"] - edges["k_pos"]
        assert (edges["q_pos"] >= WINDOW).sum() >= 3 * (LONG - WINDOW)
        assert ((back >= 0) & (back < WINDOW)).all()


@pytest.mark.slow
def test_an_edge_outside_the_window_is_refused(
    store: headattr.Store, gemma: LoadedModel, long_text: str
) -> None:
    q_pos = LONG - 1
    said = f"window is {WINDOW} keys, so this query sees keys {q_pos - WINDOW + 1} to {q_pos}"
    with pytest.raises(UsageError, match=said):
        headattr.query_edge(store, store.prompt_ids[0], "L0H0", q_pos, q_pos - WINDOW)
    with pytest.raises(UsageError, match=said):
        headattr.explain_edge(
            gemma.hf,
            {0: "tokens"},
            long_text,
            "L0H0",
            q_pos,
            q_pos - WINDOW,
            tokenizer=gemma.tokenizer,
        )


SHORT = "When the cat saw the dog, the dog saw the cat, and the cat saw the dog again."


@pytest.fixture(scope="module")
def random_basis(gemma: LoadedModel) -> dict[int, headattr.PlainDictionary]:
    """Random directions of the stream's own size, about six of 96 active at each position."""
    generator = torch.Generator().manual_seed(1)
    length = len(gemma.tokenizer(SHORT).input_ids)
    found = {}
    for layer in (5, 6):
        directions = 60 * torch.randn(96, gemma.d_model, generator=generator)
        active = torch.rand(length, 96, generator=generator) < 6 / 96
        acts = torch.rand(length, 96, generator=generator) * active
        bias = torch.randn(gemma.d_model, generator=generator)
        found[layer] = headattr.PlainDictionary(directions, [acts], bias)
    return found


@pytest.mark.slow
def test_random_dictionaries_check_ok_in_a_full_and_a_sliding_layer(
    gemma: LoadedModel,
    random_basis: dict[int, headattr.PlainDictionary],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = headattr.attribute(
        gemma.hf,
        random_basis,
        [SHORT],
        tmp_path / "store",
        tokenizer=gemma.tokenizer,
        edges="all",
        read="decoder",
    )
    _checked(kept, capsys)
    assert [(head.layer, head.head) for head in kept.heads] == [
        (layer, head) for layer in (5, 6) for head in range(4)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "q_pos", "k_pos"), [("L5H1", 11, 6), ("L5H3", 19, 0), ("L6H0", 15, 14), ("L6H2", 7, 7)]
)
def test_the_lists_of_an_edge_sum_to_its_contrast(
    head: str,
    q_pos: int,
    k_pos: int,
    gemma: LoadedModel,
    random_basis: dict[int, headattr.PlainDictionary],
) -> None:
    answer = headattr.explain_edge(
        gemma.hf,
        random_basis,
        SHORT,
        head,
        q_pos,
        k_pos,
        tokenizer=gemma.tokenizer,
        read="decoder",
    )
    qk, totals = answer["qk"], answer["qk"]["contrast_totals"]
    for name, side in (("query", "q_features"), ("key", "k_features")):
        assert qk[side]
        listed = sum(feature["contrast"] for feature in qk[side])
        assert listed == pytest.approx(totals[name]["feature"], abs=1e-5)
        rest = sum(value for kind, value in totals[name].items() if kind != "feature")
        assert listed + rest == pytest.approx(answer["score_contrast"], abs=1e-5)
    assert totals["query"].keys() == {"feature", "bias", "error"}
    assert totals["key"].keys() == {"feature", "bias", "error", "elsewhere"}
    assert qk["contrast_completeness"] <= 1e-5
    assert qk["completeness"] <= 1e-5
    score = sum(value for row in qk["totals"].values() for value in row.values())
    assert score == pytest.approx(answer["score"], abs=1e-5)


# ---- GGUF files -------------------------------------------------------------------------------


def _tiny(**changes: Any) -> Any:
    """A Gemma 3 as small as its GGUF can say: d_head is 256 and every sixth layer is full."""
    return tiny.decoder(
        "gemma3_text",
        9,
        **{
            "hidden_size": 16,
            "num_hidden_layers": 7,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 4,
            **changes,
        },
    )


def _write(model: Any, path: Path, change: Callable[[Any], Any] = lambda writer: None) -> Path:
    """`model` as a GGUF of float32, as llama.cpp writes a Gemma 3."""
    config, writer = model.config, gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    change(writer)
    names = {theirs: ours for ours, theirs in TENSORS.items()}
    for name, tensor in model.state_dict().items():
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name):
            name = f"blk.{match[1]}.{names[match[2]]}.weight"
        name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
        if not name.startswith("lm_head"):
            writer.add_tensor(name, (tensor + 1 if "norm" in name else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_of_a_second_family_is_the_model_that_was_written(tmp_path: Path) -> None:
    model = _tiny()
    found = load_model(_write(model, tmp_path / "a.gguf"), tokenizer=tiny.byte_tokenizer())
    assert len(found.notes) == 1
    assert found.family.name == "gemma3_text"
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found.hf.state_dict()[name], tensor)  # gains are rounded at 1
    assert found.config.layer_types == model.config.layer_types
    ids = torch.tensor(tiny.prompts(20))
    torch.testing.assert_close(found.hf(ids).logits, model(ids).logits)
    assert prove(found).worst <= 1e-5


def _scaled(kind: str) -> Callable[[Any], Any]:
    def change(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(8.0)

    return change


def _frequencies(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", np.full(128, 8, np.float32))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_scaled("linear"), r"gemma3\.rope\.scaling\.factor = 8\.0"),
        (_scaled("yarn"), r"gemma3\.rope\.scaling\.type = yarn"),
        (_frequencies, r"rope_freqs\.weight"),
        (lambda w: w.add_rope_freq_base_swa(5e4), r"rope\.freq_base_swa = 50000.*runs 10000"),
        (lambda w: w.add_attn_logit_softcapping(50.0), r"attn_logit_softcapping = 50.*runs None"),
        (lambda w: w.add_sliding_window_pattern(3), r"sliding_window_pattern = \[True, True, Fa"),
        (
            lambda w: w.add_sliding_window_pattern([True] * 7),
            r"sliding_window_pattern = \[True, True, True, True, True, True, True\]",
        ),
    ],
)
def test_a_gguf_that_says_what_transformers_does_not_read_is_refused(
    change: Callable[[Any], Any], said: str, tmp_path: Path
) -> None:
    path = _write(_tiny(), tmp_path / "a.gguf", change)
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(path, tokenizer=tiny.byte_tokenizer())


def test_a_gguf_that_says_what_runs_is_not_refused(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_freq_base_swa(1e4)
        writer.add_sliding_window_pattern([True] * 5 + [False, True])
        writer.add_array("general.tags", ["a", "b"])

    path = _write(_tiny(), tmp_path / "a.gguf", change)
    assert load_model(path, tokenizer=tiny.byte_tokenizer()).family.name == "gemma3_text"


def test_a_gguf_that_cannot_say_its_score_scale_is_refused(tmp_path: Path) -> None:
    """Gemma's largest models divide by something else than the square root of d_head."""
    path = _write(_tiny(head_dim=128), tmp_path / "a.gguf")
    with pytest.raises(UnsupportedModelError, match=r"score scale.*128 wide; expected 256"):
        load_model(path, tokenizer=tiny.byte_tokenizer())


def test_tensors_of_a_gguf_that_are_not_used_are_said(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_q.bias", np.ones(512, np.float32))

    path = _write(_tiny(), tmp_path / "a.gguf", change)
    notes = load_model(path, tokenizer=tiny.byte_tokenizer()).notes
    assert notes[1:] == ("not used by a Gemma3ForCausalLM: 1 tensors of a.gguf",)


def test_a_model_that_was_not_fetched_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADATTR_CACHE", str(tmp_path))
    for name, command in FETCHED.items():
        with pytest.raises(headattr.HeadattrError, match=f"{name} is not in .*`{command}`"):
            load_model(name)
