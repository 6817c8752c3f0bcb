"""The score of an exporter's findings, without waiting for their alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from testing.webhook import Notification
from validation.gauntlet.case import Case, Target
from validation.gauntlet.score import false_alarms, judge

Labels = Mapping[str, str]

ROOT = Path(__file__).parents[2]
TEXTS = yaml.safe_load((ROOT / "exporter/rankscope_exporter/diagnosis/causes.yml").read_text())["alerts"]
ALERTS = {
    entry["finding"]: alert
    for alert, texts in TEXTS.items()
    for entry in (texts, *texts.get("causes", {}).values())
    if entry.get("finding", "straggler") != "straggler" and (ROOT / f"docs/runbooks/{alert}.md").exists()
}
"""The alert about the same by kind of finding; a straggler has two."""
STRAGGLER, RANK_ZERO = "RankscopeRankLagging", "RankscopeRankZeroLagging"
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
"""The alert's cause by kind of finding, where the kind already names it."""


def scored(
    found: Iterable[tuple[Labels, float]], faults: Iterable[tuple[Case, Target]], onset: float
) -> dict[str, Any]:
    """Return the verdicts and false alarms, as if a notification had come when each finding was first seen."""
    faults = tuple(faults)
    notifications = [_notification(labels, seen) for labels, seen in found if seen >= onset]
    verdicts = [judge(case, target, onset, notifications) for case, target in faults if not case.is_decoy]
    alarms = false_alarms(faults, [_notification(labels, seen) for labels, seen in found])
    return {"verdicts": [verdict.line() for verdict in verdicts], "false_alarms": alarms}


def _notification(labels: Labels, seen: float) -> Notification:
    kind, cause = labels["kind"], labels.get("cause", "")
    is_first = labels.get("rank") == "0"
    straggler = RANK_ZERO if is_first else STRAGGLER
    alert = {"alertname": straggler if kind == "straggler" else ALERTS[kind], "cause": ONE_CAUSE.get(kind, cause)}
    kept = {name: value for name, value in labels.items() if name in ("run", "rank", "gpu", "node", "severity")}
    return Notification("firing", {**kept, **alert}, {}, "", seen)
