"""Judges one run: takes its readings again and again, and says what it has found."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rankscope_exporter.diagnosis import lost
from rankscope_exporter.diagnosis.detectors import LOSSES, STATES, straggler
from rankscope_exporter.diagnosis.detectors.hang import is_interactive
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window
from rankscope_exporter.diagnosis.facts import RunFacts, compare
from rankscope_exporter.diagnosis.findings import Candidate, Finding, Pending, Place
from rankscope_exporter.diagnosis.history import History
from rankscope_exporter.diagnosis.parts import Key, Parts, Span
from rankscope_exporter.diagnosis.priority import explanation
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.diagnosis.thresholds import Thresholds, Tier

Readings = Mapping[int, RankReading]

USEFUL: Key = ("useful", None)
STEPS_RATE: Key = ("steps_rate", None)
"""What losses are compared with: the useful work of each part and its steps per second."""

SHORTEST_PART = 0.9
"""Seconds of a part: a little less than between two polls."""
SETTLE_EVERY = 5.0
"""Seconds between two accounts of what was lost."""
LONGEST_WITHOUT_ALIGNED = 15.0
"""Seconds after which a part ends though no step of it could be compared."""
RECENT_READINGS = 24
"""That are kept one by one; older ones are thinned, so that each next is further back."""
READINGS_LIMIT = 48
STATE_GAP = 5.0
"""Seconds for which a state may be unseen and still be the same."""

_DETECTORS = {detector.kind: detector for detector in LOSSES}


@dataclass
class Verdict:
    """What is known of a run now. Times are those of the readings."""

    run: Run
    at: float
    is_ready: bool = True
    """Whether enough has been seen to decide: not in the first steps after the caller's own start."""
    findings: list[Finding] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    facts: RunFacts | None = None
    """Over the shortest span, or what there is of it. None before the second reading."""
    lost: Mapping[str, float] = field(default_factory=dict)
    """The run's GPU time by cause over that window."""
    newly_lost: Mapping[str, float] = field(default_factory=dict)
    """GPU seconds by cause since the last verdict."""


class RunJudge:
    """Of one run. Used by one thread."""

    def __init__(self, run: Run, thresholds: Thresholds | None = None) -> None:
        self.run = run
        self._thresholds = thresholds or Thresholds()
        self.history = History(self._thresholds)
        self._parts = Parts()
        self._readings: deque[tuple[float, Readings]] = deque()
        """At the ends of parts, the newest last."""
        self._last: Readings = {}
        self._settled: tuple[float, Readings] | None = None
        self._open: dict[Key, Finding] = {}
        self._above: dict[Key, float] = {}
        """Of each open finding when its loss was last above the limit for its release."""
        self._states: dict[Key, Finding] = {}
        self._is_from_start = False
        """Whether the run's ranks were seen before their first step."""
        self._seen: dict[Key, tuple[float, float]] = {}
        """Of each state when it was first and last seen."""

    def update(self, at: float, readings: Readings) -> Verdict:
        """Take the readings of one moment and return the verdict."""
        self._forget_predecessors(readings)
        living = [one for one in readings.values() if one.ended is None]
        self.history.observe(at, living)
        self._is_from_start |= bool(living) and all(one.counters.steps == 0 for one in living)
        verdict = Verdict(self.run, at)
        if not self._readings:
            self._readings.append((at, readings))
        verdict.newly_lost = self._settle(at, readings)
        if living and self._is_part_complete(at, readings):
            self._end_part(at, readings)
        window = self._recent(readings)
        verdict.facts, verdict.lost = window.run, window.lost
        states = [candidate for detect in STATES for candidate in detect(window, self.history.past(at))]
        self._update_states(at, states)
        self._decide(verdict, window, states)
        verdict.is_ready = self._is_from_start or self._parts.span(self._thresholds.tiers[0]) is not None
        return verdict

    def _forget_predecessors(self, readings: Readings) -> None:
        """Begin again where a rank has begun or ended: what was measured is of other processes, or for one of them.

        The others still wait for a rank that has ended, and nobody can be seen to be late.
        """
        last, self._last = self._last, readings
        if any(_has_changed(last.get(number), now) for number, now in readings.items()):
            self._parts, self._readings, self._settled = Parts(), deque(), None
            self._open.clear()
            self._above.clear()

    def _settle(self, at: float, readings: Readings) -> Mapping[str, float]:
        """Return the GPU seconds that were lost since this was done last, by cause; nothing before SETTLE_EVERY."""
        if self._settled is None:
            self._settled = at, readings
        if at - self._settled[0] < SETTLE_EVERY:
            return {}
        window = self._window(self._settled[1], readings)
        idle = window.lost.get("idle", 0.0)
        gpus = len(window.run.ranks) / (1.0 - idle) if idle < 1.0 else 0.0
        seconds = gpus * (at - self._settled[0])
        self._settled = at, readings
        return {cause: ratio * seconds for cause, ratio in window.lost.items() if cause != "none"}

    def _is_part_complete(self, at: float, readings: Readings) -> bool:
        begin, before = self._readings[-1]
        if at - begin < SHORTEST_PART:
            return False
        has_compared = False
        for number, now in readings.items():
            then = before.get(number)
            if now.ended or then is None or then.began != now.began:
                continue
            if now.counters.steps <= then.counters.steps:
                return False
            if now.counters.aligned.steps > then.counters.aligned.steps:
                has_compared = True
        is_compared = any(one.counters.aligned.steps for one in readings.values())
        return has_compared or not is_compared or at - begin > LONGEST_WITHOUT_ALIGNED

    def _end_part(self, at: float, readings: Readings) -> None:
        begin, before = self._readings[-1]
        self._remember(at, readings)
        window = self._window(before, readings)
        if not window.run.ranks or not window.run.steps:
            return
        losses: dict[Key, float] = {}
        for detector in LOSSES:
            losses.update({(detector.kind, rank): loss for rank, loss in detector.measure(window).items()})
        useful, steps_rate = window.lost.get("none", 0.0), window.run.steps_rate
        of_run = {kind: loss for (kind, rank), loss in losses.items() if rank is None}
        self.history.add(at, of_run, useful, steps_rate)
        self._parts.add(at, at - begin, window.run.steps, {**losses, USEFUL: useful, STEPS_RATE: steps_rate})
        self._update_losses(at, readings)

    def _remember(self, at: float, readings: Readings) -> None:
        self._readings.append((at, readings))
        if len(self._readings) > READINGS_LIMIT:
            # Drop the one of the older ones that is closest to its neighbors, in relation to its age.
            older = range(1, len(self._readings) - RECENT_READINGS)
            moments = [moment for moment, _ in self._readings]
            crowded = min(older, key=lambda i: (moments[i + 1] - moments[i - 1]) / (at - moments[i] + 1.0))
            del self._readings[crowded]

    def _window(self, before: Readings, readings: Readings) -> Window:
        facts = compare(self.run, before, readings)
        is_stuck = any(kind == "hang" for kind, _ in self._states)
        return Window(facts, lost.lost(facts, self._thresholds, is_stuck=is_stuck), self._thresholds)

    def _recent(self, readings: Readings) -> Window:
        """Over the shortest span, or all that there is."""
        tier = self._thresholds.tiers[0]
        span = self._parts.span(tier)
        begins = span.begins if span else self._readings[0][0]
        return self._window(self._readings_at(begins), readings)

    def _readings_at(self, moment: float) -> Readings:
        """Return the last readings before that time, or the first ones."""
        found = self._readings[0][1]
        for at, readings in self._readings:
            if at > moment + 1e-6:
                break
            found = readings
        return found

    def _update_losses(self, at: float, readings: Readings) -> None:
        spans = {tier: self._parts.span(tier) for tier in self._thresholds.tiers}
        shortest = spans[self._thresholds.tiers[0]]
        if shortest is None:
            return
        windows: dict[float, Window] = {}
        for key in dict.fromkeys((*self._parts.keys, *self._open)):
            if key[0] not in _DETECTORS:
                continue
            allowance = self._allowance(key, shortest)
            mean = shortest.mean(key)
            loss = -math.inf if mean is None else mean - allowance
            if key in self._open:
                self._review(at, key, mean, loss)
                continue
            if loss <= self._thresholds.loss:
                continue
            reached = self._reached(key, allowance, spans)
            if reached is None or (span := spans[reached]) is None:
                continue
            if span.begins not in windows:
                windows[span.begins] = self._window(self._readings_at(span.begins), readings)
            self._open_loss(at, key, reached, span, windows[span.begins])

    def _reached(self, key: Key, allowance: float, spans: Mapping[Tier, Span | None]) -> Tier | None:
        """Return the first tier that a loss has reached. For the longer ones it must not be over by now."""
        first, second, *_ = spans.items()
        for tier, span in spans.items():
            if span is None or not span.exceeds(key, tier, allowance):
                continue
            mean = second[1].mean(key) if second[1] and tier != first[0] else None
            if mean is None or mean - allowance > self._thresholds.loss:
                return tier
        return None

    def _allowance(self, key: Key, shortest: Span) -> float:
        """Return how much of a loss is none: what every healthy run may have, or this run has had if that is less.

        While it is a finding, what the run had before that.
        """
        detector = _DETECTORS[key[0]]
        if detector.allowance is None:
            return 0.0
        usual = detector.allowance(self._thresholds)
        before = min(shortest.begins, self._open[key].since) if key in self._open else shortest.begins
        had = self.history.baseline(key[0], before, shortest.median(USEFUL), shortest.median(STEPS_RATE))
        return usual if had is None else min(usual, had)

    def _open_loss(self, at: float, key: Key, tier: Tier, span: Span, window: Window) -> None:
        kind, rank = key
        if rank is not None and rank not in {one.rank for one in window.run.ranks}:
            return
        candidate = _DETECTORS[kind].explain(window, rank)
        if candidate is None or self._may_be_chance(key, window):
            return
        mean = span.mean(key) or candidate.ratio
        candidate = replace(candidate, ratio=mean)
        severe = [value > self._thresholds.severe for value in span.values(key)]
        is_critical = mean > self._thresholds.severe or sum(severe) > self._thresholds.severe_dips * len(severe)
        since = span.onset(key, tier.limit / 2)
        baseline = "known" if _DETECTORS[kind].allowance is None or self.history.has_baseline else "unknown"
        self._open[key] = Finding(candidate, since, at, is_critical, baseline)

    def _may_be_chance(self, key: Key, window: Window) -> bool:
        """Whether few steps are far longer than the rest, and the same rank has not had them for long enough."""
        if key[0] != straggler.KIND or not straggler.has_spikes(window.run, self._thresholds):
            return False
        half = self._thresholds.loss / 2
        long = Tier(half, self._thresholds.spike_seconds, self._thresholds.tiers[0].steps, 8, 0.1)
        span = self._parts.span(long)
        return span is None or not span.exceeds(key, long)

    def _review(self, at: float, key: Key, mean: float | None, loss: float) -> None:
        """Update the ratio of an open finding, or end it. Its severity rises once and never falls."""
        limits, finding = self._thresholds, self._open[key]
        is_above = loss >= limits.release * limits.loss
        self._above[key] = at if is_above or key not in self._above else self._above[key]
        if at - self._above[key] > limits.release_seconds:
            del self._open[key], self._above[key]
        elif is_above and mean is not None:
            is_critical = finding.is_critical or mean > limits.severe
            candidate = replace(finding.candidate, ratio=mean)
            self._open[key] = replace(finding, candidate=candidate, is_critical=is_critical)

    def _update_states(self, at: float, candidates: Iterable[Candidate]) -> None:
        present = {candidate.key: candidate for candidate in candidates}
        for key, candidate in present.items():
            first, last = self._seen.get(key, (at, at))
            first = at if at - last > STATE_GAP else first
            self._seen[key] = first, at
            lasted = at - first if candidate.lasted is None else candidate.lasted
            known = self._states.get(key)
            if known:
                kept = replace(candidate, cause=known.candidate.cause, place=known.candidate.place)
                self._states[key] = replace(known, candidate=kept)
            elif lasted >= candidate.needed:
                self._states[key] = Finding(candidate, at - lasted, at, candidate.kind in CRITICAL)
        for key in [key for key in self._states if key not in present]:
            if at - self._seen[key][1] > STATE_GAP or key[0] == "hang":
                del self._states[key]
        self._seen = {key: seen for key, seen in self._seen.items() if at - seen[1] <= STATE_GAP}

    def _decide(self, verdict: Verdict, window: Window, states: Iterable[Candidate]) -> None:
        found = [*self._open.values(), *self._states.values()]
        candidates = [finding.candidate for finding in found]
        for finding in found:
            if explanation(finding.candidate, candidates):
                verdict.pending.append(Pending(finding.candidate, "explained"))
            else:
                verdict.findings.append(finding)
        verdict.pending += self._pending(window, states, candidates)

    def _pending(self, window: Window, states: Iterable[Candidate], found: list[Candidate]) -> Iterator[Pending]:
        for candidate in states:
            if candidate.key not in self._states:
                lasted = candidate.lasted
                if lasted is None:
                    lasted = window.run.ranks[0].now.at - self._seen[candidate.key][0] if window.run.ranks else 0.0
                lacks = "explained" if explanation(candidate, found) else "time"
                yield Pending(candidate, lacks, candidate.needed - lasted)
        if is_interactive(window.run) and window.run.stalled > self._thresholds.stuck_floor:
            yield Pending(Candidate("hang", 1.0, "other"), "interactive")
        shortest = self._parts.span(self._thresholds.tiers[0])
        for one in window.run.ranks:
            key = (straggler.KIND, one.rank)
            if key in self._open or (one.lag or 0.0) <= self._thresholds.loss or not window.run.steps:
                continue
            lagging = straggler.explain(window, one.rank)
            if lagging:
                lacks = "time" if shortest else "steps"
                yield Pending(lagging, "explained" if explanation(lagging, found) else lacks)

    def state(self, at: float) -> dict[str, Any]:
        """Return what has to be saved so that a restart forgets nothing."""
        findings = [[at - one.since, at - one.opened, *_saved(one)] for one in self._open.values()]
        return {**self.history.state(at), "findings": findings}

    def restore(self, state: Mapping[str, Any], at: float) -> None:
        """Take it back. Raises an error of history.UNREADABLE for anything else."""
        findings = [_restored(saved, at) for saved in state["findings"]]
        self.history.restore(state, at)
        for finding in findings:
            self._open[finding.candidate.key], self._above[finding.candidate.key] = finding, at


def _saved(finding: Finding) -> list[Any]:
    candidate = finding.candidate
    place, evidence = list(candidate.place), dict(candidate.evidence)
    return [candidate.kind, candidate.ratio, candidate.cause, place, evidence, finding.is_critical, finding.baseline]


def _restored(saved: Sequence[Any], at: float) -> Finding:
    began, opened, kind, ratio, cause, place, evidence, is_critical, baseline = saved
    if kind not in _DETECTORS:
        raise ValueError(f"no detector is named {kind!r}")
    numbers = {str(name): float(value) for name, value in dict(evidence).items()}
    candidate = Candidate(kind, float(ratio), str(cause), Place(*place), numbers)
    return Finding(candidate, at - float(began), at - float(opened), bool(is_critical), str(baseline))


def _has_changed(then: RankReading | None, now: RankReading) -> bool:
    """Whether a rank has ended since it was seen last, or lives in another process."""
    if now.ended:
        return then is None or then.ended is None
    return then is not None and now.began > then.began


CRITICAL = frozenset({"hang", "crash", "cpu_fallback", "loss_scale_collapse"})


def detectors() -> Mapping[str, LossDetector]:
    """Return the detectors of losses by kind."""
    return _DETECTORS
