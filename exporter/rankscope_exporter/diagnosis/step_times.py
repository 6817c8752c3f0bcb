"""The distribution of step times, from the record's histogram."""

from __future__ import annotations

from itertools import accumulate
from math import inf

from rankscope.record.layout import STEP_BOUNDS
from rankscope_exporter.diagnosis.facts import RunFacts

SPIKE = 4.0
"""The 99th percentile of the step time over its median. The histogram's bounds differ by up to 2.5 times."""


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


def p99_to_median(run: RunFacts) -> float:
    """Return the 99th percentile of the step time over its median, without steps that a planned phase made long.

    All ranks have the same steps, so read the first. The planned phase may be another rank's.
    """
    one = run.first
    median = quantile(one.spent.step_buckets, 0.5) if one else None
    if one is None or not median:
        return 1.0
    p99 = quantile(_unplanned(run, one.spent.step_buckets, median), 0.99)
    return p99 / median if p99 else 1.0


def has_spikes(run: RunFacts) -> bool:
    """Return whether few steps are far longer than the rest. Then one rank may be late for a while by chance."""
    return p99_to_median(run) > SPIKE


def _unplanned(run: RunFacts, buckets: tuple[float, ...], usual: float) -> tuple[float, ...]:
    """Return the histogram without steps that a planned phase made long."""
    planned = max(each.planned_ratio * each.seconds for each in run.ranks)
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
