"""The score of the exporter's own findings about a run, next to that of the rules' alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from testing.servers import Prometheus
from testing.webhook import Notification
from validation.gauntlet.case import Case, Target
from validation.gauntlet.score import false_alarms, judge

ALERTS = {
    "rotating_straggler": "RankscopeRotatingStraggler",
    "data": "RankscopeDataBound",
    "network": "RankscopeTransferBound",
    "small_collectives": "RankscopeSmallCollectives",
    "stage_imbalance": "RankscopePipelineBound",
    "bubble": "RankscopePipelineBound",
    "copies": "RankscopeCopyBound",
    "launch": "RankscopeLaunchBound",
    "device_reads": "RankscopeDeviceReads",
    "throttling": "RankscopeThrottled",
    "hang": "RankscopeRankStuck",
    "crash": "RankscopeRankCrashed",
    "slow_startup": "RankscopeStartupSlow",
    "slow_checkpoint": "RankscopeCheckpointSlow",
    "checkpoint_overdue": "RankscopeCheckpointOverdue",
    "low_utilization": "RankscopeLowUtilization",
    "cpu_fallback": "RankscopeCpuFallback",
    "loss_scale_collapse": "RankscopeLossScaleCollapse",
}
"""The alert about the same by kind of finding; a straggler has two."""
ONE_CAUSE = {
    "copies": "h2d_copy",
    "small_collectives": "synchronization",
    "launch": "launch",
    "device_reads": "device_read",
    "throttling": "throttled",
    "slow_startup": "startup",
    "slow_checkpoint": "checkpoint",
    "cpu_fallback": "cpu_fallback",
    "loss_scale_collapse": "not_finite",
}
"""The rules' cause by kind of finding, where the kind already names it."""

BEFORE = 5  # seconds before the fault


def findings(prometheus: Prometheus, since: float, until: float) -> list[tuple[dict[str, str], float]]:
    """Return the labels of every finding that begins between two unix times, and when Prometheus first saw it.

    A finding that goes on from a fault that was healed a moment ago is left out.
    """
    series = prometheus.query(f"rankscope_finding_ratio[{round(until - since) + BEFORE}s] @ {until}")
    found = [(one["metric"], float(one["values"][0][0])) for one in series]
    return sorted((one for one in found if one[1] > since), key=lambda item: item[1])


def scored(
    found: Iterable[tuple[Mapping[str, str], float]], faults: Iterable[tuple[Case, Target]], onset: float
) -> dict[str, Any]:
    """Return the verdicts and false alarms, as if a notification had come when each finding was first seen."""
    faults = tuple(faults)
    notifications = [_notification(labels, seen) for labels, seen in found if seen >= onset]
    verdicts = [judge(case, target, onset, notifications) for case, target in faults if not case.is_decoy]
    alarms = false_alarms(faults, [_notification(labels, seen) for labels, seen in found])
    return {"verdicts": [verdict.line() for verdict in verdicts], "false_alarms": alarms}


def _notification(labels: Mapping[str, str], seen: float) -> Notification:
    kind, cause = labels["kind"], labels.get("cause", "")
    is_first = labels.get("rank") == "0"
    straggler = "RankscopeRankZeroLagging" if is_first else "RankscopeRankLagging"
    alert = {"alertname": straggler if kind == "straggler" else ALERTS[kind], "cause": ONE_CAUSE.get(kind, cause)}
    kept = {name: value for name, value in labels.items() if name in ("run", "rank", "gpu", "node", "severity")}
    return Notification("firing", {**kept, **alert}, {}, "", seen)
