"""The ranks of this machine: finds their records in the run directories and says which live and how others ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rankscope.record.clock import NodeClock
from rankscope.record.directory import ForeignLinkError, open_directory
from rankscope.record.listing import Listing, RankFile
from rankscope.record.process_stat import is_running
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.ranks.checks import CLOCKS_APART, check_info, check_time
from rankscope_exporter.ranks.complaints import Complaints, Skipped
from rankscope_exporter.ranks.files import each_once, fair_share
from rankscope_exporter.ranks.new_series import NewSeries
from rankscope_exporter.ranks.rank import Key, Rank, Scan
from rankscope_exporter.ranks.share import RANKS_LIMIT, TextLimit, fair_page

ENDED_RANKS_SHOWN_FOR = 600.0  # seconds: long enough for a scrape, an alert and a look at it
FILES_LIMIT = 1024  # read in a scan; a full one of bad files costs a tenth of a second
SERIES_LIMIT = 265  # of one rank: every phase, operation, group and tracker that a record has room for


class End(NamedTuple):
    """When a rank ended: unix time, and what was then to be added to a monotonic time for its unix time.

    The latter is None for a record of another boot.
    """

    at: float
    offset: float | None

    def unix(self, offset: float) -> float:
        """Return the unix time by the node's clock as it is set now."""
        return self.at if self.offset is None else self.at + (offset - self.offset)


@dataclass(frozen=True)
class RankPolicy:
    """What else this machine knows of ranks. Both are asked with each scan and must not block."""

    user_name: Callable[[int], str] = lambda _uid: ""
    is_elsewhere: Callable[[Rank], bool] = lambda _rank: False
    has_owner: bool = True
    """If not, a run's identity is its name alone."""
    users: frozenset[int] | None = None
    """Whose ranks are shown, if not everybody's."""

    def admits(self, file: RankFile) -> bool:
        """Whether the file is read at all."""
        return self.users is None or file.owner in self.users


class RunDirectory:
    """Reads the records below `paths`; directories that do not exist yet are simply empty.

    At most `files_limit` files are read in a scan and `ranks_limit` ordinary ranks shown. A node has some eight ranks
    of a job; the limits bound what users who fill a directory can cost a scrape and Prometheus.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        clock: Callable[[], float] = time.time,
        files_limit: int = FILES_LIMIT,
        ranks_limit: int = RANKS_LIMIT,
        beliefs: RankPolicy | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listings = {path: Listing(path) for path in paths}
        self._clock = clock
        self._files_limit = files_limit
        self._ranks_limit = ranks_limit
        self._beliefs = beliefs or RankPolicy()
        self._monotonic = monotonic
        self._node_clock = NodeClock(clock, monotonic)
        self._living: dict[Path, float] = {}  # when each record was last seen with its process, monotonic
        self._ends: dict[Path, End] = {}  # of the records without a process
        self._shown: dict[Key, Rank] = {}  # by the last scan
        self._in_vain: set[tuple[int, int, int]] = set()  # stamps of the files that were no records in the last scan
        self._checked: dict[Path, tuple[object, TextLimit]] = {}  # the info whose labels were found to be good
        self._new_series = NewSeries(monotonic)
        self._lock_pids: dict[Path, int] = {}  # of the processes that had the records locked
        self._complaints = Complaints()
        self._lock = threading.Lock()  # scrapes come from several threads

    def close(self) -> None:
        """Let go of the directories whose listing is not at its end."""
        with self._lock:
            for listing in self._listings.values():
                listing.close()

    def scan(self, *, with_steps: bool = False) -> Scan:
        """Read every record once, `with_steps` their last steps too. A file that cannot be read costs no other."""
        with self._lock, ExitStack() as directories:
            skipped = Skipped()
            known = {rank.snapshot.path for rank in self._shown.values()}
            files = each_once(self._files(known, directories, skipped), known)
            chosen = fair_share(files, self._files_limit, known, self._in_vain)
            skipped.count["too_many_files"] += len(files) - len(chosen)
            found = self._that_count(chosen, skipped, with_steps)
            ranks = fair_page(found.values(), self._shown, self._ranks_limit)
            skipped.count["too_many_ranks"] += len(found) - len(ranks)
            admitted = [rank for rank in ranks if self._new_series.admits(rank)]
            self._new_series.forget()
            skipped.count["too_many_names"] += len(ranks) - len(admitted)
            ranks = [self._placed(rank) for rank in admitted]
            self._complaints.log("skipped a file in the run directory", skipped.errors)
            self._complaints.log("not believed about its GPU", map(_contradiction, _elsewhere(ranks)))
            self._remember({file.path for file in chosen}, ranks, skipped)
            return Scan(tuple(ranks), +skipped.count)  # without the zeros

    def _files(self, known: Collection[Path], directories: ExitStack, skipped: Skipped) -> Iterable[RankFile]:
        for path, listing in self._listings.items():
            names = [one.name for one in known if one.parent == path]
            try:
                descriptor = open_directory(path)
                directories.callback(os.close, descriptor)
                listed = listing.look(descriptor, names)
            except FileNotFoundError:
                listing.close()
                continue
            except OSError as error:  # also of a file system that fails, or as there are no descriptors left
                reason = "symlink" if isinstance(error, ForeignLinkError) else "unreadable"
                skipped.add(UnreadableRecordError(reason, path, error.strerror or str(error)))
                continue
            skipped.count["too_many_files"] += listed.are_more
            if listed.error:
                skipped.add(listed.error, listed.failures)
            yield from filter(self._beliefs.admits, listed.files)

    def _that_count(self, files: Iterable[RankFile], skipped: Skipped, with_steps: bool) -> dict[Key, Rank]:
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

    def _precedence(self, rank: Rank) -> tuple[bool, bool, bool, bool, float]:
        """Which of two records of one key is shown: of those that live the one that was there in the last scan.

        A rank that the other one has started takes its place. A run that was started again takes over at
        once from its ended rank. Owners differ only where they are no part of the key; there nobody's rank replaces
        another user's before that has ended.
        """
        alive, before = rank.snapshot.alive, self._shown.get(rank.key)
        is_known = before is not None and before.snapshot.path == rank.snapshot.path
        is_same_owner = before is not None and before.owner == rank.owner
        return alive, is_same_owner, rank.has_parent, alive and is_known, rank.snapshot.unix_field("started_unix")

    def _read(self, file: RankFile, skipped: Skipped, with_steps: bool) -> Rank | None:
        try:
            offset = self._node_clock.offset()
            snapshot = read_rank(file.path, file.descriptor, with_steps=with_steps, unix_offset=offset)
            if snapshot.unix_offset is None and file.path in self._living:  # a hook that named no boot
                snapshot = replace(snapshot, unix_offset=offset)
            info, limit = self._checked.get(file.path, (None, None))
            if limit is None or info is not snapshot.info:
                check_info(snapshot)
                limit = TextLimit(snapshot)
                self._checked[file.path] = snapshot.info, limit
            check_time(snapshot, self._clock())
            snapshot = self._without_lock(snapshot, offset)
        except FileNotFoundError:
            return None
        except UnreadableRecordError as error:
            skipped.add(error)
            skipped.stamps.add(file.stamp)
            return None
        exit_unix = None if snapshot.alive else self._exit_unix(snapshot, offset)
        if snapshot.alive:
            self._living[file.path] = self._monotonic()
            self._ends.pop(file.path, None)
        return Rank(snapshot, exit_unix, file.owner, has_owner=self._beliefs.has_owner, weight=limit.weight(snapshot))

    def _exit_unix(self, snapshot: RankSnapshot, offset: float) -> float:
        """When it ended, by the node's clock as it is set now."""
        if snapshot.path not in self._ends:
            self._ends[snapshot.path] = End(self._first_exit_unix(snapshot), snapshot.unix_offset)
        return self._ends[snapshot.path].unix(offset)

    def _first_exit_unix(self, snapshot: RankSnapshot) -> float:
        """By its own account, unless that is in the future, or before the rank was last seen to live or to work."""
        now, said = self._clock(), snapshot.exit_unix
        if not said or said > now + CLOCKS_APART:
            return now
        if snapshot.path in self._living:
            return max(said, now - (self._monotonic() - self._living[snapshot.path]))
        return said if snapshot.unix_offset is None else max(said, min(now, snapshot.unix(snapshot.last_progress)))

    def _without_lock(self, snapshot: RankSnapshot, offset: float) -> RankSnapshot:
        """Return the snapshot, as that of a living rank if the process lives and only the lock is lost.

        A job loses it for the rank when it closes all descriptors, or opens and closes the record.
        """
        if snapshot.alive:
            self._lock_pids[snapshot.path] = snapshot.lock_pid
        if snapshot.alive or snapshot.exit_unix is not None:
            return snapshot
        pid = self._lock_pids.get(snapshot.path, 0)
        is_alive = is_running(pid, snapshot.info.get("process_start"))
        if is_alive is None:
            is_alive = snapshot.has_recent_progress
        return replace(snapshot, alive=True, lock_pid=pid, unix_offset=offset) if is_alive else snapshot

    def _is_shown(self, rank: Rank) -> bool:
        return rank.exit_unix is None or self._clock() - rank.exit_unix < ENDED_RANKS_SHOWN_FOR

    def _placed(self, rank: Rank) -> Rank:
        """With its owner's name, and whether it can be on the GPU that it names: of one that has ended, as it lived."""
        before = self._shown.get(rank.key)
        if before and before.snapshot.path == rank.snapshot.path and not rank.snapshot.alive:
            is_elsewhere = before.is_elsewhere
        else:
            is_elsewhere = bool(rank.snapshot.info["uuid"]) and self._beliefs.is_elsewhere(rank)
        return replace(rank, user=self._beliefs.user_name(rank.owner), is_elsewhere=is_elsewhere)

    def _remember(self, present: set[Path], ranks: Iterable[Rank], skipped: Skipped) -> None:
        self._shown = {rank.key: rank for rank in ranks}
        self._in_vain = skipped.stamps
        self._living = {path: when for path, when in self._living.items() if path in present}
        self._ends = {path: end for path, end in self._ends.items() if path in present}
        self._checked = {path: info for path, info in self._checked.items() if path in present}
        self._lock_pids = {path: pid for path, pid in self._lock_pids.items() if path in present}


def _are_rivals(one: Rank, other: Rank) -> bool:
    """Whether not to show one of them hides something: of one owner's, an ended one has only been succeeded."""
    if one.owner != other.owner:
        return True
    return one.snapshot.alive and other.snapshot.alive and not (one.is_child_of(other) or other.is_child_of(one))


def _elsewhere(ranks: Iterable[Rank]) -> Iterable[Rank]:
    return (rank for rank in ranks if rank.is_elsewhere)


def _contradiction(rank: Rank) -> UnreadableRecordError:
    detail = f"this node has no GPU {rank.snapshot.info['uuid']}, or only processes of other users are on it"
    return UnreadableRecordError("elsewhere", rank.snapshot.path, detail)
