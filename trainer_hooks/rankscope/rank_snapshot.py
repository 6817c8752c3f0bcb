"""What one reading of a rank record says: a `RankSnapshot`, and the last steps out of its ring."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

from rankscope import record
from rankscope.record import FIELDS, PLACES

_RING_PHASES = slice(record.RING_WIDTH - len(record.PHASES), record.RING_WIDTH)
_ROUNDING = 1e-6  # seconds: of sums that have run for years
LARGEST = 2.0**200  # of all slots together: a loss scale (float32) may come to 2**127; their sum stays finite


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
    def phase_since(self) -> float:
        """Monotonic time since when that phase is open; one that was interrupted, since it goes on."""
        return self["phase_since"] or self.last_progress

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
        if not newest <= LARGEST:
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
    is_later = 0.0 <= before[1] < after[1] <= LARGEST
    is_a_step = is_later and min(phases) >= 0.0 and sum(phases) <= seconds + _ROUNDING
    return Step(int(after[0]), after[1], seconds, phases) if is_a_step else None
