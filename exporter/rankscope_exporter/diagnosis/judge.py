"""Diagnosis of one run over time: each call takes the newest readings and returns the findings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean
from typing import Any

from rankscope.record import phases
from rankscope_exporter.diagnosis import lost
from rankscope_exporter.diagnosis.detectors import LOSSES, STATES, key_of
from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.facts import RunFacts, compare
from rankscope_exporter.diagnosis.findings import Candidate, Finding, Pending
from rankscope_exporter.diagnosis.history import History
from rankscope_exporter.diagnosis.measured_steps import MeasuredSteps
from rankscope_exporter.diagnosis.parts import Key
from rankscope_exporter.diagnosis.persistence import LossFindings, SavedFinding, StateFindings
from rankscope_exporter.diagnosis.priority import STANDSTILLS, explanation
from rankscope_exporter.diagnosis.readings import RankReading, Run, are_stopped, reading_bytes
from rankscope_exporter.diagnosis.saved import Time, restored, saved
from rankscope_exporter.diagnosis.thresholds import Thresholds

Readings = Mapping[int, RankReading]

MIN_PART_SECONDS = 0.9
"""The shortest part: a little less than the time between two polls."""
ACCOUNTING_SECONDS = 5.0
"""Seconds between two accounts of where the GPU time went."""
MIN_STALL_SECONDS = 0.5
"""Seconds without progress after which the time is not accounted for until it is known whether the run hangs."""
MAX_SECONDS_WITHOUT_ALIGNED = 15.0
"""Seconds after which a part ends although none of its steps was compared."""
STALLED_STEPS = 2.0
"""Steps for which no rank makes progress, after which a possible hang hides what was found in the steps before it."""
MOSTLY = 0.8
"""Ratio of planned phases from which a part says nothing about the losses in steps."""
RECENT_READINGS = 24
"""The number of newest readings that are all kept; older ones are thinned out, so that gaps grow with age."""
READINGS_LIMIT, MIN_READINGS = 48, 8
RUN_BYTES = 20_000
"""The memory of a run without its history and readings."""
NEED_STEPS = {one.kind for one in STATES if one.needs_steps}
ENDS_LATE = {one.kind: one.ends_late for one in STATES}
JUST_BEGUN_SECONDS = 10.0
"""A rank that is first read within this time was seen from its start: its record may appear with its first steps."""


_SAVED = {"findings": tuple[SavedFinding, ...], "accounted": Time | None, "readings": tuple[RankReading, ...]}
"""The types of what is saved in addition to the history: the time until which GPU time is accounted for, and the
readings then."""


@dataclass
class Verdict:
    """The state of a run now. Times are those of the readings."""

    run: Run
    at: float
    is_ready: bool = True
    """False in the first steps after the caller's own start, while too little of the run has been seen."""
    findings: list[Finding] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    facts: RunFacts | None = None
    """The facts over the shortest span (parts.py), or what has passed of it. None before the second reading."""
    lost: Mapping[str, float] = field(default_factory=dict)
    """The run's GPU time by cause over that window."""
    new_gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    """GPU seconds by cause since the last verdict; `none` is useful work."""
    undecided_seconds: float = 0.0
    """The last seconds of each rank that `new_gpu_seconds` leaves for later, because the run may hang, or because no
    measured step explains them yet."""

    @property
    def may_hang(self) -> bool:
        """Return whether the run hangs, or will if it goes on like this: its waits and lags are from before that."""
        candidates = [*(one.candidate for one in self.findings), *(one.candidate for one in self.pending)]
        return any(candidate.kind in STANDSTILLS for candidate in candidates)


class RunJudge:
    """Diagnoses one run. Not thread-safe."""

    def __init__(self, run: Run, thresholds: Thresholds | None = None) -> None:
        self.run = run
        self._thresholds = thresholds or Thresholds()
        self.history = History(self._thresholds)
        self._losses = LossFindings(self._thresholds, self.history)
        self._states = StateFindings()
        self._readings: deque[tuple[float, Readings]] = deque()
        """The readings at the ends of parts, the newest last."""
        self._last: Readings = {}
        self._alive: dict[int, RankReading] = {}
        """The last reading of each rank while it was alive."""
        self._accounted: tuple[float, Readings] | None = None
        self._measured = MeasuredSteps()
        self._moving: tuple[float, Readings] = -inf, {}
        """The readings of the last progress of any rank."""
        self._is_ready = False
        """True if the run was seen from its start, or for a whole span."""
        self._restored_at = inf
        """The time of a restored state until the first readings after it."""
        self._windows: dict[tuple[int, int], Window] = {}
        """The windows of this update, by the identities of the readings at their begin and end."""
        self._explained: dict[Key, float] = {}
        """By the key of an open finding: the last time that another finding explained it."""
        self._readings_limit = READINGS_LIMIT
        self._moment_bytes = 0
        """The memory of the readings of one moment."""

    def kept_bytes(self, *, is_growing: bool) -> int:
        """Return about how much memory the run takes; if it is growing, with all the readings that it will keep."""
        kept = READINGS_LIMIT if is_growing else len(self._readings)
        return RUN_BYTES + self.history.kept_bytes() + self._measured.kept_bytes() + kept * self._moment_bytes

    def limit_readings(self, ratio: float) -> None:
        """Keep only this ratio of the readings that are otherwise kept."""
        self._readings_limit = max(MIN_READINGS, int(ratio * READINGS_LIMIT))

    def update(self, at: float, readings: Readings) -> Verdict:
        """Add the readings of one moment and return the verdict."""
        self._moment_bytes = sum(map(reading_bytes, readings.values()))
        self._windows.clear()
        self._measured.observe(self._last, readings)
        self._reset_if_ranks_changed(readings)
        living = [one for one in readings.values() if one.ended is None]
        self._alive |= {one.rank: one for one in living}
        self.history.observe(at, living, [one for one in readings.values() if one.ended])
        self.history.speed.observe(at, self.run, readings)
        self._is_ready |= bool(living) and all(_has_just_begun(one) for one in living)
        verdict = Verdict(self.run, at)
        if not self._readings:
            self._readings.append((at, readings))
        verdict.new_gpu_seconds = self._account(at, readings)
        verdict.undecided_seconds = self._measured.undecided + (at - self._accounted[0] if self._accounted else 0.0)
        if _progress(readings) > _progress(self._moving[1]):
            self._moving = at, readings
        if living and self._is_part_complete(at, readings):
            self._end_part(at, readings)
        window = self._recent(readings)
        verdict.facts, verdict.lost = window.run, self._losses_of(window, self._measured.show(window.run))
        past = replace(self.history.past(at), alive=self._alive)
        states = [candidate for one in STATES for candidate in one.detect(window, past)]
        was_hung = self._states.is_hung
        self._states.update(at, [*(self._unseen(window) if living else ()), *states])
        if self._states.is_hung != was_hung:
            self._begin_parts_again(at, readings)
        self._decide(verdict, window, states)
        self._is_ready |= self._losses.shortest is not None
        verdict.is_ready = self._is_ready or are_stopped(living)  # all of a stopped run is known
        return verdict

    def _unseen(self, window: Window) -> Iterator[Candidate]:
        """Yield the open states that may go on although this window cannot show them."""
        for finding in self._states.open.values():
            if not (window.run.ranks and (self._is_ready or finding.kind not in NEED_STEPS)):
                yield finding.candidate

    def _reset_if_ranks_changed(self, readings: Readings) -> None:
        """Drop the measurements of ranks that have started or ended: they belong to other processes.

        Drop all if no rank goes on, or if all ranks are stopped or continued: no rank is late for the time between.
        """
        last, self._last = self._last, readings
        restored_at, self._restored_at = self._restored_at, inf
        changed = {
            number: now
            for number, now in readings.items()
            if _has_changed(last.get(number), now) or (now.began >= restored_at and not now.ended)
        }
        if changed and all(one.ended or number in changed for number, one in readings.items()):
            self._accounted, self._measured = None, MeasuredSteps()
            self.history.speed.forget()
            if any(one.began >= restored_at for one in changed.values()):
                self._states = StateFindings()
            self._forget_all()
        elif changed:
            self.history.speed.forget()
            self._readings = deque((at, {**before, **changed}) for at, before in self._readings)
            if self._accounted:
                self._accounted = self._accounted[0], {**self._accounted[1], **changed}
            self._losses.forget(changed)
            self._states.forget(changed)
        if are_stopped(last.values()) != are_stopped(readings.values()):
            self._forget_all()

    def _forget_all(self) -> None:
        self._readings = deque()
        self._losses.forget()

    def forget_losses(self) -> None:
        """End the findings of losses, because some ranks have not been seen for a while. States go on."""
        self._forget_all()

    def _begin_parts_again(self, at: float, readings: Readings) -> None:
        """Drop the losses when a hang begins or ends: the run had them before it, and all of it is one step."""
        if self._states.is_hung:
            at = self._losses.shortest.begins if self._losses.shortest else self._readings[0][0]
            readings = self._readings_at(at)
        self._readings = deque([(at, readings)])
        self._losses.forget()

    def _account(self, at: float, readings: Readings) -> Mapping[str, float]:
        """Return the GPU seconds by cause since they were last returned; empty for ACCOUNTING_SECONDS after that.

        The time since the last progress of a run that may hang is left for later: it is stall if the run hangs, or if
        all ranks are stopped.
        """
        if self._accounted is None:
            self._accounted = self._moving = at, readings
        begin, before = self._accounted
        has_moved = _progress(readings) > _progress(self._moving[1])
        if at - begin < ACCOUNTING_SECONDS and not (has_moved and self._states.is_hung):
            return {}
        window = self._window(before, readings)
        is_stop = are_stopped(readings.values())
        if not has_moved and (begin < self._moving[0] if is_stop else self._may_hang(window.run)):
            at, readings = self._moving
            if at <= begin:
                return {}
            window = self._window(before, readings)
        run, spent, left = window.run, window.run.seconds, self._measured.undecided
        if "stall" not in window.lost:
            if self._measured.is_awaited(run):
                return {}
            run, spent = self._measured.account(run)
        losses = self._losses_of(window, run)
        idle = losses.get("idle", 0.0)
        gpus = len(run.ranks) / (1.0 - idle) if idle < 1.0 else 0.0
        seconds = gpus * min(at - begin + left, spent)  # less after a restart of the run
        self._accounted = at, readings
        return {cause: ratio * seconds for cause, ratio in losses.items()}

    def _losses_of(self, window: Window, run: RunFacts) -> Mapping[str, float]:
        """Return the losses of a window's time, if `run` is what is known of all its steps."""
        return window.lost if run is window.run else lost.lost(run, self._thresholds, is_stuck="stall" in window.lost)

    def _may_hang(self, run: RunFacts) -> bool:
        """Return whether a run that makes no progress may turn out to hang soon."""
        is_planned = any(one.now.phase in phases.PLANNED for one in run.ranks)
        is_known = self._states.is_hung or run.is_interactive
        return run.stalled > MIN_STALL_SECONDS and not (is_planned or is_known)

    def _is_part_complete(self, at: float, readings: Readings) -> bool:
        begin, before = self._readings[-1]
        if at - begin < MIN_PART_SECONDS:
            return False
        has_compared = False
        for number, now in readings.items():
            then = before.get(number)
            if now.ended or then is None or then.began != now.began:
                continue
            is_compared = now.counters.aligned.steps > then.counters.aligned.steps
            if now.counters.iterations <= then.counters.iterations and not is_compared:  # the host may run ahead
                return False
            if is_compared or now.counters.steps == then.counters.steps:
                has_compared = True  # skipped steps are not compared
        is_any_compared = any(one.counters.aligned.steps for one in readings.values())
        is_awaited = at - begin <= MAX_SECONDS_WITHOUT_ALIGNED or self.history.pace.standstill is not None
        return has_compared or not is_any_compared or not is_awaited

    def _end_part(self, at: float, readings: Readings) -> None:
        begin, before = self._readings[-1]
        self._remember(at, readings)
        part = self._window(before, readings)
        planned = fmean(one.planned_ratio for one in part.run.ranks) if part.run.ranks else 0.0
        if planned < MOSTLY and part.run.device_steps:  # else it shows little of the steps
            self._losses.add(at, at - begin, part)
            self._losses.update(at, lambda begins: self._since(begins, readings))

    def _remember(self, at: float, readings: Readings) -> None:
        self._readings.append((at, readings))
        while len(self._readings) > self._readings_limit:
            # Drop the older reading that is closest to its neighbors, relative to its age.
            older = range(1, len(self._readings) - min(RECENT_READINGS, self._readings_limit // 2))
            moments = [moment for moment, _ in self._readings]
            densest = min(older, key=lambda i: (moments[i + 1] - moments[i - 1]) / (at - moments[i] + 1.0))
            del self._readings[densest]

    def _window(self, before: Readings, readings: Readings) -> Window:
        if known := self._windows.get((id(before), id(readings))):
            return known
        facts = compare(self.run, before, readings, self.history.pace.stalls)
        is_stuck = self._states.is_hung or are_stopped(before.values()) or are_stopped(readings.values())
        losses = lost.lost(facts, self._thresholds, is_stuck=is_stuck)
        window = self._windows[id(before), id(readings)] = Window(facts, losses, self._thresholds)
        return window

    def _recent(self, readings: Readings) -> Window:
        """Return the window of the shortest span, or of all readings if they cover less."""
        span = self._losses.shortest
        return self._since(span.begins if span else self._readings[0][0], readings)

    def _since(self, begins: float, readings: Readings) -> Window:
        """Return the window from that time until now."""
        return self._window(self._readings_at(begins), readings)

    def _readings_at(self, moment: float) -> Readings:
        """Return the last readings at or before that time, or else the first ones."""
        found = self._readings[0][1]
        for at, readings in self._readings:
            if at > moment + 1e-6:
                break
            found = readings
        return found

    def _decide(self, verdict: Verdict, window: Window, states: Sequence[Candidate]) -> None:
        found = [*self._losses.open.values(), *self._states.open.values()]
        candidates = [finding.candidate for finding in found]
        keys = {key_of(candidate) for candidate in candidates}
        self._explained = {key: last for key, last in self._explained.items() if key in keys}
        stalled = self._stall(states)
        for finding in found:
            is_old = finding in self._losses.open.values() and explanation(finding.candidate, stalled)
            if self._is_explained(verdict.at, finding.candidate, candidates) or is_old:
                verdict.pending.append(Pending(finding.candidate, "explained"))
            else:
                verdict.findings.append(finding)
        verdict.pending += self._pending_states(verdict.at, window, states, candidates)
        verdict.pending += self._pending_sets(window, [*candidates, *stalled])
        if usual := self._losses.usual:
            verdict.pending.append(Pending(usual, "explained" if explanation(usual, candidates) else "usual"))

    def _stall(self, states: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the possible hang if it is longer than the run's steps: whether their losses go on is unknown."""
        shortest = self._losses.shortest
        a_step = 1.0 / shortest.steps_rate() if shortest else 0.0
        return [one for one in states if one.kind in STANDSTILLS and (one.lasted or 0.0) > STALLED_STEPS * a_step]

    def _is_explained(self, at: float, candidate: Candidate, others: Sequence[Candidate]) -> bool:
        """Return whether another finding explains the candidate, or did so recently: the two do not end together.

        A loss that was explained and is small now is nothing of its own.
        """
        limits, key = self._thresholds, key_of(candidate)
        if explanation(candidate, others):
            self._explained[key] = at
        lasts = max(limits.release_seconds, ENDS_LATE.get(candidate.kind, 0.0) * candidate.needed)
        is_small = key in self._losses.open and candidate.ratio < limits.release * limits.loss
        return at - self._explained.get(key, -inf) <= (inf if is_small and key in self._explained else lasts)

    def _pending_states(
        self, at: float, window: Window, states: Sequence[Candidate], found: Sequence[Candidate]
    ) -> Iterator[Pending]:
        for candidate in states:
            if key_of(candidate) not in self._states.open:
                lacks = "explained" if explanation(candidate, found) else candidate.lacks
                yield Pending(candidate, lacks, candidate.needed - self._states.lasted(candidate, at))
        for detector in STATES:
            if detector.undecided:
                yield from detector.undecided(window, states)

    def _pending_sets(self, window: Window, found: Sequence[Candidate]) -> Iterator[Pending]:
        for detector in LOSSES if window.run.steps else ():
            for ranks in detector.sets(window.run, self._thresholds, self._losses.named) if detector.sets else ():
                if lagging := detector.explain(window, ranks):
                    lacks = "time" if self._losses.shortest else "steps"
                    yield Pending(lagging, "explained" if explanation(lagging, found) else lacks)

    def state(self, at: float, *, is_last: bool = False) -> dict[str, Any]:
        """Return the state that a restart needs, as JSON values; if `is_last`, with the time not accounted for yet."""
        begin, readings = self._accounted if is_last and self._accounted else (None, {})
        findings = *self._losses.saved, *self._states.saved
        known = {"findings": findings, "accounted": begin, "readings": tuple(readings.values())}
        return {**self.history.state(at), **{name: saved(kind, known[name], at) for name, kind in _SAVED.items()}}

    def restore(self, state: Mapping[str, Any], at: float) -> None:
        """Restore what `state` returned. Raise one of saved.UNREADABLE if it is damaged."""
        known = {name: restored(kind, state[name], at) for name, kind in _SAVED.items()}
        readings = {one.rank: one for one in known["readings"]}
        accounted = (min(known["accounted"], at), readings) if readings else None
        self.history.restore(state, at)
        self._losses.restore(known["findings"], at)
        self._states.restore(known["findings"], at)
        self._accounted, self._restored_at = accounted, at
        self._moving = accounted or self._moving


def _progress(readings: Readings) -> float:
    """Return the time of the last progress of any living rank."""
    return max((one.last_progress for one in readings.values() if one.ended is None), default=-inf)


def _has_just_begun(reading: RankReading) -> bool:
    return reading.counters.steps == 0 or reading.at - reading.began < JUST_BEGUN_SECONDS


def _has_changed(then: RankReading | None, now: RankReading) -> bool:
    """Return whether a rank has ended since its last reading, or runs in another process."""
    if now.ended:
        return then is None or then.ended is None
    return then is not None and now.began > then.began
