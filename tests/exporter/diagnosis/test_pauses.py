"""Pauses, evaluations, checkpoints and hangs: which states go on in them, and which are no findings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from testing.readings import EARLY, STEP, Training, Trial, counting, hang, spend
from tests.exporter.diagnosis.test_started_again import underused

from rankscope_exporter.diagnosis.readings import Ending, GpuCounters, GpuReading, RankReading


def small_model(*busy: str) -> Any:
    """Return ranks that use 2% of their memory, and whose GPU is idle outside of these phases."""
    last: dict[int, float] = {}

    def change(one: RankReading) -> RankReading:
        if one.phase in busy or one.at - one.phase_since < 1.0:
            last[one.rank] = one.at
        return replace(one, gpu=GpuReading("0", 0.02, 1, one.at - last.get(one.rank, 0.0)))

    return change


COMPUTES = ("forward", "backward", "optimizer")


def test_a_notebook_that_waits_for_input_does_not_train_on_the_cpu() -> None:
    trial = Trial(Training(1, adjust=small_model(*COMPUTES))).trained(60)
    assert not trial.train(120, hang("other")).findings


@pytest.mark.parametrize("phase", ["evaluation", "other"])
def test_a_pause_of_minutes_is_not_training_on_the_cpu(phase) -> None:
    """An evaluation or a simulation on the CPU, between steps on the GPU."""
    trial = Trial(Training(1, adjust=small_model(*COMPUTES))).trained(60)
    trial.train(1, spend(phase, 90.0))
    trial.train(109)
    assert not trial.opened("cpu_fallback")


def test_a_run_that_hangs_does_not_train_on_the_cpu() -> None:
    trial = Trial(Training(2, adjust=small_model(*COMPUTES))).trained(100)
    assert [one.kind for one in trial.train(100, hang("data_wait")).findings] == ["hang"]


@pytest.mark.parametrize(("phase", "every"), [("evaluation", 780), ("checkpoint", 1000)])
def test_low_utilization_goes_on_over_pauses(phase, every) -> None:
    trial = Trial(Training(1, adjust=underused), every=5).trained(5)
    for _ in range(2):
        trial.train(1, spend(phase, 20.0))
        trial.train(every)
    assert len(trial.opened("low_utilization")) == 1


def test_slow_launches_explain_low_utilization() -> None:
    def launching(one: RankReading) -> RankReading:
        measured = one.counters.steps
        return counting(
            one, device_steps=measured, device_phases={name: n * measured for name, n in STEP.items()},
            device_dry={"backward": 0.04 * measured}, gpu=GpuCounters(0.45 * one.at, {}, one.at),
        )  # fmt: skip

    trial = Trial(Training(1, adjust=launching)).trained(1000)
    assert [one.kind for one in trial.verdicts[-1].findings] == ["launch"]


def test_a_pipeline_that_hangs_has_no_other_finding() -> None:
    staged = lambda one: counting(replace(one, stage=one.rank), micro_steps=2.0 * one.counters.steps)  # noqa: E731
    trial = Trial(Training(4, adjust=staged)).trained(100, spend("backward", 0.3, 1))
    assert [one.kind for one in trial.verdicts[-1].findings] == ["stage_imbalance"]
    assert [one.kind for one in trial.train(70, hang("backward", 2)).findings] == ["hang"]


def test_a_collapsed_loss_scale_explains_that_no_step_was_made() -> None:
    """The start-up never ends, since no step is made: the scaler skips them from the first one on."""

    def skip(one: RankReading) -> RankReading:
        passes = one.counters.steps
        scaled = replace(one, phase="startup", phase_since=0.0, amp_scale=65536.0 / 2 ** min(passes, 60))
        return counting(scaled, steps=0.0, amp_skipped_steps=passes, phases={"startup": one.at})

    trial = Trial(Training(1, adjust=skip)).trained(700)
    assert [one.kind for one in trial.verdicts[-1].findings] == ["loss_scale_collapse"]


def test_a_rank_that_finishes_while_the_run_hangs_does_not_end_the_hang() -> None:
    trial = Trial(Training(4)).trained(100)
    trial.train(60, hang("backward", 2))
    ends = trial.training.now
    trial.training.adjust = lambda one: replace(one, ended=Ending("finished", ends)) if one.rank == 3 else one
    trial.train(10)
    assert len(trial.opened("hang")) == 1


@pytest.mark.parametrize(("longest", "limit"), [(1.0, 45.0), (55.0, 90.0), (200.0, 450.0)])
def test_an_exporter_that_starts_during_a_hang_knows_the_pace_from_the_records(longest, limit) -> None:
    thresholds = replace(EARLY, stuck=60.0)
    watched = Trial(thresholds=thresholds).trained(10)
    watched.train(1, spend("backward", longest))
    watched.every = 5
    watched.train(250 + longest)
    watched.every = 1
    watched.train(1, hang("backward", 2))
    onset = watched.verdicts[-1].facts.ranks[2].now.last_progress
    started = Trial(watched.training, thresholds)
    found = started.find(kinds=["hang"])[1]
    assert found
    assert found.opened - onset == pytest.approx(limit, abs=2.0)


def test_a_run_that_has_just_begun_to_train_has_no_recorded_pace() -> None:
    young = Trial().trained(30)
    started = Trial(young.training).trained(80, hang("backward", 2))
    assert not started.opened("hang")


def test_an_idle_notebook_has_no_overdue_checkpoint() -> None:
    trial = Trial(Training(1)).trained(60)
    trial.training.now += 4 * 3600.0
    assert not trial.train(60, hang("other")).findings
