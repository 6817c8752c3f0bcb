"""The ranks of this machine: finds their records in the run directories and says which live and how others ended."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rankscope.rank_reader import UnreadableRecordError, read_rank
from rankscope.rank_snapshot import RankSnapshot
from rankscope_exporter.rank_files import RankFile, fair_share, list_files, open_directory

ENDED_RANKS_SHOWN_FOR = 600.0  # seconds: long enough for a scrape, an alert and a look at it
LABELS = (
    "run",
    "rank",
    "local_rank",
    "world_size",
    "group",
    "node",
    "pid",
    "uuid",
    "backend",
    "torch_version",
    "rankscope_version",
)
LABEL_LIMIT = 200  # characters; the hook's longest is a run's name with 128

FILES_LIMIT = 1024  # read in a scan; a full one of bad files costs a tenth of a second
RANKS_LIMIT = 256  # shown
SERIES_LIMIT = 246  # of one rank: every phase, operation and group that a record has a place for
COMPLAINTS_LIMIT = 10  # log lines in a scan
NUMBER = re.compile(r"[0-9]{1,10}")

Key = tuple[str, str, str]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rank:
    """One rank as its record shows it; `exit_unix` is set once it has ended."""

    snapshot: RankSnapshot
    exit_unix: float | None
    owner: int
    """User id of the file's owner."""
    user: str = ""
    """The owner's name where this machine knows one."""
    has_owner: bool = True
    """Whether its owner is part of who it is."""

    @property
    def key(self) -> Key:
        """Run, rank and owner: the labels of all its series."""
        return self.snapshot.info["run"], self.snapshot.info["rank"], str(self.owner) if self.has_owner else ""


@dataclass(frozen=True)
class Scan:
    """What the run directories hold now: the newest record of each rank, and how many files were skipped why."""

    ranks: Sequence[Rank]
    skipped: Counter[str]


class RunDirectory:
    """Reads the records below `paths`; directories that do not exist yet are simply empty.

    At most `files_limit` files are read in a scan and `ranks_limit` ranks found, living ones first. A node has some
    eight ranks of a job; the limits bound what users who fill a directory can cost a scrape and Prometheus.

    `user_name` is asked with each scan and must not block. Without `has_owner` a run's identity is its name alone.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        clock: Callable[[], float] = time.time,
        files_limit: int = FILES_LIMIT,
        ranks_limit: int = RANKS_LIMIT,
        user_name: Callable[[int], str] = lambda _uid: "",
        *,
        has_owner: bool = True,
    ) -> None:
        self._paths = tuple(paths)
        self._clock = clock
        self._files_limit = files_limit
        self._ranks_limit = ranks_limit
        self._user_name = user_name
        self._has_owner = has_owner
        self._noticed: dict[Path, float] = {}  # when a record was first seen without its process
        self._shown: dict[Key, Rank] = {}  # by the last scan
        self._complained: set[Path] = set()
        self._checked: dict[Path, object] = {}  # the info whose labels were found to be good
        self._lock = threading.Lock()  # scrapes come from several threads

    def scan(self, *, with_steps: bool = False) -> Scan:
        """Read every record once, `with_steps` their last steps too. A file that cannot be read costs no other."""
        with self._lock, ExitStack() as directories:
            skipped = _Skipped()
            files = [file for path in self._paths for file in self._list(path, directories, skipped)]
            chosen = fair_share(files, self._files_limit)
            skipped.count["too_many_files"] += len(files) - len(chosen)
            found = self._newest(chosen, skipped, with_steps)
            ranks = sorted(found.values(), key=lambda rank: not rank.snapshot.alive)[: self._ranks_limit]
            skipped.count["too_many_ranks"] += len(found) - len(ranks)
            self._complain(skipped.errors)
            self._forget_all_but({file.path for file in chosen} | set(self._paths))
            self._shown = {rank.key: rank for rank in ranks}
            named = tuple(replace(rank, user=self._user_name(rank.owner)) for rank in ranks)
            return Scan(named, +skipped.count)  # without the zeros

    def _list(self, path: Path, directories: ExitStack, skipped: _Skipped) -> list[RankFile]:
        try:
            descriptor = open_directory(path)
        except FileNotFoundError:
            return []
        except UnreadableRecordError as error:
            skipped.add(error)
            return []
        directories.callback(os.close, descriptor)
        files, are_more = list_files(path, descriptor)
        skipped.count["too_many_files"] += are_more
        return files

    def _newest(self, files: Iterable[RankFile], skipped: _Skipped, with_steps: bool) -> dict[Key, Rank]:
        """The record that counts of each run, rank and owner."""
        found: dict[Key, Rank] = {}
        for file in files:
            rank = self._read(file, skipped, with_steps)
            if rank and self._is_shown(rank):
                other = found.get(rank.key)
                skipped.count["duplicate"] += other is not None and _are_rivals(rank, other)
                if other is None or self._precedence(rank) > self._precedence(other):
                    found[rank.key] = rank
        return found

    def _precedence(self, rank: Rank) -> tuple[bool, bool, bool, float]:
        """Which of two records of one key is shown: of those that live the one that was there in the last scan.

        A run that was started again takes over at once from its ended rank. Owners differ only where they are no part
        of the key; there nobody's rank takes the place of another user's before that has ended.
        """
        alive, before = rank.snapshot.alive, self._shown.get(rank.key)
        is_known = before is not None and before.snapshot.path == rank.snapshot.path
        is_same_owner = before is not None and before.owner == rank.owner
        return alive, is_same_owner, alive and is_known, rank.snapshot["started_unix"]

    def _read(self, file: RankFile, skipped: _Skipped, with_steps: bool) -> Rank | None:
        try:
            snapshot = read_rank(file.path, file.descriptor, with_steps=with_steps)
            if self._checked.get(file.path) is not snapshot.info:
                _check_labels(snapshot)
                self._checked[file.path] = snapshot.info
        except FileNotFoundError:
            return None
        except UnreadableRecordError as error:
            skipped.add(error)
            return None
        exit_unix = None if snapshot.alive else snapshot.exit_unix or self._first_noticed(file.path)
        return Rank(snapshot, exit_unix, file.owner, has_owner=self._has_owner)

    def _first_noticed(self, path: Path) -> float:
        return self._noticed.setdefault(path, self._clock())

    def _is_shown(self, rank: Rank) -> bool:
        return rank.exit_unix is None or self._clock() - rank.exit_unix < ENDED_RANKS_SHOWN_FOR

    def _complain(self, errors: Iterable[UnreadableRecordError]) -> None:
        """Log each file once, and a few at a time: names that change all the time shall not fill the log."""
        news = (error for error in errors if error.path not in self._complained)
        for error in islice(news, COMPLAINTS_LIMIT):
            logger.warning("skipped a file in the run directory: %s", error)
            self._complained.add(error.path)

    def _forget_all_but(self, present: set[Path]) -> None:
        self._complained &= present
        self._noticed = {path: when for path, when in self._noticed.items() if path in present}
        self._checked = {path: info for path, info in self._checked.items() if path in present}


def _are_rivals(one: Rank, other: Rank) -> bool:
    """Whether not to show one of them hides something: of one owner's, an ended one has only been succeeded."""
    return one.owner != other.owner or (one.snapshot.alive and other.snapshot.alive)


class _Skipped:
    """What one scan did not show, and why."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.errors: list[UnreadableRecordError] = []

    def add(self, error: UnreadableRecordError) -> None:
        self.count[error.reason] += 1
        self.errors.append(error)


def _check_labels(snapshot: RankSnapshot) -> None:
    for label in LABELS:
        value = snapshot.info.get(label)
        if not isinstance(value, str) or len(value) > LABEL_LIMIT or not value.isprintable():
            raise UnreadableRecordError(
                "foreign", snapshot.path, f"its {label} is no printable text of ≤ {LABEL_LIMIT}"
            )
    if not (NUMBER.fullmatch(snapshot.info["rank"]) and NUMBER.fullmatch(snapshot.info["pid"])):
        raise UnreadableRecordError("foreign", snapshot.path, "its rank or pid is no number")
    settings = snapshot.info.get("settings", {})
    for text in (*snapshot.info.get("phases", ()), *snapshot.groups, *settings.values()):
        if len(text) > LABEL_LIMIT or not text.isprintable():
            raise UnreadableRecordError("foreign", snapshot.path, f"a name in it is no printable text: {text[:20]!r}")
