"""Helpers of the attacks on ranks: living and ended records of several users, and the ranks that a scan shows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testing.programs import Program
from testing.records import living_rank, publish

from rankscope.record import layout
from rankscope_exporter.ranks.rank import Rank, Scan

NOW = 1_700_000_000.0


def as_user(uid: int) -> list[str]:
    """Return the prefix that runs a command as another user."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


@contextmanager
def living(
    directory: Path, uid: int, name: str, started: float = NOW - 100, before: str = "", **labels: Any
) -> Iterator[Program]:
    """Start a rank of the user in run `train`. It runs the code `before` before it writes its record."""
    directory.chmod(0o1777)
    code = f"become({uid})\n{before}"
    slots = {"started_unix": started, "started_monotonic": time.monotonic() + started - NOW}
    with living_rank(directory, name, slots, code, **{"run": "train", **labels}) as rank:
        yield rank


def ended(directory: Path, uid: int, name: str, at: float = NOW, **labels: Any) -> Path:
    """Write the record of the user's rank that has ended with an exception."""
    slots = {"started_unix": NOW - 100, "ended": layout.EXCEPTION, "ended_unix": at}
    writer, path = publish(directory, name, slots, **{"run": "train", **labels})
    writer.detach()
    os.chown(path, uid, uid)
    return path


def owned(scan: Scan, owner: int) -> list[Rank]:
    """Return the shown ranks of one user."""
    return [rank for rank in scan.ranks if rank.owner == owner]


def clock() -> float:
    """Return the exporter's time, just after the ends of all ranks."""
    return NOW + 1
