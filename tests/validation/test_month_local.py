"""Simulated runs of one node: their readings are an exporter's, omitted polls change no finding, and what is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from validation.month import scene as scenes
from validation.month.feed import verdicts
from validation.month.local import Task, body, is_false, is_right, judge, tasks
from validation.month.plan import Plan, SimulatedEvent
from validation.month.run import SimulatedRun
from validation.month.scene import COMPUTE, Extra, Mode, Scene, Truth
from validation.month.series import NANO, added
from validation.month.steps import P

from rankscope_exporter.diagnosis.detectors import key_of
from rankscope_exporter.diagnosis.readings import RankReading, spent
from rankscope_exporter.diagnosis.thresholds import Thresholds

CHECKPOINT = SimulatedEvent("checkpoint", 200.0, 40.0, 2)
RESTART = SimulatedEvent("restart", 400.0, 30.0)
RANK_RESTART = SimulatedEvent("rank restart", 500.0, 5.0, 3)


def a_scene(**others: object) -> Scene:
    plan = replace(Plan("run", 1, 4, 0.7, "host", seconds=700.0, speed=np.ones(4)), **others)  # type: ignore[arg-type]  # any field
    return Scene(plan, startup=20.0)


def slow(*ranks: int, begins: float = 300.0, ends: float = 500.0, **extra: Any) -> Scene:
    """Return a run whose ranks are late by half of a step for some minutes."""
    truth = Truth(("straggler",), ranks, tuple(COMPUTE), begins, ends)
    return replace(a_scene(), truth=truth).with_fault(Mode((Extra(COMPUTE, 0.5, ranks, **extra),)))


def moments(scene: Scene) -> list[Mapping[int, RankReading]]:
    run = SimulatedRun(scene)
    return [found for at in range(int(scene.plan.seconds)) if (found := run.readings(float(at)))]


@pytest.mark.parametrize("clock", ["host", "device"])
def test_the_phases_of_a_rank_add_up_to_the_time_of_its_process_and_no_counter_decreases(clock: str) -> None:
    scene = a_scene(clock=clock, events=(CHECKPOINT, RESTART, RANK_RESTART))
    readings = moments(replace(scene, modes=((0.0, Mode()), (300.0, Mode(work=2.0)))))
    for ranks in readings:
        for one in ranks.values():
            assert sum(one.counters.phases.values()) == pytest.approx(one.at - one.began)
            assert one.began <= one.last_progress <= one.at
    for before, after in pairwise(readings):
        for then, now in zip(before.values(), after.values(), strict=True):
            if then.began == now.began:
                grown = spent(now.counters, then.counters)
                assert sum(grown.phases.values()) == pytest.approx(now.at - then.at)
                assert now.counters.aligned.skew >= then.counters.aligned.skew
    assert {one.began for ranks in readings for one in ranks.values()} > {0.0}
    assert len({one.began for one in readings[-1].values()}) == 2


def test_all_steps_are_compared_on_the_host_and_only_those_of_certain_numbers_on_the_device() -> None:
    counters = [moments(a_scene(clock=clock, step=0.1))[-1][0].counters for clock in ("host", "device")]
    host, device = counters
    assert host.aligned.steps == host.steps > 0
    assert device.aligned.steps == device.device_steps
    assert device.steps / 16 < device.device_steps < device.steps / 4
    waited = device.aligned.wait_floor + device.aligned.skew
    assert waited == pytest.approx(device.aligned.phases["collective_wait"])


def test_the_sums_over_a_repeated_series_are_those_of_its_steps() -> None:
    values = np.array([3, 1, 4, 1, 5])
    sums = np.concatenate(([0], np.cumsum(values)))
    for first in range(5):
        for steps in range(14):
            assert added(sums, first, steps) == np.resize(np.roll(values, -first), steps).sum()


@pytest.mark.parametrize("step", [0.02, 0.5])
def test_steps_repeat_only_after_the_longest_span_that_is_judged(step: float) -> None:
    run = SimulatedRun(a_scene(step=step, ranks=2, speed=np.ones(2), seconds=3600.0))
    assert int(run._series(Mode()).ends[-1]) * NANO >= Thresholds().tiers[-1].seconds


def test_a_late_rank_waits_least_and_the_others_wait_for_it() -> None:
    last = moments(slow(2, ends=700.0))[-1]
    waits = {rank: one.counters.aligned.skew for rank, one in last.items()}
    assert min(waits, key=waits.__getitem__) == 2
    blame = last[2].counters.aligned.blame
    assert max(blame, key=blame.__getitem__) == "backward"


@pytest.mark.parametrize(
    ("extra", "late"),
    [({"every": 3}, [(0, 0), (0, 1), (3, 0), (3, 1)]), ({"in_turn": True}, [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)])],
)
def test_each_nth_step_or_each_rank_in_turn_has_the_additional_time(
    extra: dict[str, Any], late: list[tuple[int, int]]
) -> None:
    scene = slow(0, 1, **extra).planned(noise=0.0, collect=0.0)
    backward = SimulatedRun(scene)._series(scene.modes[1][1]).durations[:5, P["backward"]]
    assert [(step, rank) for step, rank in np.argwhere(backward > backward.min()).tolist()] == late


def found(scene: Scene, *, is_whole: bool) -> list[object]:
    shown: dict[object, float] = {}
    for verdict in verdicts(scene, is_whole=is_whole):
        for one in verdict.findings:
            shown.setdefault((key_of(one.candidate), one.candidate.cause, one.opened), verdict.at)
    return list(shown.items())


def test_of_several_events_in_one_step_the_checkpoint_happens() -> None:
    waits = [SimulatedEvent("data_wait", at, 90.0, 0) for at in (190.0, 195.0, 210.0)]
    events = sorted((*waits, CHECKPOINT), key=lambda one: one.at)
    readings = SimulatedRun(a_scene(step=100.0, events=tuple(events))).readings(690.0)
    assert readings
    assert readings[0].checkpoints == 1.0
    assert readings[0].counters.phases["data_wait"] < 10.0


HANG = SimulatedEvent("other", 450.0, 200.0, 1)


@pytest.mark.parametrize("scene", [slow(1), replace(slow(0, 1), stages=2), a_scene(events=(HANG,))])
def test_a_run_with_omitted_polls_has_the_same_findings_at_the_same_second(scene: Scene) -> None:
    assert found(scene, is_whole=False) == found(scene, is_whole=True) != []


def test_few_polls_of_a_healthy_run_are_judged() -> None:
    scene = a_scene(seconds=1500.0)
    assert sum(1 for _ in verdicts(scene, is_whole=False)) < 1500 / 5


def test_a_run_without_an_optimizer_makes_progress_and_no_step() -> None:
    readings = moments(replace(a_scene(), has_optimizer=False))[-1]
    assert {(one.phase, one.counters.steps, one.at - one.last_progress < 1) for one in readings.values()} == {
        ("startup", 0.0, True)
    }


def test_each_run_depends_only_on_its_number_and_has_its_own_line_in_the_ledger() -> None:
    assert str(scenes.healthy(7)) == str(scenes.healthy(7)) != str(scenes.healthy(8))
    for fault, dose in scenes.faults():
        scene = scenes.faulty(fault, dose, 1)
        assert str(scene) == str(scenes.faulty(fault, dose, 1)) != str(scenes.faulty(fault, dose, 2))
        assert scene.truth.kinds
        assert scene.truth.begins < scene.truth.ends < scene.plan.seconds
        for number in range(12):
            drawn = scenes.faulty(fault, dose, number)
            assert set(drawn.truth.ranks) < set(range(drawn.plan.ranks))
    each = [*tasks(range(5), range(2), is_whole=False), *tasks(range(5), range(2), is_whole=True)]
    assert len({task.id for task in each}) == len(each)


def a_line(*found: list[Any], **others: Any) -> dict[str, Any]:
    truth = {"kinds": ["straggler"], "ranks": [4, 5], "causes": ["other"], "begins": 100.0, "ends": 200.0}
    line = {"id": "one rank is slow/1.3/0", "whole": False, "run": "one rank is slow", "dose": 1.3, "days": 0.5}
    return line | {"polls": 10, "cpu": 6.0, "truth": truth, "found": list(found)} | others


def test_a_finding_is_right_if_it_names_only_ranks_of_the_fault_while_it_lasts() -> None:
    right, other, early = (
        ["straggler", ranks, "other", at, 200.0] for ranks, at in (([4], 110.0), ([4, 6], 110.0), ([4], 90.0))
    )
    line = a_line(right, other, early)
    assert [is_right(line, one) for one in line["found"]] == [True, False, False]
    healthy = a_line(truth=line["truth"] | {"kinds": [], "ranks": []})
    assert [is_false(healthy, one) for one in (right, early)] == [True, False]


def test_the_page_counts_what_is_found_in_its_place_and_with_its_cause_and_compares_the_control() -> None:
    both = [["straggler", [rank], cause, 110.0 + rank, 200.0] for rank, cause in ((4, "other"), (5, "forward"))]
    lines = [a_line(*both), a_line(both[0], id="one rank is slow/1.3/1"), a_line(id="one rank is slow/1.3/2")]
    lines += [a_line(both[0], id="whole/one rank is slow/1.3/1", whole=True, polls=100)]
    lines += [a_line(both[1], id="healthy/1", run="day", dose=None, truth=lines[0]["truth"] | {"kinds": []})]
    alarms, speed, right, control, table = body(lines)
    assert alarms.startswith("0.5 days of healthy runs: 1 false alarms, 2000.0 in 1,000 days")
    assert speed == "Healthy runs: 5.0 run-days in a minute of CPU time."
    assert right.endswith("a tenth: 2 of 3 found, place right in 1 of 2, cause in 1 of 2.")
    assert "1 have the same findings, at most 0 s apart, with 10 instead of 100 polls" in control.replace("\n", " ")
    assert "| one rank is slow | 1.3 | 3 | 1.5 | 2/3 | 1/2 | 1/2 | 14 | 1.5 | 0 |" in table
    assert "| day |  | 1 | 0.5 |  |  |  |  |  | 1 |" in table


def test_a_fault_is_found_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Task, "scene", lambda _: ("one rank is slow", slow(1)))
    line = judge(Task(1, "one rank is slow", 1.3))
    assert [is_right(line, one) for one in line["found"]] == [True]


@pytest.mark.parametrize(
    "task",
    [Task(46), Task(155), Task(163), Task(1516), Task(0, "slow, and another rank restarts", 2.0)],
    ids=["uneven optimizer steps", "uneven forward passes", "a compilation", "steps of 38 s", "restarts"],
)
def test_runs_that_had_a_false_alarm_have_none(task: Task) -> None:
    line = judge(task)
    assert not [found for found in line["found"] if is_false(line, found)]


def test_a_slowdown_that_throttling_explained_is_no_finding_after_both_are_over() -> None:
    line = judge(Task(0, "throttled GPUs", 2.0))
    assert [one[0] for one in line["found"]] == ["throttling"]


@pytest.mark.parametrize("clock", ["host", "device"])
def test_a_run_on_two_nodes_has_the_findings_that_it_has_on_one(clock: str) -> None:
    scene = slow(3)
    scene = replace(scene, plan=replace(scene.plan, clock=clock, events=(CHECKPOINT,)))
    found = [
        {(one.kind, one.candidate.cause, one.candidate.place.rank) for verdict in judged for one in verdict.findings}
        for judged in (verdicts(scene, is_whole=False, nodes=nodes) for nodes in (1, 2))
    ]
    assert found == [{("straggler", "backward", 3)}] * 2
