"""Resources that a process and its children have used, from procfs: CPU time, run queue time, bytes read, memory.

All files exist since Linux 4.2. If a file is missing or not readable, its value is unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankscope.record.stopped import has_stopped_state

PROCFS = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
ALLOWED_CPUS = re.compile(rb"^Cpus_allowed_list:\s+([\d,-]+)$", re.MULTILINE)
READ_BYTES = re.compile(rb"^read_bytes: (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """The resources that a process has used so far, in seconds and bytes. None is unknown."""

    cpu: float
    """CPU time of the process itself, including ended threads."""
    children_cpu: float | None
    """CPU time of its children, including ended ones that were waited for."""
    run_queue: float | None
    """Time that its main thread was runnable and waited for a CPU."""
    children_run_queue: Mapping[int, float]
    """The same for each living child, by pid. The kernel does not keep it for ended children."""
    read_bytes: float | None
    """Bytes that it and its children read from storage, including ended children that were waited for."""
    children: int | None
    resident: float
    unread_children: int = 0
    """Children that were not read because there are too many. Values that include children are then unknown."""
    descendants: int = 0
    """Children and their descendants that were read, or counted before there were too many."""
    is_stopped: bool = False
    """True if a signal or a debugger has stopped the process."""


def read_usage(pid: int, procfs: Path = PROCFS, children_limit: float = float("inf"), *, generations: int = 1) -> Usage:
    """Return the usage of a process, and of its children unless there are more than the limit.

    With more generations, the values of children include those of their children, and are unknown if there are more
    than the limit in all. Raise OSError if the process is gone or hidden.
    """
    process = f"{procfs}/{pid}"
    stat = _read(f"{process}/stat")
    own, waited_for, resident = _parse_stat(stat)
    # Read children after the process: a child that ends in between is missed once, instead of counted twice.
    read_bytes = _read_bytes(process)
    children = _children(process, pid)
    counted = _with_descendants(children or [], procfs, generations, children_limit)
    is_read = children is not None and len(counted) <= children_limit
    read = counted if is_read else []
    living = [f"{procfs}/{child}" for child in read]
    unread = 0 if is_read else len(children or ())
    return Usage(
        cpu=own,
        children_cpu=waited_for + sum(map(_cpu, living)) if is_read else None,
        run_queue=_run_queue(process),
        children_run_queue=dict(_run_queues(read, procfs)),
        read_bytes=None if unread else _sum_known([read_bytes, *map(_read_bytes_of_living, living)]),
        children=None if children is None else len(children),
        resident=resident,
        unread_children=unread,
        descendants=len(counted) if len(children or ()) <= children_limit else 0,
        is_stopped=has_stopped_state(stat),
    )


def allowed_cpus(pid: int, procfs: Path = PROCFS) -> frozenset[int]:
    """Return the CPUs that a process may use; empty if it is gone or hidden."""
    try:
        found = ALLOWED_CPUS.search(_read(f"{procfs}/{pid}/status"))
    except OSError:
        return frozenset()
    spans = (part.partition("-") for part in found[1].decode().split(",")) if found else ()
    return frozenset(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))


def _read(path: str) -> bytes:
    # Path.read_bytes takes three times as long.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)


def _read_all(path: str) -> bytes:
    """Return the content of a file that is longer than a page: the kernel returns one page at a time."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as in _read
        return file.readall()


def _parse_stat(text: bytes) -> tuple[float, float, float]:
    """Return the CPU seconds of the process and of the children that it waited for, and its resident bytes.

    The name in parentheses may contain any characters, including parentheses.
    """
    fields = text.rpartition(b")")[2].split()
    user, system, children_user, children_system = map(int, fields[11:15])
    return (user + system) / TICKS, (children_user + children_system) / TICKS, float(int(fields[21]) * PAGE)


def _children(process: str, pid: int) -> list[int] | None:
    """Return the main thread's children, which include the loader workers. Reading a hundred threads costs too much."""
    try:
        return list(map(int, _read_all(f"{process}/task/{pid}/children").split()))
    except FileNotFoundError:  # this kernel has no such file
        return None


def _with_descendants(children: list[int], procfs: Path, generations: int, limit: float) -> list[int]:
    """Return the children, and theirs, and so on, until there are more than the limit."""
    found, newest = list(children), children
    for _ in range(generations - 1):
        parents, newest = newest, []
        for parent in parents:
            if len(found) > limit:
                return found
            its_own = _children_of_living(f"{procfs}/{parent}", parent)
            found += its_own
            newest += its_own
    return found


def _children_of_living(process: str, pid: int) -> list[int]:
    try:
        return _children(process, pid) or []
    except OSError:  # it has ended
        return []


def _cpu(process: str) -> float:
    try:
        own, waited_for, _ = _parse_stat(_read(f"{process}/stat"))
    except OSError:  # it has ended: its parent's value includes it next time
        return 0.0
    return own + waited_for


def _run_queues(pids: Iterable[int], procfs: Path) -> Iterator[tuple[int, float]]:
    for pid in pids:
        seconds = _run_queue(f"{procfs}/{pid}")
        if seconds is not None:
            yield pid, seconds


def _run_queue(process: str) -> float | None:
    try:
        ran, waited, _ = map(int, _read(f"{process}/schedstat").split())
    except (OSError, ValueError):
        return None
    return waited / 1e9 if ran else None  # all values are 0 if the kernel does not count


def _read_bytes(process: str) -> float | None:
    try:
        found = READ_BYTES.search(_read(f"{process}/io"))
    except OSError:  # another user's process, or one that has ended
        return None
    return float(found[1]) if found else None


def _read_bytes_of_living(process: str) -> float | None:
    """Return 0 for a process that has ended: its parent's value includes it next time."""
    found = _read_bytes(process)
    return 0.0 if found is None and not os.path.exists(process) else found  # noqa: PTH110 - as in _read


def _sum_known(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
