"""The node in a capture: memory, pressure and load, and of the run's processes their limits and blocked threads."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from rankscope_exporter.capture.source import cut

PROCFS, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
MEMORY = ("MemTotal", "MemAvailable", "Dirty", "Writeback", "Shmem", "SwapTotal", "SwapFree", "HugePages_Free")
PRESSURE = ("cpu", "memory", "io")
CGROUP = ("memory.current", "memory.max", "memory.events", "memory.swap.current", "pids.current", "pids.max", "cpu.max")
READ_BYTES = 64 * 1024
DESCRIPTORS_LIMIT = 2**20
"""The most descriptors of all ranks that are counted."""
CHILDREN_LIMIT, THREADS_LIMIT = 256, 20_000
"""The most children of a rank, and the most threads of all ranks and children that are read."""
BLOCKED_SHOWN = 50
BYTES = 64 * 1024
OPEN_FILES = re.compile(r"^Max open files +(\S+)", re.MULTILINE)
BLOCKED = "D"
"""The state of a thread in an uninterruptible sleep, such as for a disk, a network file system or a driver."""


def describe_machine(pids: Collection[int], *, procfs: Path = PROCFS, cgroups: Path = CGROUPS) -> str:
    """Return the node's state and that of the run's processes, in at most 64 KiB. It reads only procfs and cgroups.

    `pids` are the run's ranks. What may not be read is absent, or named as not visible.
    """
    sections = (
        ("Memory", _memory(procfs)),
        ("Pressure: share of the time that some or all tasks waited, in %", _pressure(procfs)),
        ("Load", _load(procfs)),
        ("Limits of the run's cgroups", _cgroups(pids, procfs, cgroups)),
        ("File descriptors of the run's ranks", _descriptors(pids, procfs)),
        ("Threads of the run in an uninterruptible sleep (D)", _blocked(pids, procfs)),
    )
    lines = []
    for title, content in sections:
        lines += [title, *(f"  {line}" for line in [*content] or ["unknown"]), ""]
    return cut("\n".join(lines), BYTES)


def _memory(procfs: Path) -> Iterator[str]:
    fields = dict(line.partition(":")[::2] for line in _read(procfs / "meminfo").splitlines())
    for name in MEMORY:
        number, _, unit = fields.get(name, "").strip().partition(" ")
        if number.isdecimal():
            yield f"{name}: {int(number) / 2**20:.2f} GiB" if unit == "kB" else f"{name}: {number}"


def _pressure(procfs: Path) -> Iterator[str]:
    for name in PRESSURE:
        for line in _read(procfs / "pressure" / name).splitlines():
            yield f"{name}: {line.partition(' total=')[0]}"


def _load(procfs: Path) -> Iterator[str]:
    if text := _read(procfs / "loadavg").split():
        yield f"{' '.join(text[:3])} (1, 5 and 15 min), {os.cpu_count()} CPUs, running and all tasks {text[3]}"
    if files := _read(procfs / "sys/fs/file-nr").split():
        yield f"open files of all processes: {files[0]} of {files[2]}"


def _cgroups(pids: Collection[int], procfs: Path, cgroups: Path) -> Iterator[str]:
    """Yield the limits of each cgroup (version 2) with a rank. In a container, a parent may have more."""
    places: dict[str, int] = {}
    for pid in pids:
        for line in _read(procfs / str(pid) / "cgroup").splitlines():
            if line.startswith("0::/") and ".." not in line:
                places.setdefault(line.removeprefix("0::/"), pid)
    for place, pid in islice(places.items(), CHILDREN_LIMIT):
        values = ((name, _read(cgroups / place / name).split()) for name in CGROUP)
        known = ", ".join(f"{name} {' '.join(value)}" for name, value in values if value)
        if known:
            yield f"process {pid}: {known}"


def _descriptors(pids: Collection[int], procfs: Path) -> Iterator[str]:
    limit = DESCRIPTORS_LIMIT // max(len(pids), 1)
    for pid in pids:
        if found := OPEN_FILES.search(_read(procfs / str(pid) / "limits")):
            count = _count(procfs / str(pid) / "fd", limit)
            number = "not visible" if count is None else f"at least {count}" if count == limit else count
            yield f"process {pid}: {number} of {found[1]}"


def _count(directory: Path, limit: int) -> int | None:
    """Return the number of entries, counted up to a limit; None if it may not be seen."""
    try:
        with os.scandir(directory) as entries:
            return sum(1 for _ in islice(entries, limit))
    except OSError:
        return None


def _blocked(pids: Collection[int], procfs: Path) -> Iterator[str]:
    """Yield the threads of ranks and of their children in state D, and where in the kernel they sleep."""
    found = []
    for owner, task in islice(_tasks(pids, procfs), THREADS_LIMIT):
        head, _, tail = _read(task / "stat").rpartition(")")
        if tail.split()[:1] == [BLOCKED]:
            place = _read(task / "wchan").strip()
            where = f": {place}" if place not in ("", "0") else ""  # 0 without the permission to see it
            found.append(f"{owner}, thread {task.name} ({head.partition('(')[2]}){where}")
    yield from found[:BLOCKED_SHOWN] or ["none"]
    if len(found) > BLOCKED_SHOWN:
        yield f"and {len(found) - BLOCKED_SHOWN} more"


def _tasks(pids: Collection[int], procfs: Path) -> Iterator[tuple[str, Path]]:
    """Yield the threads of each rank and of its children, with the name of their process."""
    for pid in map(str, pids):
        children = _read(procfs / pid / "task" / pid / "children").split()[:CHILDREN_LIMIT]
        for process in (pid, *children):
            owner = f"process {pid}" if process == pid else f"process {process}, a child of {pid}"
            with suppress(OSError), os.scandir(procfs / process / "task") as entries:
                yield from ((owner, Path(task.path)) for task in entries)


def _read(path: Path) -> str:
    """Return the beginning of a file of the kernel; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(READ_BYTES).decode(errors="replace")
    except OSError:
        return ""
