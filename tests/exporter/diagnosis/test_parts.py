"""The losses of a run in parts of its time, on which persistence is decided."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.diagnosis.parts import CAPACITY, Key, Parts, Span
from rankscope_exporter.diagnosis.thresholds import Tier

LAG: Key = ("straggler", 1)
SHORT = Tier(0.2, 8.0, 12, 8, 0.25)


def parts(losses: list[float | None], seconds: float = 1.0, steps: float = 2.0) -> Parts:
    """Return parts of a second with these losses, the oldest first."""
    found = Parts()
    for number, loss in enumerate(losses, start=1):
        found.add(number * seconds, seconds, steps, {} if loss is None else {LAG: loss})
    return found


def span(losses: list[float | None], tier: Tier = SHORT) -> Span:
    found = parts(losses).span(tier)
    assert found
    return found


@pytest.mark.parametrize(
    "tier",
    [SHORT._replace(seconds=11.0), SHORT._replace(steps=21), SHORT._replace(parts=11)],
    ids=["seconds", "steps", "parts"],
)
def test_a_span_has_the_seconds_steps_and_parts_of_its_tier(tier) -> None:
    assert parts([0.0] * 10).span(tier) is None
    assert parts([0.0] * 11).span(tier)


def test_a_span_has_the_newest_parts_and_is_no_longer_than_needed() -> None:
    found = span([0.9] * 10 + [0.1] * 8)
    assert found.begins == 10.0
    assert found.values(LAG) == pytest.approx([0.1] * 8)


def test_a_loss_exceeds_a_tier_by_its_mean_beyond_the_allowance() -> None:
    assert span([0.3] * 8).exceeds(LAG, SHORT)
    assert not span([0.3] * 8).exceeds(LAG, SHORT, allowance=0.15)
    assert not span([0.15] * 8).exceeds(LAG, SHORT)


def test_a_single_event_does_not_exceed_a_tier() -> None:
    assert span([0.0, 0.0, *[0.4] * 6]).exceeds(LAG, SHORT)
    assert not span([0.0, 0.0, 0.0, *[0.4] * 5]).exceeds(LAG, SHORT)
    assert not span([9.0, *[0.0] * 7]).exceeds(LAG, SHORT)


def test_an_unknown_loss_is_below_every_limit() -> None:
    assert span([None, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, None]).exceeds(LAG, SHORT)
    assert not span([None, None, None, 0.3, 0.3, 0.3, 0.3, 0.3]).exceeds(LAG, SHORT)
    assert not span([None] * 8).exceeds(LAG, SHORT)
    assert span([None] * 8).mean(LAG) is None


def test_a_span_of_a_key_has_only_the_parts_in_which_its_loss_is_known() -> None:
    found = parts([None, 0.1, None, *[0.3, None, None] * 8]).span(SHORT, LAG)
    assert found
    assert found.values(LAG) == pytest.approx([0.3] * 8)
    assert found.exceeds(LAG, SHORT)
    assert parts([0.3, None, None] * 7).span(SHORT, LAG) is None
    assert parts([0.3] * 20).span(SHORT, ("launch", None)) is None


def test_a_loss_rises_where_it_begins_to_exceed_the_level() -> None:
    assert span([0.0] * 4 + [0.5] * 4).rise(LAG, 0.1).begins == 4.0
    assert span([0.2] + [0.0] * 3 + [0.5] * 4).rise(LAG, 0.1).begins == 4.0
    assert span([0.0] * 4 + [0.5, 0.0, 0.5, 0.5]).rise(LAG, 0.1).begins == 4.0
    assert span([0.0] * 8).rise(LAG, 0.1).begins == 7.0


@pytest.mark.parametrize("seconds", [60.0, 300.0, 1500.0])
def test_longer_spans_have_longer_parts_with_the_same_mean(seconds) -> None:
    found = parts([0.1, 0.3] * 1000).span(Tier(0.1, seconds, 12, 8, 0.4))
    assert found
    assert 2000.0 - found.begins == pytest.approx(seconds, abs=30.0)
    assert found.mean(LAG) == pytest.approx(0.2, abs=0.01)


@given(st.lists(st.none() | st.floats(0.0, 1.0), min_size=1, max_size=300), st.sampled_from([0.5, 1.0, 4.0, 40.0]))
def test_parts_are_bounded_and_means_are_within_the_losses(losses: list[float | None], seconds: float) -> None:
    found = parts(losses, seconds).span(Tier(0.1, min(90.0, seconds * len(losses)), 1, 1, 0.4))
    known = [loss for loss in losses if loss is not None]
    if found:
        assert len(found.values(LAG)) <= CAPACITY
        mean = found.mean(LAG)
        assert mean is None or min(known) - 1e-9 <= mean <= max(known) + 1e-9
        assert all(math.isnan(value) or 0.0 <= value <= 1.0 + 1e-9 for value in found.values(LAG))


def test_a_pause_does_not_change_the_usual_rate_and_useful_work() -> None:
    """Two of four parts are pauses: an evaluation of five minutes, and a checkpoint of one rank."""
    found = Parts()
    for ends, seconds, steps, useful in ((6.0, 6.0, 5.0, 0.8), (26.0, 20.0, 1.0, 0.1), (32.0, 6.0, 5.0, 0.7)):
        found.add(ends, seconds, steps, {LAG: useful})
    found.add(332.0, 300.0, 1.0, {LAG: 0.0})
    newest = found.span(SHORT._replace(parts=4))
    assert newest
    assert newest.median(LAG) == 0.7
    assert newest.steps_rate() == pytest.approx(10.0 / 12.0)


def test_the_rate_is_the_mean_of_parts_with_few_steps() -> None:
    """Steps of 0.75 s: a part of a second has one or two, and most have one."""
    found = Parts()
    for number in range(1, 13):
        found.add(float(number), 1.0, 2.0 if number % 3 == 0 else 1.0, {})
    newest = found.span(SHORT)
    assert newest
    assert newest.steps_rate() == pytest.approx(4.0 / 3.0, rel=0.1)
