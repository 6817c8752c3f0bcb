"""Finding the process of a rank: the one that holds the write lock of its record, by the kernel, and has its owner.

A record proves nothing by itself: any user can write one that names any process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

from rankscope.record.directory import open_untrusted
from rankscope.record.process_stat import read_user_ids
from rankscope.record.reader import lock_holder


class NotTheRankError(Exception):
    """A process is not the rank; the message has the reason."""


class Process:
    """The process of a rank. Call `verify` again before each action on it."""

    def __init__(self, pid: int, descriptor: int, record: Path, owner: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._record = record
        self._owner = owner

    def verify(self) -> None:
        """Raise NotTheRankError if the process no longer holds the lock, or is no longer the owner's."""
        if _locked_by(self._record, self._owner) != self.pid:
            raise NotTheRankError("its process no longer holds the record's lock")
        if set(_user_ids(self.pid)) != {self._owner}:
            raise NotTheRankError("the process that holds its record's lock belongs to another user than the record")

    def send(self, number: int) -> None:
        """Send a signal to this process, never to a later one with the same process ID. Raises OSError."""
        if self._descriptor >= 0:
            signal.pidfd_send_signal(self._descriptor, number)
        else:
            os.kill(self.pid, number)


@contextlib.contextmanager
def process_of(record: Path, pid: int, owner: int) -> Iterator[Process]:
    """Yield the process that holds the lock of a record of `owner`. Raises NotTheRankError if it is not `pid`."""
    descriptor = _pidfd(pid)
    try:
        process = Process(pid, descriptor, record, owner)
        process.verify()
        yield process
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _pidfd(pid: int) -> int:
    """Return a pidfd; -1 on kernels before 5.3, such as RHEL 8's."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):  # EPERM: a container's seccomp filter
            return -1
        raise NotTheRankError(f"its process {pid}: {error.strerror}") from error


def _locked_by(record: Path, owner: int) -> int | None:
    """Return the process that holds the record's write lock. Raises NotTheRankError if the record is not `owner`'s."""
    try:
        descriptor = open_untrusted(record)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != owner:
                raise NotTheRankError("its record now belongs to another user")
            return lock_holder(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NotTheRankError(f"its record: {error.strerror}") from error


def _user_ids(pid: int) -> list[int]:
    """Return all of the process's user IDs: a lock survives the exec of a setuid program."""
    try:
        return read_user_ids(pid)
    except OSError as error:
        raise NotTheRankError(f"its process {pid}: {error.strerror}") from error
