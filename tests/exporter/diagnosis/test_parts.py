"""The losses of a run in parts of its time, on which persistence is decided."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.diagnosis.parts import CAPACITY, Column, Key, Lasting, Parts, Span

LOSS: Column = ("straggler", None)
LAG: Key = ("straggler", ())
LATE: Column = ("straggler", 1)
OTHER: Column = ("straggler", 0)
SHORT = 8.0
LIMIT = 1e-5


def parts(losses: list[float | None], seconds: float = 1.0, steps: float = 2.0) -> Parts:
    """Return parts of a second with these losses, the oldest first."""
    found = Parts(0.07)
    for number, loss in enumerate(losses, start=1):
        found.add(number * seconds, seconds, steps, {} if loss is None else {LOSS: loss})
    return found


def span(losses: list[float | None], seconds: float = SHORT) -> Span:
    found = parts(losses).span(seconds)
    assert found
    return found


def lasting(losses: list[float | None], number: int, allowance: float = 0.0) -> Lasting:
    """Return how a loss has lasted for this number of the newest parts."""
    found = parts(losses).lasting(LAG, allowance)
    return next(one for one in found if len(one.span) == number)


def test_a_span_has_the_seconds_and_parts_that_it_needs() -> None:
    assert parts([0.0] * 10).span(11.0) is None
    assert parts([0.0] * 11).span(11.0)
    assert parts([0.0] * 2, seconds=60.0).span(11.0, least=3) is None
    assert parts([0.0] * 3, seconds=60.0).span(11.0, least=3)


def test_a_span_has_the_newest_parts_and_is_no_longer_than_needed() -> None:
    found = span([0.9] * 10 + [0.1] * 8)
    assert found.begins == 10.0
    assert found.values(LAG) == pytest.approx([0.1] * 8)


def test_a_steady_loss_is_not_a_matter_of_chance_and_a_varying_one_may_be() -> None:
    assert lasting([0.3, 0.31, 0.29, 0.3], 4).chance < 1e-3
    assert lasting([0.3, 0.31, 0.29, 0.3] * 2, 8).chance < LIMIT
    assert lasting([0.6, 0.0, 0.6, 0.0] * 2, 8).chance > LIMIT
    assert lasting([-0.3] * 8, 8).chance == 1.0


def test_a_steady_loss_of_few_parts_may_be_chance_if_ranks_were_late_in_turn() -> None:
    assert of_two([1] * 8, 8).chance < LIMIT
    assert of_two([0] * 30 + [1] * 8, 8).chance < LIMIT
    assert of_two([0, 1] * 15 + [1] * 8, 8).chance > LIMIT


def test_a_loss_is_measured_beyond_its_allowance() -> None:
    assert lasting([0.3, 0.31, 0.29, 0.3] * 2, 8, allowance=0.2).chance < LIMIT
    assert lasting([0.3, 0.31, 0.29, 0.3] * 2, 8, allowance=0.3).chance > 0.1
    assert lasting([0.3] * 8, 8, allowance=0.2).mean == pytest.approx(0.3)


def test_a_single_event_may_be_chance_and_a_number_of_them_is_not() -> None:
    assert lasting([9.0, *[0.0] * 7], 8).chance > 0.1
    assert lasting([0.0, 0.0, 0.0, *[0.4] * 5], 8).chance > LIMIT
    assert lasting([0.0, *[0.4] * 7], 8).chance < LIMIT
    assert lasting([0.0, 0.4, 0.0] * 7, 20).chance < LIMIT


def of_two(last: list[int], number: int) -> Lasting:
    """Return how the lag of rank 1 has lasted for a number of parts, if one of two ranks is late in each."""
    found = Parts(0.07)
    for end, rank in enumerate(last, start=1):
        waits = {LATE: 0.0 if rank else 0.4, OTHER: 0.4 if rank else 0.0}
        found.add(float(end), 1.0, 2.0, waits, [[LATE, OTHER]])
    return next(one for one in found.lasting(("straggler", (1,)), 0.0) if len(one.span) == number)


def test_the_same_one_of_few_ranks_has_to_be_last_in_more_events() -> None:
    assert of_two([1, 1, 1, 0] * 5, 20).chance > LIMIT
    assert of_two([1, 1, 1, 1, 1, 0] * 10, 56).chance < 1e-3


def test_only_parts_in_which_a_loss_is_known_count() -> None:
    found = [*parts([None, 0.1, None, *[0.3, None, None] * 8]).lasting(LAG, 0.0)]
    assert found[0].span.values(LAG)[-1] == 0.3
    assert found[0].span.seconds == 9.0, "three parts in which it is known"
    assert span([None] * 8).mean(LAG) is None


def test_a_part_counts_by_its_seconds_and_compared_steps_by_theirs() -> None:
    found = Parts(0.07, {"straggler"})
    for ends, seconds, lag, compared in ((20.0, 20.0, 0.9, 2.0), (30.0, 10.0, 0.0, 6.0)):
        found.add(ends, seconds, 1.0, {LOSS: lag, ("data", None): lag}, compared=compared)
    newest = found.span(30.0)
    assert newest
    assert newest.mean(("data", ())) == pytest.approx(0.6)
    assert newest.mean(LAG) == pytest.approx(0.225)


def test_the_longest_gap_is_the_time_between_two_events() -> None:
    assert span([0.5] * 8).longest_gap(LAG, 0.1) == 0.0
    assert span([0.5, 0.5, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5]).longest_gap(LAG, 0.1) == 4.0
    assert span([0.0] * 7 + [0.5]).longest_gap(LAG, 0.1) == 0.0


def test_a_loss_rises_where_it_begins_to_exceed_the_level() -> None:
    assert span([0.0] * 4 + [0.5] * 4).rise(LAG, 0.1).begins == 4.0
    assert span([0.2] + [0.0] * 3 + [0.5] * 4).rise(LAG, 0.1).begins == 4.0
    assert span([0.0] * 4 + [0.5, 0.0, 0.5, 0.5]).rise(LAG, 0.1).begins == 4.0
    assert span([0.0] * 8).rise(LAG, 0.1).begins == 7.0


@pytest.mark.parametrize("seconds", [60.0, 300.0, 1500.0])
def test_longer_spans_have_longer_parts_with_the_same_mean(seconds) -> None:
    found = parts([0.1, 0.3] * 1000).span(seconds)
    assert found
    assert 2000.0 - found.begins == pytest.approx(seconds, abs=100.0)
    assert found.mean(LAG) == pytest.approx(0.2, abs=0.01)


@given(st.lists(st.none() | st.floats(0.0, 1.0), min_size=1, max_size=300), st.sampled_from([0.5, 1.0, 4.0, 40.0]))
def test_parts_are_bounded_and_means_are_within_the_losses(losses: list[float | None], seconds: float) -> None:
    found = parts(losses, seconds).span(min(90.0, seconds * len(losses)))
    known = [loss for loss in losses if loss is not None]
    if found:
        assert len(found.values(LAG)) <= CAPACITY
        mean = found.mean(LAG)
        assert mean is None or min(known) - 1e-9 <= mean <= max(known) + 1e-9
        assert all(math.isnan(value) or 0.0 <= value <= 1.0 + 1e-9 for value in found.values(LAG))


def test_a_pause_does_not_change_the_usual_rate_and_useful_work() -> None:
    """Two of four parts are pauses: an evaluation of five minutes, and a checkpoint of one rank."""
    found = Parts(0.07)
    for ends, seconds, steps, useful in ((6.0, 6.0, 5.0, 0.8), (26.0, 20.0, 1.0, 0.1), (32.0, 6.0, 5.0, 0.7)):
        found.add(ends, seconds, steps, {LOSS: useful})
    found.add(332.0, 300.0, 1.0, {LOSS: 0.0})
    newest = found.span(SHORT, least=4)
    assert newest
    assert newest.median(LAG) == 0.7
    assert newest.steps_rate() == pytest.approx(10.0 / 12.0)


def test_the_rate_is_the_mean_of_parts_with_few_steps() -> None:
    """Steps of 0.75 s: a part of a second has one or two, and most have one."""
    found = Parts(0.07)
    for number in range(1, 13):
        found.add(float(number), 1.0, 2.0 if number % 3 == 0 else 1.0, {})
    newest = found.span(12.0)
    assert newest
    assert newest.steps_rate() == pytest.approx(4.0 / 3.0, rel=0.1)
