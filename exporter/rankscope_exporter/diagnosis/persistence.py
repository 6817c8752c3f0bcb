"""Persistence: candidates that last long enough, in seconds and steps, become findings, until they are over."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from statistics import fmean
from typing import NamedTuple

from rankscope_exporter.diagnosis.detectors import LOSSES, STATES, key_of
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window
from rankscope_exporter.diagnosis.facts import DEVICE, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate, Finding
from rankscope_exporter.diagnosis.history import HIGH, LOWER, History
from rankscope_exporter.diagnosis.late_set import LEVEL, Ranks, late_sets
from rankscope_exporter.diagnosis.parts import Column, Key, Lasting, Parts, Span, concerns_only
from rankscope_exporter.diagnosis.thresholds import Thresholds

USEFUL, STEPS_RATE, BYTES_RATE = "useful", "steps_rate", "bytes_rate"
"""The references for losses: the useful work of each part, its steps and its bytes in collectives per second."""

STATE_GAP, STATE_GAP_RATIO = 5.0, 0.1
"""How long a state may be absent and still count as the same one: in seconds, and as a ratio of the time that it has to
last, if it is more. A pause or a checkpoint is not the end of a state that has to last for a quarter of an hour."""
MOST, LAGGARDS = 0.6, 4.0
"""Ratio of the parts in which each rank of a set is late, and multiple of the shortest span up to which a set is not
named while another rank begins to be late."""
FEWEST_PARTS = 3
"""The fewest parts of the shortest span."""
CHANCE_SECONDS, UNEVEN_SECONDS = 100.0, 3000.0
"""The shortest time over which a loss is one by chance with the probability of the thresholds, and the same for a run
whose work is uneven, which has such losses all day."""
RETURNS, RETURNS_BY_CHANCE = 8.0, 0.01
"""A loss that comes and goes is the same one if it is less probable by chance, in so many of its longest absences."""
AS_LONG = 1.5
"""Multiple of the longest time between two events of a finding, for which it stays open without one."""
PERIODS = 2.0
"""The same for which its mean loss is shown."""
LONGEST_ABSENCE = 900.0
"""Seconds after which a loss that returns is another finding."""
UNKNOWN_SECONDS = 60.0
"""How long a loss may be unknown before its finding ends. The hook measures steps more often than that, and steps that
a gradient scaler skips are not compared."""
_DETECTORS = {detector.kind: detector for detector in LOSSES}
(SETS,) = (detector.kind for detector in LOSSES if detector.sets)
"""The kind of the findings about sets of ranks."""
_STATES = {detector.kind: detector for detector in STATES}

Since = Callable[[float], Window]
"""A function that returns the window from a time until now."""


class SavedFinding(NamedTuple):
    """An open finding, and the longest time between two of its events."""

    finding: Finding
    gap: float


@dataclass
class _Open:
    """An open finding about a loss."""

    finding: Finding
    above: float
    """The time when its loss was last above the release limit."""
    allowance: float | None = None
    """Its allowance when it began; None after a restart."""
    is_quiet: bool = False
    """True if its loss was below that limit since then."""
    names: Collection[str] = field(init=False)
    """The names of the numbers that it rests on."""

    def __post_init__(self) -> None:
        self.names = tuple(self.finding.candidate.evidence)

    def evidence(self, newest: Candidate | None) -> Mapping[str, float]:
        """Return the numbers that it rests on now. One that is no longer measured, as a reason that is over, is absent.

        Where nothing could be measured they are the last ones.
        """
        if newest is None:
            return self.finding.candidate.evidence
        return {name: newest.evidence[name] for name in self.names if name in newest.evidence}


class LossFindings:
    """Losses in parts of a run's time, and the findings among them. A loss is a finding when it reaches any tier."""

    def __init__(self, thresholds: Thresholds, history: History) -> None:
        self._thresholds = thresholds
        self._history = history
        self._parts = self._no_parts()
        self._open: dict[Key, _Open] = {}
        self._part: Window | None = None
        """The newest part."""
        self._returns = Returns()
        self.usual: Candidate | None = None
        """Ranks that are late in turn as much as in many runs: no finding."""
        self._looked = self._uneven_at = -math.inf
        """When that was sought, and found."""
        self._began: float | None = None
        """The begin of the oldest part."""

    @property
    def open(self) -> Mapping[Key, Finding]:
        """Return the open findings."""
        return {key: one.finding for key, one in self._open.items()}

    @property
    def named(self) -> Collection[int]:
        """Return the ranks that an open finding names as late."""
        return {rank for _, ranks in self._open for rank in ranks}

    @property
    def shortest(self) -> Span | None:
        """Return the newest parts that cover the shortest tier; None if there are too few yet."""
        return self._parts.span(self._shortest_seconds, FEWEST_PARTS)

    @property
    def _shortest_seconds(self) -> float:
        return self._thresholds.tiers[0].seconds

    def _no_parts(self) -> Parts:
        return Parts(self._thresholds.loss, {detector.kind for detector in LOSSES if detector.is_compared})

    def forget(self, ranks: Collection[int] | None = None) -> None:
        """Drop all parts and findings, or only those of some ranks, because their processes have changed."""
        if ranks is not None:
            self._parts.forget(ranks)
            for key in [key for key in self._open if concerns_only(key, ranks)]:
                del self._open[key]
            self._returns.forget(ranks)
            return
        self._parts, self._returns = self._no_parts(), Returns()
        self.usual, self._looked, self._uneven_at, self._began = None, -math.inf, -math.inf, None
        self._open.clear()

    def add(self, at: float, seconds: float, part: Window) -> None:
        """Measure the losses of the newest part."""
        self._part = part
        self._began = at - seconds if self._began is None else self._began
        losses: dict[Column, float] = {}
        is_unmeasured = _is_between_measured_steps(part.run)
        for detector in LOSSES:
            if not (is_unmeasured and detector.is_on_device):
                found = detector.measure(part)
                by_rank = found if isinstance(found, Mapping) else {None: found}
                losses |= {(detector.kind, rank): loss for rank, loss in by_rank.items() if loss is not None}
        steps = part.run.device_steps
        if not is_unmeasured:  # what is usual is unknown, too
            losses |= {
                (USEFUL, None): part.lost.get("none", 0.0),
                (STEPS_RATE, None): steps / part.run.seconds,
                (BYTES_RATE, None): part.run.bytes_rate,
            }
        rivals = [[(SETS, one.rank) for one in members] for members in part.run.peers.values()]
        compared = max((one.spent.aligned.seconds for one in part.run.ranks), default=0.0)
        is_known = any(kind == SETS for kind, _ in losses)
        self._parts.add(at, seconds, steps, losses, rivals, compared or is_known * seconds)
        if self._history.is_row_due(at):
            self._add_row(at)

    def _add_row(self, at: float) -> None:
        """Add the losses of the newest parts to the history, without those that an open finding makes unusual."""
        span, found = self._parts.span(self._history.row_seconds), {kind for kind, _ in self._open}
        if span is None or (useful := span.mean((USEFUL, ()))) is None:
            return
        usual = (kind for kind, detector in _DETECTORS.items() if found.isdisjoint(detector.unusual_in))
        losses = {kind: mean for kind in usual if (mean := span.mean((kind, ()))) is not None}
        self._history.add(at, losses, useful, *(span.mean((rate, ())) or 0.0 for rate in (STEPS_RATE, BYTES_RATE)))

    def update(self, at: float, since: Since) -> None:
        """Open and close findings."""
        shortest = self.shortest
        if shortest is None:
            return
        self._parts.peers.late = self._still_late(shortest)
        usual, self.usual = self.usual, None
        of_run = ((kind, ()) for kind, rank in self._parts.columns if rank is None and kind in _DETECTORS)
        for key in dict.fromkeys((*self._late_sets(), *of_run, *self._open)):
            mean = self._mean(key, shortest)
            if key not in self._open and (mean is None or mean <= self._thresholds.loss):
                continue  # no allowance is negative
            if _DETECTORS[key[0]].is_usual and mean is not None:
                is_known = at - self._looked < self._shortest_seconds
                self.usual = usual if is_known else self._look_for_usual(at, key, mean, since)
                self._uneven_at = at if self.usual else self._uneven_at
            known = self._open.get(key)
            allowance = self._allowance(key, known.finding.candidate if known else self.usual, shortest)
            loss = -math.inf if mean is None else mean - allowance
            if known:
                self._review(at, key, loss, shortest, since)
            elif loss > self._thresholds.loss:
                any(self._begin(at, key, one, allowance, since) for one in self._reached(key, allowance))

    def _mean(self, key: Key, span: Span) -> float | None:
        """Return the mean loss without that of sets that are always late, if the detector excludes it."""
        detector = _DETECTORS[key[0]]
        if not detector.less:
            return span.mean(key)
        level = self._healthy(detector) + self._thresholds.loss / 2
        return span.beyond_late(key, detector.less, self._shortest_seconds, level)

    def _still_late(self, shortest: Span) -> set[int]:
        """Return the ranks of open findings that are late now."""
        limits, peers, found = self._thresholds, self._parts.peers, set[int]()
        peers.late = self.named
        for _, ranks in self._open:
            waits, others = (shortest.waits(SETS, of) for of in (ranks, peers.others(ranks)))
            lags = {rank: fmean(others.values()) - wait for rank, wait in waits.items()} if others else {}
            least = max(limits.release * limits.loss, LEVEL * max(lags.values(), default=0.0))
            found |= {rank for rank, lag in lags.items() if lag >= least}
        return found

    def _late_sets(self) -> Iterator[Key]:
        """Yield the sets of ranks that are late in one of the spans and that no open finding names."""
        limits, named = self._thresholds, self.named
        for span in self._spans():
            for group in self._parts.peers.groups:
                waits, late = span.waits(SETS, group), self._parts.peers.late
                for ranks in late_sets(waits, limits.loss, limits.allowance, late):
                    if steady := tuple(rank for rank in self._steady(ranks, span) if rank not in named):
                        yield SETS, steady

    def _spans(self) -> Iterator[Span]:
        """Yield spans from the shortest one on, each twice as long."""
        seconds = self._shortest_seconds
        while seconds <= self._thresholds.tiers[-1].seconds and (span := self._parts.span(seconds, FEWEST_PARTS)):
            yield span
            seconds *= 2.0

    def _steady(self, ranks: Ranks, span: Span) -> Ranks:
        """Return those of the ranks that are late when the set is: the others may be late before or after them.

        If one of the others is late now, the set may not be complete. It is empty then, for some seconds.
        """
        if len(ranks) < 2:
            return ranks
        others, level, steady = self._parts.peers.others(ranks), self._thresholds.loss / 2, []
        are_late = [lag > level for lag in span.lags(SETS, ranks, others)]
        for rank in ranks:
            lags = span.lags(SETS, (rank,), others)
            if sum(lag > level for lag in compress(lags, are_late)) >= MOST * sum(are_late):
                steady.append(rank)
            elif fmean(lags[:FEWEST_PARTS]) > level and span.seconds < LAGGARDS * self._shortest_seconds:
                return ()
        return tuple(steady)

    def _look_for_usual(self, at: float, key: Key, mean: float, since: Since) -> Candidate | None:
        """Return a loss beyond the limit that is no fault by itself, such as uneven work."""
        detector = _DETECTORS[key[0]]
        if key in self._open or mean - self._healthy(detector) <= self._thresholds.loss:
            return None
        self._looked = at
        found = detector.explain(since([*self._spans()][-1].begins), ())
        return found if found and _is_usual(detector, found) else None

    def _healthy(self, detector: LossDetector) -> float:
        """Return the loss that a healthy run may have in the newest part."""
        return detector.allowance(self._part) if detector.allowance and self._part else 0.0

    def _reached(self, key: Key, allowance: float) -> Iterator[Lasting]:
        """Yield the spans over which a loss exceeds the limit, and not by chance, from short to long ones.

        What was found before is over, and does not count again.
        """
        ended_at = self._returns.ended_at(key)
        ranks = self._parts.peers.still_late(key[1])
        for one in self._parts.lasting(key, allowance):
            least = UNEVEN_SECONDS if one.span.begins <= self._uneven_at else CHANCE_SECONDS
            is_chance = one.chance >= self._thresholds.chance * min(one.span.seconds / least, 1.0)
            is_reached = one.span.begins >= ended_at and not is_chance and self._exceeds(key, one, allowance)
            if is_reached and self._steady(ranks, one.span) == ranks:
                yield one

    def _exceeds(self, key: Key, lasting: Lasting, allowance: float) -> bool:
        mean: float | None = lasting.mean
        if _DETECTORS[key[0]].less:
            mean = self._mean(key, lasting.span)
        else:  # a checkpoint in the newest parts makes what is usual for them small
            allowance = max(allowance, self._allowance(key, None, lasting.span))
        return mean is not None and mean - allowance > self._thresholds.limit(lasting.span.seconds)

    def _allowance(self, key: Key, candidate: Candidate | None, shortest: Span) -> float:
        """Return the allowance: what a healthy run may lose, or this run's baseline if that is less.

        For an open finding, the baseline is from before it began.
        """
        detector = _DETECTORS[key[0]]
        if detector.allowance is None or self._part is None:
            return 0.0
        allowance, known = self._healthy(detector), self._open.get(key)
        if candidate and _is_usual(detector, candidate):
            began_with = known.allowance if known else None
            return self._uneven_allowance(key, allowance, shortest) if began_with is None else began_with
        before = min(shortest.begins, known.finding.since) if known else shortest.begins
        baseline = self._baseline(key, before, shortest, LOWER)
        return allowance if baseline is None else min(allowance, baseline)

    def _uneven_allowance(self, key: Key, by_chance: float, shortest: Span) -> float:
        """Return the allowance of uneven work: what most jobs have, or this run usually has if that is less."""
        limits = self._thresholds
        usual = self._baseline(key, shortest.begins, shortest, HIGH) if self._history.has_baseline else None
        if usual is None and key in self._open:  # restored, and what was usual before it is forgotten
            return by_chance
        allowance = limits.uneven_allowance if usual is None else limits.uneven_increase * usual
        return max(by_chance, min(allowance, limits.uneven_allowance))

    def _baseline(self, key: Key, before: float, shortest: Span, quantile: float) -> float | None:
        useful, steps_rate = shortest.median((USEFUL, ())), shortest.steps_rate()
        bytes_rate, of_all = (shortest.mean((rate, ())) or 0.0 for rate in (BYTES_RATE, STEPS_RATE))
        step_bytes = bytes_rate / of_all if of_all else 0.0
        return self._history.baseline(key[0], before, useful, steps_rate, quantile, step_bytes)

    def _begin(self, at: float, key: Key, lasting: Lasting, allowance: float, since: Since) -> bool:
        """Begin a finding if its detector explains the loss. Return whether it did."""
        span, shortest, detector = lasting.span, self.shortest, _DETECTORS[key[0]]
        if shortest is None:
            return False
        # The time before its onset says nothing about its cause.
        rise = span.rise(key, (self._thresholds.limit(span.seconds) + allowance + lasting.mean) / 2)
        window = since(rise.begins)._replace(is_onset=self._is_onset(rise))
        if not _is_alive(key, window):
            return False
        candidate = detector.explain(window, key[1])
        if candidate is None or candidate.needed > span.seconds:
            return False
        allowance = self._allowance(key, candidate, shortest)
        if not self._exceeds(key, lasting, allowance):
            return False
        mean = self._mean(key, rise) or candidate.ratio
        has_baseline = detector.allowance is None or self._history.has_baseline
        baseline = "known" if has_baseline else "unknown"
        finding = Finding(replace(candidate, ratio=mean), rise.begins, at, mean > self._thresholds.severe, baseline)
        gap = self._parts.longest_gap(key, allowance + self._thresholds.loss / 2, span.begins)
        self._open[key] = _Open(self._returns.begin(finding, gap), at, allowance)
        for other in LOSSES:
            if key[0] in other.unusual_in:
                self._history.forget(other.kind, rise.begins)
        return True

    def _is_onset(self, rise: Span) -> bool:
        """Return whether the run was watched before the loss rose."""
        return self._began is not None and rise.begins > self._began + self._shortest_seconds

    def _review(self, at: float, key: Key, loss: float, shortest: Span, since: Since) -> None:
        """Update ratio and evidence of an open finding, or close it. Its severity can rise, but never falls."""
        limits, known = self._thresholds, self._open[key]
        finding = known.finding
        span = self._parts.span(PERIODS * self._returns.gap(key)) or shortest
        span = span if span.begins < shortest.begins else shortest
        mean, window = self._mean(key, span), since(span.begins)
        is_unknown = mean is None and (bool(key[1]) or (key[0], None) in self._parts.columns)
        if is_unknown and at - known.above <= UNKNOWN_SECONDS:
            return
        is_above = loss >= limits.release * limits.loss
        is_explained = is_above and mean is not None and _is_alive(key, window)
        ranks = self._parts.peers.still_late(key[1])
        newest = _DETECTORS[key[0]].explain(window, ranks) if is_explained else None
        if newest and _is_contradicted(finding, newest, window):
            lasting = next((one for one in self._reached(key, 0.0) if one.span.begins >= shortest.begins), None)
            is_above = lasting is not None  # else its own fault is over, and what is left is small
            window = since(lasting.span.begins) if lasting else window
            newest = _DETECTORS[key[0]].explain(window, ranks) if lasting else None
            if lasting and newest and _is_contradicted(finding, newest, window):
                del self._open[key]  # another fault goes on
                self._begin(at, (key[0], ranks), lasting, 0.0, since)
                return
        if is_above and (known.is_quiet or self._returns.gap(key)):
            is_above = self._comes_again(at, key, known)
        if is_above:
            if known.is_quiet and at - known.above > limits.release_seconds:
                self._returns.add_gap(key, at - known.above)
            known.above, known.is_quiet = at, False
        elif mean is not None:
            known.is_quiet = True
        if at - known.above > limits.release_seconds + AS_LONG * self._returns.gap(key):
            self._returns.end(self._open.pop(key).finding, known.above)
        elif is_above and mean is not None:
            is_critical = finding.is_critical or mean > limits.severe
            candidate = replace(finding.candidate, ratio=mean, evidence=known.evidence(newest))
            known.finding = replace(finding, candidate=candidate, is_critical=is_critical)

    def _comes_again(self, at: float, key: Key, known: _Open) -> bool:
        """Return whether a loss that was away is there again, and not by chance, as in uneven work."""
        since = min(known.above, at - RETURNS * self._returns.gap(key))
        spans = self._parts.lasting(key, known.allowance or 0.0)
        return any(one.chance < RETURNS_BY_CHANCE for one in spans if one.span.begins >= since)

    @property
    def saved(self) -> list[SavedFinding]:
        """Return the open findings, to save them."""
        return [SavedFinding(finding, self._returns.gap(key)) for key, finding in self.open.items()]

    def restore(self, findings: Iterable[SavedFinding], at: float) -> None:
        """Restore the findings of losses."""
        for finding, gap in findings:
            if finding.kind in _DETECTORS:
                key = key_of(finding.candidate)
                self._open[key] = _Open(finding, at)
                self._returns.add_gap(key, gap)


class Returns:
    """Findings that end and come again. What comes in each minute is one finding, which stays open between."""

    def __init__(self) -> None:
        self._ended: dict[Key, tuple[Finding, float]] = {}
        """By key: the finding that ended, and the time when its loss was last above the release limit."""
        self._gaps: dict[Key, float] = {}
        """By key: the longest time between two events of the finding."""

    def ended_at(self, key: Key) -> float:
        """Return the end of the earlier finding, or of the last one about any of the same ranks."""
        kind, ranks = key
        same = (at for (one, of), (_, at) in self._ended.items() if one == kind and (of == ranks or {*of} & {*ranks}))
        return max(same, default=-math.inf)

    def forget(self, ranks: Collection[int]) -> None:
        """Drop the findings of some ranks."""
        for known in (self._ended, self._gaps):
            for key in [key for key in known if concerns_only(key, ranks)]:
                del known[key]

    def end(self, finding: Finding, at: float) -> None:
        """Remember a finding that has ended."""
        self._ended[key_of(finding.candidate)] = finding, at

    def begin(self, finding: Finding, gap: float = 0.0) -> Finding:
        """Return a new finding, or the one that it continues: the same one that ended a while ago."""
        key = key_of(finding.candidate)
        before, ended = self._ended.get(key, (finding, -math.inf))
        absence = finding.since - ended
        is_same = before.candidate.cause == finding.candidate.cause and absence <= LONGEST_ABSENCE
        self._gaps[key] = max(gap, absence) if is_same else gap
        if not is_same:
            return finding
        is_critical = before.is_critical or finding.is_critical
        return replace(finding, since=before.since, opened=before.opened, is_critical=is_critical)

    def add_gap(self, key: Key, seconds: float) -> None:
        """Add the time between two events of an open finding."""
        self._gaps[key] = max(seconds, self._gaps.get(key, 0.0))

    def gap(self, key: Key) -> float:
        """Return the longest time between two events of a finding; 0 if it has been steady."""
        return self._gaps.get(key, 0.0)


def _is_usual(detector: LossDetector, candidate: Candidate) -> bool:
    return detector.is_usual is not None and detector.is_usual(candidate)


def _is_contradicted(finding: Finding, newest: Candidate, window: Window) -> bool:
    """Return whether the loss has another cause now, and that of the finding explains too little of it."""
    detector = _DETECTORS[finding.kind]
    return detector.is_contradicted is not None and detector.is_contradicted(finding.candidate, newest, window)


def _is_between_measured_steps(run: RunFacts) -> bool:
    """Return whether the devices are measured, but in no step of the window."""
    has_steps = any(one.now.counters.device_steps for one in run.ranks)
    return has_steps and all(one.clock != DEVICE for one in run.ranks)


def _is_alive(key: Key, window: Window) -> bool:
    return {one.rank for one in window.run.ranks}.issuperset(key[1])


class StateFindings:
    """The states that are present, and the findings among them."""

    def __init__(self) -> None:
        self.open: dict[Key, Finding] = {}
        self._seen: dict[Key, tuple[float, float, float]] = {}
        """By key of each state: the times when it was first and last seen, and how long it may be absent."""
        self._returns = Returns()

    @property
    def is_hung(self) -> bool:
        """Return whether the run hangs."""
        return any(_STATES[kind].stops_run for kind, _ in self.open)

    def update(self, at: float, candidates: Iterable[Candidate]) -> None:
        """Open and close findings."""
        present = {key_of(candidate): candidate for candidate in candidates}
        for key, candidate in present.items():
            gap = STATE_GAP if candidate.lasted is not None else max(STATE_GAP, STATE_GAP_RATIO * candidate.needed)
            gap = max(gap, AS_LONG * self._returns.gap(key))
            first, last, _ = self._seen.get(key, (at, at, gap))
            self._seen[key] = at if at - last > gap else first, at, gap
            known = self.open.get(key)
            if known:
                kept = replace(candidate, cause=known.candidate.cause, place=known.candidate.place)
                self.open[key] = replace(known, candidate=kept)
            elif (lasted := self.lasted(candidate, at)) >= candidate.needed:
                detector = _STATES[candidate.kind]
                finding = Finding(candidate, at - lasted, at, detector.is_critical)
                self.open[key] = self._returns.begin(finding) if detector.returns else finding
        for key in [key for key in self.open if key not in present]:
            _, last, gap = self._seen[key]
            if at - last > gap or _STATES[key[0]].stops_run:
                self._returns.end(self.open.pop(key), last)
        self._seen = {key: seen for key, seen in self._seen.items() if at - seen[1] <= seen[2]}

    def forget(self, ranks: Collection[int]) -> None:
        """Drop the findings of some ranks, because their processes have changed."""
        for key in [key for key in self._seen if concerns_only(key, ranks)]:
            self.open.pop(key, None)
            del self._seen[key]

    def lasted(self, candidate: Candidate, at: float) -> float:
        """Return the seconds that a present state has lasted."""
        return at - self._seen[key_of(candidate)][0] if candidate.lasted is None else candidate.lasted

    @property
    def saved(self) -> list[SavedFinding]:
        """Return the open findings, to save them."""
        return [SavedFinding(finding, self._returns.gap(key)) for key, finding in self.open.items()]

    def restore(self, findings: Iterable[SavedFinding], at: float) -> None:
        """Restore the findings of states."""
        for finding, gap in findings:
            if finding.kind in _STATES:
                key = key_of(finding.candidate)
                self.open[key] = finding
                self._seen[key] = finding.since, at, max(STATE_GAP, AS_LONG * gap)
                self._returns.add_gap(key, gap)
