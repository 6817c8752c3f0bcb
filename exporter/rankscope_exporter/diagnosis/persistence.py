"""Persistence: candidates that last long enough, in seconds and steps, become findings, until they are over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from rankscope_exporter.diagnosis import step_times
from rankscope_exporter.diagnosis.detectors import KINDS, LOSSES, STATES, gpu_time, rotating, straggler
from rankscope_exporter.diagnosis.detectors.loss import Window
from rankscope_exporter.diagnosis.facts import DEVICE, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate, Finding, Place
from rankscope_exporter.diagnosis.history import HIGH, LOWER, History, finite
from rankscope_exporter.diagnosis.parts import Key, Parts, Span
from rankscope_exporter.diagnosis.thresholds import Thresholds, Tier

USEFUL: Key = ("useful", None)
STEPS_RATE: Key = ("steps_rate", None)
"""The references for losses: the useful work of each part and its steps per second."""

IN_TURN: Key = (rotating.KIND, None)
USUAL: Key = (rotating.USUAL, None)

STATE_GAP, STATE_GAP_RATIO = 5.0, 0.1
"""How long a state may be absent and still count as the same one: in seconds, and as a ratio of the time that it has to
last, if it is more. A pause or a checkpoint is not the end of a state that has to last for a quarter of an hour."""
CHANCE = 4.5
"""The standard errors that a mean lag does not reach by chance: one of ten ranks does in one of 30,000 windows."""
STEADY = 7.0
"""The same if their deviation is estimated from a dozen parts: Student's t has longer tails."""
LATE_RANKS = (straggler.KIND, rotating.KIND)
"""The findings of which the wait for late ranks is not usual."""
ON_DEVICE: tuple[Key, ...] = ((gpu_time.LAUNCH, None), (gpu_time.DEVICE_READS, None))
"""The losses that only the device's clock shows. They are unknown in a part without a measured step, and a tier needs
its number of parts in which they are known."""
UNKNOWN_SECONDS = 60.0
"""How long a loss may be unknown before its finding ends. The hook measures steps more often than that, and steps that
a gradient scaler skips are not compared."""
CRITICAL = frozenset(kind for detector in STATES if detector.is_critical for kind in detector.kinds)

_DETECTORS = {detector.kind: detector for detector in LOSSES}

Since = Callable[[float], Window]
"""A function that returns the window from a time until now."""


class LossFindings:
    """Losses in parts of a run's time, and the findings among them. A loss is a finding when it reaches any tier."""

    def __init__(self, thresholds: Thresholds, history: History) -> None:
        self._thresholds = thresholds
        self._history = history
        self._parts = Parts()
        self._open: dict[Key, Finding] = {}
        self._part: Window | None = None
        """The newest part."""
        self._above: dict[Key, float] = {}
        """By key of each open finding: the time when its loss was last above the release limit."""
        self._usual: dict[Key, float] = {}
        """By key of each open finding about late ranks: its allowance when it began."""
        self._ended: dict[Key, float] = {}
        """By key of each finding that ended: the time when its loss was last above the release limit."""

    @property
    def open(self) -> Mapping[Key, Finding]:
        """Return the open findings."""
        return self._open

    @property
    def shortest(self) -> Span | None:
        """Return the newest parts that cover the shortest tier; None if there are too few yet."""
        return self._parts.span(self._thresholds.tiers[0])

    def forget(self) -> None:
        """Drop all parts and findings, because the ranks' processes have changed."""
        self._parts = Parts()
        self._open.clear()
        self._above.clear()
        self._usual.clear()
        self._ended.clear()

    def add(self, at: float, seconds: float, part: Window) -> None:
        """Measure the losses of the newest part."""
        self._part = part
        losses: dict[Key, float] = {}
        for detector in LOSSES:
            losses.update({(detector.kind, rank): loss for rank, loss in detector.measure(part).items()})
        if _is_between_measured_steps(part.run):
            for key in ON_DEVICE:
                losses.pop(key, None)
        useful, steps_rate = part.lost.get("none", 0.0), part.run.steps_rate
        of_run = {kind: loss for (kind, rank), loss in losses.items() if rank is None}
        if any(kind in LATE_RANKS for kind, _ in self._open):
            of_run.pop(rotating.KIND, None)
        self._history.add(at, of_run, useful, steps_rate)
        self._parts.add(at, seconds, part.run.steps, {**losses, USEFUL: useful, STEPS_RATE: steps_rate})

    def update(self, at: float, since: Since) -> None:
        """Open and close findings."""
        spans = {tier: self._parts.span(tier) for tier in self._thresholds.tiers}
        shortest = spans[self._thresholds.tiers[0]]
        if shortest is None:
            return
        for key in dict.fromkeys((*self._parts.keys, *self._open)):
            if key[0] not in _DETECTORS or (key == IN_TURN and not {key, USUAL} & self._open.keys()):
                continue  # ranks are late in turn only beyond the usual loss
            mean = self._mean(key, shortest)
            if key not in self._open and (mean is None or mean <= self._thresholds.loss):
                continue  # no allowance is negative
            allowance = self._allowance(key, self._cause(key), shortest)
            loss = -math.inf if mean is None else mean - allowance
            if key in self._open:
                self._review(at, key, loss, shortest, since(shortest.begins))
            elif loss > self._thresholds.loss:
                for tier in self._reached_tiers(key, allowance, spans):
                    if self._begin(at, key, tier, allowance, since):
                        break

    def _mean(self, key: Key, span: Span) -> float | None:
        """Return the mean loss; of ranks that are late in turn, without what one of them explains."""
        if key not in (IN_TURN, USUAL):
            return span.mean(key)
        ranks = [one for one in self._parts.keys if one[0] == straggler.KIND]
        return span.beyond_one(key, ranks, self._thresholds.tiers[0])

    def _exceeds(self, key: Key, span: Span, tier: Tier, allowance: float) -> bool:
        if not span.exceeds(key, tier, allowance):
            return False
        mean = self._mean(key, span)
        return mean is not None and mean - allowance > tier.limit

    def _reached_tiers(self, key: Key, allowance: float, spans: Mapping[Tier, Span | None]) -> Iterator[Tier]:
        """Yield the tiers that a loss has reached. It does not reach a longer tier if it is already over.

        What was found before is over, and does not count again.
        """
        if key in ON_DEVICE:
            spans = {tier: self._parts.span(tier, key) for tier in spans}
        first, second, *_ = spans.items()
        for tier, span in spans.items():
            if span is None or span.begins < self._ended.get(key, -math.inf):
                continue
            if not self._exceeds(key, span, tier, allowance):
                continue
            mean = self._mean(key, second[1]) if second[1] and tier != first[0] else None
            if mean is None or mean - allowance > self._thresholds.loss:
                yield tier

    def _cause(self, key: Key) -> str:
        """Return the cause of an open finding, or of the usual loss before it; empty if there is none."""
        usual = self._open.get(USUAL) if key == IN_TURN else None
        finding = self._open.get(key, usual)
        return finding.candidate.cause if finding else ""

    def _allowance(self, key: Key, cause: str, shortest: Span) -> float:
        """Return the allowance: what a healthy run may lose, or this run's baseline if that is less.

        For an open finding, the baseline is from before it began.
        """
        detector = _DETECTORS[key[0]]
        if detector.allowance is None or self._part is None:
            return 0.0
        allowance = detector.allowance(self._part)
        if (key, cause) == (IN_TURN, rotating.UNEVEN_WORK):
            return self._usual[key] if key in self._usual else self._uneven_allowance(key, allowance, shortest)
        before = min(shortest.begins, self._open[key].since) if key in self._open else shortest.begins
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
        useful, steps_rate = shortest.median(USEFUL), shortest.steps_rate()
        return self._history.baseline(key[0], before, useful, steps_rate, quantile)

    def _begin(self, at: float, key: Key, tier: Tier, allowance: float, since: Since) -> bool:
        """Begin a finding if its detector explains the loss. Return whether it did."""
        span, shortest = self._parts.span(tier, key if key in ON_DEVICE else None), self.shortest
        if span is None or shortest is None:
            return False
        # The time before its onset says nothing about its cause.
        rise = span.rise(key, _middle(span.mean(key), tier, allowance))
        window = since(rise.begins)
        if not _is_alive(key, window):
            return False
        candidate = _DETECTORS[key[0]].explain(window, key[1])
        if candidate is None or self._may_be_chance(candidate, window, tier):
            return False
        allowance = self._allowance(key, candidate.cause, shortest)
        if not self._exceeds(key, span, tier, allowance):
            return False
        mean = self._mean(key, rise) or candidate.ratio
        severe = [value > self._thresholds.severe for value in rise.values(key)]
        is_critical = mean > self._thresholds.severe or sum(severe) > self._thresholds.severe_dips * len(severe)
        has_baseline = _DETECTORS[key[0]].allowance is None or self._history.has_baseline
        baseline = "known" if has_baseline else "unknown"
        self._open[key] = Finding(replace(candidate, ratio=mean), rise.begins, at, is_critical, baseline)
        if key[0] in LATE_RANKS:
            self._history.forget(rotating.KIND, rise.begins)
            self._usual[key] = allowance
        return True

    def _may_be_chance(self, candidate: Candidate, window: Window, tier: Tier) -> bool:
        """Return whether a rank may be the last one by chance, and has not been it for long.

        That is possible if few steps are far longer than the rest, and if ranks are late in turn. And for some seconds,
        the garbage collectors of all ranks may run one after the other, each only once.
        """
        limits, key = self._thresholds, candidate.key
        if candidate.kind != straggler.KIND:
            return candidate.cause == rotating.COLLECTOR and tier == limits.tiers[0]
        is_steady = not straggler.has_spikes(window.run, limits) or _makes_most_long_steps(key, window.run)
        if is_steady and self._exceeds_chance(key, window.run):
            return False
        long = Tier(limits.loss / 2, limits.spike_seconds, limits.tiers[0].steps, 8, 0.1)
        span = self._parts.span(long)
        return span is None or not span.exceeds(key, long)

    def _exceeds_chance(self, key: Key, run: RunFacts) -> bool:
        """Return whether a lag is too large for chance.

        It is if it is steady, or even if all waiting is for steps that differ by chance.
        """
        first = self._thresholds.tiers[0]
        ranks = len(run.peers_of(key[1]))
        for steps in (first.steps, 2 * first.steps, 4 * first.steps):
            span = self._parts.span(first._replace(steps=steps))
            skew = span.mean(USUAL) if span else None
            if span is None or skew is None:
                return False
            lags = [lag for lag in span.values(key) if not math.isnan(lag)]
            if len(lags) >= first.parts and fmean(lags) > STEADY * stdev(lags) / math.sqrt(len(lags)):
                return True
            deviation = skew / rotating.expected_wait(ranks)
            if (span.mean(key) or 0.0) > CHANCE * deviation * math.sqrt(ranks / (ranks - 1) / span.steps):
                return True
        return False

    def _review(self, at: float, key: Key, loss: float, shortest: Span, window: Window) -> None:
        """Update ratio and evidence of an open finding, or close it. Its severity can rise, but never falls."""
        limits, finding, mean = self._thresholds, self._open[key], self._mean(key, shortest)
        is_unknown = mean is None and key in self._parts.keys
        if is_unknown and at - self._above.setdefault(key, at) <= UNKNOWN_SECONDS:
            return
        is_above = loss >= limits.release * limits.loss
        is_explained = is_above and mean is not None and _is_alive(key, window)
        newest = _DETECTORS[key[0]].explain(window, key[1]) if is_explained else None
        if newest and straggler.is_contradicted(finding.candidate, newest, window):
            is_above = shortest.exceeds(key, limits.tiers[0])  # else its own fault is over, and what is left is small
            if is_above and not self._may_be_chance(newest, window, limits.tiers[0]):
                self._begin_again(at, newest, shortest)
                return
            newest = None
        self._above[key] = at if is_above or key not in self._above else self._above[key]
        if at - self._above[key] > limits.release_seconds:
            self._ended[key] = self._above.pop(key)
            del self._open[key]
            self._usual.pop(key, None)
        elif is_above and mean is not None:
            is_critical = finding.is_critical or mean > limits.severe
            evidence = dict(finding.candidate.evidence)
            evidence |= {name: value for name, value in (newest.evidence if newest else {}).items() if name in evidence}
            candidate = replace(finding.candidate, ratio=mean, evidence=evidence)
            self._open[key] = replace(finding, candidate=candidate, is_critical=is_critical)

    def _begin_again(self, at: float, newest: Candidate, shortest: Span) -> None:
        """Replace an open finding by one with another cause: its own fault is over, and another one goes on."""
        limits, key = self._thresholds, newest.key
        mean = shortest.mean(key) or newest.ratio
        began = shortest.rise(key, _middle(mean, limits.tiers[0], 0.0)).begins
        is_critical = mean > limits.severe
        self._open[key] = Finding(replace(newest, ratio=mean), began, at, is_critical, self._open[key].baseline)

    def restore(self, findings: Sequence[Finding], at: float) -> None:
        """Add the restored findings of losses."""
        self._open |= {finding.candidate.key: finding for finding in findings if finding.kind in _DETECTORS}
        self._above |= dict.fromkeys(self._open, at)


def _middle(mean: float | None, tier: Tier, allowance: float) -> float:
    """Return the level between a tier's limit and a mean loss above it: what is below it is from before the onset."""
    return (tier.limit + allowance + (mean or 0.0)) / 2


def _makes_most_long_steps(key: Key, run: RunFacts) -> bool:
    """Return whether a rank is the last one of more long steps than by chance, if each is the last equally often."""
    ranks, steps = len(run.peers_of(key[1])), step_times.long_steps(run)
    by_chance = 1.0 / ranks
    error = math.sqrt(by_chance * (1.0 - by_chance) / steps) if steps else math.inf
    return straggler.share_of_blame(run, key[1]) > by_chance + CHANCE * error


def _is_between_measured_steps(run: RunFacts) -> bool:
    """Return whether the devices are measured, but in no step of the window."""
    has_steps = any(one.now.counters.device_steps for one in run.ranks)
    return has_steps and all(one.clock != DEVICE for one in run.ranks)


def _is_alive(key: Key, window: Window) -> bool:
    return key[1] is None or key[1] in {one.rank for one in window.run.ranks}


def findings_to_json(findings: Iterable[Finding], at: float) -> list[list[Any]]:
    """Return findings as JSON values, with ages instead of times."""
    return [[at - one.since, at - one.opened, *_to_json(one)] for one in findings]


def _to_json(finding: Finding) -> list[Any]:
    candidate = finding.candidate
    place, evidence = list(candidate.place), dict(candidate.evidence)
    return [candidate.kind, candidate.ratio, candidate.cause, place, evidence, finding.is_critical, finding.baseline]


def findings_from_json(state: Iterable[Sequence[Any]], at: float) -> list[Finding]:
    """Return the findings of a state. Raise one of history.UNREADABLE if it is damaged."""
    return [_from_json(saved, at) for saved in state]


def _from_json(saved: Sequence[Any], at: float) -> Finding:
    began, opened, kind, ratio, cause, place, evidence, is_critical, baseline = saved
    if kind not in (*KINDS, rotating.USUAL):
        raise ValueError(f"unknown detector {kind!r}")
    numbers = {str(name): finite(value) for name, value in dict(evidence).items()}
    candidate = Candidate(kind, finite(ratio), str(cause), Place(*place), numbers)
    return Finding(candidate, at - finite(began), at - finite(opened), bool(is_critical), str(baseline))


class StateFindings:
    """The states that are present, and the findings among them."""

    def __init__(self) -> None:
        self.open: dict[Key, Finding] = {}
        self._seen: dict[Key, tuple[float, float, float]] = {}
        """By key of each state: the times when it was first and last seen, and how long it may be absent."""

    @property
    def is_hung(self) -> bool:
        """Return whether the run hangs."""
        return any(kind == "hang" for kind, _ in self.open)

    def update(self, at: float, candidates: Iterable[Candidate]) -> None:
        """Open and close findings."""
        present = {candidate.key: candidate for candidate in candidates}
        for key, candidate in present.items():
            gap = STATE_GAP if candidate.lasted is not None else max(STATE_GAP, STATE_GAP_RATIO * candidate.needed)
            first, last, _ = self._seen.get(key, (at, at, gap))
            self._seen[key] = at if at - last > gap else first, at, gap
            known = self.open.get(key)
            if known:
                kept = replace(candidate, cause=known.candidate.cause, place=known.candidate.place)
                self.open[key] = replace(known, candidate=kept)
            elif (lasted := self.lasted(candidate, at)) >= candidate.needed:
                self.open[key] = Finding(candidate, at - lasted, at, candidate.kind in CRITICAL)
        self._seen = {key: seen for key, seen in self._seen.items() if at - seen[1] <= seen[2]}
        for key in [key for key in self.open if key not in present]:
            if key not in self._seen or key[0] == "hang":
                del self.open[key]

    def lasted(self, candidate: Candidate, at: float) -> float:
        """Return the seconds that a present state has lasted."""
        return at - self._seen[candidate.key][0] if candidate.lasted is None else candidate.lasted

    def restore(self, findings: Sequence[Finding], at: float) -> None:
        """Add the restored findings of states."""
        for finding in findings:
            if finding.kind not in _DETECTORS:
                self.open[finding.candidate.key] = finding
                self._seen[finding.candidate.key] = finding.since, at, STATE_GAP
