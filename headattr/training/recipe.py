"""Recipes of dictionaries: TOML files that say all that decides what is trained."""

import tomllib
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headattr.basis.site import site_of
from headattr.errors import DictionaryError, UsageError
from headattr.model.sites import Site, SiteKind

Storage = Literal["float32", "bfloat16", "float16"]
Trained = Literal["batchtopk", "topk", "jumprelu"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How dictionaries are trained; with the texts and the model it fixes the result on one
    machine."""

    model: str
    """Folder, hub id, .gguf file or name; one that begins with ./ or ../ is relative to the
    recipe."""
    texts: tuple[str, ...]
    """.txt and .jsonl files, folders of them (relative to the recipe), or `stdlib`: the help topics
    and docstrings of this CPython."""
    context_size: int
    """Tokens in a window, BOS included."""
    prepend_bos: bool
    """Does every window begin with BOS?"""
    tokens: int
    """Harvested for training, in whole windows."""
    held_out_tokens: int
    """Of other windows of the same texts, for the scores."""
    d_sae: int
    """Features of each dictionary, or of each group of a crosscoder."""
    k: int
    """Features active at a position: on average (batchtopk), at most (topk), or aimed at
    (jumprelu); of a crosscoder those of all groups together."""
    out: str = ""
    """The folder of the result, relative to where the command runs; --out overrides it."""
    activation: Trained = "batchtopk"
    """batchtopk and jumprelu are saved with thresholds; batchtopk with one, at which up to 65,536
    of the training positions have k features active on average."""
    epochs: float = 1.0
    """How often each position is seen; may be a fraction."""
    batch_size: int = 1024
    """Positions in one optimiser step."""
    learning_rate: float = 1e-3
    """Adam's, constant between warm-up and decay."""
    decay: float = 0.3
    """Share of the steps, at the end, over which the learning rate falls to zero."""
    warm_up: int = 50
    """Steps over which the learning rate (and the sparsity loss of jumprelu) rises; at most a tenth
    of all."""
    dead_after: int = 100_000
    """Positions without firing after which a feature counts as dead."""
    aux_coefficient: float = 1.0
    """Weight of the loss that revives dead features; jumprelu has one of its own, times this."""
    sparsity_coefficient: float = 1.0
    """Weight of the loss that holds jumprelu at k."""
    seed: int = 0
    """Of windows, initial weights and order."""
    norm_limit: float = 10.0
    """A position with more than this many median norms at a site of the dictionary is left out."""
    leave_out_first: bool = True
    """Is the first position of every window left out?"""
    leave_out_special: bool = True
    """Are special tokens left out?"""
    storage: Storage = "float32"
    """How activations are kept between harvest and training."""
    memory_gb: float = 2.0
    """A harvest above this is kept in files beside the result, which go when it is complete."""
    disk_gb: float = 8.0
    """A set of transcoders is harvested some layers at a time where all would be above this."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    labels: bool = False
    """Write labels.jsonl: where each feature fires most?"""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        for name in ("tokens", "held_out_tokens", "d_sae", "k", "epochs", "batch_size"):
            self._at_least(name, 0.0, open_end=True)
        for name in ("learning_rate", "dead_after", "norm_limit", "disk_gb", "checkpoint_every"):
            self._at_least(name, 0.0, open_end=True)
        for name in ("warm_up", "aux_coefficient", "sparsity_coefficient", "memory_gb", "seed"):
            self._at_least(name, 0.0)
        self._at_least("context_size", 2.0)
        if not self.texts:
            raise UsageError("texts is empty; expected files, folders or `stdlib`")
        if not 0 <= self.decay <= 0.9:
            raise UsageError(f"decay is {self.decay}; expected 0 to 0.9 of the run")
        if self.k > self.features:
            raise UsageError(f"k is {self.k}; expected at most the {self.features} features")
        for name in ("tokens", "held_out_tokens"):
            if getattr(self, name) < self.context_size:
                raise UsageError(f"{name} is {getattr(self, name)}; expected a window at least")

    def _at_least(self, name: str, least: float, *, open_end: bool = False) -> None:
        value = getattr(self, name)
        if not (value > least if open_end else value >= least):
            bound = f"more than {least:g}" if open_end else f"at least {least:g}"
            raise UsageError(f"{name} is {value}; expected {bound}")

    @property
    def features(self) -> int:
        """Features among which k are chosen."""
        return self.d_sae

    def numbers(self) -> dict[str, Any]:
        """All fields that change a number of the result."""
        kept = asdict(self)
        for name in ("model", "texts", "out", "memory_gb", "disk_gb", "checkpoint_every", "labels"):
            del kept[name]
        return kept


@dataclass(frozen=True, kw_only=True)
class SaeRecipe(Recipe):
    """A dictionary of one site."""

    site: str
    """`resid_pre 12`, or a hook name."""

    @property
    def place(self) -> Site:
        """The site. Raises UsageError for what is none."""
        kind, _, layer = self.site.partition(" ")
        if kind in get_args(SiteKind) and layer.isdecimal():
            return Site(kind, int(layer))  # type: ignore[arg-type]
        try:
            return site_of(self.site)
        except DictionaryError as error:
            raise UsageError(
                f"site is {self.site!r}; expected `resid_pre 12` or the like, or a hook name: "
                f"{error}"
            ) from error

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        _ = self.place


@dataclass(frozen=True, kw_only=True)
class TranscoderRecipe(Recipe):
    """A set of transcoders: each reads the input of one MLP (mlp_in) and writes its output."""

    layers: tuple[int, ...] | Literal["all"]
    """Layers of the MLPs, ascending, or `all`."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        if self.layers != "all":
            _check_layers("layers", self.layers)
        if self.activation == "topk":
            raise UsageError(
                "activation is topk; expected batchtopk or jumprelu: the files of a transcoder set "
                "hold thresholds"
            )


@dataclass(frozen=True, kw_only=True)
class CrosscoderRecipe(Recipe):
    """A crosscoder of residual streams."""

    sites: tuple[int, ...]
    """Layers whose resid_pre it reads and writes, ascending; the number of layers: the last
    output."""
    causal: bool
    """true: a group of features a site, which reads it alone and writes it and all later ones.
    false: one group, which reads and writes all."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        _check_layers("sites", self.sites)
        if self.causal and self.activation == "topk":
            raise UsageError(
                "activation is topk on a causal crosscoder; expected batchtopk or jumprelu: its "
                "features read different sites, and the k largest are known behind the last alone"
            )

    @property
    def features(self) -> int:
        """Features of all groups."""
        return self.d_sae * (len(self.sites) if self.causal else 1)


KINDS: dict[str, type[Recipe]] = {
    "sae": SaeRecipe,
    "transcoder": TranscoderRecipe,
    "crosscoder": CrosscoderRecipe,
}


def read_recipe(path: Path, kind: str) -> Recipe:
    """The recipe in a TOML file.

    Raises UsageError, naming the file and the key, for one that is unknown or missing, or a value
    of another type.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file; expected a recipe (.toml)")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    try:
        return recipe_of(raw, kind)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def recipe_of(raw: dict[str, Any], kind: str) -> Recipe:
    """The recipe of a kind with these keys; UsageError as `read_recipe`, without the file."""
    recipe = KINDS[kind]
    hints = get_type_hints(recipe)
    known = {field.name: field for field in fields(recipe)}
    if unknown := sorted(raw.keys() - known.keys()):
        raise UsageError(f"unknown key {', '.join(unknown)}; {_meant(raw, kind, known)}")
    optional = {"out", *(f.name for f in fields(Recipe) if f.name not in _REQUIRED)}
    if missing := sorted(known.keys() - raw.keys() - optional):
        raise UsageError(f"{', '.join(missing)} is missing; a {kind} recipe needs it")
    values = {}
    for name, value in raw.items():
        found = _typed(value, hints[name])
        if found is None:
            raise UsageError(f"{name} is {value!r}; expected {in_words(hints[name])}")
        values[name] = found
    return recipe(**values)


def _meant(raw: dict[str, Any], kind: str, known: Collection[str]) -> str:
    """The command for a recipe of another kind; else what was expected."""
    for other, recipe in KINDS.items():
        if other != kind and raw.keys() <= {field.name for field in fields(recipe)}:
            return f"it looks like a {other} recipe, which `headattr train {other}` takes"
    return f"expected among {', '.join(sorted(known))}"


_REQUIRED = (
    "model",
    "texts",
    "context_size",
    "prepend_bos",
    "tokens",
    "held_out_tokens",
    "d_sae",
    "k",
)


def _typed(value: Any, hint: Any) -> Any:
    """The value as a field keeps it, or None where it is of another type."""
    if get_origin(hint) is UnionType or str(get_origin(hint)) == "typing.Union":
        return next((v for h in get_args(hint) if (v := _typed(value, h)) is not None), None)
    if get_origin(hint) is Literal:
        return value if value in get_args(hint) and isinstance(value, str) else None
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            return None
        parts = [_typed(part, get_args(hint)[0]) for part in value]
        return None if None in parts else tuple(parts)
    if hint is float and type(value) is int:
        return float(value)
    return value if type(value) is hint else None


def in_words(hint: Any) -> str:
    """The type of a field, as a recipe may give it."""
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a list of {in_words(get_args(hint)[0])}"
    if get_args(hint):
        return " or ".join(in_words(part) for part in get_args(hint))
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    return names[hint]


def _check_layers(name: str, layers: tuple[int, ...] | str) -> None:
    numbers = [layer for layer in layers if isinstance(layer, int)]
    if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 0:
        raise UsageError(f"{name} is {list(layers)}; expected layers, each once, ascending")
