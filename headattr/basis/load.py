"""Dictionaries that were asked for -> bases and outputs, each loaded once.

Whatever does not fit the model is refused before any forward pass.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headattr.basis.formats import saelens
from headattr.basis.plain import PlainDictionary, plain_basis
from headattr.basis.sae import SaeBasis, check_fit, from_object, load_sae
from headattr.basis.tokens import token_basis
from headattr.basis.unembed import unembed_output
from headattr.config import SourceSpec
from headattr.errors import DictionaryError, UsageError
from headattr.model.load import LoadedModel


class Sources(NamedTuple):
    """Everything that decomposes or reads the stream in one run."""

    bases: dict[int, Any]
    """By the layer whose resid_pre each decomposes."""
    outputs: dict[int, Any]
    """By the layer at which each reads, n_layers being the last output; the unembedding comes after
    all, at n_layers + 1."""


def declared_bos(sources: Iterable[Any]) -> dict[str, bool]:
    """With or without BOS, as each dictionary that says so was trained; named with its layer."""
    return {
        f"{source.about.name} of layer {source.about.layer}": source.about.prepend_bos
        for source in sources
        if source.about.prepend_bos is not None
    }


def check_files(specs: list[SourceSpec]) -> None:
    """Look at every dictionary file before a model is loaded: whole, complete, of the right
    site."""
    for spec in specs:
        if spec.kind == "sae" and isinstance(spec.target, Path):
            check_fit(saelens.read_config(spec.target), spec.layer, None, str(spec.target))


def load_sources(model: LoadedModel, basis: list[SourceSpec], output: list[SourceSpec]) -> Sources:
    """Load all; the same dictionary given as basis and as output is one object."""
    bases = {spec.layer: _load(model, spec, "basis") for spec in basis}
    outputs: dict[int, Any] = {}
    for spec in output:
        twin = next((b for b, s in zip(bases.values(), basis, strict=True) if _same(s, spec)), None)
        found = twin if twin is not None else _load(model, spec, "output")
        outputs[found.layer + (spec.kind == "unembed")] = found
    return Sources(bases, outputs)


def _same(one: SourceSpec, other: SourceSpec) -> bool:
    return one.layer == other.layer and (
        one.target is other.target or (one[:2] == other[:2] and one.target == other.target)
    )


def _load(model: LoadedModel, spec: SourceSpec, role: Literal["basis", "output"]) -> Any:
    n_layers = len(model.layers)
    highest = n_layers - 1 if role == "basis" else n_layers
    if spec.layer > highest:
        raise DictionaryError(f"--{role} {spec.layer}=...: the model's layers are 0 to {highest}")
    fit: dict[str, Any] = {"d_model": model.d_model, "dtype": model.dtype, "device": model.device}
    if spec.kind == "tokens":
        return token_basis(model)
    if spec.kind == "unembed":
        return unembed_output(model)
    if isinstance(spec.target, PlainDictionary):
        return plain_basis(spec.target, spec.layer, **fit)
    if isinstance(spec.target, Path):
        return _fitting(load_sae(spec.target, spec.layer, **fit), model)
    if callable(getattr(getattr(spec.target, "cfg", None), "architecture", None)):
        return _fitting(from_object(spec.target, spec.layer, **fit), model)
    raise UsageError(
        f"--{role} at layer {spec.layer}: found a {type(spec.target).__name__}; expected a "
        "folder, a sae_lens.SAE, "
        "a PlainDictionary or 'tokens'"
    )


def _fitting(basis: SaeBasis, model: LoadedModel) -> SaeBasis:
    """Refuse what only the model shows: a centring that its norm does not have, a normed site."""
    name, site = basis.about.name, basis.config.hook_name or ""
    norm = model.family.unembedding(model.hf).norm.kind
    if basis.config.centred and norm != "layer":
        raise DictionaryError(
            f"{name} says center_writing_weights, but {model.name} has RMSNorm, whose stream "
            "TransformerLens never centres; expected a dictionary of a LayerNorm model, or "
            "center_writing_weights = false in its configuration"
        )
    if basis.layer == len(model.layers) and site.startswith("hidden_states"):
        raise DictionaryError(
            f"{name}: {site} of a model of {basis.layer} layers lies behind the final norm; "
            "expected the last block's output, "
            f"blocks.{basis.layer - 1}.hook_resid_post"
        )
    return basis
