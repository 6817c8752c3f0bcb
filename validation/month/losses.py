"""The losses of a run in the parts that its diagnosis divides it into, all at once, and the polls that may matter.

They are those that the diagnosis measures in a run of one node without a pipeline (rankscope_exporter/diagnosis), which
a test compares. A loss becomes a finding only if its mean over the shortest span exceeds the least limit, and its mean
over the span of a tier exceeds the limit of that tier. So polls at which no mean is near these limits can be left out,
if the diagnosis gets the parts between them (fill.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from validation.month.polls import PLANNED_NUMBERS, Polls
from validation.month.steps import PHASES, WAIT, Array, P

from rankscope.record.phases import COMPUTING
from rankscope_exporter.diagnosis.detectors import rotating
from rankscope_exporter.diagnosis.history import ROW_SECONDS
from rankscope_exporter.diagnosis.judge import MAX_SECONDS_WITHOUT_ALIGNED
from rankscope_exporter.diagnosis.parts import CAPACITY, Key
from rankscope_exporter.diagnosis.persistence import ON_DEVICE, STEPS_RATE, USEFUL
from rankscope_exporter.diagnosis.thresholds import Thresholds, Tier

MARGIN = 0.8  # ratio of a limit
BASELINE_MARGIN = 0.9  # ratio of the run's baseline
BASELINE_EVERY = 20  # rows between two estimates of the baseline
UNPLANNED = [number for number in range(len(PHASES)) if number not in PLANNED_NUMBERS]
COMPUTING_NUMBERS = [P[phase] for phase in COMPUTING if phase in P]
ABSENT = ("small_collectives", "launch", "device_reads")
"""Losses that a simulated run does not have."""


@dataclass(frozen=True)
class Losses:
    """The losses of the parts of a run, in their order."""

    beginning: dict[int, int]
    """The part that begins at a poll."""
    ends: Array
    """The poll at which each part ends."""
    seconds: Array
    steps: Array
    values: dict[Key, Array]
    """By detector and rank; NaN if unknown."""


def next_ends(polls: Polls) -> Array:
    """Return the poll at which a part that begins at each poll ends (RunJudge); the number of polls if in none."""
    found = np.full(len(polls), len(polls))
    for job in polls.jobs():
        steps, compared = polls.steps[job], polls.compared[job]
        here = np.arange(len(steps))
        earliest = np.maximum(here + 1, np.searchsorted(steps, steps, side="right"))
        latest = here + int(MAX_SECONDS_WITHOUT_ALIGNED) + 1
        aligned = np.maximum(earliest, np.minimum(latest, np.searchsorted(compared, compared, side="right")))
        is_compared = np.append(compared, 0.0)[np.minimum(earliest, len(here))] > 0.0
        ends = np.where(is_compared, aligned, earliest)
        found[job] = np.where(ends < len(here), job.start + ends, len(polls))
    return found


def measure(polls: Polls, following: Array) -> Losses:
    """Return the losses of all parts of a run that is polled each second."""
    begins = []
    for job in polls.jobs():
        at = job.start
        while (end := int(following[at])) < len(polls):
            begins.append(at)
            at = end
    ends = following[begins]
    parts = _Parts(polls, begins, ends)
    seconds = polls.times[ends] - polls.times[begins]
    return Losses(dict(zip(begins, range(len(ends)), strict=True)), ends, seconds, parts.steps, parts.losses())


class _Parts:
    """The increase of a run's counters in parts."""

    def __init__(self, polls: Polls, begins: list[int], ends: Array) -> None:
        def spent(counter: Array) -> Array:
            return counter[ends] - counter[begins]

        self.steps = spent(polls.steps)
        self._spent = spent
        self._ends = ends
        self._polls = polls
        self._seconds = spent(polls.seconds).sum(axis=1)
        self._host = spent(polls.seconds) / self._seconds[:, None]
        self._ratios = self._measured_ratios()
        self._aligned = spent(polls.compared_seconds)[:, None]
        self._floor, self._skew = spent(polls.floor), spent(polls.skew)

    def _measured_ratios(self) -> Array:
        """Return the ratios of the time by part, phase and rank, on the device's clock if steps were measured."""
        if not self._polls.is_device:
            return self._host
        measured = self._spent(self._polls.measured)[:, UNPLANNED]
        total = measured.sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            of_device = measured * (self._host[:, UNPLANNED].sum(axis=1) / total)[:, None]
        ratios = self._host.copy()
        ratios[:, UNPLANNED] = np.where((total > 0.0)[:, None], of_device, self._host[:, UNPLANNED])
        return ratios

    def _waits(self) -> tuple[Array, Array]:
        """Return the wait of each rank as a ratio of its steps, and whether the ranks of the part are compared."""
        unplanned = self._ratios[:, UNPLANNED]
        with np.errstate(invalid="ignore", divide="ignore"):
            of_all = np.nan_to_num(self._ratios[:, WAIT] / unplanned.sum(axis=1))
            of_aligned = (self._floor + self._skew) / self._aligned
        has_planned = self._host[:, PLANNED_NUMBERS].sum(axis=(1, 2)) > 0.0
        is_aligned = self._aligned > 0.0
        was_compared = self._has_measured() & (self._polls.compared[self._ends] > 0.0)
        return np.where(is_aligned, of_aligned, of_all), is_aligned[:, 0] | ~(has_planned | was_compared)

    def losses(self) -> dict[Key, Array]:
        """Return the losses by detector and rank, and the references for them."""
        waits, is_comparable = self._waits()
        lags = np.where(is_comparable[:, None], np.median(waits, axis=1, keepdims=True) - waits, np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            skew = np.where(self._aligned > 0.0, self._skew / self._aligned, waits - waits.min(axis=1, keepdims=True))
        moving = (self._ratios / self._ratios.sum(axis=1, keepdims=True)).mean(axis=2)
        computing = moving[:, COMPUTING_NUMBERS].sum(axis=1)
        throttled = computing * self._throttled()
        in_turn = np.where(is_comparable, skew.sum(axis=1) / (skew.shape[1] - 1), np.nan)
        found: dict[Key, Array] = {("straggler", rank): lags[:, rank] for rank in range(lags.shape[1])}
        return found | {
            ("uneven_steps", None): in_turn,
            ("rotating_straggler", None): in_turn,
            ("data", None): self._if_usual("data_wait", moving),
            ("network", None): np.where(is_comparable, self._transfer(moving[:, WAIT]), np.nan),
            ("copies", None): self._if_usual("h2d_copy", moving),
            ("throttling", None): throttled,
            **{(kind, None): np.zeros(len(skew)) for kind in ABSENT},
            **{key: np.where(self._are_unmeasured(), np.nan, 0.0) for key in ON_DEVICE},
            USEFUL: computing - throttled,
            STEPS_RATE: self.steps / self._seconds.mean(axis=1),
        }

    def _if_usual(self, phase: str, moving: Array) -> Array:
        """Return a phase's mean ratio in `moving`; 0 in the parts in which the median rank has little of it."""
        usual = np.sort(self._ratios[:, P[phase]], axis=1)[:, (self._ratios.shape[2] - 1) // 2]
        return np.where(usual > Thresholds().loss / 2, moving[:, P[phase]], 0.0)

    def _are_unmeasured(self) -> Array:
        """Return by part whether the devices are measured, but in no step of the part."""
        return self._has_measured() & (self._spent(self._polls.measured)[:, UNPLANNED].sum(axis=1) <= 0.0).any(axis=1)

    def _has_measured(self) -> Array:
        """Return by part whether the devices have been measured."""
        return self._polls.is_device & (self._polls.measured[self._ends].sum(axis=(1, 2)) > 0.0)

    def _transfer(self, waited: Array) -> Array:
        waits = self._floor + self._skew
        planned = self._host[:, PLANNED_NUMBERS].sum(axis=1)
        for_planned = np.minimum(self._ratios[:, WAIT], planned.max(axis=1, keepdims=True) - planned)
        own = self._ratios[:, WAIT] - for_planned
        with np.errstate(invalid="ignore", divide="ignore"):
            floor = np.where(waits > 0.0, own * self._floor / waits, own.min(axis=1, keepdims=True))
        return np.minimum(floor.mean(axis=1), np.maximum(waited - for_planned.mean(axis=1), 0.0))

    def _throttled(self) -> Array:
        throttled, clock = self._spent(self._polls.throttled), self._spent(self._polls.clock_seconds)
        part = np.minimum(throttled[:, None] / self._seconds, 1.0)
        return (part * (1.0 - np.minimum(clock[:, None] / self._seconds, 1.0))).mean(axis=1)


def near_ends(polls: Polls, losses: Losses) -> Array:
    """Return the parts at whose end a loss is near a limit over the shortest span, and near that of any tier."""
    limits = Thresholds()
    spans = {tier: _span_begins(losses, tier) for tier in limits.tiers}
    shortest = spans[limits.tiers[0]]
    useful, rate = (_means(losses.values[key], shortest) for key in (USEFUL, STEPS_RATE))
    in_turn = rotating.wait_by_chance(limits, 8)
    allowances = {"network": limits.network_allowance, "uneven_steps": in_turn, "rotating_straggler": in_turn}
    found = np.zeros(len(shortest), bool)
    for key, values in losses.values.items():
        if key in (USEFUL, STEPS_RATE) or key[0] in ABSENT:
            continue
        allowance = np.zeros(len(shortest))
        if key[1] is None:
            to_useful, per_step = _baselines(polls, losses, values)
            baseline = BASELINE_MARGIN * np.fmax(to_useful * useful, per_step * rate)
            allowance = np.fmin(allowances.get(key[0], limits.allowance), baseline)
        found |= _is_near(losses, values, allowance, spans)
    return found & (shortest >= 0)


def _is_near(losses: Losses, values: Array, allowance: Array, spans: Mapping[Tier, Array]) -> Array:
    """Return the parts at whose end one loss is near the limit of a tier."""
    (first, shortest), *others = spans.items()
    mean = _means(values, shortest) - allowance
    is_long = np.zeros(len(values), bool)
    for tier, begins in others:
        of_tier = _means(values, begins, losses.seconds) - allowance
        is_long |= (of_tier > MARGIN * tier.limit) & (begins >= 0)
    is_short = mean > MARGIN * first.limit
    for part in np.flatnonzero(is_short & ~is_long).tolist():
        of_span = values[max(int(shortest[part]), 0) : part + 1] - allowance[part]
        is_short[part] = (~(of_span > MARGIN * first.limit / 2)).sum() <= first.dips * len(of_span)
    return np.asarray((mean > MARGIN * Thresholds().loss) & (is_short | is_long))


def _span_begins(losses: Losses, tier: Tier) -> Array:
    """Return the first part of the tier's span that ends with each part; -1 if there are too few parts."""
    is_shortest = tier == Thresholds().tiers[0]
    here = np.arange(len(losses.ends))
    found = here - tier.parts + 1 if is_shortest else here
    for values, least in ((losses.seconds, tier.seconds), (losses.steps, tier.steps)):
        reached = np.concatenate(([0.0], np.cumsum(values)))
        found = np.minimum(found, np.searchsorted(reached, reached[1:] - least + 1e-9, side="right") - 1)
    return np.where(is_shortest & (here - found >= CAPACITY), -1, found)


def _means(values: Array, begins: Array, weights: Array | float = 1.0) -> Array:
    """Return the means of the known values from each of these parts to the part itself."""
    weights = np.where(np.isnan(values), 0.0, weights)
    sums, totals = (np.concatenate(([0.0], np.cumsum(one))) for one in (np.nan_to_num(values) * weights, weights))
    first = np.maximum(begins, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[1:] - sums[first]) / (totals[1:] - totals[first])


def _baselines(polls: Polls, losses: Losses, values: Array) -> tuple[Array, Array]:
    """Return by part the lower quartiles of the last hour, per useful second and per step; NaN before the first row.

    The least of the two nearest estimates is returned.
    """
    ends = polls.times[losses.ends]
    rows, at = [], -np.inf
    for part, when in enumerate(ends.tolist()):
        if when - at >= ROW_SECONDS:
            rows.append(part)
            at = when
    hour = int(Thresholds().baseline_seconds / ROW_SECONDS)
    where = np.searchsorted(ends[rows], ends, side="right") // BASELINE_EVERY
    found = []
    for reference in (losses.values[USEFUL], losses.values[STEPS_RATE]):
        with np.errstate(invalid="ignore", divide="ignore"):
            padded = np.concatenate((np.full(hour, np.nan), (values / reference)[rows]))
        windows = sliding_window_view(padded, hour)[::BASELINE_EVERY]
        has_known = ~np.isnan(windows).all(axis=1)
        quartiles = np.full(len(windows), np.inf)
        quartiles[has_known] = np.nanquantile(windows[has_known], 0.25, axis=1)
        after = np.append(quartiles[1:], quartiles[-1])
        least = np.minimum(quartiles, after)
        found.append(np.where(np.isinf(least), np.nan, least)[np.minimum(where, len(least) - 1)])
    return found[0], found[1]
