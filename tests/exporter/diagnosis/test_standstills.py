"""Runs that stand still: which of them hang, which pause or take long steps, and what their pace is."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest
from testing.readings import STEP, Adjust, Change, Training, Trial, Work, counting, drift, hang, spend

from rankscope_exporter.diagnosis.judge import RunJudge
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.standstill import AWAITED, PACES


def scaled(factor: float, *changes: Change) -> Change:
    """Make all steps so many times as long; other changes come before."""

    def change(step: int, rank: int, work: dict[str, float]) -> None:
        for each in changes:
            each(step, rank, work)
        for phase in work:
            work[phase] *= factor

    return change


def events(after: float, *phases: str, every: float = 0.0) -> Adjust:
    """Return ranks that have events again and again in these phases, from that time on."""

    def adjust(one: RankReading) -> RankReading:
        if one.at <= after or one.phase not in phases:
            return one
        last = one.at - (one.at % every if every else 0.05)
        return replace(one, last_progress=max(last, one.last_progress))

    return adjust


def hangs(trial: Trial) -> list[tuple[int | None, str]]:
    """Return rank and cause of each hang."""
    return [(one.candidate.place.rank, one.candidate.cause) for one in trial.opened("hang")]


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize(("phase", "every"), [("data_wait", 0.0), ("data_wait", 4.0), ("forward", 0.0), ("other", 0.0)])
def test_a_rank_that_has_events_for_ever_hangs_as_soon_as_one_without(phase: str, every: float, clock: str) -> None:
    trial = Trial(Training(3, clock=clock)).trained(60)
    trial.training.adjust = events(62.0, phase, every=every)
    seconds, finding = trial.find(hang(phase, 2))
    assert finding
    assert (finding.kind, finding.candidate.place.rank, finding.candidate.cause) == ("hang", 2, phase)
    assert seconds <= 60.0
    trial.train(60, hang(phase, 2))
    assert len(hangs(trial)) == 1


def test_a_rank_that_looks_for_a_batch_for_a_while_does_not_hang() -> None:
    trial = Trial(Training(3)).trained(60)
    trial.training.adjust = events(62.0, "data_wait")
    trial.train(1, spend("data_wait", 35.0, 2))
    assert not hangs(trial.trained(60))


def test_ranks_that_all_fetch_for_ever_hang() -> None:
    trial = Trial(Training(2)).trained(60)
    trial.training.adjust = events(62.0, "data_wait")
    assert trial.find(hang("data_wait"))[0] <= 60.0


def test_uneven_ranks_with_steps_of_minutes_do_not_hang_in_the_first_ones() -> None:
    def uneven(step: int, rank: int, work: Work) -> None:
        work.update(forward=120.0, backward=230.0 if step % 2 == rank else 400.0)

    begun = lambda one: counting(one, steps=max(one.counters.steps - 1.0, 0.0))  # noqa: E731
    trial = Trial(Training(2, adjust=begun), every=5).trained(3000, uneven)
    assert not trial.kinds()
    assert [one.kind for one in trial.train(1500, uneven, hang("backward", 1)).findings] == ["hang"]


@pytest.mark.parametrize(("forward", "steps", "seconds"), [(0.1, 0, 90), (40, 1, 90), (300, 1, 450), (400, 0, 300)])
def test_a_hang_in_the_first_steps_is_found_by_how_long_they_take(forward: float, steps: int, seconds: float) -> None:
    """A forward pass compiles, or computes for minutes."""
    training = Training(2, adjust=lambda one: counting(one, steps=float(steps)))
    found, _ = Trial(training).find(lambda _, rank, work: work.update(forward=forward, backward=inf if rank else 0.1))
    assert found - 5.0 - forward == pytest.approx(seconds, abs=2.0)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("phase", ["forward", "evaluation", "other"])
def test_ranks_that_work_for_themselves_do_not_hang(phase: str, ranks: int) -> None:
    """An evaluation of ten minutes after a training, or between two of its steps."""
    trial = Trial(Training(ranks)).trained(60)
    trial.training.adjust = events(62.0, phase)
    trial.train(1, spend(phase, 600.0))
    assert not hangs(trial.trained(620))


@pytest.mark.parametrize("pause", [60.0, 400.0, 1800.0])
def test_pauses_of_all_ranks_are_no_hangs_and_do_not_delay_one(pause: float) -> None:
    """Another process makes rollouts meanwhile."""
    trial = Trial(Training(2)).trained(60)
    for _ in range(2):
        trial.train(1, spend("other", pause))
        trial.every = 5
        trial.train(pause + 60)
        trial.every = 1
    assert not trial.kinds() & {"hang"}
    for phase in ("other", "data_wait", "backward"):
        seconds, finding = trial.find(hang(phase, 1))
        assert finding
        assert (finding.kind, finding.candidate.place.rank, finding.candidate.cause) == ("hang", 1, phase)
        assert seconds <= 60.0
        trial.training._step_began, trial.training._length = trial.training.now, 1.0  # it goes on
        trial.training._begin_step(())
        trial.train(20)


def test_a_collective_that_never_ends_is_found_in_a_run_that_pauses() -> None:
    trial = Trial(Training(2)).trained(60)
    trial.train(1, spend("other", 400.0))
    trial.train(460)
    assert trial.find(hang("collective_wait"))[0] <= 60.0
    assert hangs(trial)[0][1] == "inside_collective"


def test_a_rank_that_the_others_often_wait_for_is_found_once() -> None:
    """Rank 0 samples images."""
    trial = Trial(Training(2), every=5).trained(60)
    for _ in range(3):
        trial.train(1, spend("other", 60.0, 0))
        trial.train(1500)
    assert hangs(trial) == [(0, "other")]
    trial.train(2700)
    trial.train(1, spend("other", 60.0, 0))
    trial.train(90)
    assert hangs(trial) == [(0, "other")]


@pytest.mark.parametrize(("seconds", "clock"), [(60.0, "host"), (600.0, "device"), (1200.0, "host")])
def test_long_steps_are_no_hangs_and_a_hang_is_found_by_their_pace(seconds: float, clock: str) -> None:
    factor, training = seconds / sum(STEP.values()), Training(2, clock=clock, transfer=0.01 * seconds)
    trial = Trial(training, every=5).trained(2.5 * seconds, scaled(factor, drift))
    trial.train(3.0 * 1.6 * seconds, scaled(factor, drift, spend("backward", 0.12, 1)))
    assert not hangs(trial)
    onset = training.now
    trial.train(8.0 * seconds, scaled(factor, hang("backward", 0)))
    (found,) = trial.opened("hang")
    assert found.candidate.place.rank == 0
    assert found.opened - onset > 2.0 * seconds


@pytest.mark.parametrize(
    ("seconds", "waited", "is_hang"), [(600.0, 185.0, False), (60.0, 400.0, True), (sum(STEP.values()), 185.0, True)]
)
def test_a_wait_that_is_short_compared_with_a_step_is_no_hang(seconds: float, waited: float, is_hang: bool) -> None:
    factor = seconds / sum(STEP.values())
    trial = Trial(Training(3), every=5).trained(330.0 + 4.0 * seconds, scaled(factor))
    trial.train(seconds, scaled(factor, spend("data_wait", waited / factor, 1)))
    trial.train(waited + 2.0 * seconds, scaled(factor))
    assert bool(hangs(trial)) == is_hang


def test_a_hang_in_a_checkpoint_is_found_by_the_pace_of_checkpoints() -> None:
    trial = Trial(Training(2)).trained(60)
    trial.train(1, spend("checkpoint", 100.0, 0))
    trial.train(120)
    assert not hangs(trial)
    seconds, finding = trial.find(hang("checkpoint", 0))
    assert finding
    assert seconds == pytest.approx(400.0, abs=6.0)
    assert finding.candidate.cause == "checkpoint"


def test_an_exporter_that_is_restarted_keeps_the_pace() -> None:
    trial = Trial(Training(2)).trained(60)
    trial.train(1, spend("other", 100.0, 0))
    trial.train(130)
    saved = json.loads(json.dumps(trial.judge.state(trial.training.now)))
    trial.judge = RunJudge(trial.judge.run)
    trial.judge.restore(saved, trial.training.now)
    assert trial.find(hang("other", 0))[0] == pytest.approx(400.0, abs=6.0)


def test_a_record_with_many_phases_does_not_let_the_pace_grow() -> None:
    """The owner of a record names its phases."""
    trial = Trial(Training(2)).trained(60)
    for number in range(40):
        trial.train(1, spend(f"phase-{number}", 8.0), spend(f"other-{number}", 8.0, 0))
        trial.train(16)
    assert trial.judge.history.state(trial.training.now)["pace"].keys() <= AWAITED


def restarting(rank: int, every: float) -> Adjust:
    """Return a training in which one rank's process starts again and again."""
    return lambda one: replace(one, began=one.began + every * (one.at // every)) if one.rank == rank else one


@pytest.mark.parametrize("every", [20.0, 45.0])
def test_a_rank_that_restarts_does_not_end_the_findings_of_others(every: float) -> None:
    trial = Trial(Training(4, adjust=restarting(3, every))).trained(300, drift, spend("backward", 0.12, 1))
    assert [one.candidate.place.rank for one in trial.opened()] == [1]
    assert [one.kind for one in trial.verdicts[-1].findings] == ["straggler"]


def test_a_rank_that_restarts_does_not_delay_a_hang_of_another_rank() -> None:
    trial = Trial(Training(4, adjust=restarting(3, 20.0))).trained(120)
    seconds, finding = trial.find(hang("backward", 1))
    assert finding
    assert (finding.kind, finding.candidate.place.rank) == ("hang", 1)
    assert seconds <= 60.0


def test_the_finding_of_a_rank_ends_with_its_process() -> None:
    trial = Trial(Training(4)).trained(60, spend("backward", 0.12, 1))
    assert trial.verdicts[-1].findings
    began = trial.training.now
    trial.training.adjust = lambda one: replace(one, began=began) if one.rank == 1 else one
    assert not trial.train(2).findings
    assert not trial.train(60).findings


@pytest.mark.parametrize(
    ("last_event", "is_slow"),
    [
        pytest.param(inf, False, id="forward passes without end"),
        pytest.param(2000.0, False, id="a server without requests after a while"),
        pytest.param(200.0, True, id="a start-up that hangs"),
    ],
)
def test_a_run_without_an_optimizer_is_no_slow_start_up(last_event: float, is_slow: bool) -> None:
    adjust: Adjust = lambda one: replace(one, last_progress=min(one.at - 0.1, last_event))  # noqa: E731
    trial = Trial(Training(2, startup=inf, adjust=adjust), every=5).trained(5000 if not is_slow else 1000)
    assert trial.kinds() == ({"slow_startup"} if is_slow else set())


def test_a_hang_lengthens_the_limit_of_its_own_rank_alone() -> None:
    trial = Trial(Training(2)).trained(330)
    trial.train(1, spend("other", 80.0, 1))
    trial.train(100)
    assert trial.find(hang("other", 0))[0] <= 60.0


def test_pauses_of_one_rank_after_the_other_hang_twice_at_most() -> None:
    """Then they are the pace of all ranks: a hang of another one is found by it."""
    trial = Trial(Training(8), every=2).trained(330)
    for rank in range(6):
        trial.train(1, spend("other", 80.0, rank))
        trial.train(100)
    assert len(trial.opened("hang")) == 2
    assert 80.0 < trial.find(hang("other", 7), kinds={"hang"})[0] <= 4 * 81.0


def test_the_paces_of_a_run_are_limited() -> None:
    pace = Trial(Training(2)).trained(330).judge.history.pace
    pace._waited = {("backward", rank): 100.0 for rank in range(1000)}
    pace._end(400.0, ())
    assert len(pace.longest) <= PACES
