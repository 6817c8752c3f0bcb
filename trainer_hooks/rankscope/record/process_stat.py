"""The state of a process in /proc: whether it is alive, its parent, its start time, and its users."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

PROCFS = Path("/proc")
DEAD = frozenset("ZXx")  # states of ended processes, also of zombies
TICKS = os.sysconf("SC_CLK_TCK")  # per second
ANCESTORS_LIMIT = 64
ENVIRONMENT_BYTES = 2**20


class ProcessStat(NamedTuple):
    """The state of a process. Its ID and start time together identify it, because the kernel reuses IDs."""

    is_alive: bool
    parent: int
    start: int  # clock ticks since boot


def read_process_stat(pid: int | str, procfs: Path = PROCFS) -> ProcessStat:
    """Read /proc/PID/stat. Raises OSError if the process has ended or is hidden."""
    text = (procfs / str(pid) / "stat").read_bytes()
    # The name in parentheses may contain anything, even parentheses.
    fields = text.rpartition(b")")[2].split()
    return ProcessStat(fields[0].decode() not in DEAD, int(fields[1]), int(fields[19]))


def read_user_ids(pid: int, procfs: Path = PROCFS) -> list[int]:
    """Return a process's real, effective, saved and file system user ID. Raises OSError as above."""
    lines = (procfs / str(pid) / "status").read_text(errors="replace").splitlines()
    return next(([int(one) for one in line.split()[1:]] for line in lines if line.startswith("Uid:")), [])


def read_environment(pid: int, procfs: Path = PROCFS) -> dict[str, str]:
    """Return a process's environment, of its first MiB. Raises OSError as above."""
    with (procfs / str(pid) / "environ").open("rb") as file:
        pairs = file.read(ENVIRONMENT_BYTES).decode(errors="surrogateescape").split("\0")
    return dict(pair.partition("=")[::2] for pair in pairs)


def is_running(pid: int, start: object, ahead: float = 0.0) -> bool | None:
    """Return whether the process with this ID and start time is alive; None if that is not known.

    The ID alone is not enough, because the kernel reuses IDs. This process's CLOCK_BOOTTIME is `ahead` of the one of
    `start` by so many seconds.
    """
    if not (pid and start and isinstance(start, int)):
        return None
    try:
        process = read_process_stat(pid)
    except OSError:
        return None if exists(pid) else False  # it may be hidden
    return process.is_alive and abs(process.start - round(ahead * TICKS) - start) <= 1  # the kernel rounds both


def exists(pid: int) -> bool:
    """Return whether there is a process with this ID, even if it is hidden from this user."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def own_start() -> int:
    """Return the start time of this process in clock ticks since boot; 0 if that is not known."""
    try:
        return read_process_stat("self").start
    except OSError:
        return 0


def ancestors(pid: int | str = "self") -> Iterator[int]:
    """Yield the parent of a process, its parent and so on, as far as they are visible."""
    return islice(_ancestors(pid), ANCESTORS_LIMIT)


def _ancestors(pid: int | str) -> Iterator[int]:
    with contextlib.suppress(OSError):
        while pid := read_process_stat(pid).parent:
            yield pid
