"""Statistics of measurements: percentiles, bootstrap intervals, and comparisons of counts."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

RESAMPLES = 2000
CONFIDENCE = 0.95

T = TypeVar("T")


class Resample(Protocol):
    """A function that draws as many values as it gets, with replacement."""

    def __call__(self, values: Sequence[T], /) -> list[T]: ...


class Interval(NamedTuple):
    """An estimate and the ends of its 95% interval."""

    middle: float
    low: float
    high: float

    def scaled(self, factor: float, digits: int = 1) -> Interval:
        """Return it in another unit, rounded."""
        return Interval(*(round(factor * value, digits) for value in self))


def bootstrap(estimate: Callable[[Resample], float], resamples: int = RESAMPLES) -> Interval:
    """Return the estimate and its interval (percentile method).

    `estimate` passes each independent group of values through its argument.
    """
    generator = random.Random(0)

    def resample(values: Sequence[T], /) -> list[T]:
        return generator.choices(values, k=len(values))

    found = [estimate(resample) for _ in range(resamples)]
    tail = (1 - CONFIDENCE) / 2
    return Interval(estimate(list), percentile(found, tail), percentile(found, 1 - tail))


def median_interval(values: Sequence[float]) -> Interval:
    return bootstrap(lambda resample: statistics.median(resample(values)))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this ratio of the values does not exceed (nearest rank); NaN without values."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def wilson(count: int, of: int) -> tuple[float, float]:
    """Return Wilson's interval of a proportion."""
    if not of:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, scale = count / of, 1 + z * z / of
    middle = (share + z * z / (2 * of)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, middle - half), min(1.0, middle + half)


def poisson_bound(count: int) -> float:
    """Return the upper limit of the expected number with 95% confidence, if this number was counted."""
    low, high = 0.0, 10.0 * (count + 1)
    while high - low > 1e-6:
        middle = (low + high) / 2
        at_most = math.exp(-middle) * sum(middle**number / math.factorial(number) for number in range(count + 1))
        low, high = (middle, high) if at_most > 1 - CONFIDENCE else (low, middle)
    return high


def newcombe(first: int, second: int, of: int) -> tuple[float, float]:
    """Return Newcombe's interval of the difference of two proportions, each a count of `of`."""
    (low, high), (other_low, other_high) = wilson(first, of), wilson(second, of)
    share, other = first / of, second / of
    below = math.hypot(share - low, other_high - other)
    above = math.hypot(high - share, other - other_low)
    return share - other - below, share - other + above


def fisher(first: int, second: int, of: int) -> tuple[float, float]:
    """Return Fisher's exact test of two counts, each of `of`: p for a first count as large, p for such a difference."""
    total = first + second
    ways = {count: math.comb(of, count) * math.comb(of, total - count) for count in range(total + 1)}
    everything = sum(ways.values())
    larger = sum(number for count, number in ways.items() if count >= first)
    rarer = sum(number for number in ways.values() if number <= ways[first])
    return larger / everything, rarer / everything
