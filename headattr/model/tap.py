"""A tap in one forward pass: what it keeps of attention, streams and sites."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from headattr.model.forward import (
    Enough,
    eager_in_blocks,
    first_of,
    listening,
    run_model,
    scale_of,
)
from headattr.model.head import Norm
from headattr.model.load import LoadedModel
from headattr.model.sites import Site


class Tap:
    """Keeps queries, keys, values, scale and some rows of the pattern of some layers."""

    def __init__(
        self, layers: frozenset[int], rows: Int[Tensor, "batch row"], numbers: int
    ) -> None:
        """Keeps nothing yet; `rows`: of the padded pattern, a prompt."""
        self.layers, self.rows, self.numbers = layers, rows, numbers
        self.found: dict[int, dict[str, Any]] = {}
        """By layer: Q, K, V, scale, pattern, rotary, attn_out, block."""
        self.resid: dict[int, Tensor] = {}
        self.inside: dict[Site, Tensor] = {}
        self.keeps_z: frozenset[int] = frozenset()
        """The layers whose heads' outputs are kept."""

    def __call__(
        self,
        eager: Any,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """The module's own attention, unchanged."""
        output, pattern = eager_in_blocks(
            eager, module, query, key, value, mask, rows=self.rows, numbers=self.numbers, **kwargs
        )
        if module.layer_idx in self.keeps_z:
            self.inside[Site("z", module.layer_idx)] = output.flatten(2)
        if module.layer_idx in self.layers:
            scale = scale_of(query, kwargs)
            self.keep(module.layer_idx, Q=query, K=key, V=value, scale=scale, pattern=pattern)
        return output

    def keep(self, layer: int, **found: Any) -> None:
        """Add to what was found in a layer."""
        self.found.setdefault(layer, {}).update(found)


def forward_through(
    model: LoadedModel, ids: Tensor, mask: Tensor, tap: Tap, wanted: frozenset[Site]
) -> None:
    """One forward pass, as far as the last layer that is wanted."""
    modules, layers = model.layers, tap.layers
    sites = {site.layer for site in wanted if site.kind == "resid_pre"}
    inside = {site for site in wanted if site.kind != "resid_pre"}
    tap.keeps_z = frozenset(site.layer for site in inside if site.kind == "z")
    with listening(model, tap) as stack:

        def before(module: Any, hook: Any) -> None:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

        def after(module: Any, hook: Any) -> None:
            stack.callback(module.register_forward_hook(hook).remove)

        for layer in layers | {site for site in sites if site < len(modules)}:
            before(modules[layer], _keep_input(tap, layer))
        if len(modules) in sites:
            after(modules[-1], _keep_output(tap, len(modules)))
        for layer in layers:
            attention = model.family.attention(modules[layer])
            before(attention, _keep_rotary(tap, layer))
            after(attention, _keep_found(tap, layer, "attn_out"))
            after(model.family.added(modules[layer]), _keep_found(tap, layer, "block"))
        for site in inside:
            _listen_inside(model, tap, site, before, after)
        ends = layers | {site.layer for site in inside}
        last = max(ends | sites)
        if last in ends:
            after(modules[last], _enough)
        elif last < len(modules):
            before(modules[last], _enough)
        run_model(model, ids, mask)


def _listen_inside(model: LoadedModel, tap: Tap, site: Site, before: Any, after: Any) -> None:
    """Keep what passes one site inside a layer."""
    block, family = model.layers[site.layer], model.family
    if site.kind == "z":
        return  # the tap keeps it
    if site.kind in ("attn_own", "attn_out"):
        module = family.attention if site.kind == "attn_own" else family.added
        after(module(block), _keep_inside(tap, site))
        return
    assert family.mlp is not None
    mlp = family.mlp(block)
    if site.kind in ("mlp_own", "mlp_out"):
        after(mlp.module if site.kind == "mlp_own" else mlp.added, _keep_inside(tap, site))
        return
    unscaled = Norm(mlp.norm.kind, torch.ones_like(mlp.norm.gain), None, mlp.norm.eps)
    norm = unscaled if site.kind == "mlp_normed" else None
    before(mlp.module if site.kind == "mlp_in" else mlp.norm_module, _keep_given(tap, site, norm))


def _keep_inside(tap: Tap, site: Site) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        tap.inside[site] = first_of(output)

    return hook


def _keep_given(tap: Tap, site: Site, norm: Any) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        tap.inside[site] = x if norm is None else norm(x)

    return hook


def _enough(*_: Any) -> None:
    raise Enough


def _keep_input(tap: Tap, site: int) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap.resid[site] = (args[0] if args else kwargs["hidden_states"]).detach()

    return hook


def _keep_output(tap: Tap, site: int) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        tap.resid[site] = first_of(output)

    return hook


def _keep_rotary(tap: Tap, layer: int) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap.keep(layer, rotary=kwargs.get("position_embeddings"))

    return hook


def _keep_found(tap: Tap, layer: int, name: str) -> Any:
    def hook(module: Any, args: Any, output: Any) -> None:
        tap.keep(layer, **{name: first_of(output)})

    return hook
