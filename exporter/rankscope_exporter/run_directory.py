"""The ranks of this machine: finds their records in the run directories and says which live and how others ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankscope.rank_reader import RankSnapshot, UnreadableRecordError, read_rank
from rankscope.rank_writer import SUFFIX

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

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rank:
    """One rank as its record shows it; `exit_unix` is set once it has ended."""

    snapshot: RankSnapshot
    exit_unix: float | None

    @property
    def key(self) -> tuple[str, str]:
        """Run and rank."""
        return self.snapshot.info["run"], self.snapshot.info["rank"]


@dataclass(frozen=True)
class Scan:
    """What the run directories hold now: the newest record of each rank, and how many files were skipped why."""

    ranks: Sequence[Rank]
    skipped: Counter[str]


class RunDirectory:
    """Reads the records below `paths`; directories that do not exist yet are simply empty."""

    def __init__(self, paths: Iterable[Path], clock: Callable[[], float] = time.time) -> None:
        self._paths = tuple(paths)
        self._clock = clock
        self._noticed: dict[Path, float] = {}  # when a record was first seen without its process
        self._complained: set[Path] = set()
        self._lock = threading.Lock()  # scrapes come from several threads

    def scan(self) -> Scan:
        """Read every record once. A file that cannot be read costs nobody else anything."""
        with self._lock:
            skipped: Counter[str] = Counter()
            found: dict[tuple[str, str], Rank] = {}
            paths = [path for directory in self._paths for path in _records(directory)]
            for path in paths:
                rank = self._read(path, skipped)
                if rank and self._is_shown(rank) and _is_newer(rank, found.get(rank.key)):
                    found[rank.key] = rank
            self._forget_all_but(paths)
            return Scan(tuple(found.values()), skipped)

    def _read(self, path: Path, skipped: Counter[str]) -> Rank | None:
        try:
            snapshot = read_rank(path)
            _check_labels(snapshot)
        except FileNotFoundError:
            return None
        except UnreadableRecordError as error:
            skipped[error.reason] += 1
            if path not in self._complained:
                logger.warning("skipped a file in the run directory: %s", error)
                self._complained.add(path)
            return None
        return Rank(snapshot, None if snapshot.alive else snapshot.exit_unix or self._first_noticed(path))

    def _first_noticed(self, path: Path) -> float:
        return self._noticed.setdefault(path, self._clock())

    def _is_shown(self, rank: Rank) -> bool:
        return rank.exit_unix is None or self._clock() - rank.exit_unix < ENDED_RANKS_SHOWN_FOR

    def _forget_all_but(self, paths: list[Path]) -> None:
        present = set(paths)
        self._complained &= present
        self._noticed = {path: when for path, when in self._noticed.items() if path in present}


def _records(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.suffix == SUFFIX and path.name[0] != ".")
    except OSError:
        return []


def _is_newer(rank: Rank, other: Rank | None) -> bool:
    def age(rank: Rank) -> tuple[bool, float]:
        return rank.snapshot.alive, rank.snapshot["started_unix"]

    return other is None or age(rank) > age(other)


def _check_labels(snapshot: RankSnapshot) -> None:
    for label in LABELS:
        value = snapshot.info.get(label)
        if not isinstance(value, str) or len(value) > LABEL_LIMIT or not value.isprintable():
            raise UnreadableRecordError(
                "foreign", snapshot.path, f"its {label} is no printable text of ≤ {LABEL_LIMIT}"
            )
    if not (snapshot.info["rank"].isdecimal() and snapshot.info["pid"].isdecimal()):
        raise UnreadableRecordError("foreign", snapshot.path, "its rank or pid is no number")
    for phase in snapshot.info.get("phases", ()):
        if len(phase) > LABEL_LIMIT or not phase.isprintable():
            raise UnreadableRecordError("foreign", snapshot.path, "a phase's name is no printable text")
