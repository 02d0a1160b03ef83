"""What config.yaml (and a run's configuration beside it) says of circuit-tracer's transcoders."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headattr.errors import DictionaryError

CONFIG, RUNS = "config.yaml", ("wandb-config.yaml", "wanb-config.yaml")
SET, CROSS = "transcoder_set", "cross_layer_transcoder"
KINDS = {"relu": "relu", "topk": "rawtopk", "jumprelu": "jumprelu", "jump_relu": "jumprelu"}
"""Activations by their names in a configuration."""
LAYER = re.compile(r"layer_(\d+)\.safetensors")
ENCODER = re.compile(r"W_enc_(\d+)\.safetensors")
_RUN_HOOKS = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}


class TracerConfig(NamedTuple):
    """What the configuration says."""

    path: Path
    kind: str
    reads: str
    """A hook's name without its layer."""
    writes: str
    activation: str | None
    k: int | None
    widths: dict[str, int]
    """d_model and d_feature, where a run's configuration has them."""
    prepend_bos: bool | None
    trained_on: str | None
    """Both where headattr trained them."""
    assumed: tuple[str, ...]


def numbered(folder: Path, pattern: re.Pattern[str]) -> dict[Path, re.Match[str] | None]:
    """The files of a folder whose names fit, with their match."""
    inside = folder.iterdir() if folder.is_dir() else ()
    return {path: found for path in inside if (found := pattern.fullmatch(path.name))}


def read_config(folder: Path) -> TracerConfig:
    """The configuration of a folder, checked; DictionaryError names the key."""
    path = folder / CONFIG
    run = next((folder / name for name in RUNS if (folder / name).is_file()), None)
    if not path.is_file() and run is None:
        raise DictionaryError(
            f"{folder} has no {CONFIG}; expected its model_kind, feature_input_hook and "
            "feature_output_hook: without them nothing says what the transcoders read"
        )
    said = _yaml(path) if path.is_file() else {}
    kind, hooks = said.get("model_kind"), {key: said.get(key) for key in _RUN_HOOKS}
    assumed = []
    if kind is None:
        cross, single = numbered(folder, ENCODER), numbered(folder, LAYER)
        if bool(cross) == bool(single):
            raise DictionaryError(f"{path} has no model_kind; expected {SET} or {CROSS}")
        kind = CROSS if cross else SET
        assumed.append(f"model_kind = {kind} (from the names of the files)")
    for key, usual in _RUN_HOOKS.items():
        if hooks[key] is None and run is not None:
            hooks[key] = usual
            assumed.append(f"{key} = {usual} (as in all sets with {run.name})")
    k = said.get("k")
    _check(path, {"model_kind": kind, "activation": said.get("activation"), "k": k, **hooks})
    widths = {} if run is None else _widths(_yaml(run))
    where = path if path.is_file() or run is None else run
    reads, writes = (str(hooks[key]) for key in _RUN_HOOKS)
    bos, trained_on = said.get("prepend_bos"), said.get("trained_on")
    return TracerConfig(
        where,
        kind,
        reads,
        writes,
        said.get("activation"),
        k,
        widths,
        bos if isinstance(bos, bool) else None,
        trained_on if isinstance(trained_on, str) else None,
        tuple(assumed),
    )


def _check(path: Path, said: Mapping[str, Any]) -> None:
    """Refuse values that mean nothing here, naming key and file."""
    if said["model_kind"] not in (SET, CROSS):
        raise DictionaryError(
            f"{path}: model_kind is {said['model_kind']!r}; expected {SET} or {CROSS}"
        )
    for key, usual in _RUN_HOOKS.items():
        if not isinstance(said[key], str):
            raise DictionaryError(
                f"{path}: {key} is {said[key]!r}; expected a hook's name without its layer, such "
                f"as {usual}"
            )
    if said["activation"] is not None and str(said["activation"]) not in KINDS:
        raise DictionaryError(
            f"{path}: activation is {said['activation']!r}; expected relu, topk or jumprelu"
        )
    if said["k"] is not None and (type(said["k"]) is not int or said["k"] < 1):
        raise DictionaryError(f"{path}: k is {said['k']!r}; expected the number of active features")


def _widths(run: Mapping[str, Any]) -> dict[str, int]:
    """d_model and d_feature of a run's configuration, as far as they are there."""
    given = {key: run.get(key) for key in ("d_model", "d_feature")}
    plain = {key: v.get("value") if isinstance(v, dict) else v for key, v in given.items()}
    return {key: value for key, value in plain.items() if type(value) is int}


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DictionaryError(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise DictionaryError(f"{path} holds a {type(found).__name__}; expected keys and values")
    return found
