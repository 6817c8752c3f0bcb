"""Eight nodes with one rank each, which no exporter can compare: the rules compare reference steps of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from testing import promtool
from testing.promtool import FAST, MEASURED, PRODUCTION, Speed

NODES = 8
SHOWN = 2  # scrapes for which a rank shows the same step
HEALTHY = {"other": 3.0, "data_wait": 2.0, "forward": 28.0, "backward": 50.0, "optimizer": 10.0}  # ms of a step
TRANSFER, EXTRA = 7.0, 30.0  # the same
Step = dict[str, float]


def healthy(_rank: int, _step: int) -> tuple[Step, float]:
    """Return a rank's time by phase, and what even the last rank waits."""
    return HEALTHY, TRANSFER


def slow_network(_rank: int, _step: int) -> tuple[Step, float]:
    return HEALTHY, TRANSFER + EXTRA


def one_slow_rank(rank: int, _step: int) -> tuple[Step, float]:
    return HEALTHY | {"backward": 50.0 + EXTRA * (rank == 3)}, TRANSFER


def another_rank_each_step(rank: int, step: int) -> tuple[Step, float]:
    return HEALTHY | {"backward": 50.0 + EXTRA * (rank == 5 * step % NODES)}, TRANSFER


Trouble = Callable[[int, int], tuple[Step, float]]
TROUBLES: dict[str, tuple[Trouble, dict[str, str]]] = {
    "slow-network": (slow_network, {"alertname": "RankscopeTransferBound", "cause": "network"}),
    "one-slow-rank": (one_slow_rank, {"alertname": "RankscopeRankLagging", "rank": "3", "cause": "backward"}),
    "in-turn": (another_rank_each_step, {"alertname": "RankscopeRotatingStraggler", "cause": "uneven_work"}),
    "healthy": (healthy, {}),
}


def step_of(trouble: Trouble, rank: int, number: int) -> Step:
    """Return the milliseconds of one step of the rank by phase: all ranks end it together."""
    lasts = max(sum(trouble(other, number)[0].values()) for other in range(NODES))
    busy, transfer = trouble(rank, number)
    return busy | {"collective_wait": lasts - sum(busy.values()) + transfer}


def shares(trouble: Trouble, rank: int) -> Step:
    """Return the rank's time by phase over the hundreds of steps between two scrapes, as ratios."""
    steps = [step_of(trouble, rank, number) for number in range(NODES)]
    total = sum(sum(step.values()) for step in steps)
    return {phase: sum(step[phase] for step in steps) / total for phase in steps[0]}


def series(run: str, trouble: Trouble, clock: str, speed: Speed, shows: bool) -> Iterator[dict[str, str]]:
    """Yield the series of a run for promtool."""
    samples = speed.quiet + speed.faulty
    for rank in range(NODES):
        does = [healthy] * speed.quiet + [trouble] * speed.faulty
        steps = [step_of(what, rank, scrape // SHOWN) for scrape, what in enumerate(does)]
        time = {what: shares(what, rank) for what in (healthy, trouble)}
        seen = [max(0, n - (rank == 7)) for n in range(samples)]  # the last is one scrape behind the others
        common = f'instance="{run}-{rank}",run="{run}",rank="{rank}"'
        info = f'{common},group="0-7",node="node-{rank}",uuid="GPU-{run}-{rank}"'
        every: dict[str, list[float]] = {
            f"rankscope_rank_info{{{info}}}": [1.0] * samples,
            f"rankscope_rank_up{{{common}}}": [1.0] * samples,
            f"rankscope_rank_start_timestamp_seconds{{{common}}}": [0.0] * samples,
            f"rankscope_rank_last_progress_timestamp_seconds{{{common}}}": [n * speed.interval for n in range(samples)],
            f"rankscope_rank_steps_total{{{common}}}": [10.0 * n * speed.interval for n in range(samples)],
        }
        for phase in steps[0]:
            own = f'{common},phase="{phase}"'
            seconds = list(_added_up(speed.interval * time[what][phase] for what in does))
            if clock == "device":
                every[f"rankscope_rank_device_seconds_total{{{own}}}"] = [MEASURED * value for value in seconds]
            else:
                every[f"rankscope_rank_phase_seconds_total{{{own}}}"] = seconds
            if shows:
                every[f"rankscope_rank_reference_step_seconds{{{own}}}"] = [
                    steps[shown][phase] / 1000 for shown in seen
                ]
        if clock == "device":
            waits = [n * float(speed.interval) for n in range(samples)]
            every[f'rankscope_rank_phase_seconds_total{{{common},phase="device_wait"}}'] = waits
        if shows:
            number = [float(1_000_000 + 640 * (shown // SHOWN)) for shown in seen]
            every[f'rankscope_rank_reference_step{{{common},clock="{clock}"}}'] = number
        yield from ({"series": name, "values": " ".join(f"{v:.9g}" for v in values)} for name, values in every.items())


def _added_up(values: Iterator[float]) -> Iterator[float]:
    total = 0.0
    for value in values:
        total += value
        yield total


def fired(speed: Speed, since: int, until: int, *expected: Mapping[str, str]) -> dict[str, Any]:
    """Return a question to promtool: the alerts that fire from one scrape to another."""
    span = f"[{(until - since) * speed.interval}s]"
    alerts = f'max_over_time(ALERTS{{alertstate="firing"}}{span})'
    found = Counter(tuple(sorted(labels.items())) for labels in expected)
    names = [
        {"labels": "{" + ",".join(f'{k}="{v}"' for k, v in labels) + "}", "value": number}
        for labels, number in found.items()
    ]
    return {
        "expr": f"count by (run, alertname, rank, cause) ({alerts})",
        "eval_time": f"{(until - 1) * speed.interval}s",
        "exp_samples": names,
    }


def question(expression: str, speed: Speed, *samples: tuple[str, float]) -> dict[str, Any]:
    expected = [{"labels": labels, "value": value} for labels, value in samples]
    last = f"{(speed.quiet + speed.faulty - 1) * speed.interval}s"
    return {"expr": f"round({expression}, 0.01)", "eval_time": last, "exp_samples": expected}


@pytest.mark.parametrize("speed", [PRODUCTION, FAST], ids=lambda speed: speed.name)
@pytest.mark.parametrize("clock", ["host", "device"])
def test_ranks_in_turn_a_slow_network_and_one_slow_rank_are_distinguished(
    clock: str, speed: Speed, tmp_path: Path
) -> None:
    end = speed.quiet + speed.faulty
    alerts = [{**labels, "run": run} for run, (_, labels) in TROUBLES.items() if labels]
    transfer = 'run:rankscope_lost:ratio{cause="transfer",run!="slow-network"}'
    test = {
        "interval": f"{speed.interval}s",
        "input_series": [
            line for run, (trouble, _) in TROUBLES.items() for line in series(run, trouble, clock, speed, shows=True)
        ],
        "promql_expr_test": [
            fired(speed, 0, speed.quiet),
            fired(speed, speed.quiet, end, *alerts),
            question(
                f"sum by (run) ({transfer})",
                speed,
                ('{run="in-turn"}', 0.05),
                ('{run="one-slow-rank"}', 0.05),
                ('{run="healthy"}', 0.07),
            ),
            question(
                'sum by (run, rank, phase) (rank:rankscope_blame:ratio{run="one-slow-rank"})',
                speed,
                ('{run="one-slow-rank",rank="3",phase="backward"}', 0.23),
            ),
        ],
    }
    assert promtool.complaint(test, speed, tmp_path / "test.yml") == ""


@pytest.mark.parametrize("clock", ["host", "device"])
def test_without_reference_steps_the_cause_is_unknown(clock: str, tmp_path: Path) -> None:
    speed = FAST
    test = {
        "interval": f"{speed.interval}s",
        "input_series": list(series("one", slow_network, clock, speed, shows=False)),
        "promql_expr_test": [
            fired(
                speed,
                speed.quiet,
                speed.quiet + speed.faulty,
                {"run": "one", "alertname": "RankscopeTransferBound", "cause": "unknown"},
            )
        ],
    }
    assert promtool.complaint(test, speed, tmp_path / "test.yml") == ""
