"""The score of the exporter's own findings about a run, and its differences from that of the rules' alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from testing.report import Line
from testing.servers import Prometheus
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
KINDS = frozenset((*ALERTS, "straggler"))
STRAGGLER, RANK_ZERO = "RankscopeRankLagging", "RankscopeRankZeroLagging"
COMPARED = frozenset((STRAGGLER, RANK_ZERO, *ALERTS.values()))
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

    A finding that has no alert, or that goes on from a fault that was healed a moment ago, is left out.
    """
    series = prometheus.query(f"rankscope_finding_ratio[{round(until - since) + BEFORE}s] @ {until}")
    found = [(one["metric"], float(one["values"][0][0])) for one in series]
    return sorted((one for one in found if one[1] > since and one[0]["kind"] in KINDS), key=lambda item: item[1])


def scored(
    found: Iterable[tuple[Labels, float]], faults: Iterable[tuple[Case, Target]], onset: float
) -> dict[str, Any]:
    """Return the verdicts and false alarms, as if a notification had come when each finding was first seen."""
    faults = tuple(faults)
    notifications = [_notification(labels, seen) for labels, seen in found if seen >= onset]
    verdicts = [judge(case, target, onset, notifications) for case, target in faults if not case.is_decoy]
    alarms = false_alarms(faults, [_notification(labels, seen) for labels, seen in found])
    return {"verdicts": [verdict.line() for verdict in verdicts], "false_alarms": alarms}


class Difference(NamedTuple):
    """One alert that rules and exporter do not share: the labels of each, None for nothing."""

    rules: Labels | None
    exporter: Labels | None
    right: str
    """`rules`, `exporter`, `both` or `neither`."""


def differences(line: Line) -> list[Difference]:
    """Return the differences of a line of the ledger: of the first alert about each fault, and of false alarms."""
    found = []
    for rules, exporter in zip(line["verdicts"], line["findings"]["verdicts"], strict=True):
        both = rules["labels"], exporter["labels"]
        is_compared = all(labels is None or labels["alertname"] in COMPARED for labels in both)
        if is_compared and not _is_same(*both):
            found.append(Difference(*both, _right(_is_right(rules), _is_right(exporter))))
    by_rules = [labels for labels in line["false_alarms"] if labels["alertname"] in COMPARED]
    by_exporter = line["findings"]["false_alarms"]
    found += [Difference(one, None, "exporter") for one in _only_in(by_rules, by_exporter)]
    return found + [Difference(None, one, "rules") for one in _only_in(by_exporter, by_rules)]


def _only_in(some: Iterable[Labels], others: Iterable[Labels]) -> list[Labels]:
    others = tuple(others)
    return [one for one in some if not any(_is_same(one, other) for other in others)]


def _is_same(one: Labels | None, other: Labels | None) -> bool:
    """Return whether alert and rank are the same, and the cause, if both name one."""
    if one is None or other is None:
        return one is other
    is_same_cause = not one.get("cause") or not other.get("cause") or one["cause"] == other["cause"]
    return is_same_cause and all(one.get(name) == other.get(name) for name in ("alertname", "rank"))


def _is_right(verdict: Mapping[str, Any]) -> bool:
    return bool(verdict["fired"] and verdict["place_right"] and verdict["cause_right"])


def _right(are_rules: bool, is_exporter: bool) -> str:
    if are_rules and is_exporter:
        return "both"
    return "rules" if are_rules else "exporter" if is_exporter else "neither"


def _notification(labels: Labels, seen: float) -> Notification:
    kind, cause = labels["kind"], labels.get("cause", "")
    is_first = labels.get("rank") == "0"
    straggler = RANK_ZERO if is_first else STRAGGLER
    alert = {"alertname": straggler if kind == "straggler" else ALERTS[kind], "cause": ONE_CAUSE.get(kind, cause)}
    kept = {name: value for name, value in labels.items() if name in ("run", "rank", "gpu", "node", "severity")}
    return Notification("firing", {**kept, **alert}, {}, "", seen)
