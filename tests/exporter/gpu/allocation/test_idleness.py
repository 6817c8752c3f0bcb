"""Table of facts and the resulting states."""

from __future__ import annotations

import math
from typing import Any

import pytest
from testing.records import READ_AT, rank_snapshot

from rankscope.record.layout import PHASES
from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.gpu.allocation import idleness
from rankscope_exporter.gpu.allocation.idleness import STATES, Facts, UnusedMemory, are_stuck, classify

TABLE = [
    # no process, no claim
    ({}, "free"),
    ({"idle_for": None}, "free"),
    ({"memory": None}, "free"),
    ({"memory": 0.04}, "free"),
    ({"idle_for": 4}, "free"),
    ({"idle_for": 2}, "working"),
    # claimed
    ({"is_allocated": True}, "allocated_no_process"),
    ({"is_allocated": True, "idle_for": 2}, "working"),
    ({"is_allocated": None}, "unknown"),
    # memory or processes left behind
    ({"memory": 0.06}, "memory_held_by_dead"),
    ({"dead": 1}, "memory_held_by_dead"),
    ({"dead": 1, "is_allocated": True}, "memory_held_by_dead"),
    ({"dead": 1, "is_allocated": None}, "memory_held_by_dead"),
    ({"dead": 1, "idle_for": 2}, "working"),
    # a living process
    ({"processes": 1, "idle_for": 0}, "working"),
    ({"processes": 1, "idle_for": 60}, "working"),
    ({"processes": 1, "idle_for": 61}, "process_no_work"),
    ({"processes": 1}, "process_no_work"),
    ({"processes": 1, "idle_for": None}, "unknown"),
    ({"processes": 1, "dead": 1, "memory": 0.9, "idle_for": 0}, "working"),
    ({"processes": 1, "is_allocated": None, "idle_for": 0}, "working"),
    # stuck ranks
    ({"processes": 1, "is_stuck": True, "idle_for": 0}, "suspected_hang"),
    ({"processes": 1, "is_stuck": True, "idle_for": 61}, "process_no_work"),
    # processes not visible
    ({"processes": None}, "unknown"),
    ({"processes": None, "is_allocated": True}, "unknown"),
    ({"processes": None, "memory": 0.9}, "unknown"),
    ({"processes": None, "idle_for": 2}, "working"),
]


@pytest.mark.parametrize(("facts", "state"), TABLE, ids=lambda value: str(value))
def test_facts_determine_the_state(facts: dict[str, Any], state: str) -> None:
    assert classify(Facts(**facts)) == state


def test_every_state_is_reachable() -> None:
    assert {state for _, state in TABLE} == set(STATES)


def rank(silent_for: float, phase: str = "forward", alive: bool = True) -> RankSnapshot:
    slots = {"started_monotonic": READ_AT - silent_for, "phase": PHASES.index(phase)}  # no time charged since
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
def test_ranks_are_stuck_if_no_living_rank_makes_progress(ranks: list[RankSnapshot], stuck: bool) -> None:
    assert are_stuck(ranks) is stuck


def test_limits_equal_those_of_the_diagnosis() -> None:
    limits = Thresholds()
    assert limits.memory_held == idleness.MEMORY_SHARE
    assert limits.stuck == idleness.STUCK_AFTER
    assert limits.planned == idleness.STUCK_AFTER_PLANNED


Moments = list[tuple[float, float | None, bool, float | None]]


def unused_since(moments: Moments) -> tuple[float, str] | None:
    """Return the result after the last of these moments: time, memory in use, whether a rank is alive, idle seconds."""
    memory = UnusedMemory()
    *_, last = [memory.update(*moment) for moment in moments]
    return last


@pytest.mark.parametrize(
    ("moments", "since"),
    [
        ([(1000, 0.9, False, 500.0)], (500.0, "kernel")),
        ([(0, 0.01, False, 500.0), (1, 0.9, False, 501.0), (700, 0.9, False, 1200.0)], (0.0, "allocation")),
        ([(0, 0.01, False, 500.0), (1, 0.9, False, 0.2), (700, 0.9, False, 690.0)], (10.0, "kernel")),
        ([(0, 0.01, False, 500.0), (1, 0.9, False, 0.2), (50, 0.9, False, 49.0)], None),
        ([(0, 0.9, True, 0.0), (1, 0.9, False, 0.5), (700, 0.9, False, 699.5)], (5.0, "rank")),
        ([(0, 0.9, True, 0.0), (20, 0.9, False, 1.0)], None),
        ([(0, 0.01, False, 500.0), (1, 0.9, False, 501.0), (2, 0.9, True, 502.0)], None),
        ([(0, 0.01, False, 500.0), (1, 0.9, False, None)], None),
        ([(0, 0.01, False, 500.0), (1, None, False, 501.0), (1000, 0.9, False, 990.0)], (10.0, "kernel")),
        ([(1000, 0.9, False, math.inf)], None),
    ],
    ids=[
        "was in use before",
        "allocated and never used",
        "a service that has worked",
        "a service that pauses",
        "left by a rank",
        "used after the rank",
        "a rank is alive",
        "kernels are not visible",
        "memory was not reported",
        "no kernel was ever seen",
    ],
)
def test_memory_is_unused_since_its_allocation_the_last_rank_or_the_last_kernel(
    moments: Moments, since: tuple[float, str] | None
) -> None:
    assert unused_since(moments) == since
