"""Run the model with given vectors put in at some of its sites; all else is the model's own.

What is put in goes through the model's own modules from there on. Where the vectors are those that
the model has there anyway, the logits are the same to the last bit.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headattr.errors import UsageError
from headattr.model.capture import ATTENTION_NUMBERS, check_sites
from headattr.model.forward import eager_in_blocks, first_of, listening, run_model
from headattr.model.load import LoadedModel
from headattr.model.sites import Site

SPLICED = ("resid_pre", "mlp_out", "attn_out", "z")
"""Kinds of site at which vectors can be put in."""


@torch.no_grad()
def run_spliced(
    model: LoadedModel,
    ids: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"],
    put: Mapping[Site, Float[Tensor, "batch pos _"]],
    where: Bool[Tensor, "batch pos"],
    *,
    numbers: int = ATTENTION_NUMBERS,
) -> Float[Tensor, "batch pos vocab"]:
    """The model's own logits (behind any cap) of a padded batch, with `put` in place of what the
    model has at those sites, at the positions `where`; an empty `put` is the model as it is.

    `numbers`: of an attention matrix that are there at once. Raises UsageError for sites that
    nothing can be put into, DictionaryError for those that the model does not have.
    """
    check_sites(model, put)
    if odd := [str(site) for site in put if site.kind not in SPLICED]:
        raise UsageError(f"nothing can be put in at {', '.join(odd)}; expected {list(SPLICED)}")
    tap = _SplicedRun(put, where.to(model.device)[..., None], numbers)
    with listening(model, tap.attend) as stack:
        for site in put:
            for hook in tap.hooks(model, site):
                stack.callback(hook.remove)
        return run_model(model, ids, mask, logits=True).logits


class _SplicedRun:
    """What is put in where."""

    def __init__(self, put: Mapping[Site, Tensor], where: Tensor, numbers: int) -> None:
        self.put, self.where, self.numbers = put, where, numbers
        self.rows = torch.zeros(len(where), 0, dtype=torch.long, device=where.device)

    def hooks(self, model: LoadedModel, site: Site) -> list[Any]:
        """The hooks of one site."""
        if site.kind == "z":
            return []  # the attention itself
        if site.kind == "resid_pre" and site.layer < len(model.layers):
            given = self._given(site)
            return [model.layers[site.layer].register_forward_pre_hook(given, with_kwargs=True)]
        if site.kind == "resid_pre":
            module = model.layers[-1]
        elif site.kind == "attn_out":
            module = model.family.added(model.layers[site.layer])
        else:
            assert model.family.mlp is not None
            module = model.family.mlp(model.layers[site.layer]).added
        return [module.register_forward_hook(self._gave(site))]

    def mixed(self, site: Site, found: Tensor) -> Tensor:
        """What goes on from a site."""
        return torch.where(self.where, self.put[site].to(found), found)

    def attend(
        self,
        eager: Any,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,
    ) -> Tensor:
        """The module's own attention, its heads' outputs replaced where they are asked for."""
        options = {"rows": self.rows, "numbers": self.numbers, **kwargs}
        output, _ = eager_in_blocks(eager, module, query, key, value, mask, **options)
        site = Site("z", module.layer_idx)
        if site not in self.put:
            return output
        return self.mixed(site, output.flatten(2)).unflatten(2, output.shape[2:])

    def _given(self, site: Site) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (self.mixed(site, args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": self.mixed(site, kwargs["hidden_states"])}

        return hook

    def _gave(self, site: Site) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            changed = self.mixed(site, first_of(output))
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook
