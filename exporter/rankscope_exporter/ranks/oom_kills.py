"""The time when the kernel's out-of-memory killer last ended a process of this node.

The kernel counts them in /proc/vmstat, which a container sees as well: those for lack of memory of the node, and those
of a cgroup at its limit (Linux 4.13).
"""

from __future__ import annotations

import re
from pathlib import Path

VMSTAT = Path("/proc/vmstat")
COUNTED = re.compile(r"^oom_kill (\d{1,15})$", re.MULTILINE)


class OomKills:
    """Watches the count. Used by one thread."""

    def __init__(self, vmstat: Path = VMSTAT) -> None:
        self._vmstat = vmstat
        self._count: int | None = None
        self._last: float | None = None

    def last(self, at: float) -> float | None:
        """Read the count at that time, and return when it last rose; None if it did not since the first call."""
        count = self._read()
        if count is not None and self._count is not None and count > self._count:
            self._last = at
        self._count = self._count if count is None else count
        return self._last

    def _read(self) -> int | None:
        """Return the count; None if the kernel has none, or if the file cannot be read."""
        try:
            found = COUNTED.search(self._vmstat.read_text())
        except (OSError, UnicodeDecodeError):
            return None
        return int(found[1]) if found else None
