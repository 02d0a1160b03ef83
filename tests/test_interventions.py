"""Interventions against the plain Hugging Face model: our own hooks, our own attention, or weights
edited by hand; never headattr's own code as its reference."""

import copy
import inspect
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

import headattr
from headattr.errors import HeadattrError, ProofError, UsageError
from headattr.interventions import (
    AddFeature,
    AddVector,
    EditScore,
    ForcePattern,
    Outcome,
    RemoveFeature,
    ScaleFeature,
    SwapFeature,
    intervene,
)
from headattr.model.forward import _Float64

DTYPES = {"float32": torch.float32, "float64": torch.float64}
EVERY = list(product(tiny.MODELS, DTYPES))
LAYERS, LENGTH = 3, 12
TOKENS = tiny.prompts(LENGTH, seed=3)[0]
EXACT = {"rtol": 1e-9, "atol": 1e-9}
"""float64, against another way to compute the same."""
SAES = (
    ("standard", {}),
    ("topk", {}),
    ("topk", {"rescale_acts_by_decoder_norm": True}),
    ("jumprelu", {"normalize_activations": "layer_norm"}),
    ("gated", {"normalize_activations": "constant_norm_rescale"}),
    ("matching_pursuit", {}),
    ("abstopk", {"apply_b_dec_to_input": False}),
)


class Seen(NamedTuple):
    """Everything that one run of the plain model shows."""

    logits: Tensor
    resid: list[Tensor]
    """resid_pre of every layer, then the last output."""
    pattern: list[Tensor]
    """[head, q_pos, k_pos] a layer."""
    scores: list[Tensor]
    """Raw, of our own attention; empty where the model's own ran."""
    scale: list[float]
    vectors: list[dict[str, Tensor]]
    """By side, [head, pos, d_head] a layer, keys and values one a query head."""


@cache
def _hf(family: str) -> Any:
    """One model a family, which no test may change."""
    return tiny.MODELS[family]()


@cache
def _plain(family: str, dtype: str = "float64") -> "Plain":
    return Plain(_hf(family), dtype)


def _blocks(hf: Any) -> Any:
    trunk = getattr(hf, "transformer", None) or getattr(hf, "gpt_neox", None) or hf.model
    return trunk.h if hasattr(trunk, "h") else trunk.layers


class OwnAttention:
    """Attention as the papers write it, for any of the families, with what should be changed."""

    def __init__(
        self,
        config: Any,
        swap: Mapping[tuple[int, int, str], Tensor],
        scores: Mapping[tuple[int, int, int, int], Callable[[Tensor], Any]],
        rows: Mapping[tuple[int, int, int], Tensor],
    ) -> None:
        self.config, self.swap, self.edits, self.rows = config, swap, scores, rows
        self.scores: list[Tensor] = []
        self.scale: list[float] = []
        self.pattern: list[Tensor] = []
        self.vectors: list[dict[str, Tensor]] = []

    def allowed(self, layer: int, length: int) -> Tensor:
        kinds = getattr(self.config, "layer_types", None)
        sliding = kinds[layer] == "sliding_attention" if kinds else True
        window = getattr(self.config, "sliding_window", None) if sliding else None
        back = torch.arange(length)[:, None] - torch.arange(length)[None]
        return (back >= 0) & (back < (window or length))

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> tuple[Tensor, Tensor]:
        layer, group = module.layer_idx, query.shape[1] // key.shape[1]
        found = {
            "query": query[0].clone(),
            "key": key[0].repeat_interleave(group, 0),
            "value": value[0].repeat_interleave(group, 0),
        }
        for (at, head, side), vectors in self.swap.items():
            if at == layer:
                found[side][head] = vectors
        raw = given["scaling"] * found["query"] @ found["key"].transpose(1, 2)
        for (at, head, q_pos, k_pos), edit in self.edits.items():
            if at == layer:
                raw[head, q_pos, k_pos] = edit(raw[head, q_pos, k_pos])
        cap = getattr(self.config, "attn_logit_softcapping", None)
        capped = raw if cap is None else cap * torch.tanh(raw / cap)
        allowed = self.allowed(layer, raw.shape[-1])
        pattern = capped.masked_fill(~allowed, -math.inf).softmax(-1)
        for (at, head, q_pos), weights in self.rows.items():
            if at == layer:
                pattern[head, q_pos] = weights
        self.scores.append(raw)
        self.scale.append(given["scaling"])
        self.pattern.append(pattern)
        self.vectors.append(found)
        return (pattern @ found["value"]).transpose(0, 1)[None], pattern[None]


class Plain:
    """A Hugging Face model without headattr."""

    def __init__(self, hf: Any, dtype: str = "float64") -> None:
        self.hf = copy.deepcopy(hf).to(DTYPES[dtype]).eval()
        self.hf.set_attn_implementation("eager")
        self.dtype = dtype

    @torch.no_grad()
    def run(
        self,
        tokens: Sequence[int],
        add: Sequence[tuple[int, int, Tensor]] = (),
        *,
        swap: Mapping[tuple[int, int, str], Tensor] | None = None,
        scores: Mapping[tuple[int, int, int, int], Callable[[Tensor], Any]] | None = None,
        rows: Mapping[tuple[int, int, int], Tensor] | None = None,
        own: bool = True,
    ) -> Seen:
        """Our own attention unless not `own`; vectors are added before their layers by hooks."""
        attention = OwnAttention(self.hf.config, swap or {}, scores or {}, rows or {})
        resid: list[Tensor] = []
        handles = [
            block.register_forward_pre_hook(_adding(layer, add, resid), with_kwargs=True)
            for layer, block in enumerate(_blocks(self.hf))
        ]
        handles.append(_blocks(self.hf)[-1].register_forward_hook(_keeping(resid)))
        try:
            with (
                _Float64() if self.dtype == "float64" else nullcontext(),
                _replaced(self.hf, attention) if own else nullcontext(),
            ):
                out = self.hf(
                    input_ids=torch.tensor([list(tokens)]), use_cache=False, output_attentions=True
                )
        finally:
            for handle in handles:
                handle.remove()
        pattern = attention.pattern if own else [a[0] for a in out.attentions]
        return Seen(
            out.logits[0], resid, pattern, attention.scores, attention.scale, attention.vectors
        )


def _adding(layer: int, add: Sequence[tuple[int, int, Tensor]], resid: list[Tensor]) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream = (args[0] if args else kwargs["hidden_states"]).clone()
        for at, pos, vector in add:
            if at == layer:
                stream[0, pos] += vector.to(stream)
        resid.append(stream[0])
        if args:
            return (stream, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": stream}

    return hook


def _keeping(resid: list[Tensor]) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        resid.append((output[0] if isinstance(output, tuple) else output)[0])

    return hook


@contextmanager
def _replaced(hf: Any, attention: OwnAttention) -> Iterator[None]:
    """The eager attention of the file that defines the model's attention is ours for a while."""
    block = _blocks(hf)[0]
    module = next(
        getattr(block, n) for n in ("attn", "attention", "self_attn") if hasattr(block, n)
    )
    file: Any = sys.modules[type(module).__module__]
    before = file.eager_attention_forward
    file.eager_attention_forward = attention
    try:
        yield
    finally:
        file.eager_attention_forward = before


def _vectors(n: int, *, seed: int = 0, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(24, generator=generator).double() for _ in range(n)]


def _same(outcome: Outcome, seen: Seen, **tolerance: float) -> None:
    """Whatever was read is what the plain model shows."""
    compare = torch.testing.assert_close
    tolerance = tolerance or EXACT
    for site, stream in outcome.resid.items():
        compare(stream, seen.resid[site], **tolerance)
    for head, pattern in outcome.pattern.items():
        compare(pattern, seen.pattern[head.layer][head.head], **tolerance)
        if seen.scores:
            compare(outcome.scores[head], seen.scores[head.layer][head.head], **tolerance)
    if outcome.logits is not None:
        compare(outcome.logits, seen.logits, **tolerance)


ALL: dict[str, Any] = {"heads": "all", "sites": range(LAYERS + 1), "logits": True}
"""Everything that can be read."""


# nothing asked, nothing changed


@pytest.mark.parametrize(("family", "dtype"), EVERY)
@pytest.mark.parametrize("length", [1, LENGTH])
def test_asking_nothing_changes_not_one_bit(family: str, dtype: str, length: int) -> None:
    hf, tokens = _hf(family), TOKENS[:length]
    seen = _plain(family, dtype).run(tokens, own=False)
    changed = AddVector(1, 0, _vectors(1)[0])
    for batch_size in (1, 2):
        outcomes = intervene(
            hf, tokens, [[], changed, [], changed], dtype=dtype, batch_size=batch_size, **ALL
        )
        for clean in (outcomes[0], outcomes[2]):
            assert clean.logits is not None
            assert torch.equal(clean.logits, seen.logits)
            for site in range(LAYERS + 1):
                assert torch.equal(clean.resid[site], seen.resid[site])
            for head, pattern in clean.pattern.items():
                assert torch.equal(pattern, seen.pattern[head.layer][head.head])
        assert not torch.equal(outcomes[1].resid[1], seen.resid[1])


@pytest.mark.parametrize("family", tiny.MODELS)
def test_changes_of_nothing_change_not_one_bit(family: str) -> None:
    hf, sae = _hf(family), tiny.sae("standard")
    seen = _plain(family, "float32").run(TOKENS, own=False)
    f, g = _active(hf, sae, 1, 5)[:2]
    nothing: list[Any] = [
        [],
        AddVector(0, 3, torch.zeros(24)),
        ScaleFeature(1, 5, f, 1.0),
        ScaleFeature(1, 5, f, 1.0, at="L1H1.key"),
        AddFeature(1, 5, f, 0.0),
        SwapFeature(1, 5, f, f, at="L1H0.value"),
        EditScore("L2H1", 4, 3, add=-0.0),
        [ScaleFeature(1, 5, f, 1.0), SwapFeature(1, 5, g, g), EditScore("L0H0", 2, 1, add=0.0)],
    ]
    runs = [run for one in nothing for run in (one, EDITS[0])]
    for batch_size in (1, 20):
        outcomes = intervene(hf, TOKENS, runs, basis={1: sae}, batch_size=batch_size, **ALL)
        for outcome in outcomes[::2]:
            assert outcome.logits is not None
            assert torch.equal(outcome.logits, seen.logits)
            assert all(torch.equal(outcome.resid[i], seen.resid[i]) for i in range(LAYERS + 1))
            assert all(torch.equal(p, seen.pattern[h[0]][h[1]]) for h, p in outcome.pattern.items())


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_rotary_that_depends_on_the_length_is_the_models_own(rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 5, "long_factor": [3.0] * 5}
        rope |= {"original_max_position_embeddings": 32}
    hf = tiny.llama(rope_parameters=rope)
    long, short = (tiny.prompts(n)[0] for n in ((90, 20) if rope_type == "dynamic" else (60, 20)))
    fresh = {len(p): Plain(hf, "float32").run(p, own=False) for p in (long, short)}
    for prompt in (short, long, short):
        (found,) = intervene(hf, prompt, [[]], **ALL)
        assert torch.equal(found.logits, fresh[len(prompt)].logits)


def _state(hf: Any) -> dict[str, Any]:
    modules = list(hf.named_modules())
    return {
        "training": {name: module.training for name, module in modules},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in modules},
        "attention": hf.config._attn_implementation,
        "config": hf.config.to_dict(),
        "buffers": {name: buffer.clone() for name, buffer in hf.named_buffers()},
        "grad": torch.is_grad_enabled(),
    }


def _logits(hf: Any) -> Tensor:
    training = {module: module.training for module in hf.modules()}
    hf.eval()
    with torch.no_grad():
        logits = hf(input_ids=torch.tensor([TOKENS])).logits
    for module, was in training.items():
        module.training = was
    return logits


EDITS: list[Any] = [
    AddVector(0, 1, torch.ones(24)),
    AddVector(1, 2, torch.ones(24), at="L1H1.key"),
    EditScore("L1H0", 4, 3, add=2.0),
    ForcePattern("L2H1", 3, [0.0] * LENGTH),
]
"""One of each kind."""


class Broken(BaseException):
    """Raised inside the model."""


@pytest.mark.parametrize(
    ("family", "error"),
    [
        *product(tiny.MODELS, (None, KeyboardInterrupt)),
        *product(("llama", "gemma2"), (UsageError, RuntimeError, Broken)),
    ],
)
def test_the_model_is_left_as_it_was(family: str, error: type[BaseException] | None) -> None:
    hf = tiny.MODELS[family]()
    if family != "gemma2":  # which has no other
        hf.set_attn_implementation("sdpa")
    hf.train()
    _blocks(hf)[1].eval()
    interrupted = []

    def interrupt(module: Any, args: Any, output: Any) -> None:
        interrupted.append(module)
        if error is not None and len(interrupted) == 2:
            raise error("in the middle")

    hook = _blocks(hf)[1].register_forward_hook(interrupt)
    before, logits = _state(hf), _logits(hf)
    with pytest.raises(error, match="in the middle") if error else nullcontext():
        intervene(hf, TOKENS, [EDITS, []], **ALL)
    after = _state(hf)
    for name in ("training", "hooks", "attention", "config", "grad"):
        assert after[name] == before[name]
    assert all(torch.equal(after["buffers"][n], b) for n, b in before["buffers"].items())
    assert torch.equal(_logits(hf), logits)
    assert len(interrupted) == (3 if error else 4)
    hook.remove()
    seen = Plain(hf, "float32").run(TOKENS, own=False)
    (clean,) = intervene(hf, TOKENS, [[]], logits=True)
    assert torch.equal(clean.logits, seen.logits)


def test_a_model_in_training_runs_without_dropout() -> None:
    hf = tiny.gpt2(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    (clean,) = intervene(hf, TOKENS, [[]], logits=True)
    assert torch.equal(clean.logits, Plain(hf, "float32").run(TOKENS, own=False).logits)
    assert hf.training


@pytest.mark.parametrize(("family", "dtype"), EVERY)
def test_our_own_attention_is_the_models(family: str, dtype: str) -> None:
    """What the tests below rest on."""
    plain = _plain(family, dtype)
    own, seen = plain.run(TOKENS), plain.run(TOKENS, own=False)
    tolerance = 1e-10 if dtype == "float64" else 1e-4
    torch.testing.assert_close(own.logits, seen.logits, rtol=tolerance, atol=tolerance)
    for one, other in zip(own.pattern, seen.pattern, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# the stream


@pytest.mark.parametrize("family", tiny.MODELS)
def test_a_vector_in_the_stream_is_what_a_hook_before_the_block_adds(family: str) -> None:
    u, v, w = _vectors(3)
    cases = [
        [(0, 0, u)],
        [(2, LENGTH - 1, v)],
        [(1, 4, w)],
        [(0, 2, u), (1, 2, v), (2, 7, w), (1, 9, u)],
        [(1, 3, u), (1, 3, v)],
    ]
    asked = [[AddVector(*add) for add in case] for case in cases]
    hf, plain = _hf(family), _plain(family)
    for case, outcome in zip(
        cases, intervene(hf, TOKENS, asked, dtype="float64", **ALL), strict=True
    ):
        _same(outcome, plain.run(TOKENS, case))


@pytest.mark.parametrize("family", tiny.MODELS)
def test_the_site_of_an_edited_layer_has_the_edit_in_it_and_earlier_ones_do_not(
    family: str,
) -> None:
    hf, vector = _hf(family), torch.arange(24.0)
    clean, changed = intervene(hf, TOKENS, [[], AddVector(1, 6, vector)], sites=[0, 1, 2, 3])
    assert torch.equal(changed.resid[0], clean.resid[0])
    wanted = clean.resid[1].clone()
    wanted[6] += vector
    assert torch.equal(changed.resid[1], wanted)
    for site in (2, 3):
        assert torch.equal(changed.resid[site][:6], clean.resid[site][:6])  # causal
        assert not torch.equal(changed.resid[site][6], clean.resid[site][6])


def test_a_vector_at_layer_0_is_another_position_embedding() -> None:
    hf, (vector,) = tiny.gpt2(), _vectors(1)
    edited = copy.deepcopy(hf).double()
    with torch.no_grad():
        edited.transformer.wpe.weight[5] += vector
    (outcome,) = intervene(hf, TOKENS, [AddVector(0, 5, vector)], dtype="float64", **ALL)
    _same(outcome, Plain(edited).run(TOKENS, own=False))


@pytest.mark.parametrize("kind", [Tensor, np.ndarray, list, torch.float16, torch.int64])
def test_a_vector_may_be_a_tensor_an_array_or_a_list(kind: Any) -> None:
    vector = torch.arange(24.0)
    given: Any = {Tensor: vector, np.ndarray: vector.numpy(), list: vector.tolist()}.get(kind)
    given = vector.to(kind) if given is None else given
    hf = tiny.llama()
    clean, found = intervene(hf, TOKENS, [[], AddVector(2, 4, given)], sites=[2])
    assert torch.equal(found.resid[2][4], clean.resid[2][4] + vector)
    with_grad = AddVector(2, 4, vector.requires_grad_())
    (found,) = intervene(hf, TOKENS, [with_grad], logits=True)
    assert not found.logits.requires_grad


# what one head reads


def _at(layer: int, head: int, side: str) -> str:
    return f"L{layer}H{head}.{side}"


Reader = tuple[int, int, str, int, Tensor]
"""Layer, head, side, position and what is added there."""


def _with_readers(plain: Plain, readers: Sequence[Reader], add: Sequence[Any] = ()) -> Seen:
    """Run once for each (layer, head, side) on the whole changed stream, and let that head have its
    vectors of that run; layer by layer, since later layers see what earlier ones did."""
    swap: dict[tuple[int, int, str], Tensor] = {}
    for layer in range(LAYERS):
        found: dict[tuple[int, int, str], Tensor] = {}
        for head, side in {(h, s) for at, h, s, *_ in readers if at == layer}:
            mine = [(at, p, v) for at, h, s, p, v in readers if (at, h, s) == (layer, head, side)]
            seen = plain.run(TOKENS, [*add, *mine], swap=swap)
            found[layer, head, side] = seen.vectors[layer][side][head]
        swap |= found
    return plain.run(TOKENS, add, swap=swap)


@pytest.mark.parametrize("family", tiny.MODELS)
@pytest.mark.parametrize("side", ["query", "key", "value"])
def test_one_heads_input_is_that_head_on_the_changed_stream(family: str, side: str) -> None:
    hf, plain = _hf(family), _plain(family)
    u, v = _vectors(2)
    cases = [(0, 2, 3), (1, 0, LENGTH - 1), (2, 2, 9), (2, 1, 0)]
    asked = [AddVector(layer, pos, u, at=_at(layer, head, side)) for layer, head, pos in cases]
    outcomes = intervene(hf, TOKENS, asked, dtype="float64", **ALL)
    for (layer, head, pos), outcome in zip(cases, outcomes, strict=True):
        _same(outcome, _with_readers(plain, [(layer, head, side, pos, u)]))
    both = [AddVector(1, 3, u, at=_at(1, 1, side)), AddVector(1, 5, v, at=_at(1, 1, side))]
    (outcome,) = intervene(hf, TOKENS, [both], dtype="float64", **ALL)
    _same(outcome, _with_readers(plain, [(1, 1, side, 3, u), (1, 1, side, 5, v)]))


@pytest.mark.parametrize("family", tiny.MODELS)
def test_heads_that_share_a_key_and_value_do_not_share_a_change(family: str) -> None:
    hf, (u,) = _hf(family), _vectors(1)
    for side, dtype in product(("query", "key", "value"), ("float32", "float64")):
        clean, changed = intervene(
            hf, TOKENS, [[], AddVector(1, 4, u, at=_at(1, 1, side))], dtype=dtype, **ALL
        )
        tolerance = {"rtol": 0, "atol": 1e-12 if dtype == "float64" else 2e-5}
        for head in clean.pattern:
            moved = (head.layer, head.head) == (1, 1) and side != "value"
            if head.layer <= 1 and not moved:
                for name in ("scores", "pattern"):
                    one, other = getattr(clean, name)[head], getattr(changed, name)[head]
                    torch.testing.assert_close(one, other, **tolerance)
        mine = changed.scores[1, 1] - clean.scores[1, 1]
        if side == "query":
            assert mine[4].abs().max() > 1e-3
            mine[4] = 0
        elif side == "key":
            assert mine[:, 4].abs().max() > 1e-3
            mine[:, 4] = 0
        torch.testing.assert_close(mine, torch.zeros_like(mine), **tolerance)
        torch.testing.assert_close(changed.resid[1], clean.resid[1], rtol=0, atol=0)
        assert (changed.resid[2] - clean.resid[2]).abs().max() > 1e-3


@pytest.mark.parametrize("family", tiny.MODELS)
def test_several_heads_sides_and_layers_change_in_one_run_and_on_top_of_the_stream(
    family: str,
) -> None:
    hf, plain = _hf(family), _plain(family)
    s, t, u, v, w, x = _vectors(6)
    stream = [(0, 1, s), (1, 4, t)]
    readers: list[Reader] = [
        (1, 0, "query", 6, u),
        (1, 0, "key", 6, v),
        (1, 1, "key", 4, w),
        (1, 2, "value", 4, x),
        (0, 2, "query", 5, u),
        (2, 1, "value", 8, v),
        (2, 1, "query", 8, w),
    ]
    asked = [AddVector(*add) for add in stream]
    asked += [AddVector(layer, p, a, at=_at(layer, h, side)) for layer, h, side, p, a in readers]
    wanted = [
        _with_readers(plain, readers, stream),
        plain.run(TOKENS, [stream[1]]),
        plain.run(TOKENS),
        _with_readers(plain, [readers[1]]),
    ]
    for batch_size in (2, 16):  # more single inputs than runs, and fewer
        outcomes = intervene(
            hf,
            TOKENS,
            [asked, AddVector(*stream[1]), asked[::-1], [], asked[3]],
            dtype="float64",
            batch_size=batch_size,
            **ALL,
        )
        for outcome, seen in zip(outcomes, [wanted[i] for i in (0, 1, 0, 2, 3)], strict=True):
            _same(outcome, seen)


def test_one_heads_key_in_a_group_is_that_key_in_a_model_without_groups() -> None:
    """Weights edited by hand: every query head gets keys and values of its own."""
    hf = tiny.llama()
    alone = tiny.llama(num_key_value_heads=4)
    state = hf.state_dict()
    for name in [n for n in state if "k_proj" in n or "v_proj" in n]:
        heads = state[name].unflatten(0, (2, 10))
        state[name] = heads.repeat_interleave(2, 0).flatten(0, 1)
    alone.load_state_dict(state)
    (u,) = _vectors(1)
    for side in ("key", "value"):
        (found,) = intervene(
            hf, TOKENS, [AddVector(1, 4, u, at=_at(1, 2, side))], dtype="float64", **ALL
        )
        _same(found, _hooked_projection(alone, side[0] + "_proj", 1, 2, 4, u))


def _hooked_projection(hf: Any, name: str, layer: int, head: int, pos: int, add: Tensor) -> Seen:
    """The plain model with one head's rows of a projection taken from a changed stream."""
    plain = Plain(hf)
    block = _blocks(plain.hf)[layer]
    projection, kept = getattr(block.self_attn, name), {}

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kept["x"] = (args[0] if args else kwargs["hidden_states"]).clone()

    def change(module: Any, args: Any, output: Tensor) -> Tensor:
        kept["x"][0, pos] += add
        again = projection.forward(block.input_layernorm.forward(kept["x"]))
        output = output.clone()
        output[..., 10 * head : 10 * head + 10] = again[..., 10 * head : 10 * head + 10]
        return output

    block.register_forward_pre_hook(keep, with_kwargs=True)
    projection.register_forward_hook(change)
    return plain.run(TOKENS, own=False)


# scores and patterns


@pytest.mark.parametrize("family", tiny.MODELS)
def test_edited_scores_go_through_cap_mask_and_softmax_and_on(family: str) -> None:
    hf, plain = _hf(family), _plain(family)
    cases: list[dict[tuple[int, int, int, int], tuple[str, float]]] = [
        {(0, 0, 5, 4): ("add", 1.5)},
        {(1, 1, 7, 7): ("set", 0.0)},
        {(2, 2, 9, 8): ("set", -3.0), (2, 2, 9, 9): ("add", 0.25), (0, 2, 9, 9): ("add", -7.0)},
        {(1, 0, 0, 0): ("set", 4.0)},
        {(1, 2, 6, 5): ("set", 1e6), (1, 2, 7, 5): ("set", -1e6)},
    ]
    asked = [
        [EditScore(f"L{at[0]}H{at[1]}", at[2], at[3], **{k: v}) for at, (k, v) in case.items()]
        for case in cases
    ]
    for case, outcome in zip(
        cases, intervene(hf, TOKENS, asked, dtype="float64", **ALL), strict=True
    ):
        edits = {
            at: (lambda s, v=v: s + v) if kind == "add" else (lambda s, v=v: v)
            for at, (kind, v) in case.items()
        }
        _same(outcome, plain.run(TOKENS, scores=edits))
        for (layer, head, q_pos, k_pos), (kind, value) in case.items():
            if kind == "set":
                assert outcome.scores[layer, head][q_pos, k_pos] == value


@pytest.mark.parametrize("family", tiny.MODELS)
def test_an_edited_score_moves_its_own_row_only(family: str) -> None:
    hf = _hf(family)
    clean, cut = intervene(hf, TOKENS, [[], EditScore("L1H1", 7, 6, set=-1e9)], heads="all")
    for head in clean.pattern:
        if head.layer <= 1:
            rows = [r for r in range(LENGTH) if head != (1, 1) or r != 7]
            assert torch.equal(cut.pattern[head][rows], clean.pattern[head][rows])
    row, before = cut.pattern[1, 1][7], clean.pattern[1, 1][7].clone()
    if family == "gemma2":  # its cap of 2 is as low as a score gets
        assert 0 < row[6] < 0.2
    else:
        assert row[6] == 0
        before[6] = 0
        torch.testing.assert_close(row, before / before.sum(), rtol=1e-5, atol=1e-6)
    assert row.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("family", tiny.MODELS)
def test_a_forced_row_is_what_the_values_are_weighted_with(family: str) -> None:
    hf, plain = _hf(family), _plain(family)
    uniform, first, odd = torch.zeros(3, LENGTH).double()
    uniform[5:8] = 1 / 3
    first[9] = 1.0
    odd[7:10] = torch.tensor([-2.0, 0.5, 3.0])
    cases = [
        {(0, 0, 7): uniform},
        {(1, 1, 9): first, (1, 2, 9): odd, (2, 0, 7): uniform},
        {(2, 1, 7): torch.zeros(LENGTH).double()},
    ]
    asked = [
        [ForcePattern(f"L{layer}H{head}", q, row) for (layer, head, q), row in case.items()]
        for case in cases
    ]
    outcomes = intervene(hf, TOKENS, asked, dtype="float64", **ALL)
    for case, outcome in zip(cases, outcomes, strict=True):
        _same(outcome, plain.run(TOKENS, rows=case))
        for (layer, head, q_pos), row in case.items():
            assert torch.equal(outcome.pattern[layer, head][q_pos], row)


def test_zero_rows_everywhere_are_a_head_without_an_output_matrix() -> None:
    for family, width, find in (
        ("gpt2", 8, lambda block: block.attn.c_proj.weight),
        ("qwen3", 10, lambda block: block.self_attn.o_proj.weight.T),
        ("gpt_neox", 6, lambda block: block.attention.dense.weight.T),
    ):
        hf = tiny.MODELS[family]()
        edited = copy.deepcopy(hf)
        with torch.no_grad():
            find(_blocks(edited)[1])[width : 2 * width] = 0
        zeros = [ForcePattern("L1H1", q, [0] * LENGTH) for q in range(LENGTH)]
        (outcome,) = intervene(hf, TOKENS, [zeros], dtype="float64", logits=True)
        _same(outcome, Plain(edited).run(TOKENS, own=False))


@pytest.mark.parametrize("family", tiny.MODELS)
def test_everything_at_once_in_one_head(family: str) -> None:
    """Its inputs, a score, a row, and the stream under them; in a batch with other runs."""
    hf, plain = _hf(family), _plain(family)
    u, v, w = _vectors(3)
    row = torch.zeros(LENGTH).double()
    row[8] = 0.7
    asked = [
        AddVector(1, 7, w),
        AddVector(1, 8, u, at="L1H1.query"),
        AddVector(1, 7, v, at="L1H1.key"),
        AddVector(1, 8, u, at="L1H1.value"),
        EditScore("L1H1", 8, 7, add=1.0),
        EditScore("L1H1", 9, 8, set=0.5),
        ForcePattern("L1H1", 9, row),
    ]
    swap = {
        (1, 1, side): plain.run(TOKENS, [(1, 7, w), (1, pos, add)]).vectors[1][side][1]
        for side, pos, add in (("query", 8, u), ("key", 7, v), ("value", 8, u))
    }
    wanted = plain.run(
        TOKENS,
        [(1, 7, w)],
        swap=swap,
        scores={(1, 1, 8, 7): lambda s: s + 1.0, (1, 1, 9, 8): lambda s: 0.5},
        rows={(1, 1, 9): row},
    )
    runs = [EDITS[2], asked, [], asked[::-1]]
    outcomes = intervene(hf, TOKENS, runs, dtype="float64", **ALL)
    _same(outcomes[1], wanted)
    _same(outcomes[3], wanted)
    _same(outcomes[0], plain.run(TOKENS, scores={(1, 0, 4, 3): lambda s: s + 2.0}))


# features


def _active(hf: Any, sae: Any, layer: int, pos: int, dtype: str = "float32") -> list[int]:
    """Features that the SAE itself says are active on the plain stream."""
    x = Plain(hf, dtype).run(TOKENS, own=False).resid[layer]
    with torch.no_grad():
        acts = copy.deepcopy(sae).to(x.dtype).encode(x)
    acts = acts.to_dense() if acts.is_sparse else acts
    return acts[pos].nonzero().flatten().tolist()


def _decoded(sae: Any, x: Tensor, pos: int, **acts: float) -> Tensor:
    """What the SAE itself decodes at a position, with the activations of some features changed
    (f3=0.5); sae_lens keeps what it divided by between the two calls."""
    with torch.no_grad():
        found = sae.encode(x)
        found = (found.to_dense() if found.is_sparse else found).clone()
        for name, value in acts.items():
            found[pos, int(name[1:])] = value
        return sae.decode(found)[pos]


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
@pytest.mark.parametrize(("architecture", "fields"), SAES)
def test_features_change_by_what_the_dictionary_itself_decodes(
    family: str, architecture: str, fields: dict[str, Any]
) -> None:
    hf, layer, pos = _hf(family), 1, 6
    sae = tiny.sae(architecture, layer=layer, **fields)
    exact = copy.deepcopy(sae).to(torch.float64)
    plain = _plain(family)
    seen = plain.run(TOKENS)
    x = seen.resid[layer]
    with torch.no_grad():
        acts = exact.encode(x)
    acts = (acts.to_dense() if acts.is_sparse else acts)[pos]
    active = acts.nonzero().flatten().tolist()
    off = next(i for i in range(40) if i not in active)
    negative = [i for i in active if acts[i] < 0]
    assert bool(negative) == (architecture == "abstopk")
    f, g = (negative or active)[0], active[-1]
    a, b = float(acts[f]), float(acts[g])
    cases = [
        ([RemoveFeature(layer, pos, f)], {f"f{f}": 0.0}),
        ([ScaleFeature(layer, pos, f, -1.5)], {f"f{f}": -1.5 * a}),
        ([AddFeature(layer, pos, off, 0.75)], {f"f{off}": 0.75}),
        ([AddFeature(layer, pos, g, -0.5)], {f"f{g}": b - 0.5}),
        ([SwapFeature(layer, pos, f, off)], {f"f{f}": 0.0, f"f{off}": a}),
        ([SwapFeature(layer, pos, f, g)], {f"f{f}": 0.0, f"f{g}": a + b}),
        (
            [RemoveFeature(layer, pos, f), ScaleFeature(layer, pos, g, 2.0)],
            {f"f{f}": 0.0, f"f{g}": 2 * b},
        ),
    ]
    outcomes = intervene(
        hf, TOKENS, [c for c, _ in cases], basis={layer: sae}, dtype="float64", **ALL
    )
    before = _decoded(exact, x, pos)
    for (_, changed), outcome in zip(cases, outcomes, strict=True):
        add = _decoded(exact, x, pos, **changed) - before
        assert add.norm() > 1e-3
        _same(outcome, plain.run(TOKENS, [(layer, pos, add)]))


@pytest.mark.parametrize("family", tiny.MODELS)
def test_feature_changes_of_one_head_are_that_vector_at_its_input(family: str) -> None:
    hf, sae = _hf(family), tiny.sae("standard")
    exact, plain = copy.deepcopy(sae).to(torch.float64), _plain(family)
    x = plain.run(TOKENS).resid[1]
    f, g, *_ = _active(hf, sae, 1, 8, "float64")
    remove = {h: _decoded(exact, x, 8, **{f"f{h}": 0.0}) - _decoded(exact, x, 8) for h in (f, g)}
    asked = [
        RemoveFeature(1, 8, f, at="L1H1.query"),
        RemoveFeature(1, 8, g, at="L1H1.key"),
        RemoveFeature(1, 8, f, at="L1H0.value"),
    ]
    (outcome,) = intervene(hf, TOKENS, [asked], basis={1: sae}, dtype="float64", **ALL)
    readers: list[Reader] = [
        (1, 1, "query", 8, remove[f]),
        (1, 1, "key", 8, remove[g]),
        (1, 0, "value", 8, remove[f]),
    ]
    _same(outcome, _with_readers(plain, readers))


@pytest.mark.parametrize("family", tiny.MODELS)
def test_swapping_tokens_at_layer_0_is_another_prompt(family: str) -> None:
    hf, other = _hf(family), list(TOKENS)
    other[4], other[7] = (TOKENS[4] + 11) % 50, (TOKENS[7] + 5) % 50
    swaps = [SwapFeature(0, pos, TOKENS[pos], other[pos]) for pos in (4, 7)]
    (outcome,) = intervene(hf, TOKENS, [swaps], basis={0: "tokens"}, dtype="float64", **ALL)
    _same(outcome, _plain(family).run(other, own=False))


@pytest.mark.parametrize("family", tiny.MODELS)
def test_a_stream_without_its_token_is_the_position_alone(family: str) -> None:
    hf = _hf(family)
    (outcome,) = intervene(hf, TOKENS, [RemoveFeature(0, 4, TOKENS[4])], basis=["0=tokens"], **ALL)
    wanted = hf.transformer.wpe.weight[4] if family == "gpt2" else torch.zeros(24)
    torch.testing.assert_close(outcome.resid[0][4], wanted.detach(), rtol=0, atol=1e-6)
    assert outcome.logits is not None
    assert outcome.logits.isfinite().all()


def test_a_plain_dictionary_changes_by_its_own_directions() -> None:
    hf, generator = tiny.qwen2(), torch.Generator().manual_seed(1)
    directions = torch.randn(5, 24, generator=generator)
    acts = torch.zeros(LENGTH, 5)
    acts[6, 2], acts[6, 4] = -1.25, 3.0
    basis = {1: headattr.PlainDictionary(directions, [acts])}
    asked = [RemoveFeature(1, 6, 2), SwapFeature(1, 6, 4, 0), AddFeature(1, 2, 3, 2.0)]
    outcomes = intervene(hf, TOKENS, asked, basis=basis, dtype="float64", **ALL)
    huge = {1: headattr.PlainDictionary(100 * directions, [acts])}
    with pytest.raises(UsageError, match="non-finite"):
        intervene(hf, TOKENS, [AddFeature(1, 2, 3, 1e38)], basis=huge)
    d = directions.double()
    for (pos, add), outcome in zip(
        ((6, 1.25 * d[2]), (6, 3 * d[0] - 3 * d[4]), (2, 2 * d[3])), outcomes, strict=True
    ):
        _same(outcome, Plain(hf).run(TOKENS, [(1, pos, add)]))


def test_amounts_are_those_of_the_clean_run_whatever_else_changes() -> None:
    hf = tiny.llama()
    saes = {1: tiny.sae("standard", layer=1), 2: tiny.sae("standard", layer=2, seed=4)}
    plain = Plain(hf)
    seen = plain.run(TOKENS)
    (u,) = _vectors(1, size=5)
    f, g = _active(hf, saes[1], 1, 3, "float64")[0], _active(hf, saes[2], 2, 3, "float64")[0]
    adds: list[Any] = [(0, 3, u)]
    for layer, feature in ((1, f), (2, g)):
        sae, x = copy.deepcopy(saes[layer]).to(torch.float64), seen.resid[layer]
        removed = _decoded(sae, x, 3, **{f"f{feature}": 0.0}) - _decoded(sae, x, 3)
        adds.append((layer, 3, removed))
    asked = [RemoveFeature(2, 3, g), AddVector(0, 3, u), RemoveFeature(1, 3, f)]
    (outcome,) = intervene(hf, TOKENS, [asked], basis=saes, dtype="float64", **ALL)
    _same(outcome, plain.run(TOKENS, adds))


# ablations and marginals


WORST: dict[tuple[str, str], list[float]] = {}
"""By family and dtype: worst error over scale |Q| |K|, and over the effect where that is large."""


def _check_ablations(
    family: str, dtype: str, basis: dict[int, Any], edge: tuple[int, int, int, int]
) -> None:
    """Every feature of both sides: what the tables predict, and what the model does without it."""
    layer, head, q_pos, k_pos = edge
    name, options = f"L{layer}H{head}", {"dtype": dtype, "basis": basis}
    answer = headattr.explain_edge(
        _hf(family), basis, TOKENS, name, q_pos, k_pos, dtype=dtype, progress=False
    )["qk"]
    asked = [
        (feature, RemoveFeature(layer, pos, feature["id"]))
        for side, pos in (("q_features", q_pos), ("k_features", k_pos))
        for feature in answer[side]
    ]
    clean, *outcomes = intervene(
        _hf(family), TOKENS, [[], *(change for _, change in asked)], heads=[name], **options
    )
    seen = _plain(family).run(TOKENS)
    vectors = seen.vectors[layer]
    size = seen.scale[layer] * float(
        vectors["query"][head, q_pos].norm() * vectors["key"][head, k_pos].norm()
    )
    worst = WORST.setdefault((family, dtype), [0.0, 0.0])
    for (feature, _), outcome in zip(asked, outcomes, strict=True):
        scores = outcome.scores[layer, head], clean.scores[layer, head]
        effect = float(scores[0][q_pos, k_pos]) - float(scores[1][q_pos, k_pos])
        error = abs(feature["ablation"] - effect)
        assert error <= (1e-5 if dtype == "float32" else 1e-9) * size
        worst[0] = max(worst[0], error / size)
        if abs(effect) > 0.01 * size:
            assert error <= 1e-4 * abs(effect)
            worst[1] = max(worst[1], error / abs(effect))
    assert asked


def _random_edges(family: str, layer: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Edges that the mask allows, one on the diagonal, one the farthest that is seen."""
    plain, draw = _plain(family), random.Random(seed)
    allowed = OwnAttention(plain.hf.config, {}, {}, {}).allowed(layer, LENGTH)
    heads = plain.hf.config.num_attention_heads
    pos, far = draw.randrange(LENGTH), LENGTH - 1
    found = [(pos, pos), (far, int(allowed[far].nonzero()[0]))]
    found += draw.sample(allowed.tril(-1).nonzero().tolist(), count)
    return [(layer, draw.randrange(heads), *edge) for edge in found]


@pytest.mark.parametrize(("family", "dtype"), EVERY)
def test_an_ablation_is_what_the_model_does_without_the_feature(family: str, dtype: str) -> None:
    for layer, (architecture, fields) in enumerate((SAES[0], SAES[3], SAES[6])):
        basis = {layer: tiny.sae(architecture, layer=layer, **fields)}
        diagonal, farthest, anywhere = _random_edges(family, layer, 1, seed=layer)
        for edge in (diagonal, farthest) if layer == 1 else (anywhere,):
            _check_ablations(family, dtype, basis, edge)


@pytest.mark.parametrize(("family", "dtype"), EVERY)
def test_an_ablation_of_a_token_is_what_the_model_does_without_it(family: str, dtype: str) -> None:
    for edge in _random_edges(family, 0, 0, seed=7):
        _check_ablations(family, dtype, {0: "tokens"}, edge)


@pytest.mark.parametrize("family", tiny.MODELS)
def test_without_a_feature_at_the_query_alone_is_the_ablation_except_on_the_diagonal(
    family: str,
) -> None:
    """A marginal has the norm frozen; with one head's input changed the norm responds."""
    basis, options = {1: tiny.sae("standard")}, {"dtype": "float64"}
    for q_pos, k_pos in ((9, 8), (9, 9)):
        answer = headattr.explain_edge(
            _hf(family), basis, TOKENS, "L1H2", q_pos, k_pos, progress=False, **options
        )["qk"]
        feature, other = (max(answer[s], key=lambda f: abs(f["marginal"])) for s in _SIDES)
        asked = [
            [],
            RemoveFeature(1, q_pos, feature["id"], at="L1H2.query"),
            RemoveFeature(1, k_pos, other["id"], at="L1H2.key"),
            RemoveFeature(1, q_pos, feature["id"]),
        ]
        found = [
            float(outcome.scores[1, 2][q_pos, k_pos])
            for outcome in intervene(
                _hf(family), TOKENS, asked, basis=basis, heads="L1H2", **options
            )
        ]
        query, key, stream = (value - found[0] for value in found[1:])
        assert stream == pytest.approx(feature["ablation"], abs=1e-9)
        assert abs(query + feature["marginal"]) > 1e-6  # the norm responds
        if q_pos != k_pos:
            assert query == pytest.approx(feature["ablation"], abs=1e-9)
            assert key == pytest.approx(other["ablation"], abs=1e-9)
        else:
            assert abs(query - feature["ablation"]) > 1e-6


_SIDES = ("q_features", "k_features")


# batches and readings


@pytest.mark.parametrize("family", tiny.MODELS)
def test_outcomes_keep_their_order_and_do_not_depend_on_the_batch(family: str) -> None:
    vectors = _vectors(5)
    runs: list[Any] = [AddVector(i % LAYERS, i, v) for i, v in enumerate(vectors)]
    runs += [[], *EDITS, EDITS, [AddVector(1, 3, vectors[0], at="L1H2.value"), EDITS[1]]]
    alone, few, together = (
        intervene(_hf(family), TOKENS, runs, dtype="float64", batch_size=size, **ALL)
        for size in (1, 3, 100)
    )
    for one, two, three in zip(alone, few, together, strict=True):
        _close(one, two, 1e-11)
        _close(one, three, 1e-11)
    for run, outcome in list(zip(runs, alone, strict=True))[3::3]:
        (single,) = intervene(_hf(family), TOKENS, [run], dtype="float64", **ALL)
        _close(single, outcome, 0)


def _close(one: Outcome, other: Outcome, tolerance: float) -> None:
    for name in ("scores", "pattern", "resid"):
        wanted, found = getattr(one, name), getattr(other, name)
        assert wanted.keys() == found.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor, rtol=tolerance, atol=tolerance)
    assert one.logits is not None
    torch.testing.assert_close(other.logits, one.logits, rtol=tolerance, atol=tolerance)


def test_a_thousand_interventions_take_seconds_and_may_come_from_a_generator() -> None:
    hf, basis = _hf("qwen3"), {1: tiny.sae("standard")}
    active = {pos: _active(hf, basis[1], 1, pos) for pos in range(LENGTH)}
    places = [(pos, f) for pos, features in active.items() for f in features]
    changes = [RemoveFeature(1, *places[i % len(places)]) for i in range(500)]
    changes += [RemoveFeature(1, *places[i % len(places)], at="L1H1.key") for i in range(500)]
    start = time.process_time()
    outcomes = intervene(
        hf, TOKENS, (c for c in changes), basis=basis, heads=["L1H1"], batch_size=50
    )
    assert time.process_time() - start < 15
    assert len(outcomes) == 1000
    (single,) = intervene(hf, TOKENS, [changes[777]], basis=basis, heads=["L1H1"])
    torch.testing.assert_close(outcomes[777].scores[1, 1], single.scores[1, 1], rtol=0, atol=1e-5)
    pattern = outcomes[777].pattern[1, 1]
    assert pattern.untyped_storage().nbytes() <= 50 * LENGTH * LENGTH * 4  # no other head is kept


def test_nothing_to_do_and_nothing_to_read() -> None:
    hf = _hf("llama")
    assert intervene(hf, TOKENS, []) == []
    (outcome,) = intervene(hf, TOKENS, [EDITS])
    assert outcome == ({}, {}, {}, None)
    (outcome,) = intervene(hf, TOKENS, [EDITS], sites=[3, 0, 3], heads=["L0H1", "L0H1"])
    assert outcome.resid.keys() == {0, 3}
    assert list(outcome.scores) == [(0, 1)]


@pytest.mark.parametrize("heads", ["all", "L1H*", "L1H1,L0H2", ["L1H1", "L0H2"], ()])
def test_heads_are_written_as_everywhere(heads: Any) -> None:
    (outcome,) = intervene(_hf("llama"), TOKENS, [[]], heads=heads)
    wanted = {
        "all": list(product(range(LAYERS), range(4))),
        "L1H*": [(1, head) for head in range(4)],
        (): [],
    }.get(heads if isinstance(heads, str | tuple) else "", [(0, 2), (1, 1)])
    assert list(outcome.scores) == list(outcome.pattern) == wanted
    assert [str(head) for head in outcome.scores] == [f"L{a}H{b}" for a, b in wanted]


@pytest.mark.parametrize("family", tiny.MODELS)
def test_what_is_read_does_not_depend_on_what_else_is(family: str) -> None:
    runs = [EDITS, AddVector(1, 5, torch.ones(24))]
    whole = intervene(_hf(family), TOKENS, runs, **ALL)
    for site in range(LAYERS + 1):
        some = intervene(_hf(family), TOKENS, runs, sites=[site])
        for one, other in zip(whole, some, strict=True):
            assert torch.equal(one.resid[site], other.resid[site])
    for head in ("L0H1", "L1H1", "L2H1"):
        some = intervene(_hf(family), TOKENS, runs, heads=[head])
        for one, other in zip(whole, some, strict=True):
            ((name, pattern),) = other.pattern.items()
            assert torch.equal(one.pattern[name], pattern)
            assert torch.equal(one.scores[name], other.scores[name])
    some = intervene(_hf(family), TOKENS, runs, logits=True)
    for one, other in zip(whole, some, strict=True):
        assert torch.equal(_of(one.logits), _of(other.logits))


def _of(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


# models and prompts


def test_a_loaded_model_is_used_as_it_is() -> None:
    hf = _hf("llama")
    loaded = headattr.load_model(hf, dtype="float64")
    (outcome,) = intervene(loaded, TOKENS, [[]], logits=True)
    assert _of(outcome.logits).dtype == torch.float64
    assert torch.equal(_of(outcome.logits), _plain("llama").run(TOKENS, own=False).logits)
    assert next(hf.parameters()).dtype == torch.float32


def test_a_bfloat16_model_runs_as_a_float32_copy() -> None:
    hf = tiny.gemma2().to(torch.bfloat16)
    (outcome,) = intervene(hf, TOKENS, [AddVector(1, 2, torch.ones(24))], **ALL, device="cpu")
    assert _of(outcome.logits).dtype == torch.float32
    assert {p.dtype for p in hf.parameters()} == {torch.bfloat16}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="torch sees no GPU"):
        intervene(_hf("llama"), TOKENS, [[]], device="cuda")


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, iter])
def test_token_ids_may_come_as_any_sequence(kind: Any) -> None:
    (outcome,) = intervene(_hf("llama"), kind(TOKENS), [[]], logits=True)
    assert _of(outcome.logits).shape == (LENGTH, tiny.VOCABULARY)
    assert torch.equal(
        _of(outcome.logits), _plain("llama", "float32").run(TOKENS, own=False).logits
    )


@pytest.mark.parametrize("bos", [None, True, False])
def test_a_text_begins_with_bos_as_its_dictionaries_were_trained(bos: bool | None) -> None:
    hf = tiny.llama(vocab_size=tiny.BYTES)
    tokenizer = tiny.byte_tokenizer(bos="<s>", adds_bos=True)
    sae = tiny.sae("standard", layer=1)
    sae.cfg.metadata.prepend_bos = bos
    basis: Any = {} if bos is None else {1: sae}
    plain = tokenizer("abc def", add_special_tokens=False).input_ids
    tokens = plain if bos is False else [256, *plain]
    for model in (hf, headattr.load_model(hf)):
        (outcome,) = intervene(
            model, "abc def", [[]], basis=basis, tokenizer=tokenizer, logits=True
        )
        seen = Plain(hf, "float32").run(tokens, own=False)
        assert torch.equal(_of(outcome.logits), seen.logits)
    asked = "no" if bos is None else "yes" if bos else "no"
    (outcome,) = intervene(hf, "abc def", [[]], tokenizer=tokenizer, bos=asked, sites=[0])
    assert len(outcome.resid[0]) == len(plain) + (asked == "yes")


def test_dictionaries_that_disagree_on_bos_are_refused() -> None:
    saes = {layer: tiny.sae("standard", layer=layer) for layer in (1, 2)}
    saes[2].cfg.metadata.prepend_bos = True
    with pytest.raises(HeadattrError, match="disagree on BOS"):
        intervene(_hf("llama"), TOKENS, [[]], basis=saes)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ("", "empty"),
        ([3, tiny.VOCABULARY], "token id 50 is not in the vocabulary of 50"),
        ([3, -1], "expected token ids"),
        ([3, 1.5], "expected a string or a list of token ids"),
        ([3, True], "expected token ids"),
        ([[1, 2]], "expected a string or a list of token ids"),
        (torch.tensor([1.0, 2.0]), "expected a string or a list of token ids"),
        (7, "expected a string or a list of token ids"),
        (None, "expected a string or a list of token ids"),
        ([1] * (tiny.CONTEXT + 1), "too long: 65 tokens > context 64"),
        (["a text"], "expected a string or a list of token ids"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(prompt: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        intervene(_hf("llama"), prompt, [[]])


def test_a_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(HeadattrError, match="no tokenizer"):
        intervene(_hf("llama"), "abc", [[]])


def test_an_attention_that_cannot_be_entered_is_refused() -> None:
    hf = tiny.llama()
    _blocks(hf)[1].self_attn.forward = lambda hidden_states, **_: (hidden_states * 0, None)
    assert intervene(hf, TOKENS, [AddVector(1, 2, torch.ones(24))], logits=True)
    assert intervene(hf, TOKENS, [EDITS[0]], heads=["L0H1"], sites=[3])
    for change, reads in (
        ([], {"heads": ["L1H0"]}),
        (EDITS[1], {"logits": True}),
        (EDITS[2], {"sites": [2]}),
        (ForcePattern("L1H1", 0, [0] * LENGTH), {"logits": True}),
    ):
        with pytest.raises(ProofError, match="attention of layer 1"):
            intervene(hf, TOKENS, [change], **reads)
    assert hf.config._attn_implementation == "sdpa"


# what is refused


def _odd(change: Any, **fields: Any) -> Any:
    """A change as a user without type checks can make it."""
    change = copy.copy(change)
    for name, value in fields.items():
        object.__setattr__(change, name, value)
    return change


ADD = AddVector(1, 3, torch.ones(24))
SCORE, ROW = EditScore("L1H1", 4, 3, add=1.0), ForcePattern("L1H1", 4, [0.0] * LENGTH)
NAN, INF = math.nan, math.inf
FORBIDDEN = [0.0] * 5 + [0.5] + [0.0] * (LENGTH - 6)
REFUSED: list[tuple[Any, str]] = [
    *((_odd(ADD, pos=v), "pos is .*expected a whole number, 0 to 11") for v in (12, -1, True, 1.0)),
    *((_odd(ADD, pos=v), "pos is .*expected a whole number") for v in ("1", None, NAN, [1])),
    *((_odd(ADD, layer=v), "layer is .*expected a whole number, 0 to 2") for v in (3, -1, False)),
    *((_odd(ADD, layer=v), "layer is .*whole number") for v in (1.0, "1", torch.tensor(1.0))),
    (_odd(ADD, vector=torch.ones(23)), r"vector is \(23,\); expected \(24,\)"),
    (_odd(ADD, vector=torch.ones(1, 24)), r"vector is \(1, 24\); expected \(24,\)"),
    (_odd(ADD, vector=[1.0] * 23 + [NAN]), "non-finite"),
    (_odd(ADD, vector=torch.full((24,), INF)), "non-finite"),
    (_odd(ADD, vector=torch.full((24,), 1e39, dtype=torch.float64)), "non-finite"),
    *((_odd(ADD, vector=v), "vector is a .*; expected 24 numbers") for v in ("ab", None, [[1], 2])),
    *((_odd(ADD, at=v), "at is .*expected stream, or one head's input") for v in ("", None, 3)),
    *((_odd(ADD, at=f"L1H1{v}"), "at is .*L5H1.query") for v in ("", ".", ".output", ".Query")),
    (_odd(ADD, at="H1.query"), "head 'H1': expected one head, such as L5H1"),
    (_odd(ADD, at="L1H4.query"), "there is no head L1H4; .*layers 0 to 2 and heads 0 to 3"),
    (_odd(ADD, at="L2H1.key"), "L2H1 reads the stream before layer 2, not 1; use layer=2"),
    *((_odd(SCORE, q_pos=v), "q_pos is .*whole number, 0 to 11") for v in (12, -1, True, 1.5)),
    *((_odd(SCORE, k_pos=v), "k_pos is .*whole number, 0 to 11") for v in (12, -1, "0", None)),
    (_odd(SCORE, k_pos=5), "q 4, k 5 is masked"),
    (_odd(SCORE, q_pos=9), "masked: the layer's window is 4 keys, .* sees keys 6 to 9"),
    *((_odd(SCORE, add=v), "add is .*expected a finite number") for v in (NAN, INF, -INF, "1")),
    *((_odd(SCORE, add=v), "add is .*expected a finite number") for v in (3e38, 1e300, True)),
    (_odd(SCORE, set=1.0), "found both of add and set"),
    (_odd(SCORE, add=None), "found neither of add and set"),
    (_odd(SCORE, head="L1H9"), "there is no head L1H9"),
    (_odd(SCORE, head="L3H0"), "there is no head L3H0"),
    *((_odd(SCORE, head=v), "expected one head, such as L5H1") for v in ("all", 3, None, "L1H*")),
    *((_odd(ROW, q_pos=v), "q_pos is .*whole number, 0 to 11") for v in (12, -1, False, 0.0)),
    (_odd(ROW, weights=[0.0] * 11), r"weights is \(11,\); expected \(12,\)"),
    (_odd(ROW, weights=[0.0] * 11 + [NAN]), "non-finite"),
    (_odd(ROW, weights=[INF] + [0.0] * 11), "non-finite"),
    (_odd(ROW, weights="uniform"), "weights is a str; expected 12 numbers"),
    (_odd(ROW, weights=FORBIDDEN), "expected weight 0 where the mask forbids; .*q 4, k 5 is mask"),
    (_odd(ROW, q_pos=9, weights=FORBIDDEN), "expected weight 0 .* window is 4 keys"),
    (_odd(ROW, head="L0H7"), "there is no head L0H7"),
    ([SCORE, EditScore("L1H1", 4, 3, set=1.0)], "what another change of the same run changes"),
    ([SCORE, EditScore("L01H1", 4, 3, add=1.0)], "what another change of the same run changes"),
    ([ROW, ROW], "what another change of the same run changes"),
    ("stream", "found 'stream' among the changes; expected AddVector"),
    (None, "found None among the changes"),
    ([ADD, [ADD]], "among the changes"),
    (AddVector, "among the changes"),
    (RemoveFeature(2, 3, 0), "layer 2 has no basis; give one with basis="),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_a_change_that_cannot_be_made_is_refused(change: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        inspect.unwrap(intervene)(_hf("mistral"), TOKENS, [[], change])
    assert len(str(error.value)) < 400


def _feature_cases() -> list[tuple[Any, str]]:
    hf, sae = _hf("llama"), tiny.sae("standard")
    active = _active(hf, sae, 1, 5)
    f, g = active[:2]
    off = next(i for i in range(40) if i not in active)
    remove, add, swap = RemoveFeature(1, 5, f), AddFeature(1, 5, f, 1.0), SwapFeature(1, 5, f, g)
    scale = ScaleFeature(1, 5, f, 2.0)
    index = "expected a whole number, 0 to 39"
    number = "expected a finite number"
    again = "what another change of the same run changes"
    return [
        *((_odd(c, feature=v), index) for c in (remove, add, swap, scale) for v in (40, -1, True)),
        *((_odd(remove, feature=v), index) for v in (1.0, "3", None, NAN)),
        *((_odd(swap, other=v), f"other is .*{index}") for v in (40, -1, True, 0.5, None)),
        *((_odd(add, activation=v), number) for v in (NAN, INF, "1", None, True, 1e39)),
        *((_odd(scale, factor=v), number) for v in (NAN, -INF, "1", None, True, 3.3e38)),
        *(
            (_odd(c, feature=off), "is not active there; active are ")
            for c in (remove, scale, swap)
        ),
        (_odd(remove, pos=12), "pos is 12"),
        (_odd(remove, at="L1H1.output"), "at is"),
        ([remove, remove], again),
        ([remove, scale], again),
        ([swap, add], again),
        ([_odd(remove, at="L1H1.key"), _odd(scale, at="L01H1.key")], again),
    ]


def test_a_feature_change_that_cannot_be_made_is_refused() -> None:
    model, basis = headattr.load_model(_hf("llama")), {1: tiny.sae("standard")}
    for change, words in _feature_cases():
        with pytest.raises(UsageError, match=words):
            intervene(model, TOKENS, [change], basis=basis)
    inactive = RemoveFeature(0, 4, (TOKENS[4] + 1) % 50)
    with pytest.raises(UsageError, match=f"not active there; active are {TOKENS[4]}$"):
        intervene(model, TOKENS, [inactive], basis={0: "tokens"})


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    hf, sae = _hf("llama"), tiny.sae("standard")
    f = _active(hf, sae, 1, 5)[0]
    plain: list[Any] = [ScaleFeature(1, 5, f, 2.0), EditScore("L1H1", 4, 3, set=1.0)]
    other = [
        _odd(plain[0], layer=np.int64(1), pos=torch.tensor(5), feature=np.uint8(f), factor=2),
        _odd(plain[1], q_pos=np.int32(4), k_pos=torch.tensor(3), set=np.float32(1)),
    ]
    one, two = intervene(hf, TOKENS, [plain, other], basis={1: sae}, **ALL, batch_size=1)
    _close(one, two, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({"batch_size": v}, "batch_size is .*at least 1") for v in (0, -1, True, 1.0, "4", None)),
        *(({"sites": [v]}, "there is no site .*0 to 3") for v in (4, -1, True, 1.5, "0", None)),
        *(({"sites": v}, "sites are .*expected a list") for v in (2, None)),
        *(({"heads": v}, "head") for v in ("L1", "L1H9", ["L3H0"], ["L1H1", "x"], [3], 3, None)),
        *(({"bos": v}, "bos is .*expected auto or yes or no") for v in ("maybe", True, None)),
        *(({"dtype": v}, "dtype is .*float32 or float64") for v in ("float16", torch.float64)),
        ({"interventions": ADD}, "expected a list: one outcome an item"),
        ({"interventions": None}, "expected a list: one outcome an item"),
        ({"interventions": "ab"}, "among the changes"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    asked = {"interventions": [[]], **options}
    with pytest.raises(UsageError, match=words):
        inspect.unwrap(intervene)(_hf("llama"), TOKENS, **asked)


def test_changes_may_be_compared_hashed_and_shown() -> None:
    for change in (ADD, SCORE, ROW, RemoveFeature(1, 2, 3)):
        assert change in {change}
        assert len(repr(change)) < 100
    assert copy.copy(ADD) != ADD
    assert RemoveFeature(1, 2, 3) == RemoveFeature(1, 2, 3)


def test_a_loaded_model_runs_in_its_own_precision_and_refuses_another() -> None:
    exact = headattr.load_model(tiny.llama(), dtype="float64")
    outcome = headattr.intervene(exact, [1, 2, 3], [[]], logits=True)[0]
    assert outcome.logits is not None
    assert outcome.logits.dtype == torch.float64
    with pytest.raises(UsageError, match=r"is in torch\.float64, and torch\.float32 is asked for"):
        headattr.intervene(exact, [1, 2, 3], [[]], logits=True, dtype="float32")
