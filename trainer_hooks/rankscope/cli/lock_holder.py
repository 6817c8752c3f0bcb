"""Which process is a rank: the one that the kernel says has its record locked for writing, and is its owner's.

A record's own words prove nothing, as anybody may write one and name any process in it.
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
from rankscope.record.reader import lock_holder


class NotTheRankError(Exception):
    """Why a process is not taken for a rank."""


class Process:
    """A process that is a rank. `still` says so again, which is due before anything is done to it."""

    def __init__(self, pid: int, descriptor: int, record: Path, owner: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
        self._record = record
        self._owner = owner

    def still(self) -> None:
        """Raises NotTheRankError if the lock or the process is another's by now."""
        if _locked_by(self._record, self._owner) != self.pid:
            raise NotTheRankError("its process no longer holds the record's lock")
        if set(_users(self.pid)) != {self._owner}:
            raise NotTheRankError("the process that holds its record's lock is not of the user whose record it is")

    def send(self, number: int) -> None:
        """A signal, to this process and never to one that has its number since. Raises OSError."""
        if self._descriptor >= 0:
            signal.pidfd_send_signal(self._descriptor, number)
        else:
            os.kill(self.pid, number)


@contextlib.contextmanager
def process_of(record: Path, pid: int, owner: int) -> Iterator[Process]:
    """The process that holds the lock of a record of `owner`. Raises NotTheRankError if it is not `pid`."""
    descriptor = _pidfd(pid)
    try:
        process = Process(pid, descriptor, record, owner)
        process.still()
        yield process
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _pidfd(pid: int) -> int:
    """-1 on a kernel before 5.3, as that of RHEL 8."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):  # EPERM: a container's filter that does not know the call
            return -1
        raise NotTheRankError(f"its process {pid}: {error.strerror}") from error


def _locked_by(record: Path, owner: int) -> int | None:
    """Return who holds the write lock of the record. Raises NotTheRankError if the record is not of `owner`."""
    try:
        descriptor = open_untrusted(record)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != owner:
                raise NotTheRankError("its record is another user's by now")
            return lock_holder(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NotTheRankError(f"its record: {error.strerror}") from error


def _users(pid: int) -> list[int]:
    """Real, effective, saved and of files: a lock outlives exec, also that of a program that becomes another user."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError as error:
        raise NotTheRankError(f"its process {pid}: {error.strerror}") from error
    return next(([int(one) for one in line.split()[1:]] for line in lines if line.startswith("Uid:")), [])
