"""The simulated month: its series match an exporter's, and omitted stretches could not alert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from deploy.prometheus.shipped import HERE
from validation.month import plan, quiet, report
from validation.month.engine import fire
from validation.month.plan import Plan, SimulatedEvent
from validation.month.record import SCRAPE, align, simulate
from validation.month.samples import Stretch
from validation.month.steps import PHASES, WAIT, P

from rankscope.record.layout import PHASES as HOOK_PHASES
from rankscope.record.snapshot import Step
from rankscope_exporter.ranks import step_alignment


def a_run(**others: object) -> Plan:
    made = Plan("run", 1, 8, 1.0, "host", seconds=2400.0)
    return replace(made, **others)


def test_a_day_depends_only_on_its_number() -> None:
    assert str(plan.healthy(7)) == str(plan.healthy(7)) != str(plan.healthy(8))


def test_the_phases_of_every_rank_add_up_to_the_time_since_its_start() -> None:
    record = simulate(
        a_run(events=(SimulatedEvent("checkpoint", 300.0, 40.0, 2), SimulatedEvent("restart", 900.0, 60.0)))
    )
    passed = np.where(record.started > 0, record.times - record.started, record.times)
    seconds = np.where(record.up[:, None], record.seconds.sum(axis=1), passed[:, None])
    assert np.allclose(seconds, passed[:, None])


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_aligned_steps_match_the_exporters(ranks: int) -> None:
    draw = np.random.default_rng(3)
    durations = draw.exponential(1.0, (1, 10, ranks))
    durations[:, P["startup"]] = 0
    own = durations.sum(axis=1) - durations[:, WAIT]
    durations[:, WAIT] = own.max() - own + 0.1
    floor, skew, blame = align(durations, [range(ranks)])
    steps = [
        Step(1, 0.0, 10.0, tuple(durations[0, P[name], rank] if name in P else 0.0 for name in HOOK_PHASES))
        for rank in range(ranks)
    ]
    alignments = [step_alignment.Alignment(key=("run", str(rank), "")) for rank in range(ranks)]
    step_alignment.account(alignments, steps)
    assert np.allclose(floor[0], [one.floor for one in alignments])
    assert np.allclose(skew[0], [one.skew for one in alignments])
    for number, name in enumerate((*PHASES, "unknown")):
        assert np.allclose(blame[0, number], [one.blame.get(name, 0.0) for one in alignments])


def test_a_failed_scrape_makes_every_series_stale_and_a_restarted_exporter_counts_from_zero() -> None:
    healthy = a_run(events=(SimulatedEvent("exporter restart", 600.0, 20.0, 0),))
    lines = {line["series"]: line["values"].split(" ") for line in Stretch(healthy, simulate(healthy), 0, 60).lines()}
    by_metric = {series.partition("{")[0]: values for series, values in lines.items()}
    assert by_metric["up"][39:43] == ["1", "0", "0", "1"]
    assert by_metric["rankscope_rank_steps_total"][40:42] == ["stale", "_"]
    assert float(by_metric["rankscope_rank_steps_total"][42]) > float(by_metric["rankscope_rank_steps_total"][39])
    assert float(by_metric["rankscope_gpu_busy_seconds_total"][42]) < 60


def test_a_pause_of_a_loader_is_kept_and_an_uneventful_day_is_not() -> None:
    quiet_day = a_run(seconds=14400.0)
    paused = replace(quiet_day, events=(SimulatedEvent("data_wait", 9000.0, 45.0, 3),))
    assert list(quiet.stretches(quiet_day, simulate(quiet_day))) == []
    (kept,) = quiet.stretches(paused, simulate(paused))
    assert kept.begin < 9000.0 - 15 * 60
    assert kept.begin + SCRAPE * len(kept) > 9000.0 + 5 * 60


def test_the_rules_alert_about_a_slow_rank_only_while_it_is_slow(tmp_path: Path) -> None:
    slow = a_run(fault="slow rank", dose=1.5, onset=900.0, heals=1500.0, culprit=5)
    stretch = Stretch(slow, simulate(slow), 0, 160)
    (firing,) = fire([stretch], HERE / "rules/15s.yml", tmp_path)[stretch]
    labels = dict(firing.labels)
    assert (labels["alertname"], labels["rank"], labels["cause"]) == ("RankscopeRankLagging", "5", "backward")
    assert 900 < firing.begins < 1100 < 1500 <= firing.ends < 2000
    assert not firing.lasts


@pytest.mark.parametrize(("again", "count"), [(1015.0, 1), (1200.0, 2)])
def test_an_alert_that_becomes_critical_is_the_same_and_one_that_returns_is_another(again: float, count: int) -> None:
    first = {"alert": "RankscopeRankLagging", "rank": "5", "severity": "warning", "begins": 900.0, "ends": 1000.0}
    second = first | {"severity": "critical", "begins": again, "ends": again + 60}
    alarms = report.merged([first, second])
    assert len(alarms) == count
    assert report.flaps(alarms) == count - 1
