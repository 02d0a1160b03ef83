"""A run whose every input has been checked: model, dictionaries, prompts, what each layer does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headattr.basis.component import Place, SourceInfo
from headattr.basis.load import Sources, declared_bos, load_sources
from headattr.basis.transcoder_checks import why_without
from headattr.budget import Shape, widest_layer
from headattr.config import RunConfig, canonical_hash
from headattr.edges import HeadId, listed_edges, parse_edge_rule, parse_heads, token_filter
from headattr.errors import DictionaryError, UsageError
from headattr.inputs import Inputs
from headattr.model.load import LoadedModel, load_model
from headattr.model.proof import Errors, prove
from headattr.model.tokens import Prompt, decide_bos, tokenize, vocabulary_lines
from headattr.sample import sample_reports
from headattr.store.manifest import build_manifest
from headattr.store.writer import LayerPlan

GUESSED_SLOTS = 64
"""Active features a position of a dictionary that does not say."""


@dataclass(frozen=True)
class Run:
    """A run whose every input has been checked; nothing is written yet."""

    config: RunConfig
    model: LoadedModel
    proof: Errors
    sources: Sources
    prompts: list[Prompt]
    plans: list[LayerPlan]
    listed: Mapping[tuple[int, HeadId], list[tuple[int, int]]]
    manifest: dict[str, Any]
    outputs: Mapping[int, Any]
    """What reads the heads of a layer, of those that have an output."""

    @property
    def source_list(self) -> list[Any]:
        """Bases and outputs, each once, in the order of the manifest."""
        return distinct(self.sources)


def make_run(config: RunConfig, inputs: Inputs, *, every_layer: bool = True) -> Run:
    """Step 1. Raises HeadattrError, before any work, for whatever does not fit.

    The adapter is proven on every layer, and how the dictionaries fit is measured on the first few
    prompts; or it is proven only on the layers that are attributed.
    """
    rule = parse_edge_rule(config.edges)
    for text in (config.q_token, config.k_token):
        token_filter(text, ())
    if not inputs.texts.prompts and not inputs.texts.set_aside:
        raise UsageError(f"--texts {config.texts} holds no prompt; expected at least one")
    model = load_model(
        inputs.model, tokenizer=inputs.tokenizer, device=config.device, dtype=config.dtype
    )
    apart = config.attention == "heads"
    sources = load_sources(model, inputs.basis, inputs.output, read=config.read, heads_apart=apart)
    _check_apart(config, sources)
    heads, skipped = plan_heads(config, model, sources)
    outputs, reasons = plan_outputs(config, sorted({h.layer for h in heads}), sources)
    sources = sources._replace(outputs={found.place: found for found in outputs.values()})
    plans = [
        plan_layer(config, model, layer, heads, sources, outputs, reasons)
        for layer in sorted({h.layer for h in heads})
    ]
    proof = prove(model, None if every_layer else [layer_plan.layer for layer_plan in plans])
    bos = decide_bos(model.tokenizer, config.bos, declared_bos(distinct(sources)))
    prompts, aside = tokenize(model, inputs.texts.prompts, bos, truncate=config.truncate)
    lengths = {prompt.id: len(prompt.tokens) for prompt in prompts}
    _check_plain(sources, inputs)
    windows = {layer_plan.layer: layer_plan.window for layer_plan in plans}
    listed = listed_edges(Path(rule.path), lengths, heads, windows) if rule.kind == "file" else {}
    every = distinct(sources)
    reports = sample_reports(model, every, prompts) if every_layer else [None for _ in every]
    manifest = build_manifest(
        config,
        model=_about_model(model, proof),
        sources=[
            {**about_source(source.about), "report": report}
            for source, report in zip(every, reports, strict=True)
        ],
        plans=plans,
        prompts=list(lengths),
        set_aside=sorted(
            (a.as_dict() for a in (*inputs.texts.set_aside, *aside)), key=lambda a: a["prompt"]
        ),
        bos=bos._asdict(),
        texts_hash=inputs.texts.hash,
        layers_without_basis=skipped,
        listed_hash=canonical_hash(sorted(map(str, listed.items())))
        if rule.kind == "file"
        else None,
        labelled=[i for i, source in enumerate(every) if has_labels(source)],
    )
    return Run(config, model, proof, sources, prompts, plans, listed, manifest, outputs)


def _check_apart(config: RunConfig, sources: Sources) -> None:
    """`--attention heads` is for transcoders."""
    kinds = [basis.source.about.kind for basis in sources.bases.values()]
    if config.attention == "heads" and "transcoders" not in kinds:
        found = ", ".join(dict.fromkeys(kinds)) or "none"
        raise UsageError(
            "--attention heads takes the attention outputs apart that a set of transcoders as "
            f"--basis leaves as components; the basis here is {found}: leave it out, or give "
            "transcoders"
        )


def about_source(about: SourceInfo) -> dict[str, Any]:
    """What the manifest says of a source."""
    return {**about._asdict(), "groups": [group._asdict() for group in about.groups]}


def distinct(sources: Sources) -> list[Any]:
    """What says which features are active: of bases, then of outputs; each once."""
    found: list[Any] = []
    for one in (*sources.bases.values(), *sources.outputs.values()):
        if not any(one.source is other for other in found):
            found.append(one.source)
    return found


def index_of(source: Any, sources: Sources) -> int:
    """The place of a source among them."""
    return next(i for i, found in enumerate(distinct(sources)) if found is source)


def _check_plain(sources: Sources, inputs: Inputs) -> None:
    """Activations that were handed in are one tensor a prompt, no more."""
    ids = [item.id for item in (*inputs.texts.prompts, *inputs.texts.set_aside)]
    for source in distinct(sources):
        given = len(getattr(source, "activations", ()))
        if given > max(ids) + 1:
            raise DictionaryError(
                f"{source.about.name} has activations of {given} prompts; expected one tensor a "
                f"prompt, {max(ids) + 1}"
            )


def _about_model(model: LoadedModel, proof: Errors) -> dict[str, Any]:
    return {
        "name": model.name,
        "family": model.family.name,
        "hash": model.hash(),
        "notes": list(model.notes),
        "n_layers": len(model.layers),
        "n_heads": model.n_heads,
        "d_model": model.d_model,
        "context": model.context,
        "proof": proof._asdict(),
    }


def plan_heads(
    config: RunConfig, model: LoadedModel, sources: Sources
) -> tuple[list[HeadId], list[int]]:
    """The heads to attribute, and the layers that `all` leaves out for want of a basis."""
    heads = parse_heads(config.heads, len(model.layers), model.n_heads)
    without = sorted({head.layer for head in heads} - sources.bases.keys())
    if without and config.heads != "all":
        hint = (
            why_without(distinct(sources), without)
            or f"give one each, as --basis {without[0]}=PATH"
        )
        raise UsageError(f"--heads {config.heads}: layers {without} have no basis; {hint}")
    kept = [head for head in heads if head.layer in sources.bases]
    if not kept:
        raise UsageError("no head has a basis; give at least one --basis layer=PATH")
    return kept, without


def plan_outputs(
    config: RunConfig, layers: Sequence[int], sources: Sources
) -> tuple[dict[int, Any], dict[int, str]]:
    """What reads the heads of each layer, and why nothing does.

    Raises DictionaryError for an output that was asked for and cannot be read as asked.
    """
    found: dict[int, Any] = {}
    reasons: dict[int, str] = {}
    for layer in layers:
        hearing = [place for place in sources.outputs if place.hears(layer)]
        if hearing:
            found[layer] = sources.outputs[min(hearing)]
            found[layer].check_read(config.read)
            continue
        beside = sources.outputs.get(Place(layer, 0))
        if beside is not None and beside.source.about.kind == "transcoder":
            raise DictionaryError(
                f"--output {layer}={beside.source.about.path or beside.source.about.name}: in this "
                "model attention and MLP read the same stream side by side, so that the transcoder "
                f"of layer {layer} does not read this attention; expected an output behind it"
            )
        implied = sources.bases.get(layer + 1)
        if implied is None:
            given = "no --output was given"
            if sources.outputs:
                given = f"none of the outputs is behind layer {layer}"
            reasons[layer] = (
                f"{given}, and resid_pre {layer + 1} has no basis: add --output {layer + 1}=PATH "
                "or --output unembed"
            )
            continue
        try:
            found[layer] = implied_output(implied, config.read)
        except DictionaryError as error:
            reasons[layer] = str(error)
    return found, reasons


def implied_output(basis: Any, read: str) -> Any:
    """The basis of the next layer as an output that nobody asked for; DictionaryError says why it
    is none."""
    if basis.source.about.kind == "tokens":
        raise DictionaryError("tokens read nothing")
    if not hasattr(basis, "check_read"):
        raise DictionaryError(
            "the basis of the next layer are transcoders of MLPs below it, which do not read it: "
            "add --output, as PATH of the transcoders for each layer's own"
        )
    basis.check_read(read)
    return basis.as_output(read) if hasattr(basis, "as_output") else basis


def plan_layer(
    config: RunConfig,
    model: LoadedModel,
    layer: int,
    heads: list[HeadId],
    sources: Sources,
    outputs: Mapping[int, Any],
    reasons: Mapping[int, str],
) -> LayerPlan:
    """What one layer decomposes by, what reads it, and the facts of its mask and scores."""
    output = outputs.get(layer)
    weights = model.family.head_weights(model.hf, layer)
    unembed = output is not None and output.source.about.kind == "unembed"
    return LayerPlan(
        layer,
        [head.head for head in heads if head.layer == layer],
        index_of(sources.bases[layer].source, sources),
        None if output is None else index_of(output.source, sources),
        None if output is None else "unembed" if unembed else config.read,
        config.outputs == "all" and output is not None,
        reasons.get(layer),
        weights.window,
        weights.softcap,
    )


def shape_of(
    model: LoadedModel,
    plans: Sequence[LayerPlan],
    sources: Sequence[Any],
    slots: Sequence[int],
    views: Sequence[Any] = (),
) -> Shape:
    """What the memory of a prompt depends on; `slots`: active features a position, by source;
    `views`: bases and outputs."""
    weights = model.family.head_weights(model.hf, plans[0].layer)
    outputs = [plan.output for plan in plans if plan.output is not None]
    return Shape(
        number=model.dtype.itemsize,
        d_model=model.d_model,
        d_mlp=widest_layer(model.config),
        d_head=weights.W_Q.shape[-1],
        n_heads=model.n_heads,
        n_kv_heads=len(weights.W_K),
        slots=max(slots[plan.basis] for plan in plans),
        reads=max((slots[output] for output in outputs), default=0),
        features=max(source.about.n_features for source in sources),
        layers=len(plans),
        sites=len({site for one in (*sources, *views) for site in one.sites}),
        together=max(len(one.sites) for one in (*sources, *views)),
        parts=max((getattr(view, "n_parts", 0) for view in views), default=0),
    )


def has_labels(source: Any) -> bool:
    """Are there labels to copy into the store?"""
    return source.about.labels is not None or source.about.kind == "unembed"


def label_lines(source: Any, model: LoadedModel) -> str | None:
    """The labels.jsonl to copy into the store; for the unembedding, the vocabulary."""
    if source.about.labels is not None:
        return Path(source.about.labels).read_text(encoding="utf-8")
    if source.about.kind == "unembed":
        return vocabulary_lines(model)
    return None
