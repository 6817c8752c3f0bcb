"""Input of promtool: series of a run of four ranks and their GPUs, first healthy and then with a fault.

A figure is seconds per second for a counter and for a timestamp that follows the time (1.0), or a gauge's value. All
speeds get the same figures at their own interval, so that the thresholds of all are tested.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankscope.record.phases import PLANNED
from testing import rule_tests

RULES = Path(__file__).resolve().parents[1] / "deploy/prometheus/rules"
STEPS = 10.0  # a second
GIB = 2.0**30

MEASURED = 0.125
"""Ratio of the steps that are measured on the device."""
MEASURED_TOO = tuple(
    f"rankscope_rank_{name}_seconds_total" for name in ("transfer_floor", "skew", "blame", "device_dry")
)
HOST_WAITS = "the host waits for the device"
"""A figure that is no series: the ratio of time in which the host waits, where the run is measured on the device."""
IN_COLLECTIVE = 'rankscope_rank_phase_since_timestamp_seconds{phase="collective_wait"}'
IN_DEVICE_WAIT = 'rankscope_rank_phase_since_timestamp_seconds{phase="device_wait"}'

Figures = dict[str, float | None]
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Speed:
    """The scrape interval in seconds, and the number of samples in each part of a test."""

    name: str
    interval: int
    quiet: int
    faulty: int


PRODUCTION = Speed("15s", 15, 62, 90)
BRISK = Speed("5s", 5, 62, 90)
FAST = Speed("fast", 1, 60, 30)

HEALTHY_RANK: Figures = {
    'rankscope_rank_phase_seconds_total{phase="forward"}': 0.28,
    'rankscope_rank_phase_seconds_total{phase="backward"}': 0.48,
    'rankscope_rank_phase_seconds_total{phase="optimizer"}': 0.1,
    'rankscope_rank_phase_seconds_total{phase="collective_wait"}': 0.08,
    'rankscope_rank_phase_seconds_total{phase="data_wait"}': 0.02,
    'rankscope_rank_phase_seconds_total{phase="h2d_copy"}': 0.01,
    'rankscope_rank_phase_seconds_total{phase="checkpoint"}': 0.01,
    'rankscope_rank_phase_seconds_total{phase="other"}': 0.02,
    'rankscope_rank_phase_seconds_total{phase="startup"}': 0.0,
    'rankscope_rank_phase_since_timestamp_seconds{phase="forward"}': 1.0,
    "rankscope_rank_up": 1.0,
    "rankscope_rank_start_timestamp_seconds": 0.0,
    "rankscope_rank_last_progress_timestamp_seconds": 1.0,
    "rankscope_rank_checkpoint_last_timestamp_seconds": 1.0,
    "rankscope_rank_checkpoints_total": 0.5,
    "rankscope_rank_steps_total": STEPS,
    'rankscope_rank_cpu_seconds_total{who="workers"}': 0.6,
    "rankscope_rank_workers_run_queue_seconds_total": 0.02,
    "rankscope_rank_run_queue_seconds_total": 0.02,
    "rankscope_rank_child_processes": 2.0,
    'rankscope_rank_loader_worker_seconds_total{state="working"}': 0.8,
    'rankscope_rank_loader_worker_seconds_total{state="idle"}': 1.2,
    'rankscope_rank_collectives_total{op="ddp_all_reduce"}': STEPS,
    'rankscope_rank_collective_bytes_total{op="ddp_all_reduce"}': 1e8 * STEPS,
    'rankscope_rank_collective_seconds_total{op="ddp_all_reduce"}': 0.08,
    'rankscope_rank_group_collectives_total{group="0-3"}': STEPS,
}
HEALTHY_GPU: Figures = {
    "rankscope_gpu_busy_seconds_total": 0.9,
    "rankscope_gpu_last_busy_timestamp_seconds": 1.0,
    "rankscope_gpu_memory_used_bytes": 56 * GIB,
    "rankscope_gpu_memory_total_bytes": 80 * GIB,
    "rankscope_gpu_processes": 1.0,
    "rankscope_gpu_up": 1.0,
    'rankscope_gpu_throttled_seconds_total{reason="sw_thermal_slowdown"}': 0.0,
    'rankscope_gpu_clock_hertz{domain="sm"}': 1.98e9,
    'rankscope_gpu_clock_max_hertz{domain="sm"}': 1.98e9,
    "rankscope_gpu_pcie_link_width": 16.0,
    "rankscope_gpu_pcie_link_width_max": 16.0,
}


@dataclass
class Fault:
    """Changed figures by rank, of the rank and of its GPU. A series whose figure is None ends."""

    ranks: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)
    gpus: Mapping[int, Mapping[str, float | None]] = field(default_factory=dict)


def phases(**seconds: float) -> dict[str, float]:
    """Return seconds per second by phase."""
    return {f'rankscope_rank_phase_seconds_total{{phase="{phase}"}}': value for phase, value in seconds.items()}


def everywhere(figures: Mapping[str, float | None]) -> dict[int, Mapping[str, float | None]]:
    """Return the same figures for each of the four ranks."""
    return dict.fromkeys(range(4), figures)


@dataclass(frozen=True)
class Case:
    """One fault in a job that is healthy except for `usual`, and all alerts that may fire in the end."""

    name: str
    fault: Fault
    alerts: tuple[Labels, ...] = ()
    usual: Fault = field(default_factory=Fault)
    clock: str = "host"
    """Where the phases are measured. On the device, the host runs ahead: it waits in no collective."""

    @property
    def run(self) -> str:
        """The run's label, unique to the case."""
        return self.name.replace(" ", "-")


def series(case: Case, speed: Speed) -> Iterator[dict[str, str]]:
    """Yield promtool's input for one case."""
    fault, usual = case.fault, case.usual
    for rank in range(4):
        common, uuid = f'instance="{case.run}",run="{case.run}",rank="{rank}"', f"GPU-{case.run}-{rank}"
        info = f'rankscope_rank_info{{{common},group="0-3",node="node-a",uuid="{uuid}"}}'
        yield {"series": info, "values": f"1x{speed.quiet + speed.faulty}"}
        before = HEALTHY_RANK | dict(usual.ranks.get(rank, {}))
        after = before | dict(fault.ranks.get(rank, {}))
        if case.clock == "device":
            before, after = _run_ahead(before), _run_ahead(after)
        yield from _input_series(before, after, common, speed)
        common = f'instance="{case.run}",gpu="{rank}",uuid="{uuid}"'
        yield {"series": f'rankscope_gpu_info{{{common},node="node-a"}}', "values": f"1x{speed.quiet + speed.faulty}"}
        before = HEALTHY_GPU | dict(usual.gpus.get(rank, {}))
        yield from _input_series(before, before | dict(fault.gpus.get(rank, {})), common, speed)


def _run_ahead(figures: Figures) -> Figures:
    """Return the figures of a rank whose device has these phases: its host runs ahead, and some steps are measured."""
    found = dict(figures)
    on_device = {name: value or 0.0 for name, value in figures.items() if is_measured_on_device(name)}
    is_measured = MEASURED * bool(figures["rankscope_rank_steps_total"])
    for name, value in on_device.items():
        found[name] = 0.0
        found[name.replace("phase_seconds", "device_seconds")] = value * is_measured
    found["rankscope_rank_device_steps_total"] = (figures["rankscope_rank_steps_total"] or 0.0) * MEASURED
    measured, waiting = sum(on_device.values()), found.pop(HOST_WAITS, 0.0) or 0.0
    found |= phases(other=measured - waiting, device_wait=waiting)
    for name in (name for name in figures if name.startswith(MEASURED_TOO)):
        found[name] = (figures[name] or 0.0) * is_measured
    if IN_COLLECTIVE in found:
        found[IN_DEVICE_WAIT] = found.pop(IN_COLLECTIVE)
    return found


def is_measured_on_device(name: str) -> bool:
    """Return whether it is the time of a phase that is not planned."""
    return name.startswith("rankscope_rank_phase_seconds_total") and not any(phase in name for phase in PLANNED)


def _input_series(before: Figures, after: Figures, common: str, speed: Speed) -> Iterator[dict[str, str]]:
    for name in before | after:
        metric, _, labels = name.rstrip("}").partition("{")
        values = _values(metric, before.get(name), after.get(name), speed)
        yield {"series": f"{metric}{{{common}{',' if labels else ''}{labels}}}", "values": values}


def _values(metric: str, before: float | None, after: float | None, speed: Speed) -> str:
    ramps = metric.endswith(("_total", "_bucket", "_timestamp_seconds")) and "_start_" not in metric
    first = f"_x{speed.quiet}" if before is None else _ramp(0.0 if ramps else before, before, ramps, speed, speed.quiet)
    start = (before or 0.0) * speed.quiet * speed.interval if ramps else (after or 0.0)
    last = f"_x{speed.faulty}" if after is None else _ramp(start, after, ramps, speed, speed.faulty)
    return f"{first} {last}"


def _ramp(start: float, figure: float, ramps: bool, speed: Speed, samples: int) -> str:
    return f"{start:.9g}+{figure * speed.interval if ramps else 0:.9g}x{samples - 1}"


def all_of(cases: Iterable[Case], speed: Speed) -> dict[str, Any]:
    """Return a test with all cases as runs of one Prometheus.

    No alert fires before the fault, and the expected ones in the end. Empty `exp_alerts` make promtool print the texts.
    """
    cases = list(cases)
    names = sorted({alert["alertname"] for case in cases for alert in case.alerts})
    return {
        "interval": f"{speed.interval}s",
        "input_series": [one for case in cases for one in series(case, speed)],
        "promql_expr_test": [question for case in cases for question in _questions(case, speed)],
        "alert_rule_test": [{"alertname": name, "eval_time": _end(speed), "exp_alerts": []} for name in names],
    }


def _end(speed: Speed) -> str:
    return f"{(speed.quiet + speed.faulty - 1) * speed.interval}s"


def _questions(case: Case, speed: Speed) -> Iterator[dict[str, Any]]:
    """Yield the expected alerts before the fault, in the end and at any time, and the sum of lost time."""
    alerts = f'ALERTS{{alertstate="firing",run="{case.run}"}}'
    firing = f"max by (alertname, severity, rank, gpu, cause) ({alerts})"
    fired = f"max by (alertname, rank, gpu, cause) (max_over_time({alerts}[{speed.faulty * speed.interval}s]))"
    names = [{name: value for name, value in labels.items() if name != "severity"} for labels in case.alerts]
    samples = [{"labels": _braces(labels), "value": 1} for labels in case.alerts]
    yield {"expr": firing, "eval_time": f"{(speed.quiet - 1) * speed.interval}s", "exp_samples": []}
    yield {"expr": firing, "eval_time": _end(speed), "exp_samples": samples}
    ever = [{"labels": _braces(labels), "value": 1} for labels in names]
    yield {"expr": fired, "eval_time": _end(speed), "exp_samples": ever}
    parts = f'round(sum by (run) (run:rankscope_lost:ratio{{run="{case.run}"}}), 0.001)'
    one = [{"labels": _braces({"run": case.run}), "value": 1}]
    yield {"expr": parts, "eval_time": _end(speed), "exp_samples": one}


def complaint(test: Mapping[str, Any], speed: Speed, path: Path, rules: Path | None = None) -> str:
    """Return promtool's failures of a test, or ''. The test is written to `path`; default are the speed's rules."""
    rules = rules or RULES / f"{speed.name}.yml"
    document = {
        "rule_files": [str(rules)],
        "evaluation_interval": f"{speed.interval}s",
        "tests": [test],
    }
    path.write_text(json.dumps(document))
    found = rule_tests.answer(path, rules)
    return "" if found.holds else found.output


def expanded(values: str) -> list[str]:
    """Return the samples of a series in promtool's notation, such as `1+2x3 _x2 5x1 stale`."""
    return [sample for word in values.split() for sample in _samples(word)]


def _samples(word: str) -> list[str]:
    head, _, times = word.rpartition("x")
    if head in ("", "_"):
        return [head] * int(times) if head else [word]
    start, _, slope = re.sub(r"(?<!e)\+", " ", head).partition(" ")
    if not slope:
        return [start] * (int(times) + 1)
    return [f"{float(start) + float(slope) * sample:.9g}" for sample in range(int(times) + 1)]


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
