"""What a run is asked to do: the command line, the Python API and the metadata at once."""

import hashlib
import json
import re
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from headattr.budget import parse_bytes
from headattr.errors import UsageError

RESULT_FREE = (
    "model",
    "basis",
    "output",
    "texts",
    "out",
    "device",
    "batch_size",
    "memory",
    "portable",
    "progress",
    "json",
)
"""Fields that cannot change a result: names of inputs (their hashes count instead), places and
speed."""


@dataclass(frozen=True)
class RunConfig:
    """Attribute the heads of a model over a set of texts and keep the result in a folder.

    Example:
      headattr run --model demo --basis demo --texts prompts.txt --heads all --out results
    """

    model: str
    """A model folder, a hub id, a .gguf file, `demo`, `smollm2` or `gemma3-270m`."""
    basis: tuple[str, ...]
    """Dictionaries of the residual stream: `layer=PATH` each, or `PATH` for every layer that it has
    (SAE, crosscoder, or transcoders of the MLPs below), PATH being a folder or org/name/folder of
    the hub; `0=tokens` needs none; a TOML file or folder of [[basis]] tables, or `demo`."""
    texts: str
    """A .txt file (a line a prompt) or a .jsonl file ({"text": ...} or {"tokens": [...]})."""
    out: str
    """The folder of the result; the same configuration resumes in it."""
    output: tuple[str, ...] = ()
    """What reads the heads' outputs, as --basis, or `unembed`. An edge at layer l uses the first
    that hears it (the transcoder of layer l, a dictionary of its attention's output, or of a later
    residual site); without any, the basis of l + 1."""
    heads: str = "all"
    """`all` heads of the layers that have a basis, or a list such as L5H1,L3H*."""
    edges: str = "top:4"
    """`top:M` keys a query, `threshold:P` of the pattern, `all`, or `file:PATH` (JSONL of prompt,
    layer, head, q_pos, k_pos)."""
    q_token: str | None = None
    """Keep only edges whose query token is this text, or matches /this expression/."""
    k_token: str | None = None
    """Keep only edges whose key token is this text, or matches /this expression/."""
    keep_sinks: bool = False
    """With top:M, treat positions that swallow attention (the first, and outlying norms) like any
    key."""
    topk: int = 32
    """Pairs kept an edge."""
    rank: Literal["value", "contrast"] = "value"
    """What pairs and features are the strongest by: their size in the score, or in how this key
    differs from the row's mean (leaves out what all keys share, as softmax does)."""
    read: Literal["encoder", "decoder"] = "encoder"
    """Read direction of output features: encoder row, or activation times decoder direction."""
    attention: Literal["whole", "heads"] = "whole"
    """With transcoders as basis: each earlier attention output is one component, or one a head."""
    outputs: Literal["active", "all"] = "active"
    """Output features to consider: those active at the query, or all (finds what a head
    suppresses)."""
    bos: Literal["auto", "yes", "no"] = "auto"
    """Begin each text with the BOS token; auto: as the dictionaries were trained, else as the
    tokenizer does."""
    paragraphs: bool = False
    """A .txt file holds a prompt a paragraph (blank lines between), not a line."""
    truncate: bool = False
    """Cut prompts that are longer than the model's context instead of setting them aside."""
    dtype: Literal["float32", "float64"] = "float32"
    """Numbers the model and the attribution run in."""
    prompts_per_shard: int = 16
    """Prompts a file of the store."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    batch_size: int = 8
    """Prompts a forward pass, at most."""
    memory: str | None = None
    """Working memory beside the loaded model and dictionaries, such as 8GiB; by default half of
    what is free. Chunks follow from it, results do not."""
    compact: bool = False
    """Keep contrasts, ablations and what is moved to 1 in 128 or finer instead of as computed: a
    quarter smaller. Scores, totals, marginals and pair values are the same."""
    portable: bool = False
    """Compress with gzip, which every HDF5 reads, instead of zstd (smaller, faster; hdf5plugin)."""
    progress: bool = True
    """Show progress on standard error."""
    json: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: False)")] = False
    """Print the summary as JSON."""

    def __post_init__(self) -> None:
        """Refuse values that make no sense, also where they come from Python."""
        for name in ("topk", "prompts_per_shard", "batch_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value!r}; expected a whole number, at least 1"
                )
        for name, hint in get_type_hints(RunConfig).items():
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            if choices and getattr(self, name) not in choices:
                raise UsageError(
                    f"--{name} is {getattr(self, name)!r}; expected {' or '.join(choices)}"
                )
        if self.memory is not None:
            parse_bytes(self.memory)
        for name in ("heads", "edges", "device"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"--{name} is {getattr(self, name)!r}; expected text")
        if self.outputs == "all" and self.read == "decoder":
            raise UsageError(
                "--outputs all with --read decoder: the decoder read of an inactive feature is "
                "zero; "
                "use --read encoder"
            )

    def identity(self) -> dict[str, Any]:
        """The fields that two runs must share to be the same run."""
        return {name: value for name, value in asdict(self).items() if name not in RESULT_FREE}


EVERY_LAYER = -2
"""As the layer of a SPEC: every layer that the dictionary has."""


class HubId(NamedTuple):
    """A folder of a repository on the Hugging Face hub."""

    repository: str
    """org/name"""
    folder: str
    """Inside it; empty for all of it."""

    def __str__(self) -> str:
        """As it was written."""
        return f"{self.repository}/{self.folder}" if self.folder else self.repository


class SourceSpec(NamedTuple):
    """One dictionary that was asked for."""

    kind: str
    """sae, tokens, unembed or plain."""
    layer: int
    """-1 for unembed: after the last; EVERY_LAYER."""
    target: Any
    """A folder, a HubId, or an object in memory."""
    spread: bool = False
    """One of all layers of a dictionary, which may have more than the model."""


def parse_specs(
    specs: tuple[str, ...],
    role: Literal["basis", "output"],
    embedded: Path | None = None,
    *,
    flag: bool = True,
) -> list[SourceSpec]:
    """Read SPECs: `layer=PATH`, `unembed`, a TOML file, a folder with spec.toml, or `demo` (in
    `embedded`).

    `flag`: were they given as --basis or --output? Raises UsageError, naming the SPEC.
    """
    found: list[SourceSpec] = []
    given = f"--{role} " if flag else ""
    for text in specs:
        layer, equals, target = text.partition("=")
        if text == "demo" and embedded is not None:
            found += _from_toml(embedded / "demo" / "spec.toml", role)
        elif text == "unembed" and role == "output":
            found.append(SourceSpec("unembed", -1, "unembed"))
        elif equals and target == "unembed":
            raise UsageError(f"--{role} {text!r}: unembed takes no layer; write --output unembed")
        elif equals and layer.strip().isdigit():
            kind = "tokens" if target == "tokens" else "sae"
            found.append(
                SourceSpec(kind, int(layer), target if kind == "tokens" else _folder(target, text))
            )
        elif (path := Path(text).expanduser()).suffix == ".toml" or (path / "spec.toml").is_file():
            found += _from_toml(path if path.suffix == ".toml" else path / "spec.toml", role)
        elif path.exists():
            found.append(SourceSpec("sae", EVERY_LAYER, path))
        elif "=" not in text and (hub := _hub_id(text)):
            found.append(SourceSpec("sae", EVERY_LAYER, hub))
        else:
            raise UsageError(
                f"{given}{text!r}: no such file or folder; expected layer=PATH, PATH, "
                f"0=tokens, demo, {'unembed, ' if role == 'output' else ''}or a TOML "
                "file (a folder holds it as spec.toml)"
            )
    return check_specs(found, role)


def check_specs(found: list[SourceSpec], role: str) -> list[SourceSpec]:
    """Refuse two dictionaries for one layer, and token decompositions anywhere but at layer 0 of a
    basis."""
    seen: dict[int, SourceSpec] = {}
    for spec in found:
        if spec.layer == EVERY_LAYER:
            continue
        if spec.layer in seen:
            raise UsageError(f"--{role}: {_twice(seen[spec.layer], spec, found)}")
        seen[spec.layer] = spec
        if spec.layer < 0 and spec.kind != "unembed":
            raise UsageError(f"--{role}: there is no layer {spec.layer}; layers count from 0")
        if spec.kind == "tokens" and (spec.layer != 0 or role == "output"):
            raise UsageError(
                f"--{role} {spec.layer}=tokens: tokens decompose layer 0 of a basis only"
            )
    return sorted(found, key=lambda spec: spec.layer % (1 << 30))


def _twice(one: SourceSpec, other: SourceSpec, found: list[SourceSpec]) -> str:
    """Two dictionaries of one layer, and how to give one each."""
    said = f"layer {one.layer} is given twice"
    if other.layer >= 0 and str(one.target) != str(other.target):
        said += f", by {one.target} and by {other.target}"
    said += "; expected one dictionary a layer"
    if not (one.spread or other.spread):
        return said
    by_layer: dict[int, list[str]] = {}
    for spec in found:
        by_layer.setdefault(spec.layer, []).append(str(spec.target))
    given = [f"{n}={t[0] if len(t) == 1 else '...'}" for n, t in sorted(by_layer.items()) if n >= 0]
    return f"{said}: say which, as {' '.join(given)}"


def _folder(target: str, text: str) -> Path | HubId:
    """The folder of a dictionary here, or on the hub."""
    path = Path(target).expanduser()
    if not path.exists() and (hub := _hub_id(target)):
        return hub
    if not path.exists():
        raise UsageError(
            f"{text!r}: {path} is not a folder; expected the folder of a dictionary, or one "
            "layer's file"
        )
    return path


def _hub_id(target: str) -> HubId | None:
    """`org/name` or `org/name/folder`, where that is no path of this machine."""
    match = re.fullmatch(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/(.+))?", target)
    if match is None or Path(target.split("/")[0]).exists():
        return None
    return HubId(match[1], match[2] or "")


def _from_toml(path: Path, role: str) -> list[SourceSpec]:
    if not path.is_file():
        raise UsageError(f"{path}: no such file; expected a TOML file of [[basis]] tables")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    listed = tables.get(role) or tables.get("basis")
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise UsageError(f"{path} has no [[{role}]] tables")
    # a file of bases that is given for the outputs: tokens read nothing
    used = [t for t in listed if not (role == "output" and t.get("kind") == "tokens")]
    return [_from_table(table, path, role) for table in used]


def _from_table(table: dict[str, Any], path: Path, role: str) -> SourceSpec:
    kind, layer = table.get("kind", "sae"), table.get("layer")
    kinds = ("sae", "tokens") if role == "basis" else ("sae", "unembed")
    if kind == "unembed" and layer is None:
        layer = -1
    elif kind == "sae" and layer is None:
        layer = EVERY_LAYER
    if kind not in kinds or type(layer) is not int:
        expected = " | ".join(f'"{name}"' for name in kinds)
        raise UsageError(f"{path}: {table}; expected kind = {expected} and layer = N")
    if kind != "sae":
        return SourceSpec(kind, layer, kind)
    if not isinstance(table.get("path"), str):
        raise UsageError(f"{path}: {table} has no path; expected the folder of a dictionary")
    return SourceSpec(kind, layer, _folder(str(path.parent / table["path"]), table["path"]))


def canonical_hash(value: Any) -> str:
    """SHA-256 (hex) of a value as JSON with sorted keys."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    ).hexdigest()
