"""Runs that are started again, also while the exporter is down: what is known of their earlier processes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from testing.readings import RUN, SLOW, Training, Trial, counting, hang, spend

from rankscope_exporter.diagnosis.judge import RunJudge
from rankscope_exporter.diagnosis.judged import Judges
from rankscope_exporter.diagnosis.readings import Ending, RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds

GPUS = {f"GPU-{number}" for number in range(4)}


*_, (_, LAST) = Training(4).train(60)
ENDS = {2: Ending("sigterm", 60.0), 3: Ending("killed", 60.0)}


def earlier(at: float) -> list[RankReading]:
    """Return ranks 2 and 3 of the run's earlier start, as they are shown later."""
    return [replace(LAST[number], at=at, ended=end) for number, end in ENDS.items()]


def started_again(ranks: int) -> Training:
    training = Training(ranks)
    training.now = 70.0
    training.restart()
    return training


def test_a_run_whose_other_ranks_now_live_on_another_node_is_not_judged() -> None:
    """The node had ranks 2 and 3, and has 0 and 1 now."""
    judges = Judges()
    for at, ranks in started_again(4).train(20):
        found = judges.update(at, {RUN: [ranks[0], ranks[1], *earlier(at)]}, GPUS)
    assert found.not_judged == {RUN: "ranks_elsewhere"}


def test_a_run_that_was_started_again_with_fewer_ranks_has_not_crashed_and_loses_nothing() -> None:
    judges = Judges()
    for at, ranks in started_again(2).train(20):
        found = judges.update(at, {RUN: [*ranks.values(), *earlier(at)]}, GPUS)
    (verdict,) = found.verdicts
    assert not verdict.findings
    assert "idle" not in verdict.lost


def test_a_crash_of_an_earlier_start_does_not_hide_a_hang() -> None:
    judges, training = Judges(Thresholds(pace_known_after=45.0)), started_again(2)
    for moments in (training.train(60), training.train(60, hang("backward", 1))):
        for at, ranks in moments:
            found = judges.update(at, {RUN: [*ranks.values(), *earlier(at)]}, GPUS)
    assert [finding.kind for finding in found.verdicts[0].findings] == ["hang"]


def test_a_compilation_in_the_first_steps_is_not_a_hang_whatever_the_pace_was_before() -> None:
    trial = Trial(Training(4)).trained(100)
    trial.training.restart()
    trial.train(10)
    trial.train(1, spend("forward", 60.0))
    trial.train(80)
    assert "hang" not in trial.kinds()


def test_a_loss_scale_that_collapses_is_found_as_soon_as_in_the_first_start() -> None:
    def collapsing(one: RankReading) -> RankReading:
        skipped = 300.0 if one.began == 0.0 else max(one.counters.steps - 200.0, 0.0)
        scale = 65536.0 if one.began == 0.0 else 65536.0 / 2 ** min(skipped, 60)
        return counting(replace(one, amp_scale=scale), amp_skipped_steps=min(skipped, 300.0))

    trial = Trial(Training(1, adjust=collapsing)).trained(400)
    trial.training.restart()
    assert trial.find(kinds=("loss_scale_collapse",))[0] < 120.0


def saved(trial: Trial, *, is_last: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(trial.judge.state(trial.training.now, is_last=is_last)))
    return state


def restore(trial: Trial, state: dict[str, Any], downtime: float) -> None:
    trial.judge = RunJudge(RUN)
    trial.judge.restore(state, trial.training.now - downtime)


def test_a_run_that_was_started_again_while_the_exporter_was_down_has_no_open_finding() -> None:
    trial = Trial(Training(4)).trained(100, SLOW)
    assert trial.verdicts[-1].findings
    state = saved(trial)
    trial.training.now += 30.0
    trial.training.restart()
    restore(trial, state, 30.0)
    assert not trial.train(60).findings


@pytest.mark.parametrize("is_started_again", [True, False], ids=["started again", "the clock has jumped"])
def test_gpu_time_in_which_a_run_did_not_train_is_not_lost(is_started_again: bool) -> None:
    trial = Trial(Training(4)).trained(100)
    state = saved(trial, is_last=True)
    if is_started_again:
        trial.training.now += 3600.0
        trial.training.restart()
    restore(trial, state, 3600.0)
    before = len(trial.verdicts)
    trial.train(10)
    assert sum(sum(verdict.new_gpu_seconds.values()) for verdict in trial.verdicts[before:]) < 4 * 20.0


@pytest.mark.parametrize("age", [float("nan"), float("inf"), 1e300, -1e9])
def test_a_damaged_age_of_the_account_is_refused_or_counts_nothing_more(age: float) -> None:
    trial = Trial(Training(2)).trained(60)
    state = saved(trial, is_last=True)
    state["accounted"] = age
    trial.judge, before = RunJudge(RUN), len(trial.verdicts)
    try:
        trial.judge.restore(state, 60.0)
    except ValueError:
        trial.judge = RunJudge(RUN)
    trial.train(30)
    counted = sum(sum(verdict.new_gpu_seconds.values()) for verdict in trial.verdicts[before:])
    assert counted == pytest.approx(60.0, abs=12.0)


def test_a_damaged_pace_is_refused() -> None:
    state = saved(Trial(Training(2)).trained(60))
    state["pace"] = {"other": [1.0, float("nan"), 0.0]}
    with pytest.raises(ValueError, match="nan is not a finite number"):
        RunJudge(RUN).restore(state, 60.0)


def underused(one: RankReading) -> RankReading:
    return counting(one, gpu=replace(one.counters.gpu, busy=0.3 * one.at))


@pytest.mark.parametrize(
    ("kind", "training", "seconds", "phase"),
    [
        ("low_utilization", Training(1, adjust=underused), 1000, ()),
        ("slow_checkpoint", Training(1), 1200, (spend("checkpoint", 20.0, every=200), spend("backward", 0.1))),
    ],
)
def test_states_go_on_after_a_restart_of_the_exporter(kind, training, seconds, phase) -> None:
    trial = Trial(training).trained(seconds, *phase)
    assert [finding.kind for finding in trial.verdicts[-1].findings] == [kind]
    restore(trial, saved(trial), 0.0)
    before = len(trial.verdicts)
    trial.train(40, *phase)
    assert all(verdict.findings for verdict in trial.verdicts[before:] if verdict.is_ready)
    assert trial.verdicts[-1].is_ready


def test_a_hang_that_ended_while_the_exporter_was_down_is_over_at_once() -> None:
    """Steps take 30 s: a whole span is seen after minutes."""
    slow = spend("forward", 30.0)
    trial = Trial(Training(2)).trained(400, slow).trained(400, slow, hang("backward", 1))
    assert [finding.kind for finding in trial.verdicts[-1].findings] == ["hang"]
    state, training = saved(trial), Training(2)
    training.now = training._began = trial.training.now - 900.0
    trial.training = training
    for _ in training.train(930.0, slow):
        pass
    restore(trial, state, 30.0)
    assert not trial.train(5, slow).findings
