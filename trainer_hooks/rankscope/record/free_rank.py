"""Choosing a rank for a process that trains alone: one of its run that no living process has."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rankscope.record.old_records import living_ranks, opened_listing

LOCK_TIMEOUT = 0.2  # seconds; any user who may open the directory can hold its lock
LOOK_EVERY = 0.004


@contextmanager
def free_rank(path: Path, directory: int, run: str, prefix: str, numbers: Iterable[int]) -> Iterator[int]:
    """Yield the rank, the first of `numbers` that is free. No other process of this user gets it before the block ends.

    `directory` is `path`, opened. If it may not be listed, every process gets the first number. The names of the run's
    records begin with `prefix`.
    """
    with contextlib.ExitStack() as stack:
        taken = set()
        with contextlib.suppress(OSError):
            listing = stack.enter_context(opened_listing(directory))
            _wait_for_lock(listing)
            living = living_ranks(path, listing, lambda name: name.startswith(prefix))
            taken = {rank.info.get("rank") for rank in living if rank.info.get("run") == run}
        yield next(rank for rank in numbers if str(rank) not in taken)


def _wait_for_lock(directory: int) -> None:
    """Lock the directory. Go on without the lock if another process does not release it in time."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOOK_EVERY)
