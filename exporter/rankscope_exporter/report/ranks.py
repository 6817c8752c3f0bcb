"""The report of one rank: its state now, and its time over the last window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from rankscope_exporter.diagnosis.facts import HOST, RankFacts
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.ranks.rank import Rank

MIN_LAG = Thresholds().loss
"""A smaller lag is not a loss: in a healthy run, one rank waits least as well."""
STEPS = 32
MINUTE = 60.0
"""The last steps are at most STEPS, and at most a MINUTE old. Reading a whole ring takes too long."""


class Moment(NamedTuple):
    """The time when the ranks were read, on both clocks."""

    monotonic: float
    unix: float


@dataclass(frozen=True)
class RankReport:
    """One rank. Unknown values are None, or absent from their mapping."""

    rank: int
    group: str
    node: str
    gpu: str
    """The index of its GPU."""
    uuid: str
    pid: int | None
    """The pid in the rank's own pid namespace: in a container, the container's. None on another machine."""
    is_alive: bool
    ended: str | None
    """The reason of its end: `finished`, `exception`, `interrupted`, `sigterm` or `killed`."""
    ended_seconds: float | None
    """Seconds since its end."""
    phase: str | None
    """The current phase of the training thread."""
    phase_seconds: float | None
    """Seconds in the current phase."""
    stalled_seconds: float | None
    """Seconds since the training thread last made progress."""
    steps: int
    backward_passes: int
    """Backward passes; a step may have several."""
    step_marker: str
    """The event that ends a step, such as `optimizer` or `backward_pass`; empty without steps."""
    clock: str | None
    """The clock of the ratios: `host` or `device`."""
    phases: Mapping[str, float]
    """Time by phase, as ratios of the window."""
    wait_ratio: float | None
    """Its wait for others, as a ratio of the step."""
    lag_ratio: float | None
    """The time that the others would save if it were like them, as a ratio of the step."""
    waits_least: bool
    """True if its lag is too large to be chance."""
    checkpoint_seconds: float | None
    """Seconds since its last checkpoint."""


def report_rank(
    reading: RankReading, moment: Moment, facts: RankFacts | None, rank: Rank | None, *, may_hang: bool
) -> RankReport:
    """Return the report of a rank at a time. `rank` is its record, if that is on this machine.

    In a hang no step is measured: the waits and the lag that are known are from before it, and only the host's clock
    goes on.
    """
    is_alive, at, saved = reading.ended is None, reading.at, reading.last_checkpoint
    info = rank.snapshot.info if rank else {}
    measured = None if may_hang else facts
    lag = measured.lag if measured else None
    ratios = measured.ratios if measured else facts.host_ratios if facts else {}
    return RankReport(
        rank=reading.rank,
        group=reading.group,
        node=reading.node,
        gpu=reading.gpu.index if reading.gpu else "",
        uuid=reading.uuid,
        pid=int(info["pid"]) if info else None,
        is_alive=is_alive,
        ended=(reading.ended.reason or None) if reading.ended else None,
        ended_seconds=_ended_seconds(reading, moment, rank),
        phase=reading.phase if is_alive else None,
        phase_seconds=max(at - reading.phase_since, 0.0) if is_alive else None,
        stalled_seconds=max(at - reading.last_progress, 0.0) if is_alive else None,
        steps=int(reading.counters.steps),
        backward_passes=int(reading.counters.micro_steps),
        step_marker=str(info.get("settings", {}).get("step_marker", "")),
        clock=measured.clock if measured else HOST if facts else None,
        phases={phase: ratio for phase, ratio in ratios.items() if ratio > 0.0},
        wait_ratio=measured.wait if measured else None,
        lag_ratio=lag,
        waits_least=lag is not None and lag > MIN_LAG,
        checkpoint_seconds=None if saved is None else max(moment.monotonic - saved, 0.0),
    )


def _ended_seconds(reading: RankReading, moment: Moment, rank: Rank | None) -> float | None:
    if rank:  # its record may be from another boot, whose monotonic clock says nothing
        return None if rank.exit_unix is None else max(moment.unix - rank.exit_unix, 0.0)
    return max(moment.monotonic - reading.ended.at, 0.0) if reading.ended else None


def step_seconds(ranks: Sequence[Rank]) -> float | None:
    """Return the median length of the last steps. All ranks of a run have the same steps, so read the first."""
    if not ranks:
        return None
    snapshot = ranks[0].snapshot
    steps = snapshot.steps_after(max(int(snapshot["steps"]) - STEPS, 0))
    recent = [step.seconds for step in steps if step.end > snapshot.read_monotonic - MINUTE]
    return median(recent) if recent else None
