"""The content of a rank record at one time: a `RankSnapshot`, and the last steps from its ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

from rankscope.record import layout
from rankscope.record.clock import MACHINE, STEP, Clocks
from rankscope.record.layout import FIELDS, INDEX
from rankscope.record.numbers import LARGEST

_RING_PHASES = slice(layout.RING_WIDTH - len(layout.PHASES), layout.RING_WIDTH)
HEARTBEAT = 5.0  # seconds; a rank that makes steps takes a lost lock again within one second
_ROUNDING = 1e-6  # seconds, for sums over years


class Step(NamedTuple):
    """A step of the training thread, from the end of step `number` - 1 to its own."""

    number: int
    end: float  # monotonic
    seconds: float
    phases: tuple[float, ...]  # seconds in each of layout.PHASES; the rest is the script's own phases


class DeviceStep(NamedTuple):
    """A step on the device, from the work issued at its start to the work issued at its end."""

    nth: int  # number among the record's measured steps, from 1
    number: int  # as in `Step`
    end: float  # monotonic, on the host, which may be long before the end on the device
    sequence: int  # of the last collective that the default group had issued by then; 0 if not known
    phases: tuple[float, ...]  # device seconds in each of layout.PHASES, without the script's own phases

    @property
    def seconds(self) -> float:
        """The step's time on the device, without the script's own phases."""
        return sum(self.phases)


class Rings(NamedTuple):
    """The rings of a record, each with the counter of its entries, read after it."""

    steps: bytes = b""
    steps_after: float = 0.0
    device: bytes = b""
    device_after: float = 0.0


NO_RINGS = Rings()


@dataclass(frozen=True)
class RankSnapshot:
    """The consistent content of a record. Times are in seconds; layout.py describes `slots` and `info`."""

    path: Path
    alive: bool
    slots: Sequence[float]
    info: dict[str, Any]
    last_words_at: float | None  # unix time at which faulthandler noted SIGTERM, if it did
    read_monotonic: float
    lock_pid: int = 0  # the rank's process in the reader's pid namespace; 0 if not visible or dead
    rings: Rings = NO_RINGS
    unix_offset: float | None = None
    """Offset from monotonic to unix time, by the node's clock at the time of reading. None for a record of another
    boot."""
    ahead: Clocks = MACHINE
    """How far the reader's clocks are ahead of the rank's. The slots are converted already, the rings are not."""
    alive_until: float = 0.0
    """Of a rank that has ended: the monotonic time of its last reading while it was alive; 0 if the reader had none."""

    def __getitem__(self, field: str) -> float:
        return self.slots[INDEX[field]]

    def many(self, field: str) -> tuple[float, ...]:
        """Return all slots of a field with several slots."""
        return tuple(self.slots[INDEX[field] : INDEX[field] + FIELDS[field]])

    def by_operation(self, field: str) -> dict[str, float]:
        """Return a field with one slot per operation, without operations whose value is 0."""
        return {op: value for op, value in zip(layout.OPS, self.many(field), strict=True) if value}

    @property
    def has_scaler(self) -> bool:
        """Return whether there is a gradient scaler. A collapsed scale is 0 after about 200 skipped steps."""
        return bool(self["amp_scale"] or self["amp_skipped_steps"])

    def unix(self, monotonic: float) -> float:
        """Return a monotonic time of the record as unix time, by the current setting of the node's clock."""
        return max(0.0, self["started_unix"] + monotonic - self["started_monotonic"] + self._clock_change)

    def unix_field(self, field: str) -> float:
        """Return a unix time of the record, by the current setting of the node's clock."""
        return max(0.0, self[field] + self._clock_change)

    @property
    def _clock_change(self) -> float:
        """Seconds by which the node's clock was set since the rank wrote the record's unix times.

        In a forged record, the sum of a time and this may be below 0.
        """
        if self.unix_offset is None:
            return 0.0
        change = self.unix_offset - (self["started_unix"] - self["started_monotonic"])
        return change if abs(change) > STEP else 0.0

    @property
    def last_progress(self) -> float:
        """Monotonic time of the last event in the training thread: the start plus all charged time."""
        return self["started_monotonic"] + sum(self.many("phase_seconds"))

    @property
    def has_recent_progress(self) -> bool:
        """True if the training thread had an event within HEARTBEAT before the reading."""
        return 0.0 <= self.read_monotonic - self.last_progress < HEARTBEAT

    @property
    def phase(self) -> str:
        """The open phase."""
        return self._phase_names()[int(self["phase"])]

    @property
    def phase_since(self) -> float:
        """Monotonic time since which that phase is open; after an interruption, since it was resumed."""
        return self["phase_since"] or self.last_progress

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase. They sum to the time since the rank's start, until it was last known to be alive."""
        seconds = self._by_phase("phase_seconds")
        until = self.read_monotonic if self.alive else self.alive_until
        seconds[self.phase] += max(0.0, until - self.last_progress)
        return seconds

    def steps_after(self, number: int) -> list[Step]:
        """Return the steps after `number` in the ring, in order, except the first entry, whose start is not known.

        An entry counts if it was complete before the read began and could not be overwritten before the read ended.
        """
        entries = self._entries("steps", self.rings.steps, self.rings.steps_after, number, layout.RING_STEPS)
        steps = (_step(before, after, self.ahead.monotonic) for before, after in pairwise(entries) if before and after)
        return [step for step in steps if step]

    def device_steps_after(self, nth: int) -> list[DeviceStep]:
        """Return the measured steps after the `nth` in the device ring, in order; as in `steps_after`."""
        rings, count = self.rings, layout.DEVICE_RING_STEPS
        entries = self._entries("device_steps", rings.device, rings.device_after, nth + 1, count)
        return [step for entry in entries if entry and (step := _device_step(entry, self.ahead.monotonic))]

    def _entries(self, field: str, ring: bytes, after: float, first: int, count: int) -> list[Entry | None]:
        """Return the entries from `first` on of a ring of `count` entries; None for one that was overwritten."""
        newest = max(self[field], after)
        if not newest <= LARGEST:
            return []
        # The writer may have been writing the entry after the newest, which overwrites the one `count` before it.
        oldest = max(first, int(newest) + 2 - count, 1)
        values = memoryview(ring).cast("d")
        return [_entry(values, at, count) for at in range(oldest, int(self[field]) + 1)]

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that the rank belongs to, in the order of the fields with one slot per group."""
        return tuple(self.info.get("groups", ()))[: layout.MAX_GROUPS]

    @property
    def issued(self) -> dict[str, float]:
        """The number of collectives that the rank has issued, by group."""
        return dict(zip(self.groups, self.many("group_collectives"), strict=False))

    @property
    def open_operation(self) -> str:
        """The training thread's current collective, one of layout.OPS; empty in none."""
        number = int(self["collective_op"])
        return layout.OPS[number - 1] if 0 < number <= len(layout.OPS) else ""

    @property
    def open_group(self) -> str:
        """The group of that collective; empty in none, or if the group has no name."""
        number = int(self["collective_group"])
        return self.groups[number] if self.open_operation and number < len(self.groups) else ""

    @property
    def device_seconds(self) -> dict[str, float]:
        """The device's seconds by phase in the measured steps; empty without a device."""
        return self._by_phase("device_seconds") if self["device_steps"] else {}

    @property
    def device_dry_seconds(self) -> dict[str, float]:
        """The part of these in which the device was idle because no work was issued; empty without a device."""
        return self._by_phase("device_dry_seconds") if self["device_steps"] else {}

    @property
    def device_group_waits(self) -> dict[str, float]:
        """Return the device's seconds in collectives by group; empty without a device."""
        seconds = self.many("device_group_wait_seconds") if self["device_steps"] else ()
        return dict(zip(self.groups, seconds, strict=False))

    @property
    def group_waits(self) -> dict[str, float]:
        """Return the training thread's seconds in collectives by group."""
        return dict(zip(self.groups, self.many("group_wait_seconds"), strict=False))

    @property
    def exit_reason(self) -> str | None:
        """`finished`, `exception`, `interrupted`, `sigterm` or `killed`, whichever came first; None while alive."""
        if self.alive:
            return None
        spoke = self["ended"] not in layout.NOT_ENDED
        if self.last_words_at is not None and not (spoke and self["ended_unix"] <= self.last_words_at):
            return "sigterm"
        return "killed" if self["ended"] == layout.RUNNING else layout.ENDINGS.get(self["ended"], "exception")

    @property
    def exhausted_memory(self) -> str:
        """The memory that the exception at its end lacked, one of layout.EXHAUSTED; empty if it says nothing of it."""
        return _named(layout.EXHAUSTED, self["exhausted_memory"])

    @property
    def exhausted_in_phase(self) -> str:
        """The phase in which that exception was raised; empty if it is not known."""
        return _named(self._phase_names(), self["exhausted_in_phase"])

    @property
    def exit_unix(self) -> float | None:
        """The unix time of the end that the rank recorded; None if it is alive or was killed, even after its work."""
        if self["ended"] == layout.LEFT_GROUP and self.last_words_at is None:
            return None
        ended_unix = self.unix_field("ended_unix")
        return {"sigterm": self.last_words_at, "killed": None, None: None}.get(self.exit_reason, ended_unix)

    def _by_phase(self, field: str) -> dict[str, float]:
        return dict(zip(self._phase_names(), self.many(field), strict=False))

    def _phase_names(self) -> tuple[str, ...]:
        return (*layout.PHASES, *self.info.get("phases", ()))


def _named(names: Sequence[str], number: float) -> str:
    """Return the name with this number, counted from 1; empty if there is none."""
    return names[int(number) - 1] if 1 <= number <= len(names) else ""


Entry = tuple[float, ...]  # of a ring; the first value is its number


def _entry(ring: memoryview[float], number: int, steps: int) -> Entry | None:
    """Return an entry of a ring of `steps` entries; None if it was overwritten or the ring is truncated."""
    width = len(ring) // steps
    begin = number % steps * width
    entry = tuple(ring[begin : begin + width])
    return entry if entry and entry[0] == number else None


def _step(before: Entry, after: Entry, ahead: float) -> Step | None:
    """Return the step between two entries, with its end by a clock `ahead`; None if the values are invalid."""
    seconds = after[1] - before[1]
    phases = tuple(map(sub, after[_RING_PHASES], before[_RING_PHASES]))
    # NaN fails too: a sum with NaN is NaN, and each comparison with NaN is false.
    is_later = 0.0 <= before[1] < after[1] <= LARGEST
    is_a_step = is_later and min(phases) >= 0.0 and sum(phases) <= seconds + _ROUNDING
    return Step(int(after[0]), after[1] + ahead, seconds, phases) if is_a_step else None


def _device_step(entry: Entry, ahead: float) -> DeviceStep | None:
    """Return a measured step, with its end by a clock `ahead`; None if the values are invalid."""
    nth, number, end, sequence, *phases = entry
    is_valid = min(entry) >= 0.0 and sum(entry) <= LARGEST and sum(phases) > 0.0  # NaN fails, as above
    return DeviceStep(int(nth), int(number), end + ahead, int(sequence), tuple(phases)) if is_valid else None
