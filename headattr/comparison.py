"""One row a dictionary, to choose by: what stands for it where it has several sites or layers.

    L0           sum over its groups of features: over the layers of a transcoder set
    EV           mean over sites
    recovered    of transcoders all layers together; else the mean over sites, each by itself
    shares       mean over the layers whose attention was judged

Asked for some layers, a crosscoder is its sites at these, and its features those that write one of
them; any other dictionary is compared as a whole.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from headattr.basis.crosscoder import Crosscoder
from headattr.model.sites import Site


def row_of(source: Any, answer: Mapping[str, Any], layers: Iterable[int] | None) -> dict[str, Any]:
    """{"sites", "layers", "l0", "explained_variance", "recovered", "feature_share",
    "feature_share_centred", "output_share"}, null where there is none.

    `answer`: of `judge`. `layers`: those that were asked for, None for all.
    """
    sites, loss = _sites(source, layers), answer["loss"]
    names = [str(site) for site in sites]
    parts = [loss["together"]] if "together" in loss else [loss[n] for n in names if n in loss]
    shares = ("feature_share_counted", "feature_share_counted_centred", "output_share")
    means = [_mean(layer[key] for layer in answer["layers"]) for key in shares]
    return {
        "sites": names,
        "layers": [layer["layer"] for layer in answer["layers"]],
        "l0": _l0(source, answer, sites),
        "explained_variance": _mean(answer["explained_variance"][name] for name in names),
        "recovered": _mean(part["recovered"] for part in parts),
        "feature_share": means[0],
        "feature_share_centred": means[1],
        "output_share": means[2],
    }


def _sites(source: Any, layers: Iterable[int] | None) -> list[Site]:
    """What is written, as far as it is compared."""
    sites = list(source.writes)
    if layers is None or not isinstance(source, Crosscoder):
        return sites
    here = set(layers)
    return [site for site in sites if site.layer in here] or sites


def _l0(source: Any, answer: Mapping[str, Any], sites: Iterable[Site]) -> float:
    """Active features of the groups that write one of the sites."""
    if not isinstance(source, Crosscoder) or len(source.coders) == 1:
        return answer["l0"]
    here = set(sites)
    pairs = zip(source.coders, answer["groups"], strict=True)
    return sum(group["l0"] for coder, group in pairs if here & set(coder.dictionary.writes))


def _mean(numbers: Iterable[float | None]) -> float | None:
    kept = [one for one in numbers if one is not None]
    return sum(kept) / len(kept) if kept else None
