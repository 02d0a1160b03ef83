"""One training at a time in a folder, as far as the file system can tell.

The lock goes with its process, however that ends; the file may stay.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headattr.errors import HeadattrError

try:
    import fcntl
except ImportError:  # not on this system: nothing is locked
    fcntl = None

LOCK = "lock"


@contextmanager
def alone(folder: Path, out: Path) -> Iterator[None]:
    """Nobody else trains in `folder`, which becomes `out`, meanwhile. Made where it is missing; an
    empty one is removed behind it.

    Raises HeadattrError where another process does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    file = _locked(path, out)
    try:
        yield
    finally:
        if _is_at(file, path):
            path.unlink()
        os.close(file)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _locked(path: Path, out: Path) -> int:
    """The lock's file, open, with this process in it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 1000).decode(errors="replace") or "one that just began"
            os.close(file)
            raise HeadattrError(
                f"another process ({holder}) is training into {out}; wait for it, or give another "
                "--out"
            ) from None
        except OSError:  # a file system without locks
            pass
        if _is_at(file, path):
            os.ftruncate(file, 0)
            os.write(file, f"{os.getpid()} on {socket.gethostname()}".encode())
            return file
        os.close(file)  # whoever held it has removed it meanwhile


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
