"""The run directory, opened: one rule for the hook and the exporter, as everybody may write where it lies.

What follows is done by the descriptor, so that what was looked at is what is used.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Whose number a user namespace does not map, root's included (a container of pyxis maps one user): he may be anybody.
UNKNOWN_USER = 65534


class ForeignLinkError(OSError):
    """The run directory is a link that another user made."""


def open_directory(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the directory. Raises FileNotFoundError, ForeignLinkError or another OSError.

    A link is followed only if root or this process's user made it (the rule of the kernel's fs.protected_symlinks,
    which is not on everywhere): in /dev/shm anybody may make one, to a mount that hangs, say.
    """
    flags |= os.O_DIRECTORY | os.O_CLOEXEC
    if not path.is_symlink():
        return os.open(path, flags | os.O_NOFOLLOW)
    if path.lstat().st_uid in (0, os.geteuid()):
        return os.open(path, flags)
    raise ForeignLinkError("the run directory is a link that another user made")


def open_untrusted(path: Path | str, directory: int | None = None) -> int:
    """Open a file that another user may have put there, in the open `directory` if there is one. Raises OSError.

    This neither follows a link nor waits: a pipe waits for its writer, and a file under another process's lease for
    that to be given back.
    """
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The directory, to make and exchange names in it; the right to list it is not needed. Raises as above."""
    descriptor = open_directory(path, getattr(os, "O_PATH", os.O_RDONLY))  # a Mac has none; the exporter runs there
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def weakness(descriptor: int) -> str:
    """Why somebody else can remove the records of whoever writes there; empty if nobody but root is known to."""
    status = os.fstat(descriptor)
    if status.st_uid not in (0, os.geteuid(), UNKNOWN_USER):
        return f"belongs to another user ({status.st_uid}), who can remove every record in it"
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return "can be written by everybody and is not sticky (chmod +t): everybody can remove every record in it"
    return ""
