"""The state of a process and its threads as the kernel shows it, and its loader workers. The process is not touched.

It is read below an open directory of /proc. If the process ends, the kernel gives its ID to another one, but never this
directory. A file that this user may not read is absent.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rankscope.cli.printable import printable
from rankscope.record.process_stat import PROCFS
from rankscope.record.stopped import is_stopped

READ_LIMIT, MAPS_LIMIT = 8192, 2**20
THREADS_LIMIT, WORKERS_LIMIT = 64, 32
STATUS = ("Name", "State", "Threads", "VmRSS", "VmSwap", "SigBlk", "SigCgt", "Cpus_allowed_list")
"""The lines of /proc/PID/status that are kept."""
SYSTEM_CALLS: Mapping[str, Mapping[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 6: "lstat", 7: "poll", 17: "pread64", 18: "pwrite64",
        19: "readv", 20: "writev", 23: "select", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto",
        45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync",
        75: "fdatasync", 202: "futex", 217: "getdents64", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid",
        257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 288: "accept4",
        332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 32: "flock", 56: "openat", 57: "close", 61: "getdents64", 63: "read",
        64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 72: "pselect6", 73: "ppoll",
        79: "newfstatat", 82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep",
        115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg",
        212: "recvmsg", 242: "accept4", 260: "wait4", 291: "statx",
    },
}  # fmt: skip
"""Names of system calls in which a process may stand."""
LOCKS = {"flock", "fcntl"}
"""Those that wait for a lock on a file."""
ON_FILES = {
    *LOCKS, "close", "read", "write", "pread64", "pwrite64", "readv", "writev", "fsync", "fdatasync", "getdents64"
}  # fmt: skip
"""Those whose first argument is a descriptor."""
OUTPUTS, OUTPUT = (1, 2), " (its output)"
"""The descriptors of a process's output, and what is added to their targets."""
STORAGE = re.compile(r"^/(?!dev/|proc/|sys/|memfd:)")
"""The target of a descriptor that is a file in a file system, or a named pipe."""


TRACKERS = ("resource_tracker", "semaphore_tracker")
"""Python's own child processes."""


@dataclass(frozen=True)
class ThreadState:
    """One thread."""

    number: int
    name: str
    state: str
    """As in /proc/PID/status: `S (sleeping)`, `D (disk sleep)`."""
    call: str
    """The system call that it is in, with the file if that is known; empty if it runs or that is hidden."""
    wait_channel: str
    """The kernel function that it sleeps in; empty if unknown."""
    stack: str
    """Its stack in the kernel; empty if this user may not read it."""
    switches: int
    """The number of times that it began to wait."""
    run_queue: float = 0.0
    """Seconds for which it has waited for a CPU."""
    address: int = 0
    """The first argument of its system call, which is an address in a futex; 0 if hidden."""

    @property
    def line(self) -> str:
        """Return the thread on one line."""
        parts = (self.state, self.call and f"in {self.call}", self.wait_channel and f"waits in {self.wait_channel}")
        return f"thread {self.number} {self.name}: {', '.join(filter(None, parts))}"


@dataclass(frozen=True)
class ProcessState:
    """One process. The first thread is the main one."""

    pid: int
    start: int
    """In clock ticks since boot; 0 if unknown."""
    status: str
    command: str
    threads: tuple[ThreadState, ...]
    workers: tuple[ProcessState, ...] = ()
    """Its children of the same user, such as loader workers, with their main threads."""
    is_stopped: bool = False
    """Whether a child is stopped: by a signal, a debugger or a cgroup's freezer."""
    maps: str = ""
    """Its mappings as in /proc/PID/maps; empty if this user may not read them."""

    @property
    def main(self) -> ThreadState | None:
        """Return the main thread."""
        return self.threads[0] if self.threads else None

    def lines(self) -> Iterator[str]:
        """Yield the process as text."""
        yield from self.status.splitlines()
        yield f"command: {self.command}"
        for one in self.threads:
            yield one.line
            yield from (f"    {line}" for line in one.stack.splitlines())
        for worker in self.workers:
            yield f"child {worker.pid}: {worker.command}"
            yield from (f"  {line}" for line in worker.lines() if not line.startswith("command: "))


def open_process(pid: int, procfs: Path = PROCFS) -> int:
    """Open the directory of a process. Raise OSError."""
    return os.open(procfs / str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def read_process(directory: int, pid: int, owner: int, procfs: Path = PROCFS) -> ProcessState:
    """Return the state of a process from its open directory, with children of the same owner."""
    threads = _threads(directory, pid, THREADS_LIMIT)
    children = _read(directory, f"task/{pid}/children").split()[:WORKERS_LIMIT]
    workers = (_worker(int(child), pid, owner, procfs) for child in children if child.isdecimal())
    found = tuple(worker for worker in workers if worker)
    maps = _read(directory, "maps", MAPS_LIMIT)
    return ProcessState(pid, _start(directory), _status(directory), _command(directory), threads, found, maps=maps)


def _worker(pid: int, parent: int, owner: int, procfs: Path) -> ProcessState | None:
    """Return a child. Its ID may be another process's by now: only one of the same parent and user counts."""
    try:
        directory = open_process(pid, procfs)
    except OSError:
        return None
    try:
        fields = _fields(_read(directory, "status"))
        is_child = fields.get("PPid") == str(parent) and {*fields.get("Uid", "").split()} == {str(owner)}
        command = _command(directory)
        is_worker = is_child and not any(name in command for name in TRACKERS)
        threads = _threads(directory, pid, 1)
        return ProcessState(pid, 0, "", command, threads, is_stopped=is_stopped(pid, procfs)) if is_worker else None
    finally:
        os.close(directory)


def _threads(directory: int, pid: int, limit: int) -> tuple[ThreadState, ...]:
    try:
        tasks = os.open("task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
    except OSError:
        return ()
    try:
        numbers = sorted((int(one.name) for one in os.scandir(tasks)), key=lambda number: (number != pid, number))
    except OSError:
        numbers = []
    finally:
        os.close(tasks)
    return tuple(_thread(directory, number) for number in numbers[:limit])


def _thread(directory: int, number: int) -> ThreadState:
    task = f"task/{number}"
    fields = _fields(_read(directory, f"{task}/status"))
    channel = _read(directory, f"{task}/wchan").strip()
    switches = fields.get("voluntary_ctxt_switches", "0")
    call = _read(directory, f"{task}/syscall")
    return ThreadState(
        number=number,
        name=fields.get("Name", ""),
        state=fields.get("State", "gone"),
        call=_call(directory, call),
        wait_channel="" if channel == "0" else channel,
        stack=_read(directory, f"{task}/stack").strip(),
        switches=int(switches) if switches.isdecimal() else 0,
        run_queue=_run_queue(_read(directory, f"{task}/schedstat")),
        address=_first_argument(call),
    )


def _run_queue(text: str) -> float:
    """Return the seconds in a run queue of /proc/PID/task/TID/schedstat; 0 if the kernel does not count them."""
    fields = text.split()
    return int(fields[1]) / 1e9 if len(fields) == 3 and fields[1].isdecimal() else 0.0


def _first_argument(text: str) -> int:
    number, *arguments = text.split() or [""]
    return int(arguments[0], 16) if number.isdecimal() and arguments else 0


def _call(directory: int, text: str) -> str:
    """Return the system call of /proc/PID/syscall, with the file that it is on."""
    number, *arguments = text.split() or [""]
    if not number.isdecimal():
        return ""
    name = SYSTEM_CALLS.get(platform.machine(), {}).get(int(number), f"system call {number}")
    if name in ON_FILES and arguments:
        with suppress(OSError, ValueError):
            descriptor = int(arguments[0], 16)
            target = os.readlink(f"fd/{descriptor}", dir_fd=directory)
            is_output = descriptor in OUTPUTS and not STORAGE.match(target)
            return f"{name} of {target}{OUTPUT * is_output}"
    return name


def _status(directory: int) -> str:
    fields = _fields(_read(directory, "status"))
    return "\n".join(f"{name}: {fields[name]}" for name in STATUS if name in fields)


def _start(directory: int) -> int:
    fields = _read(directory, "stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else 0


def _command(directory: int) -> str:
    return printable(_read(directory, "cmdline").replace("\0", " ").strip())


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: " ".join(value.split()) for name, _, value in pairs}


def _read(directory: int, name: str, limit: int = READ_LIMIT) -> str:
    """Return the first bytes of a file below the directory; nothing if it cannot be read."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return ""
    parts: list[bytes] = []
    try:
        while limit > 0 and (part := os.read(descriptor, limit)):  # the kernel gives a page of `maps` at a time
            parts.append(part)
            limit -= len(part)
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace")
