"""A file descriptor of ours in the job's process, which may close it and open a file of its own at its number.

Nothing is done with a number before its file has been compared. Ours are high numbers, which a job does not get for
its own files, as the kernel gives the lowest that is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

LOWEST = 4096  # a process that has a descriptor there has a table of 64 KiB
RESERVE = 64  # numbers below the process's limit, where that is lower

File = tuple[int, int]  # device and inode


def file_of(descriptor: int) -> File | None:
    """Return the file that is open at this number; None if there is none."""
    try:
        status = os.fstat(descriptor)
    except (OSError, OverflowError):
        return None
    return status.st_dev, status.st_ino


class OwnDescriptor:
    """Owns a descriptor, which it moves to a high number."""

    def __init__(self, descriptor: int) -> None:
        self.number = _moved(descriptor)
        self.file = file_of(self.number)

    @property
    def is_ours(self) -> bool:
        """Whether our file is still open at the number."""
        return self.file is not None and file_of(self.number) == self.file

    def close(self) -> None:
        """Close the descriptor, if it is still ours."""
        if self.is_ours:
            os.close(self.number)


def _moved(descriptor: int) -> int:
    """Return a high number of the same open file; `descriptor` if there is none. Closing frees a lock: lock later."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = LOWEST if limit == resource.RLIM_INFINITY else min(LOWEST, limit - RESERVE)
    with contextlib.suppress(OSError, ValueError):
        number = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
        os.close(descriptor)
        return number
    return descriptor
