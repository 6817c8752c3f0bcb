"""What one reading of a rank record says: a `RankSnapshot`, and the last steps out of its ring."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

from rankscope.record import layout
from rankscope.record.clock import STEP
from rankscope.record.layout import FIELDS, INDEX
from rankscope.record.numbers import LARGEST

_RING_PHASES = slice(layout.RING_WIDTH - len(layout.PHASES), layout.RING_WIDTH)
HEARTBEAT = 5.0  # seconds: a rank that steps takes a lost lock again within one
_ROUNDING = 1e-6  # seconds: of sums that have run for years


class Step(NamedTuple):
    """One step of the training thread: from the end of step `number` - 1 to its own."""

    number: int
    end: float  # monotonic
    seconds: float
    phases: tuple[float, ...]  # seconds of this step in each of layout.PHASES; the user's own phases are the rest


class DeviceStep(NamedTuple):
    """One step as the device had it, from what was issued at its begin to what was issued at its end."""

    nth: int  # which of the record's measured steps it is, from 1 on
    number: int  # the step's, as in `Step`
    end: float  # monotonic: when the host ended it, which may be long before the device did
    sequence: int  # of the last collective that the default group had issued by then; 0 if none is known
    phases: tuple[float, ...]  # seconds of the device in each of layout.PHASES; the user's own phases are missing

    @property
    def seconds(self) -> float:
        """The step's length on the device, without the user's own phases."""
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
    """One consistent reading of a record. Seconds everywhere; `slots` and `info` as layout.py describes them."""

    path: Path
    alive: bool
    slots: tuple[float, ...]
    info: dict[str, Any]
    last_words_at: float | None  # unix time at which SIGTERM made faulthandler write, if it did
    read_monotonic: float
    lock_pid: int = 0  # the rank's process in the pid namespace of the reader; 0 if it cannot be seen there, or is dead
    rings: Rings = NO_RINGS
    unix_offset: float | None = None
    """What to add to a monotonic time for its unix time, by the node's clock as it was set at the reading. None where
    that is not known: the record is of another boot."""

    def __getitem__(self, field: str) -> float:
        return self.slots[INDEX[field]]

    def many(self, field: str) -> tuple[float, ...]:
        """All slots of a field that has several."""
        return self.slots[INDEX[field] : INDEX[field] + FIELDS[field]]

    def unix(self, monotonic: float) -> float:
        """Return a monotonic time of the record as unix time, by the node's clock as it is set now."""
        return max(0.0, self["started_unix"] + monotonic - self["started_monotonic"] + self._clock_change)

    def unix_field(self, field: str) -> float:
        """Return a unix time of the record, by the node's clock as it is set now."""
        return max(0.0, self[field] + self._clock_change)

    @property
    def _clock_change(self) -> float:
        """Seconds by which the node's clock was set since the record's unix times were written.

        Times of a forged record can be so far apart that the sum is below 0.
        """
        if self.unix_offset is None:
            return 0.0
        change = self.unix_offset - (self["started_unix"] - self["started_monotonic"])
        return change if abs(change) > STEP else 0.0

    @property
    def last_progress(self) -> float:
        """Monotonic time of the last event in the training thread: all that has been charged, from the start on."""
        return self["started_monotonic"] + sum(self.many("phase_seconds"))

    @property
    def has_recent_progress(self) -> bool:
        """Whether there was an event in the training thread within HEARTBEAT before the reading."""
        return 0.0 <= self.read_monotonic - self.last_progress < HEARTBEAT

    @property
    def phase(self) -> str:
        """The phase that is open."""
        return self._phase_names()[int(self["phase"])]

    @property
    def phase_since(self) -> float:
        """Monotonic time since when that phase is open; one that was interrupted, since it goes on."""
        return self["phase_since"] or self.last_progress

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase, the open one included while the rank lives: they sum to the time since its start."""
        seconds = self._by_phase("phase_seconds")
        if self.alive:
            seconds[self.phase] += max(0.0, self.read_monotonic - self.last_progress)
        return seconds

    def steps_after(self, number: int) -> list[Step]:
        """The steps after `number` that the ring holds, in their order; the first that it holds has no beginning.

        An entry counts if it was complete before the reading began, and was not about to be overwritten when it ended.
        """
        newest = max(self["steps"], self.rings.steps_after)
        if not newest <= LARGEST:
            return []
        # What the writer may have been at is the entry after the newest, which overwrites the one RING_STEPS before it.
        oldest = max(number, int(newest) + 2 - layout.RING_STEPS, 1)
        ring = memoryview(self.rings.steps).cast("d")
        entries = [_entry(ring, at, layout.RING_STEPS) for at in range(oldest, int(self["steps"]) + 1)]
        return [step for before, after in pairwise(entries) if before and after and (step := _step(before, after))]

    def device_steps_after(self, nth: int) -> list[DeviceStep]:
        """The measured steps after the `nth` that the device ring holds, in their order; as in `steps_after`."""
        newest = max(self["device_steps"], self.rings.device_after)
        if not newest <= LARGEST:
            return []
        oldest = max(nth + 1, int(newest) + 2 - layout.DEVICE_RING_STEPS, 1)
        ring = memoryview(self.rings.device).cast("d")
        entries = [_entry(ring, at, layout.DEVICE_RING_STEPS) for at in range(oldest, int(self["device_steps"]) + 1)]
        return [step for entry in entries if entry and (step := _device_step(entry))]

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of ranks that it synchronizes with, in the order of the fields that have one slot a group."""
        return tuple(self.info.get("groups", ()))[: layout.MAX_GROUPS]

    @property
    def issued(self) -> dict[str, float]:
        """How many collectives the rank has issued, by group."""
        return dict(zip(self.groups, self.many("group_collectives"), strict=False))

    @property
    def open_operation(self) -> str:
        """The collective that the training thread is in, as one of layout.OPS. Empty in none."""
        number = int(self["collective_op"])
        return layout.OPS[number - 1] if 0 < number <= len(layout.OPS) else ""

    @property
    def open_group(self) -> str:
        """The group of that collective. Empty in none, and where the group has no name."""
        number = int(self["collective_group"])
        return self.groups[number] if self.open_operation and number < len(self.groups) else ""

    @property
    def device_seconds(self) -> dict[str, float]:
        """The device's seconds by phase, of the measured steps; empty without a device."""
        return self._by_phase("device_seconds") if self["device_steps"] else {}

    @property
    def device_dry_seconds(self) -> dict[str, float]:
        """Of these the seconds in which the device had done all that was issued; empty without a device."""
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
        """`finished`, `exception`, `interrupted`, `sigterm` or `killed`, whichever came first; None while it lives."""
        if self.alive:
            return None
        spoke = self["ended"] not in layout.NOT_ENDED
        if self.last_words_at is not None and not (spoke and self["ended_unix"] <= self.last_words_at):
            return "sigterm"
        return "killed" if self["ended"] == layout.RUNNING else layout.ENDINGS.get(self["ended"], "exception")

    @property
    def exit_unix(self) -> float | None:
        """When the rank ended by its own account; None if it lives or was killed, also after its work."""
        if self["ended"] == layout.LEFT_GROUP and self.last_words_at is None:
            return None
        ended_unix = self.unix_field("ended_unix")
        return {"sigterm": self.last_words_at, "killed": None, None: None}.get(self.exit_reason, ended_unix)

    def _by_phase(self, field: str) -> dict[str, float]:
        return dict(zip(self._phase_names(), self.many(field), strict=False))

    def _phase_names(self) -> tuple[str, ...]:
        return (*layout.PHASES, *self.info.get("phases", ()))


Entry = tuple[float, ...]  # of a ring: its number first


def _entry(ring: memoryview[float], number: int, steps: int) -> Entry | None:
    """Of a ring of so many steps; None where another entry has overwritten it, or the ring is cut off."""
    width = len(ring) // steps
    begin = number % steps * width
    entry = tuple(ring[begin : begin + width])
    return entry if entry and entry[0] == number else None


def _step(before: Entry, after: Entry) -> Step | None:
    """The step between two entries; None for values that no rank writes."""
    seconds = after[1] - before[1]
    phases = tuple(map(sub, after[_RING_PHASES], before[_RING_PHASES]))
    # NaN fails, too: a sum with it is NaN, and no comparison with that is true.
    is_later = 0.0 <= before[1] < after[1] <= LARGEST
    is_a_step = is_later and min(phases) >= 0.0 and sum(phases) <= seconds + _ROUNDING
    return Step(int(after[0]), after[1], seconds, phases) if is_a_step else None


def _device_step(entry: Entry) -> DeviceStep | None:
    """A measured step; None for values that no rank writes."""
    nth, number, end, sequence, *phases = entry
    is_one = min(entry) >= 0.0 and sum(entry) <= LARGEST and sum(phases) > 0.0  # NaN fails, as above
    return DeviceStep(int(nth), int(number), end, int(sequence), tuple(phases)) if is_one else None
