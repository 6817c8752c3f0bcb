"""Losses in each step and losses that come again, in steps of any length: found once, and open between."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from testing.readings import DEVICE, HOST, SLOW, Change, Training, Trial, Work, drift, spend

from rankscope_exporter.diagnosis.findings import Finding
from rankscope_exporter.diagnosis.readings import RankReading

STEP_SECONDS = 0.21


def scaled(factor: float) -> Change:
    """Make all steps longer."""

    def change(_step: int, _rank: int, work: Work) -> None:
        for phase in work:
            work[phase] *= factor

    return change


def each(seconds: float, *changes: Change) -> Change:
    """Make these changes in the first step of each period, in seconds of healthy steps."""

    def change(step: int, rank: int, work: Work) -> None:
        if step % round(seconds / STEP_SECONDS) == 0:
            for one in changes:
                one(step, rank, work)

    return change


def of_random_rank(ranks: int, phase: str, seconds: float, seed: int) -> Change:
    """Make one of the ranks spend more time in a phase, in each step another one by chance, with a heavy tail."""

    def change(step: int, rank: int, work: Work) -> None:
        draw = random.Random(f"{seed}-{step}")
        if rank == draw.randrange(ranks):
            work[phase] = work.get(phase, 0.0) + seconds * draw.paretovariate(2.0) / 2.0

    return change


def shown(trial: Trial, kind: str = "straggler") -> Sequence[Sequence[Finding]]:
    """Return the findings of a kind at each moment since one was first found."""
    found = [[one for one in verdict.findings if one.kind == kind] for verdict in trial.verdicts]
    first = next((number for number, findings in enumerate(found) if findings), len(found))
    return found[first:]


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("factor", [60, 300, 1400], ids=["13 s", "63 s", "294 s"])
def test_a_slow_rank_is_found_after_four_long_steps(ranks: int, factor: int) -> None:
    trial = Trial(Training(ranks, transfer=0.01 * factor), every=10).trained(4 * factor * 0.21, scaled(factor))
    trial.train(5.2 * factor * 0.33, drift, scaled(factor), spend("backward", 0.12 * factor, 1))
    (finding,) = trial.opened()
    assert (finding.candidate.place.rank, finding.candidate.cause) == (1, "backward")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_straggler_that_has_healed_does_not_stay_because_the_work_is_uneven(seed: int) -> None:
    trial, uneven = Trial(Training(4, transfer=0.1), every=2), of_random_rank(4, "backward", 1.6, seed)
    trial.train(600, scaled(10), uneven)
    trial.train(120, scaled(10), uneven, spend("backward", 1.5, 1))
    verdict = trial.train(900, scaled(10), uneven)
    assert "straggler" not in {finding.kind for finding in verdict.findings}


@pytest.mark.parametrize("ranks", [2, 8])
def test_long_steps_of_which_each_is_longer_on_a_random_rank_have_no_straggler(ranks: int) -> None:
    trial = Trial(Training(ranks, transfer=0.6), every=10)
    trial.train(9000, scaled(60), of_random_rank(ranks, "backward", 5.0, seed=ranks))
    assert not trial.opened()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_that_stalls_in_each_tenth_short_step_is_found_as_soon(ranks: int) -> None:
    short = scaled(0.25)
    trial = Trial(Training(ranks, transfer=0.0025)).trained(60, drift, short)
    seconds, finding = trial.find(drift, short, spend("other", 0.5, 1, every=10))
    assert finding
    assert (finding.kind, finding.candidate.place.rank, finding.candidate.cause) == ("straggler", 1, "other")
    assert seconds <= 20.0


@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (2, 2), (2, 3), (8, 1)])
def test_a_random_rank_that_stalls_in_each_tenth_short_step_is_no_straggler(ranks: int, seed: int) -> None:
    stall = of_random_rank(ranks, "other", 0.5, seed)
    trial = Trial(Training(ranks, transfer=0.0025), every=2)
    trial.trained(600, drift, scaled(0.25), each(10 * STEP_SECONDS, stall))
    assert not trial.opened()


@pytest.mark.parametrize(
    ("ranks", "alone", "period", "clock"),
    [
        (8, 8.0, 20.0, HOST),
        (4, 20.0, 40.0, DEVICE),
        (3, 6.0, 30.0, HOST),
        (2, 4.0, 10.0, DEVICE),
    ],
)
def test_a_rank_that_trains_alone_now_and_then_is_one_finding(
    ranks: int, alone: float, period: float, clock: str
) -> None:
    trial = Trial(Training(ranks, clock=clock), every=2).trained(60, drift)
    trial.trained(24 * (alone + period), drift, each(period, spend("other", alone, 0)))
    assert {(one.candidate.place.rank, one.candidate.cause) for one in trial.opened()} == {(0, "other")}
    assert {len(findings) for findings in shown(trial)} == {1}
    (finding,) = shown(trial)[-1]
    assert finding.candidate.ratio == pytest.approx(alone / (alone + period), rel=0.5)


@pytest.mark.parametrize("phase", ["checkpoint", "evaluation"])
@pytest.mark.parametrize("ranks", [(), (0,)], ids=["all ranks", "rank 0"])
def test_a_planned_phase_with_the_same_rhythm_is_no_finding(phase: str, ranks: tuple[int, ...]) -> None:
    trial = Trial(Training(4)).trained(60, drift)
    trial.trained(600, drift, each(40.0, spend(phase, 20.0, *ranks)))
    assert not trial.kinds() - {"slow_checkpoint"}


@pytest.mark.parametrize("seed", range(2))
def test_random_ranks_that_train_alone_with_the_same_rhythm_are_no_stragglers(seed: int) -> None:
    trial = Trial(Training(4), every=2).trained(60, drift)
    trial.trained(1500, drift, each(20.0, of_random_rank(4, "other", 8.0, seed)))
    assert not trial.opened()


@pytest.mark.parametrize(("every", "seconds"), [(10, 1.0), (20, 2.0), (50, 4.0)])
def test_a_rank_that_is_late_in_few_steps_is_found_although_few_are_measured(every: int, seconds: float) -> None:
    """The device measures one step in eight."""
    trial = Trial(Training(4, clock=DEVICE, level=3), every=2).trained(100, drift)
    trial.trained(30 * every * STEP_SECONDS * 8, drift, spend("other", seconds, 0, every=every))
    assert {(one.kind, one.candidate.place.rank) for one in trial.opened()} == {("straggler", 0)}
    assert len(trial.opened()) == 1


@pytest.mark.parametrize(("ranks", "alone", "period"), [(4, 20.0, 40.0), (8, 8.0, 20.0), (2, 30.0, 90.0)])
def test_a_rank_that_trains_alone_is_found_although_none_of_these_steps_is_measured(
    ranks: int, alone: float, period: float
) -> None:
    """The device measures one step in 32."""
    trial = Trial(Training(ranks, clock=DEVICE, level=5), every=2).trained(300, drift)
    trial.trained(12 * (alone + period), drift, each(period, spend("other", alone, 0)))
    assert {(one.candidate.place.rank, one.candidate.cause) for one in trial.opened()} == {(0, "other")}
    assert {len(findings) for findings in shown(trial)} == {1}
    (finding,) = shown(trial)[-1]
    assert finding.candidate.ratio == pytest.approx(alone / (alone + period), rel=0.5)


@pytest.mark.parametrize("seed", range(2))
def test_random_ranks_that_train_alone_are_no_stragglers_although_few_steps_are_measured(seed: int) -> None:
    trial = Trial(Training(4, clock=DEVICE, level=5), every=2).trained(300, drift)
    trial.trained(900, drift, each(20.0, of_random_rank(4, "other", 8.0, seed)))
    assert not trial.opened()


def throttled_each(period: float, lasts: float, factor: float, training: Training) -> Change:
    """Make the steps of rank 2 longer for some seconds of each period, after the first minute."""

    def change(_step: int, rank: int, work: Work) -> None:
        if rank == 2 and training._step_began > 60.0 and (training._step_began - 60.0) % period < lasts:
            work["backward"] += 0.2 * factor

    return change


@pytest.mark.parametrize(("period", "factor"), [(120.0, 15), (600.0, 1)], ids=["steps of 3.2 s", "steps of 0.21 s"])
def test_a_loss_that_returns_after_minutes_is_the_same_finding_and_stays_open_between(
    period: float, factor: float
) -> None:
    trial = Trial(Training(4, transfer=0.01 * factor), every=2)
    trial.train(60, drift, scaled(factor))
    trial.train(3 * period, drift, scaled(factor), throttled_each(period, 30.0, factor, trial.training))
    assert [one.candidate.place.rank for one in trial.opened()] == [2]
    assert all(verdict.findings for verdict in trial.verdicts if verdict.at > period + 60.0 + 40.0)
    assert not trial.train(2 * period + 60.0, drift, scaled(factor)).findings


def test_a_loss_that_returns_with_another_cause_is_another_finding() -> None:
    trial = Trial(Training(4)).trained(60, drift)
    for cause in ("backward", "other"):
        trial.trained(30, drift, spend(cause, 0.12, 1)).trained(120, drift)
    assert [one.candidate.cause for one in trial.opened()] == ["backward", "other"]


def test_a_loss_that_returns_after_longer_than_a_quarter_of_an_hour_is_another_finding() -> None:
    trial = Trial(Training(2))
    for _ in range(2):
        trial.trained(30, drift, SLOW).trained(960, drift)
    assert len(trial.opened()) == 2


def test_a_loss_of_all_ranks_that_comes_each_minute_is_one_finding() -> None:
    trial = Trial(Training(4)).trained(60, drift)
    trial.train(900, drift, each(40.0, spend("data_wait", 20.0)))
    assert len(trial.opened("data")) == 1
    assert {len(findings) for findings in shown(trial, "data")} == {1}


@pytest.mark.parametrize("seconds", [3.0, 5.0])
def test_all_ranks_that_wait_for_data_once_are_no_finding(seconds: float) -> None:
    trial = Trial(Training(4)).trained(60, drift)
    trial.trained(1, spend("data_wait", seconds)).train(300, drift)
    assert not trial.kinds()


@pytest.mark.parametrize("period", [300.0, 600.0])
def test_a_gpu_that_is_idle_now_and_then_is_one_finding(period: float) -> None:
    def idle(one: RankReading) -> RankReading:
        gpu = one.gpu
        assert gpu
        return replace(one, gpu=replace(gpu, memory_ratio=0.01, idle_seconds=max(one.at % period - period + 90.0, 0.0)))

    trial = Trial(Training(1, adjust=idle), every=5).trained(4 * period, drift)
    assert len(trial.opened("cpu_fallback")) == 1
    assert all(verdict.findings for verdict in trial.verdicts if verdict.at > 2 * period)
    trial.training.adjust = lambda one: one
    assert not trial.train(2 * period, drift).findings
