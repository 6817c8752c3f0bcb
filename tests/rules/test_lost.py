"""The parts of a run's GPU time, which sum to one, and their cost in GPU-hours and money."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.prometheus import render
from deploy.prometheus.shipped import HERE
from deploy.prometheus.thresholds import SPEEDS, Thresholds
from testing import promtool
from testing.promtool import FAST, HEALTHY_RANK, Case, Fault, everywhere, phases
from tests.rules.diagnosis_cases import CLOCK, THROTTLED

ENDED = {name: None for name in HEALTHY_RANK if "_up" not in name and "_start_" not in name}
STANDS_STILL = phases(
    forward=0, backward=0, optimizer=0, data_wait=0, h2d_copy=0, checkpoint=0, other=0, collective_wait=1
)
KINDS = (
    Case("still", Fault(everywhere({**STANDS_STILL, "rankscope_rank_last_progress_timestamp_seconds": 0.0}))),
    Case("ended", Fault({3: {**ENDED, "rankscope_rank_up": 0.0}})),
    Case("throttled", Fault(gpus=everywhere({THROTTLED: 1.0, CLOCK: 0.99e9}))),
    Case("healthy", Fault()),
)
CAPPED = THROTTLED.replace("sw_thermal_slowdown", "sw_power_cap")
LIMIT, DEFAULT_LIMIT = "rankscope_gpu_power_limit_watts", "rankscope_gpu_power_limit_default_watts"
AT_LIMIT = {CAPPED: 1.0, CLOCK: 1.4e9, DEFAULT_LIMIT: 700.0}
POWER_LIMITS = (
    Case("default limit", Fault(gpus=everywhere({**AT_LIMIT, LIMIT: 700.0}))),
    Case("lowered limit", Fault(gpus=everywhere({**AT_LIMIT, LIMIT: 500.0}))),
)
AWAY = 20
"""Missing scrapes: more than any window has, and fewer than the run is remembered."""
RUNS = [case.run for case in KINDS]
END = f"{(FAST.quiet + FAST.faulty - 1) * FAST.interval}s"


def ask(expression: str, **values: float) -> dict[str, Any]:
    """Return a question to promtool: the value of the expression by run at the end."""
    samples = [{"labels": f'{{run="{run}"}}', "value": value} for run, value in values.items()]
    return {"expr": f"round(sum by (run) ({expression}), 0.001)", "eval_time": END, "exp_samples": samples}


def complaint(path: Path, cases: tuple[Case, ...], *questions: dict[str, Any]) -> str:
    test = {**promtool.all_of(cases, FAST), "promql_expr_test": list(questions)}
    return promtool.complaint(test, FAST, path / "test.yml")


def test_each_part_is_a_share_of_the_allocated_time(tmp_path: Path) -> None:
    lost = "run:rankscope_lost:ratio"
    assert not complaint(
        tmp_path,
        KINDS,
        ask(f'{lost}{{cause="stall"}} > 0', still=1),
        ask(f'{lost}{{cause="idle"}} > 0', ended=0.25),
        ask(f'{lost}{{cause="throttling"}} > 0', throttled=0.43),
        ask(f'{lost}{{cause="none"}} > 0', ended=0.645, throttled=0.43, healthy=0.86),
        ask(f'{lost}{{cause="transfer"}} > 0', ended=0.06, throttled=0.08, healthy=0.08),
    )


def test_the_default_power_limit_is_no_loss(tmp_path: Path) -> None:
    lost = 'run:rankscope_lost:ratio{cause="throttling"} > 0'
    assert not complaint(tmp_path, POWER_LIMITS, ask(lost, **{"lowered-limit": 0.252}))


def test_the_parts_sum_to_one(tmp_path: Path) -> None:  # test_diagnosis.py has it for faults that alert
    assert not complaint(tmp_path, KINDS, ask("run:rankscope_lost:ratio", **{case.run: 1.0 for case in KINDS}))


def test_lost_gpu_hours_add_up_while_the_run_exists(tmp_path: Path) -> None:
    last = f"run:rankscope_lost_gpu_hours:total - run:rankscope_lost_gpu_hours:total offset {FAST.faulty // 2}s"
    # 15 s of four GPUs are 60 GPU-seconds.
    assert not complaint(
        tmp_path,
        KINDS,
        ask(f"3600 * ({last})", still=60, ended=21.3, throttled=34.2, healthy=8.4),
        ask("run:rankscope_lost_money:total"),
    )


def test_lost_gpu_hours_continue_after_missing_scrapes(tmp_path: Path) -> None:
    speed = replace(FAST, faulty=2 * AWAY + FAST.faulty)
    total = "run:rankscope_lost_gpu_hours:total"
    test = {
        "interval": f"{speed.interval}s",
        "input_series": [unseen(line, speed.quiet) for case in KINDS for line in promtool.series(case, speed)],
        "promql_expr_test": [
            ask(f"resets(sum by (run) ({total})[{speed.faulty}s:{speed.interval}s])", **dict.fromkeys(RUNS, 0.0)),
            ask(
                f"sum by (run) ({total}) > bool sum by (run) ({total} offset {speed.faulty}s)",
                **dict.fromkeys(RUNS, 1.0),
            ),
        ],
    }
    for question in test["promql_expr_test"]:
        question["eval_time"] = f"{speed.quiet + speed.faulty - 1}s"
    assert not promtool.complaint(test, speed, tmp_path / "test.yml")


def unseen(line: dict[str, str], first: int) -> dict[str, str]:
    """Return the series without its scrapes for some time from the sample `first` on."""
    samples = promtool.expanded(line["values"])
    samples[first : first + AWAY] = ["stale", *["_"] * (AWAY - 1)]
    return {**line, "values": " ".join(samples)}


def test_lost_money_needs_a_price() -> None:
    thresholds = Thresholds.load(HERE / "thresholds.yml")
    priced = {**thresholds.named, "gpu_hour_price": {"value": 2.5, "reason": "for the test"}}
    values = render.Values(Thresholds(priced), {}, SPEEDS[0])
    text = render.render((HERE / "rules/recording/40_lost.yml").read_text(), values, "40_lost.yml")
    assert "run:rankscope_lost_gpu_hours:total * 2.5 and on () vector(2.5) > 0" in text
