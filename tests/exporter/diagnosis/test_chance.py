"""Ranks whose steps differ at random: the rank that waits least in a dozen steps is not slow."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from testing.readings import EARLY, RUN, SLOW, Change, Training, Trial, Work, counting, spend

from rankscope_exporter.diagnosis.judge import RunJudge

SHORT = replace(EARLY, baseline_seconds=600.0)
"""Thresholds with a baseline after 100 s."""
SECOND = 5.0
"""A step of 0.2 s times this takes a second: the shortest window has a dozen steps."""


def uneven(deviation: float, seed: int) -> Change:
    """Make every rank compute for a random time in each step."""
    draw = random.Random(seed)

    def change(_step: int, _rank: int, work: Work) -> None:
        work["forward"] = SECOND * 0.2 * max(draw.gauss(1.0, deviation), 0.1)

    return change


@pytest.mark.parametrize(("ranks", "deviation"), [(4, 1.0), (10, 0.5), (10, 0.2)])
def test_uneven_work_from_the_start_is_no_finding_and_no_rank_is_named(ranks: int, deviation: float) -> None:
    trial = Trial(Training(ranks), SHORT)
    verdict = trial.train(300, uneven(deviation, seed=0))
    assert not trial.kinds()
    (pending,) = (one for one in verdict.pending if one.candidate.kind == "rotating_straggler")
    assert (pending.lacks, pending.candidate.cause) == ("usual", "uneven_work")


def test_uneven_work_is_a_finding_if_hardly_a_job_has_as_much() -> None:
    trial = Trial(Training(64), SHORT)
    trial.train(60, lambda step, rank, work: work.update(forward=0.02 if step % 64 != rank else 2.0))
    assert trial.kinds() == {"rotating_straggler"}


@pytest.mark.parametrize(("ranks", "before", "seconds"), [(10, 0.1, 60.0), (3, 0.01, 700.0)])
def test_uneven_work_that_increases_is_a_finding_until_it_is_as_before(
    ranks: int, before: float, seconds: float
) -> None:
    trial = Trial(Training(ranks), SHORT)
    trial.train(150, uneven(before, seed=0))
    assert not trial.kinds()
    trial.train(seconds, uneven(0.5, seed=1))
    assert [finding.candidate.cause for finding in trial.opened("rotating_straggler")] == ["uneven_work"]
    assert not trial.train(120, uneven(before, seed=2)).findings


def test_the_wait_for_a_slow_rank_is_not_usual() -> None:
    trial = Trial(Training(4), SHORT)
    trial.train(150)
    trial.train(150, SLOW)
    trial.train(60)
    trial.train(60, uneven(0.5, seed=1))
    assert [finding.candidate.cause for finding in trial.opened("rotating_straggler")] == ["uneven_work"]


def test_uneven_work_for_longer_than_the_baseline_stays_a_finding_over_a_restart() -> None:
    trial = Trial(Training(3), SHORT)
    trial.train(150)
    trial.train(700, uneven(0.5, seed=1))
    state, trial.judge = trial.judge.state(trial.training.now), RunJudge(RUN, SHORT)
    trial.judge.restore(state, trial.training.now)
    assert [one.kind for one in trial.train(60, uneven(0.5, seed=2)).findings] == ["rotating_straggler"]


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


def paused(seconds: float, every: int, ranks: int, number: int = 0) -> Change:
    """Make a random rank, or the one with this number, pause in every n-th step."""
    draw = random.Random(ranks)
    chosen = [number or draw.randrange(ranks) for _ in range(1000)]

    def change(step: int, rank: int, work: Work) -> None:
        if step % every == 0 and chosen[step // every] == rank:
            work["other"] = seconds

    return change


@pytest.mark.parametrize(
    ("ranks", "seconds", "every", "clock"),
    [(2, 1.0, 20, "host"), (8, 2.0, 25, "host"), (8, 2.0, 25, "device"), (20, 0.8, 15, "host")],
)
def test_ranks_that_pause_one_at_a_time_are_late_in_turn(ranks: int, seconds: float, every: int, clock: str) -> None:
    """Most blocks of seven seconds have one pause, and so one late rank."""
    trial = Trial(Training(ranks, clock=clock)).trained(30)
    trial.train(150, paused(seconds, every, ranks))
    (finding,) = trial.verdicts[-1].findings
    found = finding.candidate
    assert (found.kind, found.place.ranks, found.cause) == ("rotating_straggler", (), "spikes")
    assert 0.5 <= found.ratio * (0.2 * every + seconds) / seconds <= 1.5
    assert len(trial.kinds()) == 1


@pytest.mark.parametrize("clock", ["host", "device"])
def test_pauses_of_one_rank_are_not_in_turn_and_short_ones_are_none(clock: str) -> None:
    trial = Trial(Training(4, clock=clock))
    assert not trial.trained(200, paused(0.1, 20, 4)).kinds()
    trial.train(200, paused(1.0, 20, 4, number=1))
    assert [one.candidate.place.ranks for one in trial.verdicts[-1].findings] == [(1,)]
    assert trial.kinds() == {"straggler"}


@pytest.mark.parametrize("seed", range(3))
def test_two_ranks_with_uneven_work_have_no_straggler(seed: int) -> None:
    assert not Trial(Training(2), every=3).trained(900, uneven(0.15, seed)).opened()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_that_are_late_in_few_steps_by_chance_are_no_stragglers(ranks: int, seed: int) -> None:
    """Ranks are late in few steps, by times with a heavy tail (Pareto's distribution)."""
    draw = random.Random(seed)

    def late(_step: int, _rank: int, work: Work) -> None:
        work["backward"] += 0.1 * draw.paretovariate(1.5) if draw.random() < 0.3 / ranks else 0.0

    assert not Trial(Training(ranks), every=3).trained(1200, late).opened()
