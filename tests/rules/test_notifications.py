"""One fault is one notification, with a real Alertmanager and the shipped routes, 30 times as fast."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deploy.prometheus import fast
from deploy.prometheus.shipped import RULES
from testing.waiting import eventually
from testing.webhook import WebhookReceiver
from tests.rules.alertmanager import Alert, Alertmanager, running

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = yaml.safe_load((ROOT / "deploy/alertmanager/alertmanager.yml").read_text())
ALERTS = {
    rule["alert"]: (rule.get("labels", {}).get("kind"), rule["expr"])
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
}


def of(name: str, severity: str, **labels: str) -> Alert:
    return {"alertname": f"Rankscope{name}", "severity": severity, **labels}


LAGGING = of("RankLagging", "warning", kind="straggler", run="llm", rank="2", cause="other")
STUCK = of("RankStuck", "critical", kind="hang", run="llm", rank="2")
LOST = of("GpuLost", "critical", kind="gpu_lost", instance="a", gpu="0", uuid="GPU-0")
HELD = of("GpuMemoryHeldIdle", "warning", kind="gpu_memory_held", node="a", gpu="0", uuid="GPU-0")
FAULTS = [LAGGING, STUCK, LOST, HELD]
A_MINUTE = 60 / fast.TIMES_AS_FAST
AT_MOST = 4 * A_MINUTE
"""Longer than an alert needs until its notification, also on a busy machine; shorter than a group_interval of 5 min."""


class Operator:
    """The receiver of the notifications."""

    def __init__(self, alertmanager: Alertmanager, receiver: WebhookReceiver) -> None:
        self.alertmanager, self._receiver = alertmanager, receiver

    def notified(self, alert: Alert) -> list[str]:
        """Return the states of this alert in its notifications."""
        return [one.status for one in list(self._receiver.notifications) if one.labels == alert]

    def count_messages(self) -> int:
        """Return the number of notifications."""
        return len({one.received for one in list(self._receiver.notifications)})

    def expect(self, alert: Alert, *states: str) -> None:
        """Wait until the alert was notified with these states."""
        eventually(lambda: self.notified(alert) == list(states), AT_MOST, pause=0.02)

    def expect_silence(self) -> None:
        """Fail if there is a notification in the next minute."""
        before = self.count_messages()
        time.sleep(A_MINUTE)
        assert self.count_messages() == before


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    with WebhookReceiver() as receiver, running(tmp_path, receiver.url) as alertmanager:
        yield Operator(alertmanager, receiver)


def flapping(alert: Alert) -> Alert:
    """Return RankscopeFlapping as the rule labels it for this alert."""
    kept = {label: value for label, value in alert.items() if label not in ("alertname", "cause")}
    if alert is STUCK:
        del kept["rank"]
    return {**kept, "alertname": "RankscopeFlapping", "alert": alert["alertname"]}


@pytest.mark.parametrize("alert", FAULTS, ids=lambda alert: alert["alertname"])
def test_a_fault_that_returns_after_a_minute_is_notified_each_time(operator: Operator, alert: Alert) -> None:
    for times in range(1, 4):
        operator.alertmanager.begin(alert)
        operator.expect(alert, *["firing", "resolved"] * (times - 1), "firing")
        operator.alertmanager.end(alert)
        time.sleep(A_MINUTE)
    operator.expect(alert, *["firing", "resolved"] * 3)


@pytest.mark.parametrize("alert", FAULTS, ids=lambda alert: alert["alertname"])
def test_a_second_fault_of_the_same_run_or_node_is_notified_as_soon_as_a_first_one(
    operator: Operator, alert: Alert
) -> None:
    operator.alertmanager.begin(alert)
    operator.expect(alert, "firing")
    second = {**alert, "rank": "5"} if "rank" in alert else {**alert, "gpu": "5", "uuid": "GPU-5"}
    operator.alertmanager.begin(second)
    operator.expect(second, "firing")


def test_a_fault_that_lasts_is_notified_once(operator: Operator) -> None:
    operator.alertmanager.begin(LAGGING, {**LAGGING, "rank": "3"})
    operator.expect(LAGGING, "firing")
    operator.expect_silence()
    assert operator.count_messages() == 1


@pytest.mark.parametrize("alert", [LAGGING, STUCK, LOST], ids=lambda alert: alert["alertname"])
def test_a_fault_that_flaps_is_notified_once_as_flapping_until_it_is_steady(operator: Operator, alert: Alert) -> None:
    operator.alertmanager.begin(alert, flapping(alert))
    operator.expect(flapping(alert), "firing")
    for change in (operator.alertmanager.end, operator.alertmanager.begin) * 2:
        change(alert)
        operator.expect_silence()
    assert operator.notified(alert) == []
    operator.alertmanager.end(flapping(alert))
    operator.expect(alert, "firing")


def test_a_second_fault_is_notified_while_another_flaps(operator: Operator) -> None:
    others = [
        {**LAGGING, "rank": "5"},
        {**LAGGING, "severity": "critical"},
        {**LAGGING, "run": "vision"},
        {**LAGGING, "owner": "1001"},
        {**LAGGING, "alertname": "RankscopeCopyBound", "kind": "copies"},
        LOST,
    ]
    operator.alertmanager.begin(LAGGING, flapping(LAGGING))
    operator.expect(flapping(LAGGING), "firing")
    operator.alertmanager.begin(*others)
    for other in others:
        operator.expect(other, "firing")
    assert operator.notified(LAGGING) == []


def test_a_fault_that_ends_while_its_alert_is_inhibited_is_notified_when_it_returns(operator: Operator) -> None:
    operator.alertmanager.begin(LAGGING)
    operator.expect(LAGGING, "firing")
    operator.alertmanager.begin(STUCK)
    operator.expect(STUCK, "firing")
    operator.alertmanager.end(LAGGING)
    time.sleep(A_MINUTE)
    operator.alertmanager.end(STUCK, LAGGING)  # Prometheus sends the end of an alert for 15 minutes
    operator.expect(LAGGING, "firing", "resolved")
    operator.alertmanager.begin(LAGGING)
    operator.expect(LAGGING, "firing", "resolved", "firing")


def test_every_alert_but_two_has_the_kind_by_which_flapping_inhibits_it() -> None:
    without = {name for name, (kind, expr) in ALERTS.items() if not kind and "kind, cause" not in expr}
    assert without == {"RankscopeFlapping", "RankscopeManyAlerts"}


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\w+)", duration).groups()  # type: ignore[union-attr]
    return int(number) * {**fast.SECONDS, "ms": 0.001}[unit]


def test_the_test_has_the_intervals_of_the_shipped_file_in_the_same_proportion() -> None:
    shipped, quick = SHIPPED["route"], yaml.safe_load(fast.alertmanager_config("http://a.invalid/"))["route"]
    pairs = [(shipped, quick), (shipped["routes"][0]["routes"][0], quick["routes"][0]["routes"][0])]
    for one, other in pairs:
        intervals = [name for name in fast.INTERVALS if name in one]
        times = [seconds(one[name]) / seconds(other[name]) for name in intervals]
        assert times == pytest.approx([fast.TIMES_AS_FAST] * len(times), rel=0.01)
