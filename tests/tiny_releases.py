"""Releases in memory: dictionaries that are exact, that are zero, and random ones of every kind."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headattr.basis.dictionary import Activation, Dictionary, Frame, Release, Tensors
from headattr.model.sites import Site


def dictionary(
    tensors: Tensors, reads: Sequence[Site], writes: Sequence[Site], **fields: Any
) -> Dictionary:
    """One dictionary of given tensors."""
    features, d_in = tensors.W_enc[0].shape
    given = {"architecture": "standard", "activation": Activation("relu"), **fields}
    return Dictionary(
        name=given.pop("name", f"of {reads[0]}"),
        path=None,
        format="memory",
        reads=tuple(reads),
        writes=tuple(writes),
        d_in=d_in,
        d_out=tensors.W_dec[0].shape[1],
        features=features,
        read=lambda: (tensors, f"hash of {reads[0]}"),
        **given,
    )


def pairs(d: int = 24, size: float = 1.0) -> torch.Tensor:
    """A feature for each axis and sign: what they encode they reconstruct to the last bit."""
    return size * torch.cat([torch.eye(d), -torch.eye(d)])


def exact(site: Site, d: int = 24, **fields: Any) -> Release:
    """An SAE that gives back whatever it is given."""
    tensors = Tensors((pairs(d),), None, (pairs(d),), (None,))
    return Release("sae", "exact", None, (dictionary(tensors, [site], [site], **fields),))


def nothing(site: Site, d: int = 24) -> Release:
    """An SAE whose features are never active."""
    tensors = Tensors((0 * pairs(d),), -torch.ones(2 * d), (pairs(d),), (torch.zeros(d),))
    return Release("sae", "nothing", None, (dictionary(tensors, [site], [site]),))


def random_tensors(reads: int, writes: int, seed: int, features: int = 30, d: int = 24) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    return Tensors(
        tuple(made(features, d) for _ in range(reads)),
        made(features),
        tuple(made(features, d) for _ in range(writes)),
        tuple(made(d) for _ in range(writes)),
    )


def sae(site: Site, seed: int = 0, **sizes: int) -> Release:
    """A random SAE of any site."""
    tensors = random_tensors(1, 1, seed, **sizes)
    frame = Frame(subtract_b_dec=True)
    found = dictionary(tensors, [site], [site], frame=frame, name="random")
    return Release("sae", "random", None, (found,))


def crosscoder(layers: Sequence[int] = (1, 2), seed: int = 0) -> Release:
    """A weakly causal crosscoder: a group a site, which writes it and those behind it."""
    sites = [Site("resid_pre", layer) for layer in layers]
    parts = [
        dictionary(random_tensors(1, len(sites) - i, seed + i), [site], sites[i:])
        for i, site in enumerate(sites)
    ]
    return Release("crosscoder", "crosscoder", None, tuple(parts))


def acausal(layers: Sequence[int] = (1, 2), seed: int = 0) -> Release:
    """A crosscoder whose features read and write every site."""
    sites = [Site("resid_pre", layer) for layer in layers]
    tensors = random_tensors(len(sites), len(sites), seed)
    return Release("crosscoder", "acausal", None, (dictionary(tensors, sites, sites),))


def transcoders(n_layers: int = 3, seed: int = 0, *, across: bool = False) -> Release:
    """Transcoders of all MLPs; `across`: each writes those behind it too."""
    parts = []
    for layer in range(n_layers):
        writes = [Site("mlp_out", at) for at in range(layer, n_layers if across else layer + 1)]
        tensors = random_tensors(1, len(writes), seed + layer)
        parts.append(
            dictionary(tensors, [Site("mlp_in", layer)], writes, frame=Frame(undone=False))
        )
    return Release("transcoders", "transcoders", None, tuple(parts))


RESIDUAL: dict[str, Callable[[], Release]] = {
    "sae": lambda: sae(Site("resid_pre", 1)),
    "crosscoder": crosscoder,
    "acausal": acausal,
    "transcoders": transcoders,
    "across": lambda: transcoders(across=True),
}
"""A release of every kind that is a basis, for a model of width 24 and three layers."""
