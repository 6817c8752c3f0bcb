"""Listing a run directory in which any user may write: bounded, fair to each owner, without following links.

The exporter and `rankscope stacks` use this module; a training process does not import it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from rankscope.record.layout import SIZE
from rankscope.record.reader import UnreadableRecordError
from rankscope.record.writer import SUFFIX

# Limits of one scan of one directory, with times on tmpfs. The next scan continues with the rest.
NAMES_LIMIT = 32_768  # of any kind: 40 ms
CANDIDATES_LIMIT = 4096  # with a record's suffix: 60 ms


class RankFile(NamedTuple):
    """A file that may be a record. `descriptor` is the open `directory`, in which its name is looked up."""

    directory: Path
    name: str
    descriptor: int
    owner: int
    modified: float
    size: int = SIZE
    stamp: tuple[int, int, int] = (0, 0, 0)
    """The device and number of its inode, and the inode's change time."""
    is_known: bool = False

    @property
    def path(self) -> Path:
        """The path, for messages and to distinguish files."""
        return _join(self.directory, self.name)


@dataclass(frozen=True)
class Listed:
    """The result of a scan of one directory."""

    files: list[RankFile]
    are_more: bool
    """True if there are names that the scan did not look at."""
    failures: int
    error: UnreadableRecordError | None
    """The reason if files could not be looked up."""


@lru_cache(maxsize=1024)
def _join(directory: Path, name: str) -> Path:
    """Return the same path for the same file at every scan: a new one and its hash take as long as reading the file."""
    return directory / name


class Listing:
    """The names in one run directory. If there are more than a scan may look at, the next scan continues.

    So every file is found after some scans, in any order of the directory, whoever fills it.
    """

    def __init__(self, path: Path, names_limit: int = NAMES_LIMIT, candidates_limit: int = CANDIDATES_LIMIT) -> None:
        self._path = path
        self._names_limit = names_limit
        self._candidates_limit = candidates_limit
        self._open: Iterator[os.DirEntry[str]] | None = None
        self._rest: Iterator[os.DirEntry[str]] = iter(())
        self._directory = (0, 0)

    def look(self, descriptor: int, known: Collection[str] = ()) -> Listed:
        """Return the files in the open directory that may be records, including the names in `known`. Raises OSError.

        Each file fails by itself. In a directory that may be read but not entered, all files fail and are counted.
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
            if status.st_dev != directory.st_dev:  # a mounted file's owner proves nothing
                failures, why = failures + 1, "something is mounted there"
                continue
            stamp = (status.st_dev, status.st_ino, status.st_ctime_ns)
            of_file = status.st_uid, status.st_mtime, status.st_size, stamp
            files.append(RankFile(self._path, name, descriptor, *of_file, is_known=name in known))
        failure = UnreadableRecordError("unreadable", self._path, f"files in it: {why}") if failures else None
        return Listed(files, self._open is not None, failures, failure)

    def close(self) -> None:
        """Forget the position in the listing."""
        if self._open is not None:
            self._open.close()  # type: ignore[attr-defined]  # of what os.scandir returns
        self._open, self._rest = None, iter(())

    def _names(self, descriptor: int, status: os.stat_result) -> list[str]:
        """Return the next names that may belong to records; close the listing after the last."""
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
        """Yield the next entries, up to either limit."""
        candidates = 0
        for entry in islice(self._rest, self._names_limit):
            candidates += entry.name.endswith(SUFFIX)
            yield entry
            if candidates == self._candidates_limit:
                return


class _Owned(Protocol):
    @property
    def owner(self) -> int: ...


OwnedT = TypeVar("OwnedT", bound=_Owned)


def take_turns(
    items: Iterable[OwnedT],
    owner_limit: float = float("inf"),
    weight: Callable[[OwnedT], int] = lambda _: 1,
    principal: Callable[[int], int] = int,
) -> list[OwnedT]:
    """Return the first item of each owner, then the second of each, and so on, so that no owner hides the others.

    An item of `weight` n takes n of its owner's turns; items beyond `owner_limit` are omitted. Owners with the same
    `principal` count as one.
    """
    spent: Counter[int] = Counter()
    in_turn = []
    for item in items:
        owner = principal(item.owner)
        spent[owner] += weight(item)
        if spent[owner] <= owner_limit:
            in_turn.append((spent[owner], item))
    in_turn.sort(key=lambda pair: pair[0])  # stable
    return [item for _, item in in_turn]
