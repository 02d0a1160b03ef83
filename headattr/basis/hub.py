"""A dictionary that is named by its place on the Hugging Face hub -> its folder on this machine."""

from pathlib import Path

from headattr.config import HubId
from headattr.errors import DictionaryError


def local_copy(hub: HubId) -> Path:
    """The folder of `org/name/folder`, fetched once into the hub's own cache; with HF_HUB_OFFLINE=1
    what is there already.

    Raises DictionaryError for what is neither in the cache nor to be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [f"{hub.folder}/*", f"{hub.folder}.*", hub.folder] if hub.folder else None
    try:
        found = Path(snapshot_download(hub.repository, allow_patterns=wanted)) / hub.folder
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise DictionaryError(
            f"{hub} is no folder here, and is not in the hub's cache nor to be had from the hub "
            f"({type(error).__name__}); expected a folder, or org/name/folder of the hub"
        ) from error
    if not found.exists():
        raise DictionaryError(
            f"{hub.repository} of the hub has no {hub.folder}; expected the folder of a dictionary"
        )
    return found
