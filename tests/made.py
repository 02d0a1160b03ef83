"""Random crosscoders, transcoder sets and dictionaries of single sites, with nothing trivial."""

from typing import Any

import torch

from headattr.basis.dictionary import Activation, Dictionary, Frame, Release, Tensors
from headattr.model.sites import Site

D, FEATURES = 24, 20


def tensors(
    reads: int, writes: int, seed: int, *, skip: bool = False, first: bool = True, d: int = D
) -> Tensors:
    """Random and small enough to leave an error of the size of the stream."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 0.4 * torch.randn(*shape, generator=generator)

    return Tensors(
        W_enc=tuple(random(FEATURES, d) for _ in range(reads)),
        b_enc=random(FEATURES),
        W_dec=tuple(random(FEATURES, d) for _ in range(writes)),
        b_dec=tuple(random(d) if first or i == 0 else None for i in range(writes)),
        threshold=random(FEATURES).abs(),
        W_skip=random(d, d) if skip else None,
    )


def dictionary(
    reads: list[Site], writes: list[Site], seed: int, kind: str = "jumprelu", **options: Any
) -> Dictionary:
    given = tensors(len(reads), len(writes), seed, **options)
    k = 5 if kind == "topk" else None
    width = options.get("d", D)
    return Dictionary(
        name=f"made {seed}",
        path=None,
        format="test",
        architecture=kind,
        activation=Activation(kind, k),
        reads=tuple(reads),
        writes=tuple(writes),
        d_in=width,
        d_out=width,
        features=FEATURES,
        read=lambda: (given, str(seed)),
        frame=Frame(undone=reads == writes),
    )


def resid(*layers: int) -> list[Site]:
    return [Site("resid_pre", layer) for layer in layers]


def crosscoder(*layers: int, causal: bool = True) -> Release:
    """Groups by the site that they read, or one that reads and writes all."""
    if not causal:
        return Release(
            "crosscoder", "acausal", None, (dictionary(resid(*layers), resid(*layers), 7),)
        )
    groups = [
        dictionary(resid(layer), resid(*layers[i:]), 30 + i, first=False)
        for i, layer in enumerate(layers)
    ]
    return Release("crosscoder", "weakly causal", None, tuple(groups))


def transcoders(
    *layers: int, site: str = "mlp_in", across: int | None = None, skip: bool = False
) -> Release:
    """One a layer; `across`: each writes up to that layer."""
    made = []
    for layer in layers:
        last = layer if across is None else across
        writes = [Site("mlp_out", target) for target in range(layer, last + 1)]
        read = Site(site, layer)  # type: ignore[arg-type]
        options = {"skip": skip, "first": across is None}
        made.append(dictionary([read], writes, 50 + layer, **options))
    return Release("transcoders", "stack", None, tuple(made))
