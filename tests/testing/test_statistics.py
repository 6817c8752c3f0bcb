"""Percentiles and intervals of measurements."""

from __future__ import annotations

import math
import statistics

import pytest
from testing.statistics import (
    Interval,
    bootstrap,
    fisher,
    median_interval,
    newcombe,
    percentile,
    poisson_bound,
    wilson,
)


def test_one_of_a_hundred_values_exceeds_the_99th_percentile() -> None:
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile(range(1, 101), 0.50) == 50
    assert percentile([7.0], 0.99) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_an_interval_contains_its_estimate_and_is_reproducible() -> None:
    values = [float(number) for number in range(50)]
    found = median_interval(values)
    assert found == median_interval(values)
    assert found.low < found.middle == statistics.median(values) < found.high


def test_values_that_do_not_vary_have_no_interval() -> None:
    assert median_interval([0.002] * 9).scaled(1e6) == Interval(2000.0, 2000.0, 2000.0)


def test_groups_are_resampled_on_their_own() -> None:
    found = bootstrap(lambda resample: statistics.fmean(resample([1.0, 1.0])) - statistics.fmean(resample([3.0])))
    assert found == (-2.0, -2.0, -2.0)


def test_intervals_of_proportions_contain_them() -> None:
    assert wilson(1, 10) == pytest.approx((0.0179, 0.4042), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = newcombe(56, 48, 70)
    assert low < (56 - 48) / 70 < high
    assert newcombe(48, 56, 70) == pytest.approx((-high, -low))


def test_the_exact_test_distinguishes_counts() -> None:
    assert fisher(5, 5, 10) == pytest.approx((0.6719, 1.0), abs=1e-4)
    assert fisher(9, 1, 10) == pytest.approx((0.00055, 0.0011), abs=1e-4)


def test_a_count_of_zero_may_come_from_three_expected_events():
    assert [poisson_bound(count) for count in (0, 1, 5)] == pytest.approx([2.996, 4.744, 10.513], abs=1e-3)
