"""What a dictionary is, from its files alone; with a model and texts, how it fits them."""

from typing import Any

from headattr.basis.dictionary import Dictionary, Frame
from headattr.basis.transcoder_checks import gap_of
from headattr.basis.whole import load_whole
from headattr.errors import UsageError
from headattr.inputs import releases_of
from headattr.judging import Inspect
from headattr.model.sites import Site
from headattr.passes import given
from headattr.sample import sample_reports


def inspect(asked: Inspect) -> list[dict[str, Any]]:
    """The command `dictionaries inspect`, one entry a release:

    {"name", "path", "kind", "features", "gap" (what a transcoder set lacks, or null),
    "dictionaries": [{"name", "path", "format", "architecture", "activation": {"kind", "k"},
    "reads", "writes", "hook_name", "d_in", "d_out", "features", "frame", "prepend_bos",
    "trained_on", "assumed", "labels", "hash"}], "report"}.
    `frame`: what is done to the input, in words; `hash` only where it was asked for; `report` (see
    `Tally.report`) only with a model and texts. Raises DictionaryError for files that are broken.
    """
    named = releases_of([asked.dictionary])
    if bool(asked.model) != bool(asked.texts):
        raise UsageError("--model and --texts go together: how a dictionary fits needs both")
    reports: list[dict[str, Any] | None] = [None for _ in named]
    if asked.model:
        found = given(asked, named)
        sources = [load_whole(one.release, found.model, one.layer).source for one in named]
        reports = sample_reports(found.model, sources, found.prompts)
    return [
        {
            "name": one.release.name,
            "path": one.release.path,
            "kind": one.release.kind,
            "features": one.release.features,
            "gap": gap_of(one.release.dictionaries) if one.release.kind == "transcoders" else None,
            "dictionaries": [_facts(d, hashed=asked.hash) for d in one.release.dictionaries],
            "report": report,
        }
        for one, report in zip(named, reports, strict=True)
    ]


def _facts(dictionary: Dictionary, *, hashed: bool) -> dict[str, Any]:
    return {
        "name": dictionary.name,
        "path": dictionary.path,
        "format": dictionary.format,
        "architecture": dictionary.architecture,
        "activation": dictionary.activation._asdict(),
        "reads": [_site(site) for site in dictionary.reads],
        "writes": [_site(site) for site in dictionary.writes],
        "hook_name": dictionary.hook_name,
        "d_in": dictionary.d_in,
        "d_out": dictionary.d_out,
        "features": dictionary.features,
        "frame": frame_in_words(dictionary.frame),
        "prepend_bos": dictionary.prepend_bos,
        "trained_on": dictionary.trained_on,
        "assumed": list(dictionary.assumed),
        "labels": dictionary.labels,
        "hash": dictionary.read()[1] if hashed else None,
    }


def _site(site: Site | None) -> str | None:
    return None if site is None else str(site)


def frame_in_words(frame: Frame) -> list[str]:
    """What is done to the input before it is encoded, in order; empty where it is taken as it
    is."""
    said = []
    if frame.centred:
        said.append("the stream's mean is removed")
    if frame.scale != 1:
        said.append(f"the input is multiplied by {frame.scale:.6g}")
    if frame.normalize != "none":
        said.append(f"{frame.normalize} at every position")
    if frame.subtract_b_dec:
        said.append("b_dec is subtracted")
    if said and not frame.undone:
        said.append("the output is of another site and stays as it is")
    return said
