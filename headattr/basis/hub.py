"""A dictionary that is named by its place on the Hugging Face hub -> its folder on this machine."""

from pathlib import Path

from headattr.config import HubId
from headattr.errors import DictionaryError
from headattr.model.embedded import cache_folder, embedded_folder


def local_copy(hub: HubId) -> Path:
    """The folder of a name that `dictionaries list` shows, or of `org/name/folder`, fetched once
    into the hub's own cache; with HF_HUB_OFFLINE=1 what is there already.

    Raises DictionaryError for what is neither in the cache nor to be had.
    """
    for root in (embedded_folder(), cache_folder()):
        if (root / str(hub)).is_dir():
            return root / str(hub)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [f"{hub.folder}/*", f"{hub.folder}.*", hub.folder] if hub.folder else None
    try:
        found = Path(snapshot_download(hub.repository, allow_patterns=wanted)) / hub.folder
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise DictionaryError(
            f"{hub} is no folder here, and is not in the hub's cache nor to be had from the hub "
            f"({type(error).__name__}); expected a folder, a name that `headattr dictionaries "
            "list` shows, or org/name/folder of the hub"
        ) from error
    if not found.exists():
        raise DictionaryError(
            f"{hub.repository} of the hub has no {hub.folder}; expected the folder of a dictionary"
        )
    return found
