"""The distribution of step times, from the record's histogram."""

from __future__ import annotations

from itertools import accumulate

from rankscope.record.layout import STEP_BOUNDS
from rankscope_exporter.diagnosis.facts import RunFacts


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


def p99_to_median(run: RunFacts) -> float:
    """Return the 99th percentile of the step time over its median. All ranks have the same steps, so read the first."""
    one = run.first
    p99, median = (quantile(one.spent.step_buckets, wanted) if one else None for wanted in (0.99, 0.5))
    return p99 / median if p99 and median else 1.0
