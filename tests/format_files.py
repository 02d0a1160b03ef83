"""What the tests of formats share: files of random tensors, dictionaries read back, and sae_lens'
own loaders fed from a folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headattr.basis.coder import Coder
from headattr.basis.dictionary import Dictionary
from headattr.basis.formats.registry import open_release

D, F = 24, 40
CPU = torch.device("cpu")
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
Tensors = dict[str, torch.Tensor]


def random_tensors(seed: int, dtype: torch.dtype, **shapes: tuple[int, ...]) -> Tensors:
    """One tensor a name; thresholds and norms of no sign are made positive by the caller."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor.to(dtype).contiguous() for name, tensor in made.items()}


def vectors(seed: int = 5, positions: int = 9, width: int = D) -> torch.Tensor:
    return torch.randn(positions, width, generator=torch.Generator().manual_seed(seed))


def dictionaries(path: Path) -> tuple[Dictionary, ...]:
    return open_release(path).dictionaries


def coder_of(path: Path, index: int = 0) -> Coder:
    return Coder(dictionaries(path)[index], torch.float32, CPU)


def acts_of(coder: Coder, x: torch.Tensor) -> torch.Tensor:
    """Its activations, dense."""
    active = coder.encode([x])
    out = torch.zeros(len(x), coder.dictionary.features)
    out[active.positions, active.ids] = active.acts
    return out


def output_of(coder: Coder, x: torch.Tensor, write: int = 0) -> torch.Tensor:
    """All that it writes at one of its targets, its skip at the first."""
    found = acts_of(coder, x) @ coder.directions(write)[:] + coder.bias(write, x)
    skip = coder.skip(x) if write == 0 else None
    return found if skip is None else found + skip


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    return path


def largest(pre: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of each row, the others 0."""
    at = pre.topk(k, -1).indices
    return torch.zeros_like(pre).scatter(1, at, pre.gather(1, at))


def by_sae_lens(loader: str, root: Path, name: str, patch: pytest.MonkeyPatch) -> Any:
    """What sae_lens makes of a folder: its hub loader, told that downloads lie in `root`."""
    import sae_lens.loading.pretrained_sae_loaders as loaders
    from sae_lens import SAE

    def here(repo_id: str, filename: str, subfolder: str | None = None, **_: Any) -> str:
        path = root / (subfolder or "") / filename
        if not path.exists():
            raise huggingface_hub.utils.EntryNotFoundError(str(path))
        return str(path)

    def shapes(repo_id: str, filename: str) -> dict[str, list[int]]:
        with safe_open(here(repo_id, filename), "pt") as file:
            return {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118

    def convert(path: Any, device: str = "cpu", cfg_overrides: Any = None) -> Any:
        load: Callable[..., Any] = getattr(loaders, loader)
        return load(root.name, str(path), device, False, cfg_overrides)[:2]

    patch.setattr(loaders, "hf_hub_download", here)
    patch.setattr(loaders, "get_safetensors_tensor_shapes", shapes)
    return SAE.load_from_disk(name, converter=convert)
