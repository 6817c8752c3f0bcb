"""The living ranks that run directories show. Everybody may write there, so: bounded, fair, and never through a link.

The exporter reads them alike (rankscope_exporter/ranks/files.py), which is not there where only the hook is installed.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from rankscope.record import layout
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.writer import SUFFIX

NAMES_LIMIT = 100_000  # looked at in one directory: a second
FILES_LIMIT = 1024  # read
NUMBER = re.compile(r"[0-9]{1,10}")


class RunDirectoryError(Exception):
    """Why a run directory cannot be read."""


@dataclass(frozen=True)
class LivingRank:
    """A rank whose record somebody has locked. `owner` is the user id of the record's file."""

    snapshot: RankSnapshot
    owner: int

    @property
    def run(self) -> str:
        """As its record says."""
        return str(self.snapshot.info["run"])

    @property
    def rank(self) -> str:
        """A number of at most ten digits."""
        return str(self.snapshot.info["rank"])


@dataclass(frozen=True)
class _File:
    name: str
    owner: int
    modified: float


def living_ranks(directory: Path) -> list[LivingRank]:
    """Those of one directory; none if it does not exist. Raises RunDirectoryError."""
    try:
        descriptor = _opened(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"{directory}: {error.strerror}") from error
    try:
        newest_first = sorted(_files(descriptor), key=lambda file: (-file.modified, file.name))
        files = fair_share(newest_first, FILES_LIMIT)
        found = [_read(directory / file.name, descriptor, file.owner) for file in files]
    except OSError as error:
        raise RunDirectoryError(f"{directory}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return [rank for rank in found if rank]


def _opened(directory: Path) -> int:
    """A link is followed only if root or this user made it: in /dev/shm anybody may make one, to a mount that hangs."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if not directory.is_symlink():
        return os.open(directory, flags | os.O_NOFOLLOW)
    if directory.lstat().st_uid in (0, os.geteuid()):
        return os.open(directory, flags)
    raise RunDirectoryError(f"{directory} is a link that another user made")


def _files(descriptor: int) -> Iterator[_File]:
    """What may be a record. An empty file is none, and keeps nobody out."""
    with os.scandir(descriptor) as entries:
        for entry in islice(entries, NAMES_LIMIT):
            if not entry.name.endswith(SUFFIX) or entry.name.startswith("."):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:  # gone, or in a directory that may be listed and not entered
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size >= layout.SIZE:
                yield _File(entry.name, status.st_uid, status.st_mtime)


class _Owned(Protocol):
    @property
    def owner(self) -> int: ...


OwnedT = TypeVar("OwnedT", bound=_Owned)


def fair_share(owned: Iterable[OwnedT], limit: int) -> list[OwnedT]:
    """The first of each owner, then the second of each, and so on: who fills a directory hides nobody."""
    turns: Counter[int] = Counter()
    in_turn = []
    for one in owned:
        in_turn.append((turns[one.owner], one))
        turns[one.owner] += 1
    in_turn.sort(key=lambda pair: pair[0])
    return [one for _, one in in_turn[:limit]]


def _read(path: Path, directory: int, owner: int) -> LivingRank | None:
    """None if it does not live, or names no run and rank as a hook does."""
    try:
        snapshot = read_rank(path, directory)
    except (FileNotFoundError, UnreadableRecordError):
        return None
    run, rank = snapshot.info.get("run"), snapshot.info.get("rank")
    is_one = isinstance(run, str) and isinstance(rank, str) and NUMBER.fullmatch(rank)
    return LivingRank(snapshot, owner) if snapshot.alive and is_one else None
