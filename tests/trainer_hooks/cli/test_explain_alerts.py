"""`rankscope explain` inhibits what Alertmanager inhibits, and knows which alerts' values are lost time."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from rankscope.cli.explaining.alerts import KNOWN, Alert, uninhibited

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = yaml.safe_load((ROOT / "deploy/alertmanager/alertmanager.yml").read_text())["inhibit_rules"]
INHIBIT_RULES = [rule for rule in SHIPPED if 'alertname="RankscopeFlapping"' not in rule["source_matchers"]]
RULES = {
    rule["alert"]: rule
    for path in [ROOT / "deploy/prometheus/rules/15s.yml"]
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
MATCHER = re.compile(r'(?P<label>\w+)(?P<operator>=~|!~|!=|=)"(?P<value>.*)"')


def matches(matcher: str, labels: dict[str, str]) -> bool:
    found = MATCHER.fullmatch(matcher)
    assert found, matcher
    has, wanted = labels.get(found["label"], ""), found["value"]
    is_equal = bool(re.fullmatch(wanted, has)) if "~" in found["operator"] else has == wanted
    return is_equal != found["operator"].startswith("!")


def alertmanager_inhibits(source: dict[str, str], target: dict[str, str]) -> bool:
    def applies(rule: dict[str, Any]) -> bool:
        return (
            all(matches(matcher, source) for matcher in rule["source_matchers"])
            and all(matches(matcher, target) for matcher in rule["target_matchers"])
            and all(source.get(label) == target.get(label) for label in rule["equal"])
        )

    return any(applies(rule) for rule in INHIBIT_RULES)


def inhibits(source: Alert, target: Alert) -> bool:
    return target not in uninhibited([source, target])


def test_it_inhibits_the_same_alerts_as_alertmanager() -> None:
    labels = {"run": "train", "uuid": "GPU-1", "instance": "node-a"}
    alerts = [{"alertname": name, "severity": s, **labels} for name in RULES for s in ("critical", "warning")]
    differ = [
        (source["alertname"], source["severity"], target["alertname"], target["severity"])
        for source, target in product(alerts, alerts)
        if inhibits(Alert(source, is_firing=True), Alert(target, is_firing=True))
        != alertmanager_inhibits(source, target)
    ]
    assert differ == []


def test_a_flapping_fault_is_shown_together_with_its_flapping() -> None:
    lagging = Alert({"alertname": "RankscopeRankLagging", "run": "a", "rank": "1"}, is_firing=True)
    flapping = Alert({**lagging.labels, "alertname": "RankscopeFlapping", "alert": lagging.name}, is_firing=True)
    assert uninhibited([flapping, lagging]) == [flapping, lagging]


def test_an_alert_of_another_run_or_gpu_inhibits_nothing() -> None:
    stuck = Alert({"alertname": "RankscopeRankStuck", "severity": "critical", "run": "a"}, is_firing=True)
    idle = {"alertname": "RankscopeGpuAllocatedIdle", "severity": "warning"}
    assert inhibits(stuck, Alert({**idle, "run": "a"}, is_firing=True))
    assert not inhibits(stuck, Alert({**idle, "run": "b"}, is_firing=True))
    lost = Alert({"alertname": "RankscopeGpuLost", "severity": "critical"}, is_firing=True)
    assert not inhibits(lost, Alert(idle, is_firing=True))


def test_an_alert_that_is_only_pending_inhibits_nothing() -> None:
    stuck = {"alertname": "RankscopeRankStuck", "severity": "critical", "run": "a"}
    lagging = Alert({"alertname": "RankscopeRankLagging", "severity": "warning", "run": "a"}, is_firing=True)
    assert not inhibits(Alert(stuck, is_firing=False), lagging)


def test_an_alert_whose_summary_has_a_percentage_has_a_share() -> None:
    percentage = '$value | printf "%.2g" | humanizePercentage'
    parts = {name for name, rule in RULES.items() if percentage in rule["annotations"]["summary"]}
    # RankscopeLowUtilization has the part of the time that the GPUs are busy, which is not lost.
    shares = {name for name, share_of in KNOWN["shares"].items() if share_of == "value"}
    assert shares == parts - {"RankscopeLowUtilization"}


def test_the_alerts_with_a_cause_of_lost_time_are_those_of_the_rules() -> None:
    assert set(KNOWN["shares"]) <= set(RULES)
