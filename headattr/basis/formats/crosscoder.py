"""headattr's own format of crosscoders: cfg.json + weights.safetensors.

    cfg.json             {"format": "headattr-crosscoder", "version": 1, "model_name", "sites":
                         [hook names], "causal", "d_model", "features": [of each group],
                         "activation": {"kind": relu, jumprelu or topk, "k"}, "prepend_bos",
                         "trained_on"}
    weights.safetensors  {g}.W_enc.{s} and {g}.W_dec.{s} [features, d_model], {g}.b_enc,
                         {g}.threshold [features] (jumprelu alone), b_dec.{s} [d_model]

g counts the groups and s the sites. Causal: a group a site, which reads it alone and writes it and
all later ones. Acausal: one group, which reads and writes all. Everything is in the model's units.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headattr.basis.dictionary import Activation, Dictionary, Release, Tensors
from headattr.basis.formats.files import check_file, json_object, labels_of, shapes_of, tensors_of
from headattr.basis.formats.registry import Format
from headattr.basis.site import site_of
from headattr.errors import DictionaryError
from headattr.model.load import hash_tensors

NAME, VERSION = "headattr-crosscoder", 1
CONFIG, WEIGHTS = "cfg.json", "weights.safetensors"
_KINDS = ("relu", "jumprelu", "topk")


class CrosscoderConfig(NamedTuple):
    """What cfg.json says."""

    model_name: str
    sites: tuple[str, ...]
    """Hook names, ascending."""
    causal: bool
    d_model: int
    features: tuple[int, ...]
    """Of each group."""
    activation: Activation
    prepend_bos: bool | None = None
    trained_on: str | None = None

    def reads(self, group: int) -> range:
        """The sites that a group reads."""
        return range(group, group + 1) if self.causal else range(len(self.sites))

    def writes(self, group: int) -> range:
        """The sites that a group writes."""
        return range(group if self.causal else 0, len(self.sites))


def write_crosscoder(folder: Path, config: CrosscoderConfig, groups: Sequence[Tensors]) -> None:
    """Write both files into a folder; b_dec is that of the first group, which writes every site.

    Raises DictionaryError for tensors that do not fit the configuration.
    """
    from safetensors.torch import save_file

    named: dict[str, Any] = {f"b_dec.{s}": part for s, part in enumerate(groups[0].b_dec)}
    for g, group in enumerate(groups):
        named |= {f"{g}.W_enc.{s}": W for s, W in zip(config.reads(g), group.W_enc, strict=True)}
        named |= {f"{g}.W_dec.{s}": W for s, W in zip(config.writes(g), group.W_dec, strict=True)}
        named |= {f"{g}.b_enc": group.b_enc, f"{g}.threshold": group.threshold}
    named = {name: part.contiguous() for name, part in named.items() if part is not None}
    _check_shapes({name: tuple(part.shape) for name, part in named.items()}, config, str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(named, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes files that only their owner can read
    said = {
        "format": NAME,
        "version": VERSION,
        **config._asdict(),
        "activation": config.activation._asdict(),
    }
    (folder / CONFIG).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def read_release(folder: Path) -> Release:
    """The groups of a folder. Raises DictionaryError, naming the file and the key, for a newer
    version, a missing key, or tensors that do not fit."""
    config = _interpret(json_object(folder / CONFIG), folder / CONFIG)
    check_file(folder / WEIGHTS)
    _check_shapes(shapes_of(folder / WEIGHTS), config, str(folder / WEIGHTS))
    groups = tuple(_group(folder, config, g) for g in range(len(config.features)))
    return Release("crosscoder", folder.name, str(folder), groups)


def _group(folder: Path, config: CrosscoderConfig, g: int) -> Dictionary:
    reads, writes = config.reads(g), config.writes(g)
    sites = [site_of(name) for name in config.sites]

    def read() -> tuple[Tensors, str]:
        own = {
            name: part
            for name, part in tensors_of(folder / WEIGHTS).items()
            if name.startswith(f"{g}.") or (g == 0 and name.startswith("b_dec."))
        }
        tensors = Tensors(
            W_enc=tuple(own[f"{g}.W_enc.{s}"] for s in reads),
            b_enc=own[f"{g}.b_enc"],
            W_dec=tuple(own[f"{g}.W_dec.{s}"] for s in writes),
            b_dec=tuple(own.get(f"b_dec.{s}") for s in writes),
            threshold=own.get(f"{g}.threshold"),
        )
        return tensors, hash_tensors(own.items(), repr((config, g)))

    return Dictionary(
        name=folder.name if len(config.features) == 1 else f"{folder.name} of {sites[g]}",
        path=str(folder),
        format=FORMAT.name,
        architecture=("causal" if config.causal else "acausal") + f" {config.activation.kind}",
        activation=config.activation,
        reads=tuple(sites[s] for s in reads),
        writes=tuple(sites[s] for s in writes),
        d_in=config.d_model,
        d_out=config.d_model,
        features=config.features[g],
        read=read,
        hook_name=", ".join(config.sites[s] for s in reads),
        prepend_bos=config.prepend_bos,
        trained_on=config.trained_on,
        labels=labels_of(folder),
    )


def _interpret(raw: dict[str, Any], where: Path) -> CrosscoderConfig:
    """The configuration, checked."""
    version = raw.get("version")
    if type(version) is not int or version < 1:
        raise DictionaryError(f"{where}: version is {version!r}; expected a number from 1")
    if version > VERSION:
        raise DictionaryError(
            f"{where} has version {version}, and this headattr reads up to {VERSION}; upgrade "
            "headattr"
        )
    sites, features = raw.get("sites"), raw.get("features")
    whole = isinstance(sites, list) and sites and all(isinstance(name, str) for name in sites)
    counts = isinstance(features, list) and all(type(n) is int and n > 0 for n in features)
    for key, fits, expected in (
        ("model_name", isinstance(raw.get("model_name"), str), "a string"),
        ("sites", whole, "hook names"),
        ("causal", isinstance(raw.get("causal"), bool), "true or false"),
        ("d_model", type(raw.get("d_model")) is int and raw["d_model"] > 0, "a width"),
        ("features", counts, "the number of features of each group"),
        ("prepend_bos", isinstance(raw.get("prepend_bos"), bool | None), "true, false or null"),
        ("trained_on", isinstance(raw.get("trained_on"), str | None), "a text or null"),
    ):
        if not fits:
            raise DictionaryError(f"{where}: {key} is {raw.get(key)!r}; expected {expected}")
    config = CrosscoderConfig(
        raw["model_name"],
        tuple(raw["sites"]),
        raw["causal"],
        raw["d_model"],
        tuple(raw["features"]),
        _activation(raw.get("activation"), where),
        raw.get("prepend_bos"),
        raw.get("trained_on"),
    )
    return _checked(config, where)


def _checked(config: CrosscoderConfig, where: Path) -> CrosscoderConfig:
    """Refuse what contradicts itself."""
    groups = len(config.sites) if config.causal else 1
    if len(config.features) != groups:
        raise DictionaryError(
            f"{where}: features has {len(config.features)} groups; expected {groups}: one a site "
            "where it is causal, one alone where it is not"
        )
    sites = [site_of(name) for name in config.sites]
    if sorted(set(sites)) != sites:
        raise DictionaryError(
            f"{where}: sites are {', '.join(config.sites)}; expected each once, ascending"
        )
    k = config.activation.k
    if k is not None and k > min(config.features):
        raise DictionaryError(f"{where}: k is {k}; expected at most {min(config.features)}")
    return config


def _activation(raw: Any, where: Path) -> Activation:
    kind, k = (raw.get("kind"), raw.get("k")) if isinstance(raw, dict) else (None, None)
    counted = type(k) is int and k > 0
    if kind not in _KINDS or counted != (kind == "topk") or not (counted or k is None):
        raise DictionaryError(
            f'{where}: activation is {raw!r}; expected {{"kind": relu, jumprelu or topk}}, with '
            '"k" a number where it is topk and null elsewhere'
        )
    return Activation(kind, k)


def _check_shapes(found: dict[str, tuple[int, ...]], config: CrosscoderConfig, where: str) -> None:
    """Refuse tensors that are missing, too many, or of another shape, naming the first."""
    d = config.d_model
    expected: dict[str, tuple[int, ...]] = {f"b_dec.{s}": (d,) for s in range(len(config.sites))}
    for g, n in enumerate(config.features):
        expected |= {f"{g}.W_enc.{s}": (n, d) for s in config.reads(g)}
        expected |= {f"{g}.W_dec.{s}": (n, d) for s in config.writes(g)}
        expected[f"{g}.b_enc"] = (n,)
        if config.activation.kind == "jumprelu":
            expected[f"{g}.threshold"] = (n,)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise DictionaryError(
                f"{where}: {name} is {found.get(name, 'missing')}; expected "
                f"{expected.get(name, 'no such tensor')}"
            )


def _matches(path: Path) -> bool:
    if not (path / CONFIG).is_file():
        return False
    try:
        return json_object(path / CONFIG).get("format") == NAME
    except (DictionaryError, UnicodeDecodeError):
        return False


FORMAT = Format(
    "headattr-crosscoder",
    _matches,
    read_release,
    f'a folder with {CONFIG} ("format": "{NAME}") and {WEIGHTS}',
)
