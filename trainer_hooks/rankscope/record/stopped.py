"""A check whether a process is stopped: by a signal (SIGSTOP), a debugger or a cgroup's freezer."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from rankscope.record.process_stat import PROCFS

CGROUPS = Path("/sys/fs/cgroup")
STATES = (b"T", b"t")
"""The process states `stopped` (SIGSTOP) and `tracing stop` (a debugger)."""
FROZEN = re.compile(rb"^(?:frozen 1|FROZEN)$", re.MULTILINE)
"""A frozen cgroup, in version 2 and 1."""


def is_stopped(pid: int, procfs: Path = PROCFS, cgroups: Path = CGROUPS) -> bool:
    """Return whether a process is stopped; false if that is not known."""
    with suppress(OSError):
        return has_stopped_state((procfs / str(pid) / "stat").read_bytes()) or is_frozen(pid, procfs, cgroups)
    return False


def has_stopped_state(stat: bytes) -> bool:
    """Return whether the content of /proc/PID/stat is that of a process which a signal or a debugger has stopped."""
    return stat.rpartition(b")")[2].split()[0] in STATES


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
