"""The distribution of step times, from the record's histogram."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf

from rankscope.record.layout import STEP_BOUNDS
from rankscope_exporter.diagnosis import chance
from rankscope_exporter.diagnosis.facts import RunFacts

SPIKE = 4.0
"""How many times longer than the usual steps the longest hundredth of them is if they are spikes."""


def quantile(buckets: tuple[float, ...], wanted: float) -> float | None:
    """Return the quantile in seconds, interpolated within its bucket as in Prometheus. None if there are no steps."""
    total = sum(buckets)
    if total <= 0.0:
        return None
    rank = wanted * total
    for index, reached in enumerate(accumulate(buckets)):
        if reached >= rank:
            if index >= len(STEP_BOUNDS):
                return STEP_BOUNDS[-1]
            low = STEP_BOUNDS[index - 1] if index else 0.0
            within = (rank - (reached - buckets[index])) / buckets[index] if buckets[index] else 0.0
            return low + (STEP_BOUNDS[index] - low) * within
    return None


def longest_step(buckets: tuple[float, ...]) -> float:
    """Return an upper bound of the longest step, in seconds: infinite beyond the buckets, and without any steps."""
    counted = [index for index, count in enumerate(buckets) if count]
    return (*STEP_BOUNDS, inf)[counted[-1]] if counted else inf


def long_to_usual(run: RunFacts) -> float:
    """Return how many times longer the longest hundredth of the steps is than the usual ones: the least possible ratio.

    A histogram's bounds differ by up to 2.5 times, so the steps' whole time limits where in their buckets they are. All
    ranks have the same steps, so read the first. Steps that a planned phase made long do not count; it may be another
    rank's.
    """
    one = run.first
    usual = quantile(one.spent.step_buckets, 0.5) if one else None
    if one is None or not usual:
        return 1.0
    buckets = _unplanned(run, one.spent.step_buckets, usual)
    first, last = bisect_left(STEP_BOUNDS, usual), bisect_left([*accumulate(buckets)], 0.99 * sum(buckets))
    rest, count = sum(buckets[: first + 1]), sum(buckets[last:])
    if last <= first or not rest:
        return 1.0
    between = list(zip(buckets[first + 1 : last], STEP_BOUNDS[first:], STEP_BOUNDS[first + 1 :], strict=False))
    removed = sum(one.spent.step_buckets) - sum(buckets)
    waited = max(each.planned_seconds for each in run.ranks) - one.planned_seconds
    low, seconds = STEP_BOUNDS[last - 1], one.unplanned_seconds - removed * usual - min(removed, 1.0) * waited
    longest_rest = seconds - count * low - sum(number * least for number, least, _ in between)
    usual = min(STEP_BOUNDS[first], max(longest_rest, 0.0) / rest)
    seconds -= rest * usual + sum(number * most for number, _, most in between)
    return min(max(low, seconds / count), longest_step(buckets)) / usual if usual else 1.0


def has_spikes(run: RunFacts) -> bool:
    """Return whether few steps are far longer than the rest. Then one rank may be late for a while by chance."""
    return long_to_usual(run) > SPIKE


def events(run: RunFacts) -> float:
    """Return how many events of equal size the compared steps have: all of them, or fewer if few steps are longer."""
    one = run.first
    usual = quantile(one.spent.step_buckets, 0.5) if one else None
    if one is None or not usual:
        return 0.0
    counted = [*zip(_unplanned(run, one.spent.step_buckets, usual), (0.0, *STEP_BOUNDS), strict=True)]
    long = [(count, bound - usual) for count, bound in counted if bound > usual]
    total, squares = sum(count * excess for count, excess in long), sum(count * excess**2 for count, excess in long)
    steps = sum(count for count, _ in counted)
    return one.spent.aligned.steps * (chance.events(total, squares) / steps if total else 1.0)


def _unplanned(run: RunFacts, buckets: tuple[float, ...], usual: float) -> tuple[float, ...]:
    """Return the histogram without steps that a planned phase made long."""
    planned = max(each.planned_seconds for each in run.ranks)
    return _without_longest(buckets, planned, usual)


def _without_longest(buckets: tuple[float, ...], seconds: float, usual: float) -> tuple[float, ...]:
    """Return the histogram without its longest steps, as many as took these seconds longer than the usual ones."""
    kept = list(buckets)
    for index in reversed(range(1, len(kept))):
        excess = STEP_BOUNDS[index - 1] - usual
        if excess <= 0.0:
            break
        removed = min(kept[index], seconds / excess)
        kept[index] -= removed
        seconds -= removed * excess
    return tuple(kept)
