"""The processes on a GPU: whether they live, whose they are, and in which Slurm job or container.

NVML tells process ids of the host. They mean something only where the host's processes are seen: on the host itself, in
a container with its pid namespace, or by its /proc mounted elsewhere.
"""

from __future__ import annotations

import pwd
import re
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.record.text import is_label
from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.slurm import job_of_cgroup

# A container's cgroup ends in its id: <prefix>-<id>.scope where systemd makes it, <id> or <prefix>-<id> where the
# runtime does, and <slice>:<prefix>:<id> where the two disagree. A monitor's is <prefix>-conmon-<id>. All of these and
# their sources are in the table of tests/exporter/gpu/allocation/test_cgroups.py.
CONTAINER_CGROUP = re.compile(r"(?<=[/:-])(?<!conmon-)([0-9a-f]{64})(?:\.scope)?(?=/| \(deleted\)|$)")
NAMES_REMEMBERED = 4096  # a user with a range of subordinate ids has 65,536 uids
DEAD_STATES = ("Z", "X")  # of /proc/PID/status: a zombie has given its memory back, or the driver has lost track of it


@dataclass(frozen=True)
class Process:
    """What /proc says of a living process."""

    uid: int
    cgroup: str
    """The text of /proc/PID/cgroup."""
    pid: int = 0
    name: str = ""
    """Its first 15 characters."""


class UserNames:
    """Names by uid. Looking one up may ask a directory service and block: only `resolve` does that."""

    def __init__(self, lookup: Callable[[int], str] | None = None) -> None:
        self._lookup = lookup or _name_or_number
        self._names: dict[int, str] = {}
        self._wanted: set[int] = set()
        self._lock = threading.Lock()

    def name(self, uid: int) -> str:
        """The name, or the number where it has none; empty until the next `resolve` if it was never asked for."""
        with self._lock:
            if uid not in self._names:
                self._wanted.add(uid)
                return ""
            self._names[uid] = name = self._names.pop(uid)  # the last to be forgotten
            return name

    def resolve(self) -> None:
        """Look up what was asked for."""
        with self._lock:
            wanted, self._wanted = self._wanted, set()
        found = {uid: self._lookup(uid) for uid in wanted}
        with self._lock:
            self._names |= found
            while len(self._names) > NAMES_REMEMBERED:
                del self._names[next(iter(self._names))]


class ProcessTable:
    """The processes that can be seen below a procfs."""

    def __init__(self, procfs: Path = Path("/proc"), *, sees_all: bool | None = None) -> None:
        """`sees_all` None is found out."""
        self._procfs = procfs
        self.sees_all = _is_of_a_host(procfs) if sees_all is None else sees_all
        """Whether the process ids that NVML tells can be looked up here."""

    def find(self, pid: int) -> Process | None:
        """The process; None if it has ended. Raises PermissionError where a security module hides it."""
        status = self._text(pid, "status")
        state, uid = _field(status, "State"), _field(status, "Uid")
        if not uid.isdecimal() or state in DEAD_STATES:
            return None
        return Process(int(uid), self._text(pid, "cgroup"), pid, _field(status, "Name"))

    def _text(self, pid: int, name: str) -> str:
        """Empty if there is no such process; no other error means that it has ended."""
        try:
            return (self._procfs / str(pid) / name).read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return ""


@dataclass(frozen=True)
class Seen:
    """What is known of the processes on a GPU."""

    living: Sequence[Process | None]
    """None is one that cannot be looked up."""
    dead: int
    """Listed by the driver, and no more."""
    count: int | None
    """The living; None where there may be some that cannot be seen."""


def look_up(pids: Collection[int] | None, table: ProcessTable) -> Seen:
    """The processes that the driver lists on a GPU; `pids` None if it lists none of any GPU.

    In a pid namespace of its own an exporter is not told of the host's processes: none listed says nothing then.
    """
    if pids is None:
        return Seen((), 0, None)
    if not table.sees_all:
        return Seen([None] * len(pids), 0, len(pids) or None)
    living = [process for pid in pids for process in _if_living(table, pid)]
    return Seen(living, len(pids) - len(living), len(living))


def holders_of(processes: Collection[Process | None], users: UserNames) -> Sequence[Holder]:
    """What the processes of a GPU say of its holders; None is one that lives but cannot be looked up."""
    return [_holder(process, users) if process else Holder("process") for process in processes]


def container_of_cgroup(cgroup: str) -> str:
    """Return the id (64 hexadecimal digits) of the innermost container in whose cgroup a process is; empty if in none.

    In cgroup v1 each hierarchy has a line of its own, and not all of them need to be as deep.
    """
    deepest: list[str] = max((CONTAINER_CGROUP.findall(line) for line in cgroup.split("\n")), key=len)
    return deepest[-1] if deepest else ""


def _holder(process: Process, users: UserNames) -> Holder:
    job, container = job_of_cgroup(process.cgroup), container_of_cgroup(process.cgroup)
    source = "slurm" if job else "container" if container else "user"
    user = users.name(process.uid)
    return Holder(source, slurm_job_id=job, container_id=container, user=user, uid=str(process.uid))


def _if_living(table: ProcessTable, pid: int) -> list[Process | None]:
    try:
        process = table.find(pid)
    except PermissionError:
        return [None]
    return [process] if process else []


def _is_of_a_host(procfs: Path) -> bool:
    """Process 2 is kthreadd in the first pid namespace and nowhere else; hidepid hides it from whom it hides others."""
    try:
        return (procfs / "2" / "comm").read_text().strip() == "kthreadd"
    except OSError:
        return False


def _field(status: str, name: str) -> str:
    """The first word of a field of /proc/PID/status."""
    found = re.search(rf"^{name}:\s+(\S+)", status, re.MULTILINE)
    return found[1] if found else ""


def name_of_user(uid: int) -> str:
    """The user's name; empty where this machine knows none, or one that is no printable text."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""
    return name if is_label(name) else ""


def _name_or_number(uid: int) -> str:
    return name_of_user(uid) or str(uid)
