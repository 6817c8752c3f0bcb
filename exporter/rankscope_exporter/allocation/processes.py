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

from rankscope_exporter.allocation.holder import Holder
from rankscope_exporter.allocation.slurm import job_of_cgroup

# docker-<id>.scope, cri-containerd-<id>.scope, crio-<id>.scope, libpod-<id>.scope, or a directory named by the id
# alone. The last is the innermost.
CONTAINER_CGROUP = re.compile(r"[/-]([0-9a-f]{64})(?:\.scope)?(?=/|$)", re.MULTILINE)
DEAD_STATES = ("Z", "X")  # of /proc/PID/status: a zombie has given its memory back, or the driver has lost track of it
KTHREADD = ("2", "kthreadd")


@dataclass(frozen=True)
class Process:
    """A living process."""

    uid: int
    cgroup: str
    """The text of /proc/PID/cgroup."""


class UserNames:
    """Names by uid. Looking one up may ask a directory service and block: only `resolve` does that."""

    def __init__(self, lookup: Callable[[int], str] | None = None) -> None:
        self._lookup = lookup or _name_of_user
        self._names: dict[int, str] = {}
        self._wanted: set[int] = set()
        self._lock = threading.Lock()

    def name(self, uid: int) -> str:
        """The name, or the number where it has none; empty until the next `resolve` if it was never asked for."""
        with self._lock:
            if uid not in self._names:
                self._wanted.add(uid)
            return self._names.get(uid, "")

    def resolve(self) -> None:
        """Look up what was asked for."""
        with self._lock:
            wanted, self._wanted = self._wanted, set()
        found = {uid: self._lookup(uid) for uid in wanted}
        with self._lock:
            self._names |= found


class ProcessTable:
    """The processes that can be seen below a procfs."""

    def __init__(self, procfs: Path = Path("/proc"), *, sees_all: bool | None = None) -> None:
        """`sees_all` None: found out at each question, since /proc may be mounted anew with hidepid."""
        self._procfs = procfs
        self._sees_all = sees_all

    @property
    def sees_all(self) -> bool:
        """Whether the ids that NVML tells can be looked up here.

        Process 2 is kthreadd in the first pid namespace and nowhere else; with hidepid it is hidden from those from
        whom others are.
        """
        if self._sees_all is None:
            pid, name = KTHREADD
            return self._text(pid, "comm").strip() == name
        return self._sees_all

    def find(self, pid: int) -> Process | None:
        """The process; None if it has ended."""
        status = self._text(str(pid), "status")
        state, uid = _field(status, "State"), _field(status, "Uid")
        if not uid.isdecimal() or state in DEAD_STATES:
            return None
        return Process(int(uid), self._text(str(pid), "cgroup"))

    def _text(self, pid: str, name: str) -> str:
        try:
            return (self._procfs / pid / name).read_text(errors="replace")
        except OSError:
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
    found = [table.find(pid) for pid in pids]
    living = [process for process in found if process]
    return Seen(living, len(found) - len(living), len(living))


def holders_of(processes: Collection[Process | None], users: UserNames) -> Sequence[Holder]:
    """What the processes of a GPU say of its holders; None is one that lives but cannot be looked up."""
    return [_holder(process, users) if process else Holder("process") for process in processes]


def container_of_cgroup(cgroup: str) -> str:
    """The id (64 hexadecimal digits) of the container in whose cgroup a process is; empty if in none."""
    found = CONTAINER_CGROUP.findall(cgroup)
    return str(found[-1]) if found else ""


def _holder(process: Process, users: UserNames) -> Holder:
    job, container = job_of_cgroup(process.cgroup), container_of_cgroup(process.cgroup)
    source = "slurm" if job else "container" if container else "user"
    return Holder(source, slurm_job_id=job, container_id=container, user=users.name(process.uid))


def _field(status: str, name: str) -> str:
    """The first word of a field of /proc/PID/status."""
    found = re.search(rf"^{name}:\s+(\S+)", status, re.MULTILINE)
    return found[1] if found else ""


def _name_of_user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
