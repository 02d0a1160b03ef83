"""What `evaluate`, `dictionaries inspect` and `dictionaries label` are asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from headattr.budget import parse_bytes
from headattr.errors import UsageError

_Json = Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: False)")]


@dataclass(frozen=True, kw_only=True)
class OnTexts:
    """A model over a set of texts."""

    model: str = ""
    """A model folder, a hub id, a .gguf file, `demo`, `smollm2` or `gemma3-270m`."""
    texts: str = ""
    """A .txt file (a line a prompt) or a .jsonl file ({"text": ...} or {"tokens": [...]})."""
    max_tokens: int | None = None
    """Take prompts, in order, as long as they are no more tokens than this together (one at
    least)."""
    bos: Literal["auto", "yes", "no"] = "auto"
    """Begin each text with the BOS token; auto: as the dictionaries were trained, else as the
    tokenizer does."""
    paragraphs: bool = False
    """A .txt file holds a prompt a paragraph (blank lines between), not a line."""
    truncate: bool = False
    """Cut prompts that are longer than the model's context instead of setting them aside."""
    dtype: Literal["float32", "float64"] = "float32"
    """Numbers the model and the dictionaries run in."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    batch_size: int = 8
    """Prompts a forward pass, at most."""
    memory: str | None = None
    """Working memory beside the loaded model and dictionaries, such as 8GiB; by default half of
    what is free."""
    progress: bool = True
    """Show progress on standard error."""
    json: _Json = False
    """Print the answer as JSON."""

    def __post_init__(self) -> None:
        """Refuse values that make no sense."""
        for name in ("batch_size", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} is {value!r}; expected a whole number, at least 1")
        if self.memory is not None:
            parse_bytes(self.memory)

    def check_given(self, command: str) -> None:
        """Raises UsageError where the model or the texts are missing."""
        for name in ("model", "texts"):
            if not getattr(self, name):
                raise UsageError(f"{command} needs --{name}; found none")


@dataclass(frozen=True, kw_only=True)
class Evaluate(OnTexts):
    """Which dictionary to choose: sparsity, fit, loss recovered, attention explained.

    Example:
      headattr evaluate demo --model demo --texts prompts.txt
    """

    dictionaries: tyro.conf.Positional[tuple[str, ...]]
    """Dictionaries, each judged by itself: PATH, `layer=PATH` where it does not name its site, a
    TOML file of [[basis]] tables, or `demo`."""
    layers: str = "all"
    """Layers whose attention is judged, of those that a dictionary is a basis of: `all`, or a list
    such as 1,3-5."""
    heads: str = "all"
    """`all` heads of them, or a list such as L5H1,L3H*."""


@dataclass(frozen=True, kw_only=True)
class Inspect(OnTexts):
    """What a dictionary is, from its files; with a model and texts, how it fits them.

    Example:
      headattr dictionaries inspect demo
    """

    dictionary: tyro.conf.Positional[str]
    """PATH, `layer=PATH` where it does not name its site, or `demo`."""
    hash: bool = False
    """Read the tensors and print their hashes."""


@dataclass(frozen=True, kw_only=True)
class Label(OnTexts):
    """Write labels.jsonl: where each feature fires most, how often, and which logits it moves.

    Example:
      headattr dictionaries label path/to/dictionary --model demo --texts prompts.txt
    """

    dictionary: tyro.conf.Positional[str]
    """PATH, `layer=PATH` where it does not name its site, or `demo`."""
    out: Path | None = None
    """The file to write; by default labels.jsonl beside the dictionary."""
    given: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Take labels from a file or folder instead of a model: Neuronpedia's explanations (.json,
    .jsonl or .gz of them: "index" or "feature" a number, "description" a text, and "layer" such as
    5-res-jb where the dictionary has several), or circuit-tracer's feature files ({cantor}.json).
    """
    replace: bool = False
    """Replace a labels.jsonl that is there; with --from, what was measured in it (contexts,
    density, quantiles, logits) is kept where the file says nothing of it."""
    logits: bool = True
    """Find the tokens whose logits each feature moves most."""
