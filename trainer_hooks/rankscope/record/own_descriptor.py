"""File descriptors of the hook in the job's process, which may close them and reuse their numbers.

Each use first checks that the number is still open for the same file. The numbers are high, because the kernel gives a
job's own files the lowest free ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

LOWEST = 4096  # with a descriptor there, the process's table takes 64 KiB
RESERVE = 64  # numbers below the process's limit, if that is lower

File = tuple[int, int]  # device and inode


def file_of(descriptor: int) -> File | None:
    """Return the file that is open at this number, or None."""
    try:
        status = os.fstat(descriptor)
    except (OSError, OverflowError):
        return None
    return status.st_dev, status.st_ino


class OwnDescriptor:
    """A descriptor, moved to a high number."""

    def __init__(self, descriptor: int) -> None:
        self.number = _moved(descriptor)
        self.file = file_of(self.number)

    @property
    def is_ours(self) -> bool:
        """True if the same file is still open at the number."""
        return self.file is not None and file_of(self.number) == self.file

    def close(self) -> None:
        """Close the descriptor, if it is still ours."""
        if self.is_ours:
            os.close(self.number)


def _moved(descriptor: int) -> int:
    """Return a high number of the same open file, or `descriptor` if none is free. This releases locks of the file."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = LOWEST if limit == resource.RLIM_INFINITY else min(LOWEST, limit - RESERVE)
    with contextlib.suppress(OSError, ValueError):
        number = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
        os.close(descriptor)
        return number
    return descriptor
