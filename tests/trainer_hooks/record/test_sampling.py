"""Sampling of steps: by their number alone, evenly over time, and not in a rhythm that a job may have."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.record.sampling import MAX_LEVEL, is_sampled, next_sampled

STEPS = st.integers(0, 2**40)
LEVELS = st.integers(0, MAX_LEVEL)
SMALL_LEVELS = st.integers(0, 10)


@given(step=STEPS)
def test_at_level_0_every_step_is_sampled(step: int) -> None:
    assert is_sampled(step, 0)


@given(block=st.integers(0, 2**40), level=SMALL_LEVELS)
def test_each_block_has_exactly_one_sampled_step(block: int, level: int) -> None:
    first = block << level
    assert sum(is_sampled(step, level) for step in range(first, first + 2**level)) == 1


@given(block=st.integers(0, 2**40), level=st.integers(0, MAX_LEVEL - 1))
def test_a_step_sampled_at_a_level_is_sampled_at_all_lower_ones(block: int, level: int) -> None:
    sampled = next_sampled(block << level + 1, level + 1)
    assert all(is_sampled(sampled, lower) for lower in range(level + 2))


@given(step=STEPS, level=LEVELS)
def test_the_next_step_is_sampled_and_none_before_it_is(step: int, level: int) -> None:
    sampled = next_sampled(step, level)
    assert step <= sampled < step + 2 ** (level + 1)
    assert is_sampled(sampled, level)
    assert not any(is_sampled(between, level) for between in range(step, min(sampled, step + 1000)))


@given(step=STEPS, level=SMALL_LEVELS)
def test_a_step_is_sampled_if_it_is_the_next_one_from_itself_on(step: int, level: int) -> None:
    assert is_sampled(step, level) == (next_sampled(step, level) == step)


@pytest.mark.parametrize("level", [1, 2, 3, 5])
@pytest.mark.parametrize("period", [2, 3, 4, 7, 8, 10, 32, 50, 64, 100, 128, 1000])
def test_an_event_in_every_nth_step_is_neither_always_nor_never_sampled(period: int, level: int) -> None:
    """Compare with the share of one in 2**level, within four standard deviations of independent draws."""
    occasions = 5_000
    for phase in {0, 1, period - 1}:
        count = sum(is_sampled(period * occasion + phase, level) for occasion in range(occasions))
        share = 2.0**-level
        assert count == pytest.approx(occasions * share, abs=4 * math.sqrt(occasions * share * (1 - share)) + 1)


@pytest.mark.parametrize("level", [3, 6])
def test_the_offsets_in_blocks_have_no_pattern(level: int) -> None:
    offsets = [next_sampled(block << level, level) - (block << level) for block in range(4096)]
    counts = [offsets.count(offset) for offset in range(2**level)]
    expected = len(offsets) / 2**level
    assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in counts)
    for distance in range(1, 9):  # nearby blocks have the same offset as often as by chance
        equal = sum(a == b for a, b in zip(offsets, offsets[distance:], strict=False))
        assert abs(equal - expected) < 5 * math.sqrt(expected)
