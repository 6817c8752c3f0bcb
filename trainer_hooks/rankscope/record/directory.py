"""Opening the run directory safely, for the hook and the exporter: any user may write to its parent directory.

Callers then use the descriptor, so that they use the directory that was checked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The owner of files whose user ID a user namespace does not map, even root's (a pyxis container maps one user).
UNKNOWN_USER = 65534


class ForeignLinkError(OSError):
    """The run directory is a link that another user made."""


def open_directory(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open the directory and return its descriptor. Raises FileNotFoundError, ForeignLinkError or another OSError.

    A link is followed only if root or this process's user made it (the rule of the kernel's fs.protected_symlinks,
    which is not on everywhere): any user may make one in /dev/shm, for example to a mount that hangs.
    """
    flags |= os.O_DIRECTORY | os.O_CLOEXEC
    if not path.is_symlink():
        return os.open(path, flags | os.O_NOFOLLOW)
    if path.lstat().st_uid in (0, os.geteuid()):
        return os.open(path, flags)
    raise ForeignLinkError("the run directory is a link that another user made")


def open_untrusted(path: Path | str, directory: int | None = None) -> int:
    """Open a file that another user may have made, in the open `directory` if given. Raises OSError.

    It does not follow a link and does not block, as the open of a pipe or of a file under a lease would.
    """
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield a descriptor to create and rename files, which needs no right to list. Raises as `open_directory`."""
    descriptor = open_directory(path, getattr(os, "O_PATH", os.O_RDONLY))  # macOS has none
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def weakness(descriptor: int) -> str:
    """Return why another user than root can remove this user's records in the directory; empty if none can."""
    status = os.fstat(descriptor)
    if status.st_uid not in (0, os.geteuid(), UNKNOWN_USER):
        return f"belongs to another user ({status.st_uid}), who can remove any record in it"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return "is world-writable but not sticky (chmod +t); any user can remove every record in it"
    return ""
