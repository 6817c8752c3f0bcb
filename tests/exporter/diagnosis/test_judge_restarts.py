"""The judge of a run after a restart of the exporter: its state is saved and restored."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from operator import getitem

import pytest
from testing.readings import SLOW, Training, Trial, spend

from rankscope_exporter.diagnosis.judge import RunJudge
from rankscope_exporter.diagnosis.readings import Ending
from rankscope_exporter.diagnosis.saved import UNREADABLE


def restarted(trial: Trial) -> RunJudge:
    """Return the judge of an exporter that has just restarted."""
    judge = RunJudge(trial.judge.run)
    judge.restore(json.loads(json.dumps(trial.judge.state(trial.training.now))), trial.training.now)
    return judge


@pytest.mark.parametrize("clock", ["host", "device"])
@pytest.mark.parametrize("away", [0.0, 3.0, 200.0])
def test_gpu_time_lost_while_the_exporter_restarts_is_counted(clock, away) -> None:
    trial = Trial(Training(4, clock=clock)).trained(63, SLOW)
    saved = json.loads(json.dumps(trial.judge.state(63.0, is_last=True)))
    for _ in trial.training.train(away, SLOW):
        pass
    trial.judge = RunJudge(trial.judge.run)
    trial.judge.restore(saved, 63.0)
    trial.train(60, SLOW)
    lost = sum(verdict.new_gpu_seconds.get("straggler", 0.0) for verdict in trial.verdicts)
    assert lost == pytest.approx(0.27 * 4 * (120.0 + away), rel=0.06)


def test_gpu_time_lost_after_a_kill_is_not_counted_twice() -> None:
    trial = Trial().trained(60, SLOW)
    trial.judge = restarted(trial)
    assert not trial.train(1, SLOW).new_gpu_seconds


@pytest.mark.parametrize("value", [None, "much", [], {}, [1], [[0, 0.0, {}]], [[0, 0.0, {"steps": None}]]])
@pytest.mark.parametrize("place", ["accounted", "readings"])
def test_a_damaged_account_is_refused_or_counts_nothing(place, value) -> None:
    trial = Trial().trained(60, SLOW)
    state, judge = trial.judge.state(60.0, is_last=True), RunJudge(trial.judge.run)
    with suppress(*UNREADABLE):
        judge.restore({**state, place: value}, 60.0)
    trial.judge = judge
    assert not trial.train(1, SLOW).new_gpu_seconds


def test_a_restart_of_the_exporter_keeps_an_open_finding() -> None:
    trial = Trial()
    (before,) = trial.train(60, spend("backward", 0.5, 1)).findings
    trial.judge = restarted(trial)
    for seconds in (1, 60):
        (after,) = trial.train(seconds, spend("backward", 0.5, 1)).findings
        assert (after.since, after.opened) == pytest.approx((before.since, before.opened))
        assert (after.severity, after.candidate.cause, after.candidate.place) == (
            "critical", "backward", before.candidate.place
        )  # fmt: skip
    assert not trial.train(40).findings


def test_a_finding_stays_open_between_its_events_over_a_restart_of_the_exporter() -> None:
    trial = Trial(every=2)
    (before,) = trial.train(900, spend("other", 12.0, 1, every=150)).findings
    trial.judge = restarted(trial)
    (after,) = trial.train(60).findings
    assert after.since == pytest.approx(before.since)
    assert not trial.train(200).findings


@pytest.mark.parametrize("reason", ["finished", "killed"])
def test_a_run_that_ended_while_the_exporter_was_down_has_no_open_finding(reason) -> None:
    trial = Trial().trained(60, SLOW)
    trial.judge = restarted(trial)
    trial.training.adjust = lambda one: replace(one, ended=Ending(reason, 60.0))
    assert not trial.train(2).findings


@pytest.mark.parametrize("value", [10**400, None, "much", [], {}])
def test_a_damaged_finding_is_refused_or_ends_normally(value) -> None:
    trial = Trial().trained(30, SLOW)
    saved = json.dumps(trial.judge.state(30.0))
    moments = [*trial.training.train(40, every=4)]
    (first,) = json.loads(saved)["findings"]
    records = {(): first, (0,): first[0], (0, 0): first[0][0]}
    places = [(*path, number) for path, record in records.items() for number in range(len(record))]
    for *path, place in places:
        state, judge = json.loads(saved), RunJudge(trial.judge.run)
        reduce(getitem, path, state["findings"][0])[place] = value
        with suppress(*UNREADABLE):
            judge.restore(state, 30.0)
        assert not [judge.update(*moment) for moment in moments][-1].findings


def test_a_restored_judge_has_the_same_findings_as_the_original() -> None:
    trial = Trial(Training(4, transfer=0.02)).trained(900)
    restored = restarted(trial)
    trial.training._transfer = 0.06
    for moment in trial.training.train(120):
        verdicts = trial.judge.update(*moment), restored.update(*moment)
    found = [[(one.kind, one.candidate.cause, one.baseline) for one in verdict.findings] for verdict in verdicts]
    assert found[0] == found[1] == [("network", "network", "known")]
