"""Which files of a run directory are read. Everybody may write there, so: bounded, fair, and never through a link.

A user who fills the directory crowds nobody out: what is shown is read again first, whatever the listing says,
and where there are too many other files each owner has the same share. An owner is the one thing about a file that
cannot be made up.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

from rankscope.record import directory
from rankscope.record.layout import SIZE
from rankscope.record.reader import UnreadableRecordError
from rankscope.record.writer import SUFFIX

# In one directory and scan, measured on tmpfs; where there are more, the next scan goes on with those.
NAMES_LIMIT = 32_768  # seen, of whatever kind: 40 ms
CANDIDATES_LIMIT = 4096  # called like records, and looked up: 60 ms
OWNER_FILES_LIMIT = 256  # of one owner that are read in a scan: 15 ms


@dataclass(frozen=True)
class RankFile:
    """A file that may be a record. `descriptor` is the open `directory`, in which its name is looked up."""

    directory: Path
    name: str
    descriptor: int
    owner: int
    modified: float
    size: int = SIZE
    stamp: tuple[int, int, int] = (0, 0, 0)
    """Device and number of its inode, and when that changed: what is tried in vain need not be tried first again."""

    @property
    def path(self) -> Path:
        """For people, and to tell files apart."""
        return _joined(self.directory, self.name)


@dataclass(frozen=True)
class Listed:
    """What was found in one directory."""

    files: list[RankFile]
    are_more: bool
    """Whether there are names that were not looked at."""
    failures: int
    error: UnreadableRecordError | None
    """Of the files that could not be looked up, if there were any."""


@lru_cache(maxsize=CANDIDATES_LIMIT)
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


class Listing:
    """The names in one run directory. Of more than a scan may look at, the next one goes on where the last ended.

    So every file is found after some scans, wherever the directory's order puts it and whoever fills it.
    """

    def __init__(self, path: Path, names_limit: int = NAMES_LIMIT, candidates_limit: int = CANDIDATES_LIMIT) -> None:
        self._path = path
        self._names_limit = names_limit
        self._candidates_limit = candidates_limit
        self._open: Iterator[os.DirEntry[str]] | None = None
        self._rest: Iterator[os.DirEntry[str]] = iter(())
        self._directory = (0, 0)

    def look(self, descriptor: int, known: Iterable[str] = ()) -> Listed:
        """The files in the open directory that may be records, those of the names `known` among them. Raises OSError.

        Each file fails alone: in a directory that may be read and not entered it is every one, and they are counted.
        """
        directory = os.fstat(descriptor)
        files, failures, why = [], 0, ""
        for name in dict.fromkeys((*known, *self._names(descriptor, directory))):
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError as error:
                failures, why = failures + 1, error.strerror or str(error)
                continue
            if status.st_dev != directory.st_dev:  # whoever mounted it there chose the owner that it shows
                failures, why = failures + 1, "something is mounted there"
                continue
            stamp = (status.st_dev, status.st_ino, status.st_ctime_ns)
            file = RankFile(self._path, name, descriptor, status.st_uid, status.st_mtime, status.st_size, stamp)
            files.append(file)
        failure = UnreadableRecordError("unreadable", self._path, f"files in it: {why}") if failures else None
        return Listed(files, self._open is not None, failures, failure)

    def close(self) -> None:
        """Forget where the listing is."""
        if self._open is not None:
            self._open.close()  # type: ignore[attr-defined]  # of what os.scandir returns
        self._open, self._rest = None, iter(())

    def _names(self, descriptor: int, status: os.stat_result) -> list[str]:
        """The next names that may be of records; closes the listing behind the last."""
        directory = (status.st_dev, status.st_ino)
        if self._open is None or directory != self._directory:
            self.close()
            self._open = self._rest = os.scandir(descriptor)
            self._directory = directory
        names = [entry.name for entry in self._next() if entry.name.endswith(SUFFIX) and entry.name[0] != "."]
        following = next(self._rest, None)
        if following is None:
            self.close()
        else:
            self._rest = chain([following], self._rest)
        return names

    def _next(self) -> Iterator[os.DirEntry[str]]:
        """The next entries, up to either limit."""
        candidates = 0
        for entry in islice(self._rest, self._names_limit):
            candidates += entry.name.endswith(SUFFIX)
            yield entry
            if candidates == self._candidates_limit:
                return


def fair_share(
    files: Iterable[RankFile],
    limit: int,
    known: Collection[Path] = frozenset(),
    in_vain: Collection[tuple[int, int, int]] = frozenset(),
    owner_limit: int = OWNER_FILES_LIMIT,
) -> list[RankFile]:
    """At most `limit` of the files: the newest of each owner, then the second newest of each, and so on.

    First those of `known`, which hold ranks that are shown; last those that are as long as no record or are `in_vain`,
    by their stamps. So what was never tried is tried soon, even if there are more owners than files are read.
    """
    turns: Counter[int] = Counter()
    lots: dict[int, float] = {}
    in_turn = []
    for rank, file in sorted(
        ((_rank(file, known, in_vain), file) for file in files),
        key=lambda pair: (pair[0], -pair[1].modified, pair[1].name),
    ):
        turn = turns[file.owner]
        turns[file.owner] += 1
        if turn < owner_limit:
            # By lot, because whatever else a file says of itself a user of many owners can have his say better.
            lot = lots.setdefault(file.owner, random.random())  # noqa: S311 - nobody gains by a guess
            in_turn.append(((rank, turn, lot), file))
    in_turn.sort(key=lambda pair: pair[0])
    return [file for _, file in in_turn[:limit]]


def _rank(file: RankFile, known: Collection[Path], in_vain: Collection[tuple[int, int, int]]) -> int:
    if file.path in known:
        return 0
    return 2 if file.size != SIZE or file.stamp in in_vain else 1


def each_once(files: Iterable[RankFile], known: Collection[Path]) -> list[RankFile]:
    """Of the names of one file the known one: else hard links to a record would use up its owner's share."""
    found: dict[tuple[int, int, int], RankFile] = {}
    for file in files:
        if file.stamp not in found or file.path in known:
            found[file.stamp] = file
    return list(found.values())
