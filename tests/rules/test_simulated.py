"""Simulated runs (validation/month) that once caused a wrong or a second alert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from validation.month.engine import fire, rules
from validation.month.plan import HANG, Plan, SimulatedEvent, faulty, healthy
from validation.month.record import SCRAPE, simulate
from validation.month.samples import Stretch

HALF_AN_HOUR = 1800.0
BEFORE = 320  # scrapes: the baseline needs an hour
FAULT = {"onset": HALF_AN_HOUR, "heals": 2 * HALF_AN_HOUR, "culprit": 3}


def a_run(name: str, ranks: int = 8, clock: str = "device", **others: object) -> Plan:
    even, together = np.ones(ranks), np.zeros(ranks // 8)
    made = Plan(name, 1, ranks, 1.0, clock, 4800.0, even, imbalance=0.02, transfer=0.15, skewed=together)
    return replace(made, **others)


def checkpoint(rank: int | None, seconds: float) -> tuple[SimulatedEvent, ...]:
    return (SimulatedEvent("checkpoint", HALF_AN_HOUR, seconds, rank),)


ONE_RANK = {"fault": "slow rank", **FAULT}
IN_TURN = {"fault": "rotating straggler", **FAULT}
EXPECTED: dict[str, tuple[Plan, list[str]]] = {
    "one rank writes a checkpoint": (a_run("a", clock="host", events=checkpoint(3, 110)), []),
    "one rank writes a checkpoint, by the device's clock": (a_run("b", events=checkpoint(3, 110)), []),
    "one rank of two nodes writes a checkpoint": (a_run("c", 16, events=checkpoint(3, 110)), []),
    "all write one": (a_run("d", 16, events=checkpoint(None, 110)), []),
    "a loader pauses": (a_run("e", events=(SimulatedEvent("data_wait", HALF_AN_HOUR, 40, 3),)), []),
    "a run continues after a hang": (
        a_run("f", fault=HANG, **{**FAULT, "heals": HALF_AN_HOUR + 420}),
        ["RankscopeRankStuck 3"],
    ),
    "half of each step is lost, which is the limit of critical": (
        a_run("g", **ONE_RANK, dose=2.0),
        ["RankscopeRankLagging 3"],
    ),
    "little is lost, in forward and backward": (a_run("h", **ONE_RANK, dose=1.12), ["RankscopeRankLagging 3"]),
    "one rank of two nodes was slow and recovers": (a_run("i", 16, **ONE_RANK, dose=1.3), ["RankscopeRankLagging 3"]),
    "one rank of two nodes was slow and recovers, and old reference steps remain": (
        faulty("slow rank", 2.0, 4),
        ["RankscopeRankLagging 14"],
    ),
    "a slow network recovers, and longer tiers still contain it": (
        faulty("slow network", 2.0, 7),
        ["RankscopeTransferBound"],
    ),
    "ranks in turn recover, and the network has its usual part of the time again": (
        faulty("rotating straggler", 2.0, 7),
        ["RankscopeRotatingStraggler"],
    ),
    "a slow network between two nodes": (
        a_run("j", 16, fault="slow network", dose=2.0, **FAULT),
        ["RankscopeTransferBound"],
    ),
    "ranks in turn with few measured steps": (
        a_run("k", step=0.15, **IN_TURN, dose=2.0),
        ["RankscopeRotatingStraggler"],
    ),
    "the clock of one of two nodes is five minutes behind": (
        a_run("m", 16, skewed=np.array([0.0, -300.0]), events=(SimulatedEvent("restart", HALF_AN_HOUR, 100),)),
        [],
    ),
    "a hang of less than the five minutes by which the clock of one of two nodes is ahead": (
        a_run("n", 16, skewed=np.array([0.0, 300.0]), fault=HANG, **{**FAULT, "heals": HALF_AN_HOUR + 280}),
        ["RankscopeRankStuck 3"],
    ),
    "a rare checkpoint of minutes": (a_run("p", events=checkpoint(None, 300)), []),
    "checkpoints of minutes, one after the other": (
        a_run("q", events=tuple(SimulatedEvent("checkpoint", 600.0 * n, 60) for n in range(1, 8))),
        ["RankscopeCheckpointSlow"],
    ),
    "ranks in turn on two nodes": (a_run("l", 16, **IN_TURN, dose=1.5), ["RankscopeRotatingStraggler"]),
}


FALSE_ALARMS = {
    "garbage collections in too many measured steps, by chance": {660: 4320, 661: 3698, 666: 4814},
    "the same of one rank": {140: 587, 176: 416},
    "longer sequences with an equally slower network": {37: 31, 162: 2108, 151: 4733},
    "an exporter that does not answer while its ranks wait, or others waited for them before": {654: 3505, 730: 4721},
    "three checkpoints in an hour with two intervals": {173: 4600},
}
"""Days by number, and the scrape in which earlier rules alerted."""


@pytest.mark.parametrize("why", FALSE_ALARMS)
def test_former_false_alarms_do_not_alert(why: str, tmp_path: Path) -> None:
    found = []
    for number, scrape in FALSE_ALARMS[why].items():
        day = healthy(number)
        begin = max(0, scrape - BEFORE)
        found.append(Stretch(day, simulate(replace(day, seconds=SCRAPE * (scrape + 5))), begin, scrape + 5))
    assert [firing for alerts in fire(found, rules(tmp_path), tmp_path).values() for firing in alerts] == []


@pytest.mark.parametrize("case", EXPECTED)
def test_the_fault_alerts_once_and_nothing_else_does(case: str, tmp_path: Path) -> None:
    plan, expected = EXPECTED[case]
    fired = fire([Stretch(plan, simulate(plan), 0, 320)], rules(tmp_path), tmp_path)
    alerts = [dict(firing.labels) for firings in fired.values() for firing in firings]
    names = [" ".join(filter(None, (labels["alertname"], labels.get("rank")))) for labels in alerts]
    assert names == expected, alerts
