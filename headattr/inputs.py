"""What a run starts from: names on the command line, or objects in memory.

Files are checked, no model is loaded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from headattr.basis.dictionary import Release
from headattr.basis.formats.registry import format_of, open_release, open_releases
from headattr.basis.hub import local_copy
from headattr.basis.load import check_files
from headattr.config import EVERY_LAYER, HubId, RunConfig, SourceSpec, check_specs, parse_specs
from headattr.errors import StoreError, UsageError
from headattr.model.embedded import embedded_folder
from headattr.texts import Texts, read_texts, texts_from_memory


class Inputs(NamedTuple):
    """What a run starts from, as files or as objects in memory."""

    model: Any
    basis: list[SourceSpec]
    output: list[SourceSpec]
    texts: Texts
    tokenizer: Any | None = None


def inputs_of(config: RunConfig) -> Inputs:
    """Inputs named on the command line; dictionary files and texts are checked, no model is
    loaded."""
    embedded = embedded_folder() if "demo" in (*config.basis, *config.output) else None
    basis = parse_specs(config.basis, "basis", embedded)
    output = parse_specs(config.output, "output", embedded)
    basis, output = spread(basis, "basis"), spread(output, "output")
    return Inputs(
        config.model, basis, output, read_texts(Path(config.texts), paragraphs=config.paragraphs)
    )


def inputs_from_memory(
    model: Any,
    basis: Any,
    output: Any,
    texts: str | Path | Sequence[str | Sequence[int]] | Mapping[str, Any],
    out: str | Path,
    tokenizer: Any | None,
    options: dict[str, Any],
) -> tuple[RunConfig, Inputs]:
    """The configuration and inputs of a call from Python; see `headattr.attribute` for what each
    may be."""
    unknown = sorted(options.keys() - RunConfig.__dataclass_fields__.keys())
    if unknown:
        raise UsageError(f"there is no option {unknown[0]!r}; expected fields of RunConfig")
    if isinstance(texts, str) and not Path(texts).exists() and Path(texts).suffix == "":
        raise UsageError(f"there is no file {texts!r}; for texts in memory give a list of strings")
    config = RunConfig(
        model=str(model) if isinstance(model, str | Path) else type(model).__name__,
        texts=str(texts) if isinstance(texts, str | Path) else "in memory",
        out=str(out),
        basis=_named(basis),
        output=_named(output),
        **{"progress": False, **options},
    )
    embedded = embedded_folder() if "demo" in (*config.basis, *config.output) else None
    basis_specs = _specs(basis, config.basis, "basis", embedded)
    output_specs = _specs(output, config.output, "output", embedded)
    basis_specs, output_specs = spread(basis_specs, "basis"), spread(output_specs, "output")
    if isinstance(texts, str | Path):
        found = read_texts(Path(texts), paragraphs=config.paragraphs)
    else:
        found = texts_from_memory(texts)
    named = str(model) if isinstance(model, Path) else model
    return config, Inputs(named, basis_specs, output_specs, found, tokenizer)


def spread(specs: list[SourceSpec], role: Literal["basis", "output"]) -> list[SourceSpec]:
    """Specs whose files are checked; one without a layer as one for every layer that it has."""
    return check_specs(check_files(specs, role), role)


class NamedRelease(NamedTuple):
    """A dictionary that was asked for by itself, whatever it could be used as."""

    name: str
    release: Release
    layer: int | None
    """As it was asked for; None: as its files say."""


def releases_of(specs: Sequence[str]) -> list[NamedRelease]:
    """Dictionaries named on the command line, each once; no model is loaded.

    Raises UsageError for a SPEC that names none, DictionaryError for files that are broken.
    """
    embedded = embedded_folder() if "demo" in specs else None
    found: dict[Any, NamedRelease] = {}
    for text in specs:
        for spec in parse_specs((text,), "basis", embedded, flag=False):
            if spec.kind != "sae":
                continue
            layer = None if spec.layer == EVERY_LAYER else spec.layer
            path = local_copy(spec.target) if isinstance(spec.target, HubId) else spec.target
            for release in open_releases(path) if layer is None else [open_release(path)]:
                found.setdefault(release.path, NamedRelease(release.name, release, layer))
    if not found:
        raise UsageError(f"{', '.join(specs) or 'nothing'} names no dictionary; expected its PATH")
    return list(found.values())


def check_result(path: Path) -> None:
    """Refuse, with StoreError, what is nowhere and what is something else than a result."""
    if not path.exists():
        raise StoreError(f"{path} does not exist; expected the folder of a result")
    found = format_of(path)
    if found is not None:
        raise StoreError(
            f"{path} is a dictionary ({found}), not a result; `headattr dictionaries inspect "
            f"{path}` says what it is"
        )


def _named(given: Any) -> tuple[str, ...]:
    """Specs as text, for the record."""
    if isinstance(given, str | Path):
        return (str(given),)
    if isinstance(given, Mapping):
        return tuple(f"{layer}=in memory" for layer in given)
    return tuple(str(spec) for spec in given)


def specs_from_memory(given: Any, role: Literal["basis", "output"]) -> list[SourceSpec]:
    """Specs of a call from Python, as text or as a dict from layer to a folder or an object; files
    are checked."""
    named = _named(given)
    specs = _specs(given, named, role, embedded_folder() if "demo" in named else None)
    return spread(specs, role)


def _specs(
    given: Any, named: tuple[str, ...], role: Literal["basis", "output"], embedded: Path | None
) -> list[SourceSpec]:
    """Specs of a call from Python: text, or a dict from layer to a folder or an object."""
    if not isinstance(given, Mapping):
        return parse_specs(named, role, embedded)
    specs: list[SourceSpec] = []
    for layer, target in given.items():
        if isinstance(target, str | Path) and str(target) != "tokens":
            specs += parse_specs((f"{layer}={target}",), role)
        else:
            kind = "tokens" if isinstance(target, str) else "sae"
            specs.append(SourceSpec(kind, int(layer), target))
    return check_specs(specs, role)
