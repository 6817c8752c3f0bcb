"""The rules at each interval that the install page promises: a healthy run is healthy, and losses add up.

Prometheus scrapes and evaluates at random moments within the interval, so samples may be nearly an interval old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy.prometheus import render
from deploy.prometheus.thresholds import Speed
from testing import promtool

RANKS, SHARES = 4, {"forward": 0.5, "data_wait": 0.3, "checkpoint": 0.15, "other": 0.05}
LOST = RANKS * (1 - SHARES["forward"])  # GPU-hours per hour
PARTS = 5
"""promtool's steps per interval. Scrapes are in the first or the last of them, evaluations at its end."""
INTERVALS = 30
RUN = 'instance="a",job="gpus",run="known"'


def series(interval: int, late: int) -> Iterator[dict[str, str]]:
    """Yield ranks with one step per second, whose scrapes are `late` parts of an interval before the evaluation."""

    def sampled(name: str, labels: str, value: Callable[[float], float]) -> dict[str, str]:
        seconds = (n * interval / PARTS for n in range(INTERVALS * PARTS + 1))
        is_scrape = ((n + late) % PARTS == 0 for n in range(INTERVALS * PARTS + 1))
        values = (f"{value(at):g}" if scrape else "_" for at, scrape in zip(seconds, is_scrape, strict=True))
        return {"series": f"{name}{{{labels}}}", "values": " ".join(values)}

    exporter = 'instance="a",job="gpus"'
    yield sampled("up", exporter, lambda _: 1)
    yield sampled("rankscope_exporter_build_info", exporter, lambda _: 1)
    yield sampled("rankscope_exporter_time_seconds", exporter, lambda at: at)
    for rank in range(RANKS):
        own = f'{RUN},rank="{rank}"'
        yield sampled("rankscope_rank_info", f'{own},group="0-3",node="n",uuid="GPU-{rank}"', lambda _: 1)
        yield sampled("rankscope_rank_up", own, lambda _: 1)
        yield sampled("rankscope_rank_start_timestamp_seconds", own, lambda _: -3600)
        yield sampled("rankscope_rank_last_progress_timestamp_seconds", own, lambda at: at)
        yield sampled("rankscope_rank_steps_total", own, lambda at: at + 3600)
        for phase, share in SHARES.items():
            yield sampled(
                "rankscope_rank_phase_seconds_total", f'{own},phase="{phase}"', lambda at, s=share: s * (at + 3600)
            )


def complaint(interval: int, late: int, questions: list[dict[str, Any]], directory: Path) -> str:
    """Return promtool's complaint about what is not as expected."""
    (directory / "rules.yml").write_text(render.group(Speed(f"{interval}s", interval)))
    test = {
        "interval": f"{interval // PARTS}s",
        "input_series": list(series(interval, late)),
        "promql_expr_test": questions,
        "alert_rule_test": [
            {"eval_time": f"{n * interval}s", "alertname": "RankscopeRankStuck", "exp_alerts": []}
            for n in range(INTERVALS)
        ],
    }
    speed = promtool.Speed(f"{interval}s", interval, 0, 0)
    return promtool.complaint(test, speed, directory / "test.yml", directory / "rules.yml")


@pytest.mark.parametrize("interval", [5, 15, 30, 60])
@pytest.mark.parametrize("late", [0, PARTS - 1], ids=["at once", "nearly an interval after the scrape"])
def test_a_healthy_run_does_not_hang_and_its_losses_add_up(interval: int, late: int, tmp_path: Path) -> None:
    spans = INTERVALS // 2
    hours, end = LOST * spans * interval / 3600, f"{(INTERVALS - 1) * interval}s"
    total = "sum(run:rankscope_lost_gpu_hours:total)"
    grown = f"({total} - sum(run:rankscope_lost_gpu_hours:total offset {spans * interval}s)) / {hours:.9f}"
    questions = [
        {"expr": "run:rankscope_stuck:seconds", "eval_time": end, "exp_samples": []},
        {"expr": f"round({grown}, 0.01)", "eval_time": end, "exp_samples": [{"labels": "{}", "value": 1.0}]},
    ]
    assert not complaint(interval, late, questions, tmp_path)
