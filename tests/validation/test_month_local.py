"""Simulated days of one node: stretches that are filled in change no finding, and the page says what was counted."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan
from typing import Any

import pytest
from validation.month import fill, local
from validation.month.fill import verdicts
from validation.month.local import Task, body, judge, tasks
from validation.month.losses import measure, next_ends
from validation.month.plan import Plan, SimulatedEvent
from validation.month.polls import Polls

from rankscope_exporter.diagnosis.judge import RunJudge
from rankscope_exporter.diagnosis.parts import Part

CHECKPOINT = SimulatedEvent("checkpoint", 200.0, 40.0, 2)
RESTART = SimulatedEvent("restart", 400.0, 30.0)
STEP = 0.7


def a_run(**others: object) -> Plan:
    made = Plan("run", 1, 8, STEP, "host", seconds=1500.0)
    return replace(made, **others)  # type: ignore[arg-type]  # any field


def found(plan: Plan, *, is_whole: bool) -> list[object]:
    shown, lines = set[object](), []
    for verdict in verdicts(plan, is_whole):
        keys = {one.candidate.key for one in verdict.findings}
        lines += [(verdict.at, key) for key in sorted(keys - shown)] + [(verdict.at, len(keys))] * (keys != shown)
        shown = set(keys)
    return lines


@pytest.mark.parametrize("clock", ["host", "device"])
def test_the_losses_of_all_parts_are_those_that_the_diagnosis_measures(clock: str) -> None:
    caps = ((300.0, 350.0, 0.05), (500.0, 600.0, 0.3))
    polls = Polls(a_run(seconds=700.0, clock=clock, events=(CHECKPOINT, RESTART), caps=caps))
    losses, judge_of_run = measure(polls, next_ends(polls)), RunJudge(("run", "0"))
    parts, ring = dict(zip(polls.times[losses.ends].tolist(), range(len(losses.ends)), strict=True)), None
    for poll in range(len(polls)):
        judge_of_run.update(float(polls.times[poll]), polls.readings(poll))
        ring = judge_of_run._losses._parts._rings[0]
        if ring and ring[-1].ends == polls.times[poll]:
            part, columns = parts.pop(ring[-1].ends), judge_of_run._losses._parts.columns
            assert (ring[-1].seconds, ring[-1].steps) == (losses.seconds[part], losses.steps[part])
            for key, values in losses.values.items():
                measured = ring[-1].values[columns[key]] if key in columns else nan
                assert measured == pytest.approx(values[part], abs=1e-9, nan_ok=True), key
    assert not parts
    assert any(not isnan(value) and value > 0.05 for value in losses.values["throttling", None])


@pytest.mark.parametrize("fault", ["slow rank", "rotating straggler", "slow network", "throttled GPUs"])
def test_a_run_with_omitted_stretches_has_the_same_findings_at_the_same_second(fault: str) -> None:
    faulty = a_run(fault=fault, dose=1.25, onset=900.0, heals=1200.0, culprit=5, events=(CHECKPOINT, RESTART))
    complete = found(faulty, is_whole=True)
    assert found(faulty, is_whole=False) == complete != []


def test_a_hang_is_found_at_the_same_second_after_an_omitted_stretch() -> None:
    hung = a_run(fault="hang", onset=900.0, heals=1200.0, culprit=5)
    assert found(hung, is_whole=False) == found(hung, is_whole=True) != []


def test_windows_baselines_and_history_after_omitted_stretches_are_those_of_all_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judges = [RunJudge(("run", "0")), RunJudge(("run", "0"))]
    unused = iter(judges)
    monkeypatch.setattr(fill, "RunJudge", lambda _: next(unused))
    polls = [sum(1 for _ in verdicts(a_run(events=(CHECKPOINT,)), is_whole)) for is_whole in (True, False)]
    assert polls[1] < polls[0] / 5
    states = [judge.history.state(1500.0) for judge in judges]
    for state in states:
        state["pauses"] = [(ended, seconds, phase) for ended, seconds, phase in state["pauses"] if seconds > fill.PAUSE]
    assert states[0]["pauses"]
    assert_close(*states)
    rings = [[tuple(map(vars_of, ring)) for ring in judge._losses._parts._rings] for judge in judges]
    assert_close(*rings)
    assert [at for at, _ in judges[0]._readings] == [at for at, _ in judges[1]._readings]


def vars_of(part: Part) -> tuple[object, ...]:
    return part.ends, part.seconds, part.steps, sorted(part.values)


def assert_close(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.items()), [(key, other[key]) for key in one]
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_close(*pair)
    else:
        assert one == (pytest.approx(other, abs=1e-9) if isinstance(one, float) else other)


def test_few_polls_of_a_healthy_run_are_judged() -> None:
    assert sum(1 for _ in verdicts(a_run(), is_whole=False)) < 200


def test_runs_on_several_nodes_are_left_out_and_each_run_has_its_own_line_in_the_ledger() -> None:
    of_ten_days = [*tasks(range(10), 0, is_whole=False), *tasks(range(10), 0, is_whole=True)]
    assert "day/8" not in {task.id for task in of_ten_days}
    assert len({task.id for task in of_ten_days}) == len(of_ten_days) == 18


def test_the_page_counts_false_alarms_with_their_bound_and_compares_the_control() -> None:
    found = [["straggler", 3, "forward", 100.0]]
    day = {"id": "day/1", "whole": False, "number": 1, "fault": "", "seconds": 86400.0, "heals": 0.0, "culprit": 1}
    lines = [day | {"found": found}, day | {"id": "day/2", "found": []}]
    lines += [day | {"id": "whole/day/1", "whole": True, "found": []}]
    lines += [day | {"id": "whole/day/2", "whole": True, "found": []}]
    figures, alarm, control, _ = body(lines)
    assert figures == "2 days of healthy runs: 1 false alarms; at most 2371.9 in 1,000 days, with 95% confidence."
    assert alarm == "- `day/1`: straggler, rank 3, cause forward, at 100.0 s"
    assert "2 days were polled completely: 1 show the same findings" in control


def test_a_fault_is_found_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = a_run(fault="slow rank", dose=1.3, onset=900.0, heals=1200.0, culprit=5)
    monkeypatch.setattr(Task, "plan", lambda _: slow)
    line = judge(Task(1, "slow rank", 1.3))
    assert [local.is_right(line, one) for one in line["found"]] == [True]
