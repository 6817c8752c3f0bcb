"""A simulated run as readings once a second, and a judge's verdicts on it, for tests of the diagnosis."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from rankscope.record.layout import PHASES, STEP_BOUNDS
from rankscope.record.phases import COMPUTING
from rankscope.record.sampling import is_sampled
from rankscope.record.snapshot import Step
from rankscope_exporter.diagnosis.detectors import KINDS
from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.facts import DEVICE, HOST, WAIT, compare
from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.judge import Readings, RunJudge, Verdict
from rankscope_exporter.diagnosis.lost import lost
from rankscope_exporter.diagnosis.readings import (
    AlignedCounters,
    CollectiveCounters,
    Counters,
    GpuCounters,
    GpuReading,
    RankReading,
)
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.ranks.step_alignment import Alignment, account

RUN = ("llm", "1000")
STEP = {"data_wait": 0.005, "forward": 0.06, "backward": 0.12, "optimizer": 0.015}
"""Seconds of a healthy step, without the collective."""

Adjust = Callable[[RankReading], RankReading]
Work = dict[str, float]
Change = Callable[[int, int, Work], None]
"""A change of a rank's seconds by phase in a step. Arguments: the step's number, the rank, the seconds."""


def spend(phase: str, seconds: float, *ranks: int, every: int = 1) -> Change:
    """Make these ranks (by default all) spend more seconds in a phase, in every n-th step."""

    def change(step: int, rank: int, work: Work) -> None:
        if step % every == 0 and (not ranks or rank in ranks):
            work[phase] = work.get(phase, 0.0) + seconds

    return change


SLOW = spend("backward", 0.12, 1)
"""A loss of 0.36."""


def hang(phase: str, *ranks: int) -> Change:
    """Make these ranks stay in a phase."""
    return spend(phase, inf, *ranks)


def drift(step: int, rank: int, work: Work) -> None:
    """Change the work of each step by up to 2%."""
    work["backward"] *= 1.0 + 0.02 * ((step * 7 + rank * 3) % 5 - 2) / 2


EARLY = Thresholds(pace_known_after=45.0)
"""Thresholds with a pace after few steps, because a test does not make three hundred."""


@dataclass
class _Rank:
    number: int
    work: Work
    """Seconds by phase of the current step."""
    seconds: Work = field(default_factory=dict)
    alignment: Alignment = field(default_factory=Alignment)
    device: Work = field(default_factory=dict)
    buckets: list[float] = field(default_factory=lambda: [0.0] * (len(STEP_BOUNDS) + 1))
    checkpoints: float = 0.0
    last_checkpoint: float | None = None

    def finish(self, began: float, *, is_measured: bool = True) -> None:
        for phase, seconds in self.work.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
            if is_measured:
                self.device[phase] = self.device.get(phase, 0.0) + seconds
        self.buckets[bisect_left(STEP_BOUNDS, sum(self.work.values()))] += 1.0
        if "checkpoint" in self.work:
            self.checkpoints, self.last_checkpoint = self.checkpoints + 1.0, began


class Training:
    """Ranks that make steps and wait for each other in a collective at the end of each.

    On the device's clock, one step of each block of 2**level steps is measured, and the host reads a value in each
    `ahead`-th step: it issues the others at once and waits.
    """

    def __init__(
        self,
        ranks: int = 4,
        *,
        clock: str = HOST,
        level: int = 0,
        ahead: int = 1,
        transfer: float = 0.01,
        startup: float = 5.0,
        adjust: Adjust = lambda reading: reading,
    ) -> None:
        self.now = 0.0
        self.adjust = adjust
        """A function that may change each reading."""
        self._clock, self._transfer, self._startup, self._size = clock, transfer, startup, ranks
        self._sampling_level, self._ahead = level, ahead
        self.restart()

    def restart(self) -> None:
        """End all processes and start new ones."""
        self._began = self._step_began = self.now
        self._steps, self._length, self._measured_steps = 0, self._startup, 0
        self._ranks = [_Rank(number, {"startup": self._startup}) for number in range(self._size)]

    def train(self, seconds: float, *changes: Change, every: int = 1) -> Iterator[tuple[float, Readings]]:
        """Train, and yield the readings of each n-th second. The changes apply to steps that begin in that time."""
        until = self.now + seconds
        while self.now < until:
            self._train_a_second(changes)
            if self.now % every == 0:
                yield self.now, self._readings()

    def read_after(self, seconds: float, *changes: Change) -> Readings:
        """Train, and return only the readings at the end."""
        until = self.now + seconds
        while self.now < until:
            self._train_a_second(changes)
        return self._readings()

    def _train_a_second(self, changes: tuple[Change, ...]) -> None:
        self.now += 1.0
        while self._step_began + self._length <= self.now:
            self._finish_step()
            self._begin_step(changes)

    def _begin_step(self, changes: tuple[Change, ...]) -> None:
        for rank in self._ranks:
            rank.work = dict(STEP)
            for change in changes:
                change(self._steps, rank.number, rank.work)
        longest = max(sum(rank.work.values()) for rank in self._ranks)
        for rank in self._ranks:
            own = sum(rank.work.values())
            rank.work[WAIT] = self._transfer + (longest - own if own < longest else 0.0)
        self._step_began, self._length = self._step_began + self._length, longest + self._transfer

    def _finish_step(self) -> None:
        self._steps += 1
        is_measured = self._is_measured()
        self._measured_steps += is_measured
        for rank in self._ranks:
            rank.finish(self._step_began, is_measured=is_measured)
        if self._size > 1 and is_measured:
            phases = [tuple(rank.work.get(phase, 0.0) for phase in PHASES) for rank in self._ranks]
            steps = [Step(self._steps, self._step_began, self._length, one) for one in phases]
            account([rank.alignment for rank in self._ranks], steps)

    def _is_measured(self) -> bool:
        """Return whether the step that has just ended was measured."""
        return self._clock == HOST or is_sampled(self._steps, self._sampling_level)

    def _readings(self) -> Readings:
        return {rank.number: self.adjust(self._reading(rank)) for rank in self._ranks}

    def _reading(self, rank: _Rank) -> RankReading:
        seconds, since, phase = dict(rank.seconds), self._step_began, ""
        for phase, long in rank.work.items():
            seconds[phase] = seconds.get(phase, 0.0) + min(self.now - since, long)
            if self.now <= since + long:
                break
            since += long
        if self._clock == DEVICE:  # the host runs ahead, and waits for the device
            waits = (WAIT,) if self._ahead == 1 else (WAIT, *COMPUTING)
            seconds["device_wait"] = sum(seconds.pop(phase, 0.0) for phase in waits)
        is_waiting = phase == WAIT
        group = f"0-{self._size - 1}"
        return RankReading(
            rank.number, self.now, self._began, group, "node-a", f"GPU-{rank.number}", self._size,
            last_progress=since,
            phase="device_wait" if is_waiting and self._clock == DEVICE else phase,
            phase_since=since,
            issued={group: float(self._steps + is_waiting)},
            checkpoints=rank.checkpoints,
            last_checkpoint=rank.last_checkpoint,
            gpu=GpuReading(str(rank.number), 0.6, 1, 0.0),
            counters=self._counters(rank, seconds),
        )  # fmt: skip

    def _counters(self, rank: _Rank, seconds: Work) -> Counters:
        steps, totals, is_device = float(self._steps), rank.alignment.unplanned, self._clock == DEVICE
        return Counters(
            steps=steps - steps % self._ahead + self._ahead - 1.0,
            phases=seconds,
            device_steps=float(self._measured_steps) if is_device else 0.0,
            device_phases=dict(rank.device) if is_device else {},
            step_buckets=tuple(rank.buckets),
            aligned=AlignedCounters(
                totals.steps, totals.seconds, totals.floor, totals.skew, dict(totals.blame),
                dict(zip(PHASES, rank.alignment.phases, strict=True)),
            ),
            collectives=CollectiveCounters({"ddp_all_reduce": steps}, {"ddp_all_reduce": steps * 1e8}),
            gpu=GpuCounters(0.95 * self.now, {}, self.now),
        )  # fmt: skip


class Trial:
    """A run and its judge, with every verdict."""

    def __init__(self, training: Training | None = None, thresholds: Thresholds = EARLY, every: int = 1) -> None:
        self.training = training or Training()
        self.every = every
        """The seconds between two readings: several make a test of hours short."""
        self.judge = RunJudge(RUN, thresholds)
        self.verdicts: list[Verdict] = []

    def train(self, seconds: float, *changes: Change) -> Verdict:
        """Train and return the last verdict."""
        moments = self.training.train(seconds, *changes, every=self.every)
        self.verdicts += [self.judge.update(*moment) for moment in moments]
        return self.verdicts[-1]

    def trained(self, seconds: float, *changes: Change) -> Trial:
        """Train and return this trial."""
        self.train(seconds, *changes)
        return self

    def find(self, *changes: Change, kinds: Container[str] = KINDS) -> tuple[float, Finding | None]:
        """Train until there is a finding, for 20 min at most. Return the seconds until then, and the finding."""
        onset = self.training.now
        while self.training.now < onset + 1200.0:
            for finding in self.train(1, *changes).findings:
                if finding.kind in kinds:
                    return self.training.now - onset, finding
        return 1200.0, None

    def opened(self, kind: str = "straggler") -> list[Finding]:
        """Return each finding of a kind once, in its state when it opened."""
        found = [finding for verdict in self.verdicts for finding in verdict.findings if finding.kind == kind]
        return list({finding.opened: finding for finding in reversed(found)}.values())[::-1]

    def kinds(self) -> set[str]:
        """Return the kinds of all findings so far."""
        return {finding.kind for verdict in self.verdicts for finding in verdict.findings}


def window(training: Training, *changes: Change, seconds: float = 20.0) -> Window:
    """Return a detector's input after healthy training, then `seconds` of training with these changes."""
    before, now = training.read_after(10.0), training.read_after(seconds, *changes)
    facts, thresholds = compare(RUN, before, now), Thresholds()
    return Window(facts, lost(facts, thresholds), thresholds)


def counting(reading: RankReading, **values: Any) -> RankReading:
    """Return the reading with these counters changed."""
    return replace(reading, counters=replace(reading.counters, **values))
