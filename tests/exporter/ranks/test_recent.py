"""Earlier values that newer ones are compared with."""

from __future__ import annotations

import pytest

from rankscope_exporter.ranks.recent import Recent


def test_the_first_value_is_the_oldest_until_another_is_far_enough_apart() -> None:
    recent = Recent[str](10.0)
    recent.add(100.0, "first")
    recent.add(109.0, "too soon")
    assert recent.oldest == (100.0, "first")


def test_the_oldest_value_is_between_one_and_two_windows_old() -> None:
    recent = Recent[int](10.0)
    for second in range(100):
        recent.add(float(second), second)
        if second >= 20:
            assert 10.0 <= second - recent.oldest.at <= 20.0


def test_after_a_gap_the_oldest_is_the_last_value_before_it() -> None:
    recent = Recent[str](10.0)
    for at, value in ((0.0, "a"), (10.0, "b"), (500.0, "c")):
        recent.add(at, value)
    assert recent.oldest == (10.0, "b")


def test_without_a_value_there_is_no_oldest() -> None:
    with pytest.raises(IndexError):
        _ = Recent[str](10.0).oldest
