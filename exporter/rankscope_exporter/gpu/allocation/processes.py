"""The processes on a GPU: whether they are alive, their user, and their Slurm job or container.

NVML reports process ids of the host. They are useful only if the host's processes are visible: on the host itself, in a
container with the host's pid namespace, or with the host's /proc mounted elsewhere.
"""

from __future__ import annotations

import pwd
import random
import re
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.record.text import is_label
from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.slurm import job_of_cgroup

# A container's cgroup ends in its id: <prefix>-<id>.scope if systemd creates it, <id> or <prefix>-<id> if the runtime
# does, and <slice>:<prefix>:<id> if their cgroup drivers differ. A monitor's ends in <prefix>-conmon-<id>. The table in
# tests/exporter/gpu/allocation/test_cgroups.py lists all of these with their sources.
CONTAINER_CGROUP = re.compile(r"(?<=[/:-])(?<!conmon-)([0-9a-f]{64})(?:\.scope)?(?=/| \(deleted\)|$)")
MAX_NAMES = 4096
LOOKUPS_AT_ONCE = 64  # more than a node has users; a user with a range of subordinate ids has 65,536 uids
DEAD_STATES = ("Z", "X")  # in /proc/PID/status: a zombie has freed its memory, or the driver has lost track of it


@dataclass(frozen=True)
class Process:
    """A living process according to /proc."""

    uid: int
    cgroup: str
    """The text of /proc/PID/cgroup."""
    pid: int = 0
    name: str = ""
    """Its first 15 characters."""


def name_of_user(uid: int) -> str:
    """Return the user's name; empty if this machine has none or it is not printable."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""
    return name if is_label(name) else ""


class UserNames:
    """User names by uid. A lookup may query a directory service and block: only `resolve` does that.

    Any user may have many uids. So lookups are limited for all users together, and new uids evict no old ones.
    """

    def __init__(self, lookup: Callable[[int], str] = name_of_user) -> None:
        self._lookup = lookup
        self._names: dict[int, str] = {}  # in the order of their lookups; empty for a uid without a name
        self._requested: set[int] = set()  # since the last `resolve`
        self._lookups_left = LOOKUPS_AT_ONCE
        self._lock = threading.Lock()

    def name(self, uid: int, unnamed: str = "") -> str:
        """Return the name, or `unnamed` if the uid has none; empty until `resolve` has looked it up."""
        with self._lock:
            self._requested.add(uid)
            name = self._names.get(uid)
        return "" if name is None else name or unnamed

    def resolve(self) -> None:
        """Look up requested uids: LOOKUPS_AT_ONCE, and one more with each call. If there are more, choose at random."""
        with self._lock:
            requested, self._requested = self._requested, set()
        unknown = sorted(requested - self._names.keys())
        self._lookups_left = min(self._lookups_left + 1, LOOKUPS_AT_ONCE)
        for uid in random.sample(unknown, min(len(unknown), self._lookups_left)):
            self._lookups_left -= 1
            name = self._lookup(uid)
            with self._lock:
                self._names[uid] = name
        self._evict(requested)

    def _evict(self, requested: Collection[int]) -> None:
        """Forget the newest names that are not in use, if there are too many."""
        if (excess := len(self._names) - MAX_NAMES) > 0:
            unused = [uid for uid in reversed(self._names) if uid not in requested]
            with self._lock:
                for uid in unused[:excess]:
                    del self._names[uid]


class ProcessTable:
    """The visible processes of a procfs."""

    def __init__(self, procfs: Path = Path("/proc"), *, sees_all: bool | None = None) -> None:
        """Initialize the table. If `sees_all` is None, it is detected."""
        self._procfs = procfs
        self.sees_all = _is_host_procfs(procfs) if sees_all is None else sees_all
        """True if NVML's process ids can be looked up here."""

    def find(self, pid: int) -> Process | None:
        """Return the process, or None if it has ended. Raises PermissionError if a security module hides it."""
        status = self._text(pid, "status")
        state, uid = _field(status, "State"), _field(status, "Uid")
        if not uid.isdecimal() or state in DEAD_STATES:
            return None
        return Process(int(uid), self._text(pid, "cgroup"), pid, _field(status, "Name"))

    def _text(self, pid: int, name: str) -> str:
        """Return the file's text; empty if there is no such process. Other errors are raised."""
        try:
            return (self._procfs / str(pid) / name).read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return ""


@dataclass(frozen=True)
class GpuProcesses:
    """The processes on a GPU, as far as they are known."""

    living: Sequence[Process | None]
    """None for a process that cannot be looked up."""
    dead: int
    """Number of ended processes that the driver still lists."""
    count: int | None
    """Number of living processes; None if some may be invisible."""


def look_up(pids: Collection[int] | None, table: ProcessTable) -> GpuProcesses:
    """Look up the processes that the driver lists on a GPU. `pids` is None if the driver never lists processes.

    In a separate pid namespace the driver does not list the host's processes: an empty list then means unknown.
    """
    if pids is None:
        return GpuProcesses((), 0, None)
    if not table.sees_all:
        return GpuProcesses([None] * len(pids), 0, len(pids) or None)
    living = [process for pid in pids for process in _find_living(table, pid)]
    return GpuProcesses(living, len(pids) - len(living), len(living))


def holders_of(processes: Collection[Process | None], users: UserNames) -> Sequence[Holder]:
    """Return the holders that a GPU's processes indicate; None is a living process that cannot be looked up."""
    return [_holder(process, users) if process else Holder("process") for process in processes]


def container_of_cgroup(cgroup: str) -> str:
    """Return the id (64 hexadecimal digits) of the innermost container in a process's cgroup; empty if there is none.

    In cgroup v1 each hierarchy has its own line, and their depths may differ.
    """
    deepest: list[str] = max((CONTAINER_CGROUP.findall(line) for line in cgroup.split("\n")), key=len)
    return deepest[-1] if deepest else ""


def _holder(process: Process, users: UserNames) -> Holder:
    job, container = job_of_cgroup(process.cgroup), container_of_cgroup(process.cgroup)
    source = "slurm" if job else "container" if container else "user"
    user = users.name(process.uid, str(process.uid))
    return Holder(source, slurm_job_id=job, container_id=container, user=user, uid=str(process.uid))


def _find_living(table: ProcessTable, pid: int) -> list[Process | None]:
    try:
        process = table.find(pid)
    except PermissionError:
        return [None]
    return [process] if process else []


def _is_host_procfs(procfs: Path) -> bool:
    """Return whether process 2 is visible and kthreadd, which it is in the first pid namespace only."""
    try:
        return (procfs / "2" / "comm").read_text().strip() == "kthreadd"
    except OSError:
        return False


def _field(status: str, name: str) -> str:
    """Return the first word of a field of /proc/PID/status."""
    found = re.search(rf"^{name}:\s+(\S+)", status, re.MULTILINE)
    return found[1] if found else ""
