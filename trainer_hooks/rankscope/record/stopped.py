"""A check whether a process is stopped: by a signal (SIGSTOP), a debugger or a cgroup's freezer."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from rankscope.record.process_stat import PROCFS

CGROUPS = Path("/sys/fs/cgroup")
STATES = {b"T": "stopped by a signal (state T)", b"t": "stopped by a debugger (state t)"}
"""What has stopped a process, by its state."""
FROZEN = re.compile(rb"^(?:frozen 1|FROZEN)$", re.MULTILINE)
"""A frozen cgroup, in version 2 and 1."""


def is_stopped(pid: int, procfs: Path = PROCFS, cgroups: Path = CGROUPS) -> bool:
    """Return whether a process is stopped; false if that is not known."""
    return bool(describe_stop(pid, procfs, cgroups))


def describe_stop(pid: int, procfs: Path = PROCFS, cgroups: Path = CGROUPS) -> str:
    """Return what has stopped a process; empty if it is not stopped, or if that is not known."""
    try:
        state = read_state((procfs / str(pid) / "stat").read_bytes())
    except OSError:
        return ""
    return STATES.get(state) or "stopped by a frozen cgroup" * is_frozen(pid, procfs, cgroups)


def has_stopped_state(stat: bytes) -> bool:
    """Return whether the content of /proc/PID/stat is that of a process which a signal or a debugger has stopped."""
    return read_state(stat) in STATES


def read_state(stat: bytes) -> bytes:
    """Return the letter of a process's state from the content of /proc/PID/stat."""
    return stat.rpartition(b")")[2].split()[0]


def is_frozen(pid: int, procfs: Path = PROCFS, cgroups: Path = CGROUPS) -> bool:
    """Return whether a cgroup's freezer has stopped a process; false if that is not known.

    Its process state does not show that. `docker pause` and `systemctl freeze` use it.
    """
    try:
        lines = (procfs / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return False
    for _, controllers, place in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers == "":
            files = [f"{cgroups}{mount}{place}/cgroup.events" for mount in ("", "/unified")]
        elif "freezer" in controllers.split(","):
            files = [f"{cgroups}/freezer{place}/freezer.state"]
        else:
            continue
        for file in files:
            with suppress(OSError):
                if FROZEN.search(Path(file).read_bytes()):
                    return True
    return False
