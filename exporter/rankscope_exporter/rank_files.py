"""Which files of a run directory are read. Everybody may write there, so: bounded, fair, and never through a link.

A user who fills the directory takes nobody else's place: where there are too many files, each owner has the same
share, and an owner is the one thing about a file that cannot be made up.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from rankscope import directory
from rankscope.rank_reader import UnreadableRecordError
from rankscope.rank_writer import SUFFIX

NAMES_LIMIT = 8192  # looked at in one directory: 35 ms; a million would be a scrape of seconds


@dataclass(frozen=True)
class RankFile:
    """A file that may be a record. `descriptor` is the open `directory`, in which its name is looked up."""

    directory: Path
    name: str
    descriptor: int
    owner: int
    modified: float

    @property
    def path(self) -> Path:
        """For people, and to tell files apart."""
        return _joined(self.directory, self.name)


@lru_cache(maxsize=NAMES_LIMIT)
def _joined(directory: Path, name: str) -> Path:
    """The same path for the same file at every scan: to make one, and its hash, costs as much as to read the file."""
    return directory / name


def open_directory(path: Path) -> int:
    """A descriptor of the directory, by the hook's rule. Raises FileNotFoundError, UnreadableRecordError otherwise."""
    try:
        return directory.open_directory(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "symlink" if isinstance(error, directory.ForeignLinkError) else "unreadable"
        raise UnreadableRecordError(reason, path, error.strerror or str(error)) from error


def list_files(path: Path, descriptor: int, limit: int = NAMES_LIMIT) -> tuple[list[RankFile], bool]:
    """The files that may be records, and whether there were more names than `limit`."""
    files = []
    with os.scandir(descriptor) as entries:
        for entry in islice(entries, limit):
            if entry.name.endswith(SUFFIX) and entry.name[0] != ".":
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                files.append(RankFile(path, entry.name, descriptor, status.st_uid, status.st_mtime))
        return files, next(entries, None) is not None


def fair_share(files: Iterable[RankFile], limit: int) -> list[RankFile]:
    """At most `limit` of the files: the newest of each owner, then the second newest of each, and so on."""
    turns: Counter[int] = Counter()
    in_turn = []
    for file in sorted(files, key=lambda file: (-file.modified, file.name)):
        in_turn.append((turns[file.owner], file))
        turns[file.owner] += 1
    in_turn.sort(key=lambda pair: pair[0])
    return [file for _, file in in_turn[:limit]]
