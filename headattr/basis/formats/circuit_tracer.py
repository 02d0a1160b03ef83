"""circuit-tracer's transcoders: config.yaml beside one file a layer, or two of a cross-layer one.

    layer_{i}.safetensors   W_enc [F, d], W_dec [F, d], b_enc, b_dec, W_skip (x @ W_skip.T),
                            activation_function.threshold, k
    W_enc_{i}.safetensors   W_enc_{i} [F, d], b_enc_{i}, b_dec_{i}, threshold_{i}, W_skip_{i}
                            (x @ W_skip: not transposed)
    W_dec_{i}.safetensors   W_dec_{i} [F, n_layers - i, d]: what is written to the MLPs i to n - 1

Its jumprelu is x where x > threshold, its top-k keeps negative pre-activations where fewer than k
are positive. The `mwhanna` repositories have wandb-config.yaml beside the files of a set.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from headattr.basis.dictionary import Activation, Dictionary, Release, Tensors
from headattr.basis.formats.circuit_tracer_config import (
    CONFIG,
    CROSS,
    ENCODER,
    KINDS,
    LAYER,
    SET,
    TracerConfig,
    numbered,
    read_config,
)
from headattr.basis.formats.files import labels_of, shapes_of, tensors_of
from headattr.basis.formats.layout import Shape, as_expected, notes, turned
from headattr.basis.formats.registry import Format
from headattr.basis.site import site_of
from headattr.errors import DictionaryError
from headattr.model.load import hash_tensors

_THRESHOLD = "activation_function.threshold"


class _Part(NamedTuple):
    """One layer's dictionary before it is put together: what its files hold."""

    file: Path
    layer: int
    shapes: dict[str, Shape]
    """By the names of a single layer's file."""
    expected: dict[str, Shape]
    targets: tuple[int, ...]
    """Layers of the MLPs that it writes."""
    cross: bool
    """Of a cross-layer transcoder."""


def matches(path: Path) -> bool:
    """A folder of such files, or the file of one layer."""
    if path.is_file():
        return LAYER.fullmatch(path.name) is not None
    config = path / CONFIG
    said = config.is_file() and "model_kind" in config.read_text(encoding="utf-8", errors="replace")
    return bool(said or numbered(path, LAYER) or numbered(path, ENCODER))


def read_release(path: Path) -> Release:
    """The transcoders of a folder, or of one layer's file; layers of a set may be missing, those of
    a cross-layer transcoder not."""
    folder = path.parent if path.is_file() else path
    config = read_config(folder)
    if config.kind == CROSS and not path.is_file():
        parts = _cross_layer(folder)
    else:
        files = {path: LAYER.fullmatch(path.name)} if path.is_file() else numbered(path, LAYER)
        if config.kind != SET or not files:
            raise DictionaryError(
                f"{config.path} says model_kind {config.kind} of {path}; expected "
                f"{SET} with layer_N.safetensors, or {CROSS} with W_enc_N.safetensors and "
                "W_dec_N.safetensors beside it (files that `transcoders` lists elsewhere: give "
                "their own folder)"
            )
        numbers = {int(found.group(1)): file for file, found in files.items() if found}
        parts = [_single(file, layer) for layer, file in sorted(numbers.items())]
    name = f"{folder.name}/{path.stem}" if path.is_file() else path.name
    return Release("transcoders", name, str(path), tuple(_dictionary(p, config) for p in parts))


def _expected(shapes: Mapping[str, Shape], file: Path) -> tuple[int, int, dict[str, Shape]]:
    """Features, width and the shapes that go with them."""
    bias, out = shapes.get("b_enc"), shapes.get("b_dec")
    if bias is None or out is None or len(bias) != 1 or len(out) != 1:
        raise DictionaryError(
            f"{file} has b_enc {bias} and b_dec {out} among {', '.join(sorted(shapes))}; expected "
            "W_enc, W_dec, b_enc and b_dec, the biases one number a feature and one a dimension"
        )
    features, width = bias[0], out[0]
    expected: dict[str, Shape] = {
        "W_enc": (features, width),
        "W_dec": (features, width),
        "b_enc": bias,
        "b_dec": out,
    }
    optional: dict[str, Shape] = {"W_skip": (width, width), _THRESHOLD: (features,), "k": ()}
    expected |= {name: shape for name, shape in optional.items() if name in shapes}
    if shapes.get(_THRESHOLD) == ():
        expected[_THRESHOLD] = ()
    return features, width, expected


def _single(file: Path, layer: int) -> _Part:
    shapes = shapes_of(file)
    return _Part(file, layer, shapes, _expected(shapes, file)[2], (layer,), False)


def _cross_layer(folder: Path) -> list[_Part]:
    """One part a layer; all layers have to be there, and to agree on how many they are."""
    found = numbered(folder, ENCODER)
    layers = sorted(int(match.group(1)) for match in found.values() if match)
    parts, counts, jumps = [], set(), set()
    for i in layers:
        file, decoder = folder / f"W_enc_{i}.safetensors", folder / f"W_dec_{i}.safetensors"
        shapes = {_plain(name, i): shape for name, shape in shapes_of(file).items()}
        written = shapes_of(decoder)
        three = written.get(f"W_dec_{i}", ())
        features, width, expected = _expected(shapes, file)
        if len(written) != 1 or len(three) != 3 or (three[0], three[2]) != (features, width):
            raise DictionaryError(
                f"{decoder} has {written}; expected W_dec_{i} of shape ({features}, n_layers - {i},"
                f" {width}) alone"
            )
        counts.add(i + three[1])
        jumps.add(_THRESHOLD in shapes)
        shapes["W_dec"] = (features, width)
        parts.append(_Part(file, i, shapes, expected, tuple(range(i, i + three[1])), True))
    if len(counts) != 1 or layers != list(range(counts.copy().pop())):
        raise DictionaryError(
            f"{folder} has encoders of layers {layers or 'none'} whose decoders end at layers "
            f"{sorted(count - 1 for count in counts)}; expected all layers of one cross-layer "
            "transcoder"
        )
    if len(jumps) != 1:
        raise DictionaryError(f"{folder}: only some layers have a threshold; expected all or none")
    return parts


def _plain(name: str, layer: int) -> str:
    """A name in a cross-layer transcoder's file as a single layer's file has it."""
    plain = name.removesuffix(f"_{layer}")
    return _THRESHOLD if plain == "threshold" and plain != name else plain


def _dictionary(part: _Part, config: TracerConfig) -> Dictionary:
    file, layer, shapes = part.file, part.layer, part.shapes
    names = turned(shapes, part.expected, str(file))
    features, width = part.expected["W_enc"]
    for key, value in (("d_model", width), ("d_feature", features)):
        if config.widths.get(key, value) != value:
            raise DictionaryError(
                f"{file} has {key} {value}; the run's configuration beside it says "
                f"{config.widths[key]}"
            )
    activation = _activation(part, config)
    said = f"activation = {activation.kind} ({'a' if _THRESHOLD in shapes else 'no'} threshold)"
    guessed = () if config.activation or activation.k else (said,)
    reads, *writes = (
        site_of(f"blocks.{at}.{name}", str(file))
        for at, name in [(layer, config.reads), *((at, config.writes) for at in part.targets)]
    )
    skip = "skip " if "W_skip" in shapes else ""
    return Dictionary(
        name=f"{file.parent.name}/{file.stem}",
        path=str(file),
        format=FORMAT.name,
        architecture=f"{skip}{config.kind} {activation.kind.removeprefix('raw')}",
        activation=activation,
        reads=(reads,),
        writes=tuple(writes),
        d_in=width,
        d_out=width,
        features=features,
        read=partial(_read, part, names, activation, repr((activation, reads, writes))),
        hook_name=f"blocks.{layer}.{config.reads}",
        prepend_bos=config.prepend_bos,
        trained_on=config.trained_on,
        assumed=(*config.assumed, *guessed, *notes(shapes, names)),
        labels=labels_of(file.parent),
    )


def _activation(part: _Part, config: TracerConfig) -> Activation:
    """What the configuration and the tensors say; a top-k is never taken for a ReLU."""
    has_threshold, said = _THRESHOLD in part.shapes, config.activation
    ks = [] if config.k is None else [config.k]
    if "k" in part.shapes:
        ks.append(int(tensors_of(part.file)["k"]))
    where = f"{part.file}, with {config.path.name}"
    if said == "topk" or (said is None and "k" in part.shapes):
        features = part.expected["b_enc"][0]
        if len(set(ks)) != 1 or has_threshold or config.kind == CROSS or not 0 < ks[0] <= features:
            raise DictionaryError(
                f"{where}: activation topk with k = {ks or 'missing'}"
                f"{' and a threshold' if has_threshold else ''} on a {config.kind} of {features} "
                f"features; expected one k up to that on a {SET}"
            )
        return Activation("rawtopk", ks[0])
    if ks:
        raise DictionaryError(
            f"{where}: k = {ks[0]} with activation {said!r}; expected activation: topk, or no k"
        )
    if said is not None and (KINDS[said] == "jumprelu") != has_threshold:
        raise DictionaryError(
            f"{where}: activation {said} with {'a' if has_threshold else 'no'} threshold among the "
            "tensors; expected a threshold with jumprelu alone"
        )
    return Activation("jumprelu" if has_threshold else "relu")


def _read(
    part: _Part, names: tuple[str, ...], activation: Activation, said: str
) -> tuple[Tensors, str]:
    """The tensors; a cross-layer decoder stays one tensor, of which each target is a view."""
    stored = tensors_of(part.file)
    plain = {_plain(n, part.layer): t for n, t in stored.items()} if part.cross else stored
    state = as_expected(plain, names)
    skip = state.get("W_skip")
    if part.cross:
        decoder = part.file.with_name(f"W_dec_{part.layer}.safetensors")
        stored = stored | (written := tensors_of(decoder))
        W_dec = written[f"W_dec_{part.layer}"].unbind(1)
    else:
        W_dec, skip = (state["W_dec"],), None if skip is None else skip.T
    threshold = state.get(_THRESHOLD)
    _check_threshold(threshold, part.file)
    later = (None,) * (len(part.targets) - 1)
    tensors = Tensors(
        W_enc=(state["W_enc"],),
        b_enc=state["b_enc"],
        W_dec=W_dec,
        b_dec=(state["b_dec"], *later),
        threshold=threshold if activation.kind == "jumprelu" else None,
        W_skip=skip,
    )
    return tensors, hash_tensors(stored.items(), said)


def _check_threshold(threshold: Tensor | None, file: Path) -> None:
    """circuit-tracer lets negative pre-activations above a negative threshold pass."""
    if threshold is not None and bool((threshold < 0).any()):
        raise DictionaryError(
            f"{file}: a threshold is {float(threshold.min()):.3g}; expected none below 0: "
            "circuit-tracer's jumprelu has no ReLU, so that it would give negative activations"
        )


FORMAT = Format(
    "circuit-tracer",
    matches,
    read_release,
    f"a folder with {CONFIG} and layer_N.safetensors, or W_enc_N and W_dec_N.safetensors",
)
