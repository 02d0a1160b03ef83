"""headattr: why an attention head looks where it looks, and what it moves from there.

import headattr
store = headattr.attribute("demo", "demo", ["some text"], "results")
answer = headattr.explain_edge("demo", "demo", "some text", "L3H0", 8, 4)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "attribute": "headattr.pipeline",
    "explain_edge": "headattr.explain",
    "intervene": "headattr.interventions",
    "load_model": "headattr.model.load",
    "open_store": "headattr.store.reader",
    "query_edge": "headattr.query",
    "Store": "headattr.store.reader",
    "RunConfig": "headattr.config",
    "Edge": "headattr.edges",
    "HeadId": "headattr.edges",
    "PlainDictionary": "headattr.basis.plain",
    "HeadattrError": "headattr.errors",
}
__all__ = [
    "Edge",
    "HeadId",
    "HeadattrError",
    "PlainDictionary",
    "RunConfig",
    "Store",
    "attribute",
    "explain_edge",
    "intervene",
    "load_model",
    "open_store",
    "query_edge",
]

if TYPE_CHECKING:
    from headattr.basis.plain import PlainDictionary
    from headattr.config import RunConfig
    from headattr.edges import Edge, HeadId
    from headattr.errors import HeadattrError
    from headattr.explain import explain_edge
    from headattr.interventions import intervene
    from headattr.model.load import load_model
    from headattr.pipeline import attribute
    from headattr.query import query_edge
    from headattr.store.reader import Store, open_store


def __getattr__(name: str) -> Any:
    """Import public names when they are first used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'headattr' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """The public names."""
    return list(__all__)
