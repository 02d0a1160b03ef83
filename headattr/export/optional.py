"""The packages that only exports need, and tables in their types."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from headattr.errors import UsageError
from headattr.store.edge_frames import Frame
from headattr.store.fields import Field


def needed(name: str, what: str) -> Any:
    """A package of the extra `export`; raises UsageError, saying how to get it, where it is not
    installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{what} needs {name.split('.')[0]}, which is not installed: pip install "
            '"headattr[export]"'
        ) from error


def arrow_schema(fields: Sequence[Field]) -> Any:
    """The columns as pyarrow has them; texts may hold more than 2 GiB together."""
    arrow = needed("pyarrow", "Parquet")
    types = {"text": arrow.large_string(), "bool": arrow.bool_()}
    return arrow.schema(
        [
            arrow.field(f.name, types.get(f.type) or getattr(arrow, f.type)(), f.optional)
            for f in fields
        ]
    )


def arrow_table(frame: Frame, schema: Any) -> Any:
    """A frame as a pyarrow table, null where it is masked."""
    arrow = needed("pyarrow", "Parquet")
    columns = [(frame[field.name], field.type) for field in schema]
    arrays = [c if isinstance(c, arrow.Array) else arrow.array(c, type=t) for c, t in columns]
    return arrow.Table.from_arrays(arrays, schema=schema)
