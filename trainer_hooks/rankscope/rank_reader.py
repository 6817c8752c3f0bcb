"""The reading end of a rank record: one consistent `RankSnapshot` of a file that another user may have written.

`RankSnapshot.steps_after` gives the last steps, from the ring, as far as nobody wrote to them during the reading.

Nothing here writes to the file, follows a link or maps it (a mapping that somebody truncates kills its reader).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from rankscope import record
from rankscope.record import FIELDS, PLACES

_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid: Linux's struct flock on 64 bits
_READ_ATTEMPTS = 50
_BUCKETS = slice(PLACES["step_buckets"], PLACES["step_buckets"] + FIELDS["step_buckets"])
_STEPS_OFFSET = record.SLOTS_OFFSET + 8 * PLACES["steps"]
_RING_PHASES = slice(record.RING_WIDTH - len(record.PHASES), record.RING_WIDTH)
_ROUNDING = 1e-6  # seconds: of sums that have run for years
_LARGEST = 2.0**63  # of all slots together: eight exabytes, or longer than the universe
_SLOTS = struct.Struct(f"{record.SLOTS}d")
INFOS_REMEMBERED = 256  # of at most 8 kB each


class Step(NamedTuple):
    """One step of the training thread: from the end of step `number` - 1 to its own."""

    number: int
    end: float  # monotonic
    seconds: float
    phases: tuple[float, ...]  # seconds of this step in each of record.PHASES; the user's own phases are the rest


@dataclass(frozen=True)
class RankSnapshot:
    """One consistent reading of a record. Seconds everywhere; `slots` and `info` as record.py describes them."""

    path: Path
    alive: bool
    slots: tuple[float, ...]
    info: dict[str, Any]
    last_words_at: float | None  # unix time at which SIGTERM made faulthandler write, if it did
    read_monotonic: float
    lock_pid: int = 0  # the rank's process in the pid namespace of the reader; 0 if it cannot be seen there, or is dead
    ring: bytes = b""
    steps_after_ring: float = 0.0  # the field `steps`, read again after the ring

    def __getitem__(self, field: str) -> float:
        return self.slots[PLACES[field]]

    def many(self, field: str) -> tuple[float, ...]:
        """All places of a field that has several."""
        return self.slots[PLACES[field] : PLACES[field] + FIELDS[field]]

    def unix(self, monotonic: float) -> float:
        """A monotonic time of the record as unix time."""
        return self["started_unix"] + monotonic - self["started_monotonic"]

    @property
    def last_progress(self) -> float:
        """Monotonic time of the last event in the training thread: all that has been charged, from the start on."""
        return self["started_monotonic"] + sum(self.many("phase_seconds"))

    @property
    def phase(self) -> str:
        """The phase that is open."""
        return self._phase_names()[int(self["phase"])]

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase, the open one included while the rank lives: they sum to the time since its start."""
        names = self._phase_names()
        seconds = dict(zip(names, self.many("phase_seconds"), strict=False))
        if self.alive:
            seconds[self.phase] += max(0.0, self.read_monotonic - self.last_progress)
        return seconds

    def steps_after(self, number: int) -> list[Step]:
        """The steps after `number` that the ring holds, in their order; the first that it holds has no beginning.

        An entry counts if it was complete before the reading began, and was not about to be overwritten when it ended.
        """
        newest = max(self["steps"], self.steps_after_ring)
        if not newest <= _LARGEST:
            return []
        # What the writer may have been at is the entry after the newest, in the place of the one RING_STEPS before it.
        oldest = max(number, int(newest) + 2 - record.RING_STEPS, 1)
        ring = memoryview(self.ring).cast("d")
        entries = [_entry(ring, at) for at in range(oldest, int(self["steps"]) + 1)]
        return [step for before, after in pairwise(entries) if before and after and (step := _step(before, after))]

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of ranks that it synchronises with, in the order of the fields that have one place a group."""
        return tuple(self.info.get("groups", ()))[: record.MAX_GROUPS]

    @property
    def device_seconds(self) -> dict[str, float]:
        """The GPU's seconds by phase, as far as they are known; empty without a GPU."""
        seconds = self.many("device_seconds")
        return dict(zip(self._phase_names(), seconds, strict=False)) if any(seconds) else {}

    @property
    def exit_reason(self) -> str | None:
        """`finished`, `exception`, `interrupted`, `sigterm` or `killed`, whichever came first; None while it lives."""
        if self.alive:
            return None
        spoke = self["ended"] != record.RUNNING
        if self.last_words_at is not None and not (spoke and self["ended_unix"] <= self.last_words_at):
            return "sigterm"
        if spoke:
            return record.ENDINGS.get(self["ended"], "exception")
        return "killed"

    @property
    def exit_unix(self) -> float | None:
        """When the rank ended by its own account; None if it lives or was killed."""
        return {"sigterm": self.last_words_at, "killed": None, None: None}.get(self.exit_reason, self["ended_unix"])

    def _phase_names(self) -> tuple[str, ...]:
        return (*record.PHASES, *self.info.get("phases", ()))


Entry = tuple[float, ...]  # of the ring: number, end, and the copies


def _entry(ring: memoryview[float], number: int) -> Entry | None:
    place = number % record.RING_STEPS * record.RING_WIDTH
    entry = tuple(ring[place : place + record.RING_WIDTH])
    return entry if len(entry) == record.RING_WIDTH and entry[0] == number else None


def _step(before: Entry, after: Entry) -> Step | None:
    """The step between two entries; None for values that no rank writes."""
    seconds = after[1] - before[1]
    phases = tuple(map(sub, after[_RING_PHASES], before[_RING_PHASES]))
    # NaN fails, too: a sum with it is NaN, and no comparison with that is true.
    is_later = 0.0 <= before[1] < after[1] <= _LARGEST
    is_a_step = is_later and min(phases) >= 0.0 and sum(phases) <= seconds + _ROUNDING
    return Step(int(after[0]), after[1], seconds, phases) if is_a_step else None


class UnreadableRecordError(Exception):
    """A file that is no record this version can read. `reason` is one of the few words that metrics count by."""

    def __init__(self, reason: str, path: Path, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.reason = reason
        self.path = path


def read_rank(path: Path, directory: int | None = None) -> RankSnapshot:
    """Read one record consistently; `directory` is an open descriptor of where it lies, if there is one.

    Raises FileNotFoundError if it is gone, UnreadableRecordError with the reason otherwise.
    """
    with _opened(path, directory) as descriptor:
        _check_header(path, os.fstat(descriptor), os.pread(descriptor, record.HEADER.size, 0))
        # The lock before the data: what a dead process left is then final, and no clean end looks like a kill.
        lock_pid = _lock_holder(descriptor)
        data = _consistent(descriptor, path)
        ring = _read(descriptor, path, 8 * record.RING_SLOTS, record.RING_OFFSET)
        (steps_after_ring,) = struct.unpack("d", _read(descriptor, path, 8, _STEPS_OFFSET))
        spoke_last_words = os.pread(descriptor, 1, record.LAST_WORDS_OFFSET) != b"\0"
        modified = os.fstat(descriptor).st_mtime
    info = _info(path, data)
    return RankSnapshot(
        path=path,
        alive=lock_pid is not None,
        slots=_slots(path, data, info),
        info=info,
        last_words_at=modified if spoke_last_words else None,
        read_monotonic=time.monotonic(),
        lock_pid=lock_pid or 0,
        ring=ring,
        steps_after_ring=steps_after_ring,
    )


@contextlib.contextmanager
def _opened(path: Path, directory: int | None) -> Iterator[int]:
    name = path if directory is None else path.name
    try:
        # Non-blocking: a pipe waits for its writer, and a file under somebody's lease for that to be given back.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "symlink" if error.errno == errno.ELOOP else "unreadable"
        raise UnreadableRecordError(reason, path, error.strerror or str(error)) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnreadableRecordError("foreign", path, "not a regular file")
        yield descriptor
    except OSError as error:  # a file system may fail at any call, locks included
        raise UnreadableRecordError("unreadable", path, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)


def _check_header(path: Path, status: os.stat_result, header: bytes) -> None:
    if len(header) < record.HEADER.size:
        raise UnreadableRecordError("truncated", path, f"only {status.st_size} bytes")
    magic, version, _, layout = record.HEADER.unpack(header)
    if magic != record.MAGIC:
        raise UnreadableRecordError("foreign", path, "not a rank record")
    if (version, layout) != (record.VERSION, record.LAYOUT):
        raise UnreadableRecordError("version", path, f"a record of layout {version}/{layout.hex()}, not ours")
    if status.st_size < record.SIZE:
        raise UnreadableRecordError("truncated", path, f"{status.st_size} bytes of {record.SIZE}")


def _consistent(descriptor: int, path: Path) -> bytes:
    """The record's bytes before the ring, read while its info was not being changed."""
    for _ in range(_READ_ATTEMPTS):
        data = _read(descriptor, path, record.RING_OFFSET, 0)
        sequence = _info_sequence(data)
        if sequence % 2 == 0 and sequence == _info_sequence(os.pread(descriptor, 80, 0)):
            return data
    raise UnreadableRecordError("unreadable", path, "its info changed at every attempt to read it")


def _read(descriptor: int, path: Path, size: int, offset: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) < size:
        raise UnreadableRecordError("truncated", path, f"{offset + len(data)} bytes of {record.SIZE}")
    return data


def _info_sequence(data: bytes) -> float:
    return float(struct.unpack_from("d", data, record.SLOTS_OFFSET + 8 * PLACES["info_sequence"])[0])


def _info(path: Path, data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("d", data, record.SLOTS_OFFSET + 8 * PLACES["info_length"])
    if not 0 < length <= record.INFO_CAPACITY:
        raise UnreadableRecordError("foreign", path, f"an info of {length} bytes")
    try:
        return _parsed(data[record.INFO_OFFSET : record.INFO_OFFSET + int(length)])
    except (ValueError, RecursionError) as error:  # brackets in thousands exhaust the parser's stack
        raise UnreadableRecordError("foreign", path, f"its info is none: {error}") from error


@lru_cache(maxsize=INFOS_REMEMBERED)
def _parsed(text: bytes) -> dict[str, Any]:
    """The same dictionary for the same text: it changes a few times in a rank's life, and is read at every scrape."""
    info = json.loads(text)
    if (
        not isinstance(info, dict)
        or not _are_names(info.get("phases", []))
        or not _are_texts(info.get("probes_disabled", []))
        or not _are_texts(info.get("groups", []))
        or not _are_settings(info.get("settings", {}))
    ):
        raise ValueError("not of the form we know")
    return info


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _are_settings(value: object) -> bool:
    return isinstance(value, dict) and value.keys() <= set(record.SETTINGS) and _are_texts(list(value.values()))


def _are_names(value: object) -> bool:
    if not _are_texts(value) or not all(value):
        return False
    names = [*record.PHASES, *value]
    return len(names) <= record.MAX_PHASES and len(names) == len(set(names))


def _slots(path: Path, data: bytes, info: dict[str, Any]) -> tuple[float, ...]:
    slots = _SLOTS.unpack_from(data, record.SLOTS_OFFSET)
    phases = len(record.PHASES) + len(info.get("phases", ()))
    # What is no number makes the sum none, and then it is not below anything.
    are_values = min(slots) >= 0.0 and sum(slots) <= _LARGEST and slots[PLACES["phase"]] < phases
    is_in_order = slots[PLACES["started_monotonic"]] <= slots[PLACES["phase_since"]]
    # OpenMetrics wants whole numbers in a histogram's buckets.
    if not (are_values and is_in_order and all(map(float.is_integer, slots[_BUCKETS]))):
        raise UnreadableRecordError("foreign", path, "values that no rank writes")
    return slots


def _lock_holder(descriptor: int) -> int | None:
    """Who holds the record's lock; 0 if it is nobody whom this process's pid namespace shows, None if it is free."""
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    return None if kind == fcntl.F_UNLCK else max(0, int(pid))  # -1: a lock of an open file, of no process
