"""The ranks of this machine, from the records in the run directories: which are alive, and how the others ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import NamedTuple

from rankscope.record import process_stat
from rankscope.record.clock import NodeClock
from rankscope.record.directory import ForeignLinkError, open_directory
from rankscope.record.listing import Listing, RankFile
from rankscope.record.reader import UnreadableRecordError, read_rank
from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.ranks.checks import CLOCK_TOLERANCE, check_info, check_time
from rankscope_exporter.ranks.files import each_once, fair_share
from rankscope_exporter.ranks.lock_processes import LockProcesses, is_alive
from rankscope_exporter.ranks.new_series import NewSeries
from rankscope_exporter.ranks.rank import Key, Rank, Scan
from rankscope_exporter.ranks.share import RANKS_LIMIT, TextLimit, fair_page
from rankscope_exporter.ranks.skipped_files import FileLog, Skipped
from rankscope_exporter.ranks.trainings import Trainings

ENDED_RANK_SECONDS = 600.0  # seconds: time for a scrape, an alert and an operator to read it
GENERATIONS = 16  # from a rank to one that it has started, such as by a shell and torchrun
FILES_LIMIT = 1024  # per scan; so many bad files take 0.1 s
SERIES_LIMIT = 266  # of one rank with all phases, operations, groups and trackers that fit into a record


class End(NamedTuple):
    """The unix time of a rank's end, and the offset from monotonic to unix time then (None for another boot)."""

    at: float
    offset: float | None

    def unix(self, offset: float) -> float:
        """Return the unix time by the current setting of the node's clock."""
        return self.at if self.offset is None else self.at + (offset - self.offset)


@dataclass(frozen=True)
class RankPolicy:
    """Rules for ranks on this machine. The functions are called in each scan and must not block."""

    user_name: Callable[[int], str] = lambda _uid: ""
    is_elsewhere: Callable[[Rank], bool] = lambda _rank: False
    has_owner: bool = True
    """If false, a run is identified by its name alone."""
    users: frozenset[int] | None = None
    """The users whose ranks are shown; None for all users."""

    def admits(self, file: RankFile) -> bool:
        """Return whether the file may be read."""
        return self.users is None or file.owner in self.users


class RunDirectory:
    """The reader of the records below `paths`. Directories that do not exist yet count as empty.

    A scan reads at most `files_limit` files and shows at most `ranks_limit` ordinary ranks. A node usually has eight
    ranks of a job; the limits bound the cost for scrapes and Prometheus if users fill a directory.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        clock: Callable[[], float] = time.time,
        files_limit: int = FILES_LIMIT,
        ranks_limit: int = RANKS_LIMIT,
        policy: RankPolicy | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listings = {path: Listing(path) for path in paths}
        self._clock = clock
        self._files_limit = files_limit
        self._ranks_limit = ranks_limit
        self._policy = policy or RankPolicy()
        self._monotonic = monotonic
        self._node_clock = NodeClock(clock, monotonic)
        self._living: dict[Path, float] = {}  # monotonic time of each record's last reading with a living process
        self._ends: dict[Path, End] = {}  # ends of the records without a process
        self._shown: dict[Key, Rank] = {}  # ranks of the last scan
        self._unreadable: set[tuple[int, int, int]] = set()  # stamps of unreadable files in the last scan
        self._checked: dict[Path, tuple[object, TextLimit]] = {}  # info whose labels are checked
        self._new_series = NewSeries(monotonic)
        self._processes = LockProcesses()
        self._trainings = Trainings()
        self._log = FileLog()
        self._lock = threading.Lock()  # scrapes come from several threads

    def close(self) -> None:
        """Close the directories whose listing is unfinished; an exporter leaves that to its exit."""
        for listing in self._listings.values():
            listing.close()

    def scan(self, *, with_steps: bool = False) -> Scan:
        """Read every record once; `with_steps`, also their last steps. An unreadable file does not affect others."""
        with self._lock, ExitStack() as directories:
            skipped = Skipped()
            known = {rank.snapshot.path for rank in self._shown.values()}
            files = each_once(self._files(known, directories, skipped))
            chosen = fair_share(files, self._files_limit, self._unreadable)
            skipped.count["too_many_files"] += len(files) - len(chosen)
            # Steps are half of a record. Those of a rank that is not on the page yet may wait for the next scan.
            first = chosen[: self._ranks_limit + len(known)] if with_steps else ()
            found = self._current_records(chosen, skipped, {file.stamp for file in first})
            ranks = fair_page(found.values(), self._shown, self._ranks_limit)
            skipped.count["too_many_ranks"] += len(found) - len(ranks)
            admitted = [rank for rank in ranks if self._new_series.admits(rank)]
            self._new_series.forget()
            skipped.count["too_many_names"] += len(ranks) - len(admitted)
            ranks = [self._add_owner_and_gpu(rank) for rank in admitted]
            self._log.log("skipped a file in the run directory", skipped.errors)
            self._log.log(
                "ignored the GPU that a rank names", map(_contradiction, (rank for rank in ranks if rank.is_elsewhere))
            )
            self._remember({file.path for file in chosen}, ranks, skipped)
            return Scan(tuple(ranks), +skipped.count)  # without the zeros

    def _files(self, known: Collection[Path], directories: ExitStack, skipped: Skipped) -> Iterable[RankFile]:
        for path, listing in self._listings.items():
            names = {one.name for one in known if one.parent == path}
            try:
                descriptor = open_directory(path)
                directories.callback(os.close, descriptor)
                listed = listing.look(descriptor, names)
            except FileNotFoundError:
                listing.close()
                continue
            except OSError as error:  # also if the file system fails or no descriptors are left
                reason = "symlink" if isinstance(error, ForeignLinkError) else "unreadable"
                skipped.add(UnreadableRecordError(reason, path, error.strerror or str(error)))
                continue
            skipped.count["too_many_files"] += listed.are_more
            if listed.error:
                skipped.add(listed.error, listed.failures)
            yield from filter(self._policy.admits, listed.files)

    def _current_records(
        self, files: Iterable[RankFile], skipped: Skipped, with_steps: Collection[tuple[int, int, int]]
    ) -> dict[Key, Rank]:
        """Return the current record of each run, rank and owner; those in `with_steps` have their last steps."""
        found: dict[Key, Rank] = {}
        ancestors = cache(lambda pid: frozenset(islice(process_stat.ancestors(pid), GENERATIONS)))
        read = (self._read(file, skipped, with_steps=file.stamp in with_steps) for file in files)
        for rank in self._trainings.number([rank for rank in read if rank and self._is_shown(rank)]):
            other = found.get(rank.key)
            if other is None:
                found[rank.key] = rank
                continue
            child = _child(rank, other, ancestors)
            hidden, found[rank.key] = sorted((rank, other), key=partial(self._precedence, child))
            if _are_duplicates(rank, other, child):
                skipped.add(_duplicate(hidden, found[rank.key]))
        return found

    def _precedence(self, child: Rank | None, rank: Rank) -> tuple[bool, bool, bool, bool, bool, float, float]:
        """Return the precedence among two records with the same key. A living record that was shown before stays.

        Only a rank that the shown rank's process has started, the `child`, replaces it: once it has steps, or if
        neither has. If none was shown before, as after the exporter's start, the older process stays. A restarted run
        replaces its ended rank at once. Owners differ only if they are not part of the key; then a rank replaces
        another user's only after that has ended.
        """
        alive, before = rank.snapshot.alive, self._shown.get(rank.key)
        is_known = before is not None and before.snapshot.path == rank.snapshot.path
        is_same_owner = before is not None and before.owner == rank.owner
        has_steps = child is not None and rank.snapshot["steps"] > 0
        age = -rank.process_start if alive and rank.process_start else -inf
        started = rank.snapshot.unix_field("started_unix")
        return alive, is_same_owner, has_steps, rank is child, alive and is_known, age, started

    def _read(self, file: RankFile, skipped: Skipped, *, with_steps: bool) -> Rank | None:
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
            process = self._processes.find(file, snapshot)
            alive = is_alive(snapshot, process)
            pid = process.pid if alive else 0
            if (alive, pid) != (snapshot.alive, snapshot.lock_pid):
                unix_offset = offset if alive else snapshot.unix_offset
                snapshot = replace(snapshot, alive=alive, lock_pid=pid, unix_offset=unix_offset)
        except FileNotFoundError:
            return None
        except UnreadableRecordError as error:
            skipped.add(error)
            skipped.stamps.add(file.stamp)
            return None
        exit_unix = None if snapshot.alive else self._exit_unix(snapshot, offset)
        if snapshot.alive:
            self._living[file.path] = snapshot.read_monotonic
            self._ends.pop(file.path, None)
        else:
            snapshot = replace(snapshot, alive_until=self._living.get(file.path, 0.0))
        weight, has_owner = limit.weight(snapshot), self._policy.has_owner
        return Rank(snapshot, exit_unix, file.owner, process_start=process.start, has_owner=has_owner, weight=weight)

    def _exit_unix(self, snapshot: RankSnapshot, offset: float) -> float:
        """Return the unix time of a rank's end, by the current setting of the node's clock."""
        if snapshot.path not in self._ends:
            self._ends[snapshot.path] = End(self._first_exit_unix(snapshot), snapshot.unix_offset)
        return self._ends[snapshot.path].unix(offset)

    def _first_exit_unix(self, snapshot: RankSnapshot) -> float:
        """Return the end in the record, unless it is in the future or before the rank was last alive or active."""
        now, recorded = self._clock(), snapshot.exit_unix
        if not recorded or recorded > now + CLOCK_TOLERANCE:
            return now
        if snapshot.path in self._living:
            return max(recorded, now - (self._monotonic() - self._living[snapshot.path]))
        if snapshot.unix_offset is None:
            return recorded
        return max(recorded, min(now, snapshot.unix(snapshot.last_progress)))

    def _is_shown(self, rank: Rank) -> bool:
        return rank.exit_unix is None or self._clock() - rank.exit_unix < ENDED_RANK_SECONDS

    def _add_owner_and_gpu(self, rank: Rank) -> Rank:
        """Return the rank with its owner's name, and whether it can use its GPU (if it has ended: could before)."""
        before = self._shown.get(rank.key)
        if before and before.snapshot.path == rank.snapshot.path and not rank.snapshot.alive:
            is_elsewhere = before.is_elsewhere
        else:
            is_elsewhere = bool(rank.snapshot.info["uuid"]) and self._policy.is_elsewhere(rank)
        return replace(rank, user=self._policy.user_name(rank.owner), is_elsewhere=is_elsewhere)

    def _remember(self, present: set[Path], ranks: Iterable[Rank], skipped: Skipped) -> None:
        self._shown = {rank.key: rank for rank in ranks}
        self._unreadable = skipped.stamps
        self._living = {path: when for path, when in self._living.items() if path in present}
        self._ends = {path: end for path, end in self._ends.items() if path in present}
        self._checked = {path: info for path, info in self._checked.items() if path in present}
        self._processes.keep(present)


def _child(one: Rank, other: Rank, ancestors: Callable[[int], Collection[int]]) -> Rank | None:
    """Return the rank whose process the other's process has started; None if there is none, or it is not visible."""
    for child, parent in ((one, other), (other, one)):
        if child.snapshot.lock_pid and parent.snapshot.lock_pid in ancestors(child.snapshot.lock_pid):
            return child
    return None


def _are_duplicates(one: Rank, other: Rank, child: Rank | None) -> bool:
    """Return whether two records compete for a key. An ended rank of the same owner was only replaced."""
    return one.owner != other.owner or (one.snapshot.alive and other.snapshot.alive and child is None)


def _duplicate(hidden: Rank, shown: Rank) -> UnreadableRecordError:
    info = shown.snapshot.info
    detail = f"pid {info['pid']} on {info['node']} is shown as rank {info['rank']} of run {info['run']} instead"
    return UnreadableRecordError("duplicate", hidden.snapshot.path, detail)


def _contradiction(rank: Rank) -> UnreadableRecordError:
    detail = f"this node has no GPU {rank.snapshot.info['uuid']}, or only processes of other users use it"
    return UnreadableRecordError("elsewhere", rank.snapshot.path, detail)
