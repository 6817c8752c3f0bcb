"""Stopped processes: a suspended run does not hang, and a stopped rank is the one that the others wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testing.readings import RUN, Adjust, Training, Trial, hang, spend

from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.words import sentence
from rankscope_exporter.report.findings import report_pending

SUSPENDED = 600.0


def stopped(*ranks: int) -> Adjust:
    """Stop these ranks (by default all) when they make no progress, as the collector reads it."""
    return lambda one: replace(one, is_stopped=(not ranks or one.rank in ranks) and one.at - one.last_progress >= 5.0)


def unchanged(one: RankReading) -> RankReading:
    return one


def suspended(trial: Trial, slow_start: float = 0.0) -> Trial:
    """Suspend the run in a step. After it is continued, the step takes so many more seconds."""
    trial.train(1, spend("other", SUSPENDED + slow_start, 0))
    trial.training.adjust, trial.every = stopped(), 5
    trial.train(SUSPENDED - 2)
    trial.training.adjust, trial.every = unchanged, 1
    return trial


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_suspended_run_does_not_hang_and_no_rank_is_slow_afterwards(ranks: int, clock: str) -> None:
    trial = suspended(Trial(Training(ranks, clock=clock)).trained(60))
    (pending,) = trial.verdicts[-1].pending
    assert (pending.candidate.cause, pending.lacks) == ("stopped", "paused")
    assert report_pending(RUN, pending).sentence == "All processes of run llm are stopped"
    trial.train(120)
    assert not trial.kinds()
    assert not trial.verdicts[-1].pending


def test_a_run_that_makes_no_progress_without_being_stopped_hangs() -> None:
    trial = Trial().trained(60)
    trial.train(1, spend("other", SUSPENDED, 0))
    trial.train(SUSPENDED - 2)
    assert trial.kinds() == {"hang"}


def test_the_time_of_a_suspension_is_stall_and_no_phase_of_a_rank() -> None:
    trial = suspended(Trial(Training(2)).trained(60))
    assert trial.verdicts[-1].lost == {"stall": 1.0}
    trial.train(60)
    seconds = [one.new_gpu_seconds for one in trial.verdicts]
    assert sum(one.get("stall", 0.0) for one in seconds) == pytest.approx(2 * SUSPENDED, abs=20.0)
    assert sum(one.get("other", 0.0) + one.get("straggler", 0.0) for one in seconds) < 20.0


def test_a_continued_run_has_its_limit_from_then_on() -> None:
    """A page-in or a reconnection makes the first step longer."""
    trial = suspended(Trial().trained(60), slow_start=30.0)
    assert not trial.trained(60).kinds()


def test_a_run_that_is_continued_and_makes_no_progress_hangs() -> None:
    trial = suspended(Trial().trained(60), slow_start=1e6)
    assert trial.find(kinds=("hang",))[0] <= 90.0


def test_a_suspension_does_not_delay_the_next_hang() -> None:
    """The limit is a multiple of the longest pause of the run, and this is none of its own."""
    trial = suspended(Trial().trained(60)).trained(60)
    assert trial.find(hang("backward", 2))[0] <= 50.0


def test_a_fault_of_before_the_suspension_is_over_in_it_and_found_again_after_it() -> None:
    slow = spend("backward", 0.12, 1)
    trial = Trial().trained(60, slow)
    assert [one.kind for one in trial.verdicts[-1].findings] == ["straggler"]
    suspended(trial)
    assert not trial.verdicts[-1].findings
    trial.train(30, slow)
    assert [one.kind for one in trial.verdicts[-1].findings] == ["straggler"]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_suspended_run_is_judged_by_an_exporter_that_starts_in_the_meantime(is_stopped: bool) -> None:
    """Otherwise Prometheus' rules judge it, which do not know that it is stopped."""
    trial = Trial().trained(60)
    trial.training.adjust = stopped() if is_stopped else unchanged
    trial.train(20, hang("other", 0))
    trial.judge = Trial().judge
    assert trial.train(20).is_ready is is_stopped


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("phase", ["backward", "other"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stopped_rank_that_the_others_wait_for_is_named_with_its_state(ranks: int, phase: str, clock: str) -> None:
    trial = Trial(Training(ranks, clock=clock)).trained(60)
    trial.training.adjust = stopped(1)
    after, finding = trial.find(hang(phase, 1))
    assert finding
    assert (finding.kind, finding.candidate.cause, finding.candidate.place.rank) == ("hang", "stopped", 1)
    assert finding.severity == "critical"
    assert after <= 60.0
    expected = "Run llm hangs: Rank 1 (node-a, GPU 1) is stopped, and the other ranks wait for it"
    assert sentence(RUN, finding.candidate) == expected


def test_a_rank_that_is_stopped_inside_a_collective_is_named() -> None:
    trial = Trial().trained(60)
    trial.training.adjust = stopped(3)
    _, finding = trial.find(hang("collective_wait"))
    assert finding
    assert (finding.candidate.cause, finding.candidate.place.rank) == ("stopped", 3)


def test_the_rank_that_a_stopped_one_waits_for_too_is_named() -> None:
    """A debugger is attached to rank 3, which waits for rank 1 like the others."""
    trial = Trial().trained(60)
    trial.training.adjust = stopped(3)
    _, finding = trial.find(hang("backward", 1))
    assert finding
    assert (finding.candidate.cause, finding.candidate.place.rank) == ("backward", 1)
