"""The table of states: facts on the left, the state on the right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from deploy.prometheus.render import HERE, seconds
from testing.records import READ_AT, rank_snapshot

from rankscope.record.layout import PHASES
from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.gpu.allocation import idleness
from rankscope_exporter.gpu.allocation.idleness import STATES, Facts, are_stuck, classify

TABLE = [
    # nobody is there
    ({}, "free"),
    ({"idle_for": None}, "free"),
    ({"memory": None}, "free"),
    ({"memory": 0.04}, "free"),
    ({"idle_for": 4}, "free"),
    ({"idle_for": 2}, "working"),
    # somebody has it
    ({"allocated": True}, "allocated_no_process"),
    ({"allocated": True, "idle_for": 2}, "working"),
    ({"allocated": None}, "unknown"),
    # somebody has left something behind
    ({"memory": 0.06}, "memory_held_by_dead"),
    ({"dead": 1}, "memory_held_by_dead"),
    ({"dead": 1, "allocated": True}, "memory_held_by_dead"),
    ({"dead": 1, "allocated": None}, "memory_held_by_dead"),
    ({"dead": 1, "idle_for": 2}, "working"),
    # a process is there
    ({"processes": 1, "idle_for": 0}, "working"),
    ({"processes": 1, "idle_for": 60}, "working"),
    ({"processes": 1, "idle_for": 61}, "process_no_work"),
    ({"processes": 1}, "process_no_work"),
    ({"processes": 1, "idle_for": None}, "unknown"),
    ({"processes": 1, "dead": 1, "memory": 0.9, "idle_for": 0}, "working"),
    ({"processes": 1, "allocated": None, "idle_for": 0}, "working"),
    # ranks are there
    ({"processes": 1, "is_stuck": True, "idle_for": 0}, "suspected_hang"),
    ({"processes": 1, "is_stuck": True, "idle_for": 61}, "process_no_work"),
    # processes cannot be seen
    ({"processes": None}, "unknown"),
    ({"processes": None, "allocated": True}, "unknown"),
    ({"processes": None, "memory": 0.9}, "unknown"),
    ({"processes": None, "idle_for": 2}, "working"),
]


@pytest.mark.parametrize(("facts", "state"), TABLE, ids=lambda value: str(value))
def test_facts_make_a_state(facts: dict[str, Any], state: str) -> None:
    assert classify(Facts(**facts)) == state


def test_every_state_can_come_about() -> None:
    assert {state for _, state in TABLE} == set(STATES)


def rank(silent_for: float, phase: str = "forward", alive: bool = True) -> RankSnapshot:
    slots = {"started_monotonic": READ_AT - silent_for, "phase": PHASES.index(phase)}  # and nothing was charged since
    return rank_snapshot(slots, alive)


@pytest.mark.parametrize(
    ("ranks", "stuck"),
    [
        ([], False),
        ([rank(299)], False),
        ([rank(301)], True),
        ([rank(301), rank(1)], False),
        ([rank(301), rank(400)], True),
        ([rank(301, phase="checkpoint")], False),
        ([rank(1801, phase="checkpoint")], True),
        ([rank(301), rank(1, alive=False)], True),
        ([rank(math.inf, alive=False)], False),
    ],
)
def test_ranks_are_stuck_when_none_of_the_living_makes_progress(ranks: list[RankSnapshot], stuck: bool) -> None:
    assert are_stuck(ranks) is stuck


def test_what_the_alerts_wait_for_is_what_the_states_wait_for() -> None:
    thresholds = yaml.safe_load((HERE / "thresholds.yml").read_text(encoding="utf-8"))
    assert thresholds["gpu_memory_held"]["value"] == idleness.MEMORY_SHARE
    assert float(seconds(thresholds["stuck_for"]["value"])) == idleness.STUCK_AFTER
    assert float(seconds(thresholds["planned_phase_for"]["value"])) == idleness.STUCK_AFTER_PLANNED
