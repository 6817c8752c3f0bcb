"""The processes of the ranks: those that held the records' locks when the exporter first saw them.

A process is identified by its ID and start time, both from the kernel. What a record says about it is not used: when
the kernel reuses the ID, the record could be changed to describe the later process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rankscope.record.listing import RankFile
from rankscope.record.process_stat import PROCFS, is_running, read_process_stat, read_user_ids
from rankscope.record.snapshot import RankSnapshot


class Process(NamedTuple):
    """A process in the exporter's pid namespace."""

    pid: int
    start: int
    """In clock ticks since boot."""


UNKNOWN = Process(0, 0)


class LockProcesses:
    """The process of each record."""

    def __init__(self) -> None:
        self._processes: dict[tuple[Path, tuple[int, ...]], Process] = {}  # by path and inode

    def find(self, file: RankFile, snapshot: RankSnapshot) -> Process:
        """Return the process of a record, also after its end; UNKNOWN if it is hidden or another user's."""
        key = file.path, file.stamp[:2]
        if key not in self._processes and (process := _identify(snapshot.lock_pid, file.owner)) != UNKNOWN:
            self._processes[key] = process
        return self._processes.get(key, UNKNOWN)

    def keep(self, present: set[Path]) -> None:
        """Forget the processes of other records."""
        self._processes = {key: process for key, process in self._processes.items() if key[0] in present}


def is_alive(snapshot: RankSnapshot, process: Process) -> bool:
    """Return whether a rank is alive. Its process may lose the lock, or leave it to another process when it ends.

    A job loses the lock when it closes all descriptors, or opens and closes the record.
    """
    if not snapshot.alive and snapshot.exit_unix is not None:
        return False
    has_process = is_running(*process)
    return snapshot.alive or snapshot.has_recent_progress if has_process is None else has_process


def _identify(pid: int, owner: int) -> Process:
    """Return a process that holds the lock of a record of `owner`; UNKNOWN if it is hidden or another user's.

    The process that took the lock may have ended without releasing it. Then its ID may be another process's.
    """
    with suppress(OSError):
        if pid and owner in (*read_user_ids(pid), *_ids_in_namespace(pid)):
            return Process(pid, read_process_stat(pid).start)
    return UNKNOWN


def _ids_in_namespace(pid: int) -> Iterator[int]:
    """Yield a process's user IDs in its user namespace: they own its files on an idmapped mount."""
    users = read_user_ids(pid)
    for line in (PROCFS / str(pid) / "uid_map").read_text().splitlines():
        inside, outside, count = map(int, line.split())
        yield from (user - outside + inside for user in users if outside <= user < outside + count)
