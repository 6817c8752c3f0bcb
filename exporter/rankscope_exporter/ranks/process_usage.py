"""What a process and its children have used, from procfs: processor time, time in the run queue, bytes read, memory.

Only files that every kernel since 4.2 has; one that is missing or may not be read leaves its value unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROCFS = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
ALLOWED_CPUS = re.compile(rb"^Cpus_allowed_list:\s+([\d,-]+)$", re.MULTILINE)
READ_BYTES = re.compile(rb"^read_bytes: (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """Of one process so far; seconds and bytes. None is unknown."""

    cpu: float
    """Of the process itself, threads that have ended included."""
    children_cpu: float | None
    """Of its children, those that have ended and were waited for included."""
    run_queue: float | None
    """Time that its main thread could have run and had no processor."""
    children_run_queue: Mapping[int, float]
    """The same of each living child, by pid. The kernel keeps none of those that have ended."""
    read_bytes: float | None
    """From storage, by it and its children. The kernel adds those of children that were waited for."""
    children: int | None
    resident: float
    unread_children: int = 0
    """Children that were too many to read: then nothing that includes them is known."""


def read_usage(pid: int, procfs: Path = PROCFS, children_limit: float = float("inf")) -> Usage:
    """Read the process, and its children unless there are more than the limit.

    Raises OSError if the process is gone or hidden.
    """
    process = f"{procfs}/{pid}"
    own, waited_for, resident = _parse_stat(_read(f"{process}/stat"))
    # After the process itself: a child that is waited for meanwhile is missed for once, and not counted twice.
    read_bytes = _read_bytes(process)
    children = _children(process, pid)
    is_read = children is not None and len(children) <= children_limit
    read = children if children is not None and is_read else []
    living = [f"{procfs}/{child}" for child in read]
    unread = len(children or ()) - len(read)
    return Usage(
        cpu=own,
        children_cpu=waited_for + sum(map(_cpu, living)) if is_read else None,
        run_queue=_run_queue(process),
        children_run_queue=dict(_run_queues(read, procfs)),
        read_bytes=None if unread else _together([read_bytes, *map(_read_bytes_of_living, living)]),
        children=None if children is None else len(children),
        resident=resident,
        unread_children=unread,
    )


def allowed_cpus(pid: int, procfs: Path = PROCFS) -> frozenset[int]:
    """Return the CPUs that a process may use; none if it is gone or hidden."""
    try:
        found = ALLOWED_CPUS.search(_read(f"{procfs}/{pid}/status"))
    except OSError:
        return frozenset()
    spans = (part.partition("-") for part in found[1].decode().split(",")) if found else ()
    return frozenset(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))


def _read(path: str) -> bytes:
    # Not Path.read_bytes: it takes three times as long, and there is a file for each thread.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)


def _read_all(path: str) -> bytes:
    """Read a file that is longer than a page: the kernel returns one page of it at a time."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as in _read
        return file.readall()


def _parse_stat(text: bytes) -> tuple[float, float, float]:
    """Processor time of the process and of the children that it waited for, in seconds; resident bytes.

    The name in parentheses may hold anything, parentheses too.
    """
    fields = text.rpartition(b")")[2].split()
    user, system, children_user, children_system = map(int, fields[11:15])
    return (user + system) / TICKS, (children_user + children_system) / TICKS, float(int(fields[21]) * PAGE)


def _children(process: str, pid: int) -> list[int] | None:
    """Of the main thread: it makes the loader's workers. A rank has a hundred threads, and a file each is too many."""
    try:
        return list(map(int, _read_all(f"{process}/task/{pid}/children").split()))
    except FileNotFoundError:  # this kernel does not tell
        return None


def _cpu(process: str) -> float:
    try:
        own, waited_for, _ = _parse_stat(_read(f"{process}/stat"))
    except OSError:  # it has ended: its parent's figure has it the next time
        return 0.0
    return own + waited_for


def _run_queues(pids: Iterable[int], procfs: Path) -> Iterator[tuple[int, float]]:
    for pid in pids:
        waited = _run_queue(f"{procfs}/{pid}")
        if waited is not None:
            yield pid, waited


def _run_queue(process: str) -> float | None:
    try:
        ran, waited, _ = map(int, _read(f"{process}/schedstat").split())
    except (OSError, ValueError):
        return None
    return waited / 1e9 if ran else None  # a kernel that does not count says 0 of everything


def _read_bytes(process: str) -> float | None:
    try:
        found = READ_BYTES.search(_read(f"{process}/io"))
    except OSError:  # another user's process, or one that has ended
        return None
    return float(found[1]) if found else None


def _read_bytes_of_living(process: str) -> float | None:
    """0 for one that has ended: its parent's figure has it the next time."""
    found = _read_bytes(process)
    return 0.0 if found is None and not os.path.exists(process) else found  # noqa: PTH110 - as in _read


def _together(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
