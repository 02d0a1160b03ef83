"""Where the data that comes with headattr, and the data it caches, are on this machine."""

import os
from pathlib import Path

from headattr.errors import HeadattrError


def embedded_folder() -> Path:
    """The `dictionaries` folder: carried in the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "dictionaries", package.parent / "dictionaries"):
        if (folder / "demo" / "spec.toml").exists():
            return folder
    raise HeadattrError(f"the embedded dictionaries are not beside {package}; reinstall headattr")


def cache_folder() -> Path:
    """Where converted models and trained dictionaries are kept: $HEADATTR_CACHE or
    ~/.cache/headattr."""
    return Path(os.environ.get("HEADATTR_CACHE", "~/.cache/headattr")).expanduser()
