"""Reading the ranks in a run directory, for `rankscope stacks`, `rankscope hang` and `rankscope report`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rankscope.record.directory import ForeignLinkError, open_directory
from rankscope.record.layout import SIZE
from rankscope.record.listing import Listing, RankFile, take_turns
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.text import NUMBER

NAMES_LIMIT = 100_000  # in one directory; this takes one second
FILES_LIMIT = 1024


class RunDirectoryError(Exception):
    """A run directory cannot be read; the message has the reason."""


@dataclass(frozen=True)
class RecordedRank:
    """A rank by its record. It is alive if a process has locked that. `owner` is the user ID of the record's file."""

    snapshot: RankSnapshot
    owner: int

    @property
    def run(self) -> str:
        """The run's name in the record."""
        return str(self.snapshot.info["run"])

    @property
    def rank(self) -> str:
        """The rank's number, of at most ten digits."""
        return str(self.snapshot.info["rank"])


def all_ranks(directory: Path) -> list[RecordedRank]:
    """Return all ranks of a directory, including ended ones. Raises RunDirectoryError."""
    try:
        descriptor = open_directory(directory)
    except FileNotFoundError:
        return []
    except ForeignLinkError as error:
        raise RunDirectoryError(f"{directory} is a link that another user made") from error
    except OSError as error:
        raise RunDirectoryError(f"{directory}: {error.strerror}") from error
    try:
        found = [_read(file) for file in take_turns(_newest_first(directory, descriptor))[:FILES_LIMIT]]
    except OSError as error:
        raise RunDirectoryError(f"{directory}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return [rank for rank in found if rank]


def _newest_first(directory: Path, descriptor: int) -> list[RankFile]:
    """Return the files that are large enough to be records, newest first."""
    listing = Listing(directory, NAMES_LIMIT, NAMES_LIMIT)
    try:
        files = listing.look(descriptor).files
    finally:
        listing.close()
    return sorted((file for file in files if file.size >= SIZE), key=lambda file: (-file.modified, file.name))


def _read(file: RankFile) -> RecordedRank | None:
    """Return the rank of a record, or None if its run or rank is not as the hook writes them."""
    try:
        snapshot = read_rank(file.path, file.descriptor)
    except (FileNotFoundError, UnreadableRecordError):
        return None
    run, rank = snapshot.info.get("run"), snapshot.info.get("rank")
    is_valid = isinstance(run, str) and isinstance(rank, str) and NUMBER.fullmatch(rank)
    return RecordedRank(snapshot, file.owner) if is_valid else None
