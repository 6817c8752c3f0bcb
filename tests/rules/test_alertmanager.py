"""Grouping and inhibition of alerts in a real Alertmanager."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deploy.prometheus import fast
from tests.rules.alertmanager import NOWHERE, Alert, Alertmanager, running

CONFIG = Path(__file__).resolve().parents[2] / "deploy/alertmanager/alertmanager.yml"


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[Alertmanager]:
    with running(tmp_path) as alertmanager:
        yield alertmanager


def alert(name: str, severity: str = "warning", **labels: str) -> Alert:
    return {"alertname": f"Rankscope{name}", "severity": severity, **labels}


def test_a_crashed_rank_inhibits_only_the_other_symptoms_of_its_run(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("RankCrashed", "critical", run="llm", rank="2"),
        alert("RankStuck", "critical", run="llm", rank="1"),
        alert("RankZeroLagging", run="llm", rank="0"),
        alert("GpuAllocatedIdle", run="llm", rank="1", gpu="1"),
        alert("RankLagging", run="another", rank="3"),
        alert("GpuMemoryHeldIdle", gpu="2", uuid="GPU-2", node="a"),
    )
    assert alertmanager.names() == {"RankscopeRankCrashed", "RankscopeRankLagging", "RankscopeGpuMemoryHeldIdle"}


def test_alerts_without_a_run_or_an_owner_inhibit_no_alert_about_a_node(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("RankCrashed", "critical", rank="0"),
        alert("RankStuck", "critical", rank="1"),
        alert("StartupSlow"),
        alert("ExporterDown", instance="a:10417"),
        alert("GpuAllocatedIdle", node="a", gpu="0"),
        alert("RanksHidden", instance="a:10417", reason="version"),
    )
    assert {"RankscopeExporterDown", "RankscopeGpuAllocatedIdle", "RankscopeRanksHidden"} <= alertmanager.names()


def test_a_hang_inhibits_alerts_about_idle_gpus_and_lagging_ranks(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("RankStuck", "critical", run="llm", rank="1"),
        alert("RankLagging", run="llm", rank="1"),
        alert("GpuAllocatedIdle", run="llm", rank="1", gpu="1"),
        alert("TransferBound", run="llm", cause="network"),
        alert("CheckpointOverdue", run="llm", cause="overdue"),
    )
    assert alertmanager.names() == {"RankscopeRankStuck"}


def test_the_reason_for_waiting_gpus_inhibits_low_utilization(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("DataBound", run="llm", cause="io"),
        alert("LowUtilization", run="llm", cause="unknown"),
        alert("SmallCollectives", run="vision", cause="synchronization"),
        alert("TransferBound", run="vision", cause="network"),
        alert("LaunchBound", run="speech", cause="launch"),
        alert("LowUtilization", run="speech", cause="unknown"),
        alert("LowUtilization", run="another", cause="batch_too_small"),
        alert("StartupSlow", run="third", cause="startup"),
        alert("GpuAllocatedIdle", run="third", rank="1", gpu="1"),
    )
    names = ("DataBound", "SmallCollectives", "LaunchBound", "LowUtilization", "StartupSlow")
    assert alertmanager.names() == {f"Rankscope{name}" for name in names}
    assert [alert["run"] for alert in alertmanager.uninhibited() if "LowUtilization" in alert["alertname"]] == [
        "another"
    ]


def test_a_lost_gpu_inhibits_its_own_alerts_and_no_others(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("GpuLost", "critical", instance="a", uuid="GPU-0"),
        alert("GpuXid", "critical", instance="a", uuid="GPU-0", xid="79"),
        alert("GpuMemoryHeldIdle", node="a", uuid="GPU-1"),
        alert("GpuAllocatedIdle", run="cpu", rank="0"),
    )
    assert alertmanager.names() == {"RankscopeGpuLost", "RankscopeGpuMemoryHeldIdle", "RankscopeGpuAllocatedIdle"}


def test_gpus_that_the_driver_no_longer_lists_inhibit_no_named_gpu(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("GpuLost", "critical", instance="a"),
        alert("GpuXid", "critical", instance="a", uuid="GPU-0", xid="48"),
        alert("GpuAllocatedIdle", run="cpu", rank="0"),  # has no uuid either, which does not match
    )
    assert alertmanager.names() == {"RankscopeGpuLost", "RankscopeGpuXid", "RankscopeGpuAllocatedIdle"}


def test_an_exporter_that_is_down_inhibits_alerts_from_its_last_values(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("ExporterDown", job="rankscope", instance="a"),
        alert("GpuLost", "critical", instance="a", uuid="GPU-0"),
        alert("GpuXid", instance="b", uuid="GPU-1", xid="13"),
    )
    assert alertmanager.names() == {"RankscopeExporterDown", "RankscopeGpuXid"}


def test_a_fault_that_becomes_critical_or_covers_other_ranks_inhibits_its_former_alert(
    alertmanager: Alertmanager,
) -> None:
    late = {"kind": "straggler", "run": "llm", "group": "0-3", "cause": "other"}
    kept = [
        alert("RankLagging", "critical", rank="3", **late),
        alert("RankLagging", rank="2", **late),
        alert("DataBound", run="llm", kind="data", cause="io"),
    ]
    alertmanager.fire(*kept, alert("RankLagging", rank="3", **late), alert("RankZeroLagging", rank="0", **late))
    assert sorted(map(sorted, map(dict.items, alertmanager.uninhibited()))) == sorted(
        map(sorted, map(dict.items, kept))
    )


@pytest.mark.parametrize("owner", [{"owner": "1001"}, {}], ids=["an owner", "no owner"])
def test_many_alerts_inhibit_those_of_their_owner_and_severity(alertmanager: Alertmanager, owner: Alert) -> None:
    kept = [
        alert("ManyAlerts", "critical", **owner),
        alert("DataBound", run="slow", **owner),
        alert("RankStuck", "critical", run="llm", owner="1002"),
        alert("GpuLost", "critical", instance="a", uuid="GPU-0"),
    ]
    alertmanager.fire(
        *kept,
        alert("RankStuck", "critical", run="llm", **owner),
        alert("RankCrashed", "critical", run="vision", **owner),
        alert("Flapping", "critical", run="speech", alert="RankscopeRankStuck", **owner),
    )
    assert sorted(alertmanager.uninhibited(), key=str) == sorted(kept, key=str)


def test_many_alerts_of_two_owners_are_two_notifications(alertmanager: Alertmanager) -> None:
    alertmanager.fire(alert("ManyAlerts", "critical", owner="1001"), alert("ManyAlerts", "critical", owner="1002"))
    assert alertmanager.notifications() == [("RankscopeManyAlerts", 1), ("RankscopeManyAlerts", 1)]


def test_one_fault_is_one_notification_per_run_or_node(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("RankLagging", run="llm", rank="1", node="a"),
        alert("RankLagging", run="llm", rank="2", node="b"),
        alert("RankLagging", run="another", rank="1", node="a"),
        alert("GpuMemoryHeldIdle", gpu="1", node="a"),
        alert("GpuMemoryHeldIdle", gpu="2", node="a"),
        alert("GpuMemoryHeldIdle", gpu="1", node="b"),
        alert("ExporterDown", job="rankscope", instance="c"),
        alert("ExporterDown", job="rankscope", instance="d"),
    )
    assert alertmanager.notifications() == [
        ("RankscopeExporterDown", 2),
        ("RankscopeGpuMemoryHeldIdle", 1),
        ("RankscopeGpuMemoryHeldIdle", 2),
        ("RankscopeRankLagging", 1),
        ("RankscopeRankLagging", 2),
    ]


@pytest.mark.parametrize("about", [{"run": "llm", "rank": "1"}, {"node": "a", "uuid": "GPU-0", "instance": "a"}])
def test_critical_alerts_are_not_delayed_for_grouping(about: Alert) -> None:
    assert group_wait_of(alert("Some", "critical", **about)) == "5s"


def test_only_warnings_about_nodes_and_those_that_are_not_urgent_are_delayed_for_grouping() -> None:
    assert group_wait_of(alert("Some", "warning", run="llm", rank="1")) == "5s"
    assert group_wait_of(alert("CheckpointOverdue", "warning", run="llm")) == "30s"
    assert group_wait_of(alert("Some", "warning", node="a", uuid="GPU-0", instance="a")) == "30s"


def group_wait_of(labels: Alert) -> str:
    """Return `group_wait` of the innermost route whose matchers match the labels."""
    route = yaml.safe_load(CONFIG.read_text())["route"]
    wait: str = route["group_wait"]
    while route := next((one for one in route.get("routes", ()) if matches_all(labels, one["matchers"])), None):
        wait = route.get("group_wait", wait)
    return wait


def matches_all(labels: Alert, matchers: list[str]) -> bool:
    found = [re.fullmatch(r'(\w+)(=~|!=|=)"(.*)"', text) for text in matchers]
    return all(match and is_matched(labels.get(match[1], ""), match[2], match[3]) for match in found)


def is_matched(value: str, operator: str, asked: str) -> bool:
    if operator == "=~":
        return bool(re.fullmatch(asked, value))
    return (value == asked) == (operator == "=")


@pytest.mark.parametrize("speed", ["production", "fast"])
def test_amtool_accepts_the_configuration(tmp_path: Path, speed: str) -> None:
    path = tmp_path / "alertmanager.yml"
    path.write_text(CONFIG.read_text() if speed == "production" else fast.alertmanager_config(NOWHERE))
    done = subprocess.run(["amtool", "check-config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(yaml.safe_load(CONFIG.read_text())['inhibit_rules'])} inhibit rules" in done.stdout


def test_the_fast_configuration_differs_only_in_intervals_and_address() -> None:
    shipped = yaml.safe_load(CONFIG.read_text())
    quick = yaml.safe_load(fast.alertmanager_config(NOWHERE))
    assert quick["receivers"][0]["webhook_configs"][0]["url"] == NOWHERE
    assert quick["inhibit_rules"] == shipped["inhibit_rules"]
    assert quick["route"]["routes"][0]["matchers"] == shipped["route"]["routes"][0]["matchers"]
