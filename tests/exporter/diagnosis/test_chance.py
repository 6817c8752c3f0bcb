"""Ranks whose steps differ at random: the rank that waits least in a dozen steps is not slow."""

from __future__ import annotations

import random

import pytest
from testing.readings import Change, Training, Trial, Work, counting, spend

SECOND = 5.0
"""A step of 0.2 s times this takes a second: the shortest window has a dozen steps."""


def uneven(deviation: float, seed: int) -> Change:
    """Make every rank compute for a random time in each step."""
    draw = random.Random(seed)

    def change(_step: int, _rank: int, work: Work) -> None:
        work["forward"] = SECOND * 0.2 * max(draw.gauss(1.0, deviation), 0.1)

    return change


@pytest.mark.parametrize(("ranks", "deviation"), [(4, 1.0), (10, 0.5)])
def test_no_rank_is_named_if_all_differ_at_random(ranks: int, deviation: float) -> None:
    trial = Trial(Training(ranks))
    trial.train(600, uneven(deviation, seed=0))
    assert trial.kinds() == {"rotating_straggler"}


@pytest.mark.parametrize(("ranks", "seconds"), [(2, 1.0), (4, 2.0), (10, 1.0)])
def test_a_slow_rank_is_named_among_ranks_that_differ_at_random(ranks: int, seconds: float) -> None:
    """A slow rank of two differs only after most steps from one that is late by chance."""
    trial = Trial(Training(ranks))
    trial.train(60, uneven(0.2, seed=1))
    trial.train(130 if ranks == 2 else 60, uneven(0.2, seed=2), spend("backward", seconds, 1))
    (finding,) = trial.verdicts[-1].findings
    assert (finding.kind, finding.candidate.place.rank, finding.candidate.cause) == ("straggler", 1, "backward")


@pytest.mark.parametrize(("seconds", "is_found"), [(8.0, False), (60.0, True)])
def test_collectors_that_run_in_turn_for_some_seconds_do_not_alert(seconds: float, is_found: bool) -> None:
    """Eight ranks collect one after the other for 0.15 s, one in each step of 0.2 s."""
    training = Training(8, adjust=lambda one: counting(one, gc_seconds=0.08 * one.at))
    trial = Trial(training)
    trial.train(60)
    trial.train(seconds, lambda step, rank, work: work.update(backward=0.27 if step % 8 == rank else 0.12))
    trial.train(60)
    assert [one.candidate.cause for one in trial.opened("rotating_straggler")] == ["gc"] * is_found
