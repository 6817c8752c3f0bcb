"""Which alerts arrive together and which are silent beside others, asked of a real Alertmanager."""

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


def test_a_crashed_rank_silences_the_other_symptoms_of_its_run_only(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("RankCrashed", "critical", run="llm", rank="2"),
        alert("RankStuck", "critical", run="llm", rank="1"),
        alert("RankZeroLagging", run="llm", rank="0"),
        alert("GpuAllocatedIdle", run="llm", rank="1", gpu="1"),
        alert("RankLagging", run="another", rank="3"),
        alert("GpuMemoryHeldIdle", gpu="2", uuid="GPU-2", node="a"),
    )
    assert alertmanager.heard() == {"RankscopeRankCrashed", "RankscopeRankLagging", "RankscopeGpuMemoryHeldIdle"}


def test_alerts_without_a_run_or_an_owner_silence_no_alert_about_a_node(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("RankCrashed", "critical", rank="0"),
        alert("RankStuck", "critical", rank="1"),
        alert("StartupSlow"),
        alert("ExporterDown", instance="a:10417"),
        alert("GpuAllocatedIdle", node="a", gpu="0"),
        alert("RanksHidden", instance="a:10417", reason="version"),
    )
    assert {"RankscopeExporterDown", "RankscopeGpuAllocatedIdle", "RankscopeRanksHidden"} <= alertmanager.heard()


def test_a_run_that_stands_still_is_not_told_of_as_idle_or_lagging_too(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("RankStuck", "critical", run="llm", rank="1"),
        alert("RankLagging", run="llm", rank="1"),
        alert("GpuAllocatedIdle", run="llm", rank="1", gpu="1"),
        alert("TransferBound", run="llm", cause="network"),
        alert("CheckpointOverdue", run="llm", cause="overdue"),
    )
    assert alertmanager.heard() == {"RankscopeRankStuck"}


def test_gpus_that_wait_for_something_are_told_of_by_what_they_wait_for(alertmanager: Alertmanager) -> None:
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
    heard = ("DataBound", "SmallCollectives", "LaunchBound", "LowUtilization", "StartupSlow")
    assert alertmanager.heard() == {f"Rankscope{name}" for name in heard}
    assert [alert["run"] for alert in alertmanager.told() if "LowUtilization" in alert["alertname"]] == ["another"]


def test_a_lost_gpu_has_nothing_more_to_tell_and_others_do(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("GpuLost", "critical", instance="a", uuid="GPU-0"),
        alert("GpuXid", "critical", instance="a", uuid="GPU-0", xid="79"),
        alert("GpuMemoryHeldIdle", node="a", uuid="GPU-1"),
        alert("GpuAllocatedIdle", run="cpu", rank="0"),
    )
    assert alertmanager.heard() == {"RankscopeGpuLost", "RankscopeGpuMemoryHeldIdle", "RankscopeGpuAllocatedIdle"}


def test_gpus_that_the_driver_no_longer_lists_silence_no_named_gpu(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("GpuLost", "critical", instance="a"),
        alert("GpuXid", "critical", instance="a", uuid="GPU-0", xid="48"),
        alert("GpuAllocatedIdle", run="cpu", rank="0"),  # has no uuid either, which is no match
    )
    assert alertmanager.heard() == {"RankscopeGpuLost", "RankscopeGpuXid", "RankscopeGpuAllocatedIdle"}


def test_an_exporter_that_is_down_silences_what_was_last_heard_from_it(alertmanager: Alertmanager) -> None:
    alertmanager.fire(
        alert("ExporterDown", job="rankscope", instance="a"),
        alert("GpuLost", "critical", instance="a", uuid="GPU-0"),
        alert("GpuXid", instance="b", uuid="GPU-1", xid="13"),
    )
    assert alertmanager.heard() == {"RankscopeExporterDown", "RankscopeGpuXid"}


def test_one_fault_is_one_notification_a_run_or_a_node(alertmanager: Alertmanager) -> None:
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
def test_what_is_critical_does_not_wait_for_company(about: Alert) -> None:
    assert waits_for_company(alert("Some", "critical", **about)) == "5s"


def test_only_warnings_about_nodes_wait_for_company() -> None:
    assert waits_for_company(alert("Some", "warning", run="llm", rank="1")) == "5s"
    assert waits_for_company(alert("Some", "warning", node="a", uuid="GPU-0", instance="a")) == "30s"


def waits_for_company(labels: Alert) -> str:
    """`group_wait` of the innermost route whose matchers, each `=` or `!=`, these labels fulfil."""
    route = yaml.safe_load(CONFIG.read_text())["route"]
    wait: str = route["group_wait"]
    while route := next((one for one in route.get("routes", ()) if fulfil(labels, one["matchers"])), None):
        wait = route.get("group_wait", wait)
    return wait


def fulfil(labels: Alert, matchers: list[str]) -> bool:
    found = [re.fullmatch(r'(\w+)(=|!=)"(.*)"', text) for text in matchers]
    return all(match and (labels.get(match[1], "") == match[3]) == (match[2] == "=") for match in found)


@pytest.mark.parametrize("speed", ["production", "fast"])
def test_amtool_finds_no_fault_in_the_configuration(tmp_path: Path, speed: str) -> None:
    path = tmp_path / "alertmanager.yml"
    path.write_text(CONFIG.read_text() if speed == "production" else fast.alertmanager_config(NOWHERE))
    done = subprocess.run(["amtool", "check-config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(yaml.safe_load(CONFIG.read_text())['inhibit_rules'])} inhibit rules" in done.stdout


def test_the_fast_configuration_differs_in_waiting_times_and_address_only() -> None:
    shipped = yaml.safe_load(CONFIG.read_text())
    quick = yaml.safe_load(fast.alertmanager_config(NOWHERE))
    assert quick["receivers"][0]["webhook_configs"][0]["url"] == NOWHERE
    assert quick["inhibit_rules"] == shipped["inhibit_rules"]
    assert quick["route"]["routes"][0]["matchers"] == shipped["route"]["routes"][0]["matchers"]
