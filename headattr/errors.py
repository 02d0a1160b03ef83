"""The errors that headattr raises on purpose.

Each says what was found, what was expected, what to do.
"""


class HeadattrError(Exception):
    """Base of all; the command line prints it as one line and exits with `exit_code`."""

    exit_code = 1


class UsageError(HeadattrError):
    """The request itself is off: a flag, a spec, a head or an edge that does not exist."""

    exit_code = 2


class UnsupportedModelError(HeadattrError):
    """The model is of a family, or has a setting, that is not handled exactly."""


class ProofError(HeadattrError):
    """What the adapter rebuilds from the residual stream is not what the model computed."""


class DictionaryError(HeadattrError):
    """A dictionary that is broken, incomplete, or of another width or site."""


class PromptError(HeadattrError):
    """One prompt cannot be run; the others can. The prompt is set aside with this reason."""


class StoreError(HeadattrError):
    """A store, or a file of it, is broken, foreign, or does not hold what was asked for."""
