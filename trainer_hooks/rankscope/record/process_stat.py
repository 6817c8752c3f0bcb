"""What the kernel says of a process in /proc/PID/stat: whether it lives, its parent, and when it started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

PROCFS = Path("/proc")
DEAD = frozenset("ZXx")  # states: ended, and perhaps its parent has not waited for it
ANCESTORS_LIMIT = 64


class ProcessStat(NamedTuple):
    """A process ID and a start time together name one process: the kernel uses the numbers again."""

    is_alive: bool
    parent: int
    start: int  # clock ticks since boot


def read_process_stat(pid: int | str, procfs: Path = PROCFS) -> ProcessStat:
    """Return what /proc/PID/stat says. Raises OSError if the process is gone or hidden."""
    text = (procfs / str(pid) / "stat").read_bytes()
    # The name in parentheses may hold anything, parentheses too.
    fields = text.rpartition(b")")[2].split()
    return ProcessStat(fields[0].decode() not in DEAD, int(fields[1]), int(fields[19]))


def is_running(pid: int, start: object) -> bool | None:
    """Return whether the process of this number and start time lives; None if that is not known.

    Numbers alone do not tell: after a process has ended, the next one may get its number.
    """
    if not (pid and start and isinstance(start, int)):
        return None
    try:
        process = read_process_stat(pid)
    except OSError:
        return None if exists(pid) else False  # it may be hidden
    return process.is_alive and process.start == start


def exists(pid: int) -> bool:
    """Return whether there is a process of this number, whoever may look at it."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def own_start() -> int:
    """Return when this process started, in clock ticks since boot; 0 if that is not known."""
    try:
        return read_process_stat("self").start
    except OSError:
        return 0


def ancestors() -> Iterator[int]:
    """Yield the parent of this process, its parent and so on, as far as this process may see them."""
    return islice(_ancestors(), ANCESTORS_LIMIT)


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid:
        yield pid
        try:
            pid = read_process_stat(pid).parent
        except OSError:
            return
