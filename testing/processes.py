"""CPU time and memory of a process, as the kernel reports them."""

from __future__ import annotations

import os
import re
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")  # of CPU time, 100 a second
MEBIBYTE = 2**20


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; the first one is the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads so far, user and system."""
    fields = stat(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_bytes(pid: int, field: str = "VmRSS") -> int:
    """Return the resident memory with shared pages: now, or the maximum (`VmHWM`). Raises OSError without any."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    if not found:
        raise ProcessLookupError(f"process {pid} has ended")
    return int(found[1]) * 1024
