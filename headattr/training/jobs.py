"""The dictionaries that a recipe asks for: what each reads, how it is made, written and read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headattr.basis.dictionary import Dictionary
from headattr.basis.formats import circuit_tracer, crosscoder, saelens
from headattr.basis.site import hook_name_of
from headattr.model.capture import check_sites
from headattr.model.load import LoadedModel
from headattr.model.sites import Site
from headattr.training.blocks import BlockCoder, Group, Moments, Sparsity
from headattr.training.recipe import CrosscoderRecipe, Recipe, SaeRecipe, TranscoderRecipe
from headattr.training.results import (
    metadata,
    write_groups,
    write_set,
    write_transcoder,
)
from headattr.training.single import SingleCoder


class Job(NamedTuple):
    """What is trained by itself."""

    name: str
    sites: tuple[Site, ...]
    features: int
    make: Callable[[Moments], Any]
    """The module, fresh."""
    write: Callable[[Any, Path], None]
    """Its files, into the folder of the result."""
    read: Callable[[Path], Sequence[Dictionary]]
    """What was written."""
    first: int = 0
    """The id of its first feature, among those of all jobs."""


def jobs_of(recipe: Recipe, model: LoadedModel) -> list[Job]:
    """The jobs of a recipe. Raises DictionaryError for a site that the model does not have."""
    if isinstance(recipe, SaeRecipe):
        jobs = [_sae(recipe, model)]
    elif isinstance(recipe, CrosscoderRecipe):
        jobs = [_crosscoder(recipe, model)]
    else:
        assert isinstance(recipe, TranscoderRecipe)
        layers = recipe.layers
        layers = tuple(range(len(model.layers))) if isinstance(layers, str) else layers
        jobs = [
            _transcoder(recipe, model, layer)._replace(first=i * recipe.d_sae)
            for i, layer in enumerate(layers)
        ]
    check_sites(model, {site for job in jobs for site in job.sites})
    return jobs


def _sparsity(recipe: Recipe) -> Sparsity:
    return Sparsity(
        recipe.activation, recipe.k, recipe.aux_coefficient, recipe.sparsity_coefficient
    )


def _sae(recipe: SaeRecipe, model: LoadedModel) -> Job:
    site = recipe.place
    about = metadata(recipe, hook_name_of(site, len(model.layers)))

    def make(moments: Moments) -> SingleCoder:
        return SingleCoder(recipe.d_sae, moments, _sparsity(recipe), recipe.seed, about)

    return Job(
        str(site).replace(" ", "_"),
        (site,),
        recipe.d_sae,
        make,
        lambda trained, folder: trained.save(folder),
        lambda folder: saelens.read_release(folder).dictionaries,
    )


def _crosscoder(recipe: CrosscoderRecipe, model: LoadedModel) -> Job:
    sites = tuple(Site("resid_pre", layer) for layer in recipe.sites)
    every = tuple(range(len(sites)))
    groups = [Group((s,), every[s:], recipe.d_sae) for s in every]
    if not recipe.causal:
        groups = [Group(every, every, recipe.d_sae)]
    hooks = [hook_name_of(site, len(model.layers)) for site in sites]

    def write(trained: BlockCoder, folder: Path) -> None:
        tensors, kind = trained.saved()
        write_groups(folder, recipe, hooks, tensors, kind)

    return Job(
        "crosscoder",
        sites,
        recipe.features,
        lambda moments: BlockCoder(groups, moments, _sparsity(recipe), recipe.seed),
        write,
        lambda folder: crosscoder.read_release(folder).dictionaries,
    )


def _transcoder(recipe: TranscoderRecipe, model: LoadedModel, layer: int) -> Job:
    group = Group((0,), (1,), recipe.d_sae)

    def write(trained: BlockCoder, folder: Path) -> None:
        write_set(folder, recipe)
        write_transcoder(folder, layer, trained.saved()[0][0])

    def read(folder: Path) -> Sequence[Dictionary]:
        return circuit_tracer.read_release(folder / f"layer_{layer}.safetensors").dictionaries

    return Job(
        f"layer_{layer}",
        (Site("mlp_in", layer), Site("mlp_out", layer)),
        recipe.d_sae,
        lambda moments: BlockCoder([group], moments, _sparsity(recipe), recipe.seed),
        write,
        read,
    )
