"""The number of processes that the kernel's out-of-memory killer has ended on this node since its boot.

The kernel counts them in /proc/vmstat, which a container sees as well: those for lack of memory of the node, and those
of a cgroup at its limit (Linux 4.13).
"""

from __future__ import annotations

import re
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
COUNTED = re.compile(r"^oom_kill (\d{1,15})$", re.MULTILINE)


def read_oom_kills(vmstat: Path = VMSTAT) -> float | None:
    """Return the number; None if the kernel does not count them, or if the file cannot be read."""
    try:
        found = COUNTED.search(vmstat.read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return float(found[1]) if found else None
