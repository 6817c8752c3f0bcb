"""Removing ended records when the next record of their owner is made.

Any user may write to the directory. So the number of names is limited, and only files of this process's user are read:
300,000 empty files of another user made a job's first step 3.5 s longer.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rankscope.record.process_stat import ancestors, is_running
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.text import NUMBER
from rankscope.record.writer import SUFFIX

RECORD_LIFETIME = 600.0  # seconds after the rank's end, as long as the exporter shows it
NAMES_LIMIT = 8192  # looked at, as many as the exporter looks at
READ_LIMIT = 256  # records read; a node has about eight per run


def remove_old_records(path: Path, directory: int, info: dict[str, Any]) -> None:
    """Remove this rank's ended records of the same run, and all records that the exporter no longer shows.

    `directory` is `path`, opened. If it may not be listed, nothing is removed.
    """
    with contextlib.suppress(OSError), opened_listing(directory) as listing:
        for name in islice(_own_names(listing), READ_LIMIT):
            with contextlib.suppress(OSError, UnreadableRecordError):  # already removed, or not a record
                if _is_over(path / name, listing, info):
                    os.unlink(name, dir_fd=listing)


def living_ranks(path: Path, listing: int, is_wanted: Callable[[str], bool]) -> Iterator[RankSnapshot]:
    """Yield the living ranks of this process's user whose file name is wanted. Other files are not read.

    `listing` is `path`, opened for listing.
    """
    for name in islice(filter(is_wanted, _own_names(listing)), READ_LIMIT):
        with contextlib.suppress(OSError, UnreadableRecordError):  # already removed, or not a record
            rank = read_rank(path / name, listing)
            if rank.alive:
                yield rank


def claimants(path: Path, directory: int, info: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Return the infos of living processes that are the same rank of the same run.

    Their file names begin with `prefix`. `directory` is `path`, opened. If it may not be listed, none is known.
    """
    with contextlib.suppress(OSError), opened_listing(directory) as listing:
        ranks = living_ranks(path, listing, lambda name: name.startswith(prefix))
        return [rank.info for rank in ranks if all(rank.info.get(label) == info[label] for label in ("run", "rank"))]
    return []


def parent_rank(path: Path, directory: int) -> dict[str, Any]:
    """Return the info of the living rank that started this process or an ancestor of it; empty if there is none.

    `directory` is `path`, opened. Raises OSError if it may not be listed.
    """
    pids = set(ancestors())
    words = set(map(str, pids))

    def has_ancestor_id(name: str) -> bool:
        return not words.isdisjoint(name.split(".")[2:])  # after the run and the rank

    with opened_listing(directory) as listing:
        ranks = living_ranks(path, listing, has_ancestor_id)
        return next((rank.info for rank in ranks if rank.lock_pid in pids), {})


@contextlib.contextmanager
def opened_listing(directory: int) -> Iterator[int]:
    """Reopen the open directory for listing and locking. Raises OSError."""
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        yield listing
    finally:
        os.close(listing)


def _own_names(listing: int) -> Iterator[str]:
    """Yield the names of this user's possible records, including temporary ones of killed processes."""
    with os.scandir(listing) as entries:
        for entry in islice(entries, NAMES_LIMIT):
            with contextlib.suppress(OSError):  # removed since
                if entry.name.endswith(SUFFIX) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    yield entry.name


def _is_over(path: Path, directory: int, info: dict[str, Any]) -> bool:
    try:
        rank = read_rank(path, directory)
    except UnreadableRecordError as error:
        # Its process was killed before it had written it. A process that is still writing it takes another name.
        return path.name.startswith(".") and error.reason == "truncated"
    is_mine = all(rank.info.get(label) == info[label] for label in ("run", "rank"))
    is_old = time.time() - rank.unix(rank.last_progress) > RECORD_LIFETIME
    return (is_mine or is_old) and not (rank.alive or _runs_without_lock(rank))


def _runs_without_lock(rank: RankSnapshot) -> bool:
    """Return whether a rank without a recorded end is running: the job may have lost its lock."""
    info, pid = rank.info, str(rank.info.get("pid"))
    if rank.exit_unix is not None:
        return False
    return bool(NUMBER.fullmatch(pid) and is_running(int(pid), info.get("process_start"), rank.ahead.boottime))
