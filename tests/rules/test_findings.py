"""Alerts about findings: quiet without one, then with its labels and words, whoever shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.prometheus.shipped import CAUSES, RULES
from testing.promtool import INTERVAL, braces, complaint, series

BEGIN, END, LAST = 20, 60, 120
"""Samples: the first and the last one of a finding, and the last one of a test."""
HELD = 120 // INTERVAL
"""Evaluations for which an alert fires after its finding's last sample."""
RUN = {"run": "llm", "owner": "1000"}
EXPORTER = {"job": "rankscope", "instance": "a"}
RANK = {"rank": "3", "group": "0-3", "node": "node-a", "gpu": "3", "uuid": "GPU-3"}

SHOWN = {
    "straggler": ("RankscopeRankLagging", RANK | {"cause": "throttled"}, {"cause": "throttled"}),
    "rotating_straggler": ("RankscopeRotatingStraggler", {"cause": "gc"}, {"cause": "gc"}),
    "data": ("RankscopeDataBound", {"cause": "io"}, {"cause": "io"}),
    "copies": ("RankscopeCopyBound", {}, {"cause": "h2d_copy"}),
    "network": ("RankscopeTransferBound", {"cause": "link", "port": "mlx5_0", "node": "node-a"}, {"cause": "link"}),
    "small_collectives": ("RankscopeSmallCollectives", {}, {"cause": "synchronization"}),
    "stage_imbalance": ("RankscopePipelineBound", {"cause": "forward"}, {"cause": "stage_imbalance"}),
    "bubble": ("RankscopePipelineBound", {}, {"cause": "bubble"}),
    "launch": ("RankscopeLaunchBound", {}, {"cause": "launch"}),
    "device_reads": ("RankscopeDeviceReads", {}, {"cause": "device_read"}),
    "throttling": ("RankscopeThrottled", {}, {"cause": "throttled"}),
    "slowdown": ("RankscopeSlowdown", {"cause": "clocks"}, {"cause": "clocks"}),
    "cpu_fallback": ("RankscopeCpuFallback", RANK, {"cause": "cpu_fallback"}),
    "loss_scale_collapse": ("RankscopeLossScaleCollapse", {}, {"cause": "not_finite"}),
    "out_of_memory": ("RankscopeOutOfMemory", RANK | {"cause": "fragmentation"}, {"cause": "fragmentation"}),
    "not_finite": ("RankscopeNotFinite", RANK | {"cause": "loss"}, {"cause": "loss"}),
    "hang": ("RankscopeRankStuck", RANK | {"cause": "data_wait"}, {"phase": "data_wait"}),
    "crash": ("RankscopeRankCrashed", RANK | {"cause": "killed"}, {"reason": "killed"}),
    "slow_startup": ("RankscopeStartupSlow", {}, {"cause": "startup"}),
    "low_utilization": ("RankscopeLowUtilization", {"cause": "unknown"}, {"cause": "unknown"}),
    "slow_checkpoint": ("RankscopeCheckpointSlow", {}, {"cause": "checkpoint"}),
    "checkpoint_overdue": ("RankscopeCheckpointOverdue", {"cause": "never"}, {"cause": "never"}),
}
"""By kind: the alert, the labels of a finding, and those that the alert has instead of `cause`."""


def finding(kind: str, values: str = "", **labels: str) -> list[dict[str, str]]:
    """Return the series of a finding, which ends after END without `values`."""
    values = values or f"_x{BEGIN} 0.3x{END - BEGIN} stale _x{LAST - END}"
    labels = {**EXPORTER, **RUN, "kind": kind, "severity": "warning"} | labels
    said = {"summary": f"Run llm has {kind}", "evidence": "It waits.", "advice": "Look."}
    return [
        series("rankscope_finding_ratio", values, **labels),
        series("rankscope_finding_info", values.replace("0.3", "1").replace("0.6", "1"), **labels, **said),
    ]


def expected(alert: str, at: int, *fires: dict[str, Any]) -> dict[str, Any]:
    """Return that these alerts, and no others of this name, fire at a sample."""
    page = f"https://github.com/rankscope/rankscope/blob/main/docs/runbooks/{alert}.md"
    return {
        "eval_time": f"{at * INTERVAL}s",
        "alertname": alert,
        "exp_alerts": [
            {
                "exp_labels": {name: value for name, value in one.items() if value},
                "exp_annotations": {
                    "summary": f"Run llm has {one['kind']}",
                    "description": "It waits. Look.",
                    "runbook_url": page,
                },
            }
            for one in fires
        ],
    }


def found(path: Path, shown: list[dict[str, str]], *expectations: dict[str, Any]) -> str:
    """Return promtool's complaint about these series and expectations."""
    test = {"interval": f"{INTERVAL}s", "input_series": shown, "alert_rule_test": list(expectations)}
    return complaint(test, path / "test.yml")


def firing(kind: str, labels: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    """Return the labels of the alert about a finding."""
    return {**RUN, "kind": kind, "severity": "warning", **labels, "cause": "", **own}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_finding_alerts_with_its_words_from_its_begin_until_two_minutes_after_its_end(
    kind: str, tmp_path: Path
) -> None:
    name, labels, own = SHOWN[kind]
    alert = firing(kind, labels, own)
    complaints = found(
        tmp_path,
        finding(kind, **labels),
        expected(name, BEGIN - 1),
        expected(name, BEGIN + 1, alert),
        expected(name, END + HELD - 1, alert),
        expected(name, END + HELD + 2),
    )
    assert complaints == ""


def test_each_kind_of_finding_has_an_alert() -> None:
    alerts = yaml.safe_load(CAUSES.read_text())["alerts"].values()
    entries = [*alerts, *(cause for alert in alerts for cause in alert.get("causes", {}).values())]
    assert {entry["finding"] for entry in entries if "finding" in entry} == set(SHOWN)


def test_a_finding_without_numbers_has_only_its_advice(tmp_path: Path) -> None:
    ratio, info = finding("copies")
    info["series"] = info["series"].replace("It waits.", "")
    fires = expected("RankscopeCopyBound", BEGIN + 1, firing("copies", {}, {"cause": "h2d_copy"}))
    fires["exp_alerts"][0]["exp_annotations"]["description"] = "Look."
    assert found(tmp_path, [ratio, info], fires) == ""


@pytest.mark.parametrize("kind", ["hang", "crash"])
@pytest.mark.parametrize(
    ("node", "capture"),
    [("node-a", "node-a in /c/llm-1-hang"), ("node-c", "node-b in /c/llm-2-hang"), ("", "node-b in /c/llm-2-hang")],
)
def test_an_alert_names_the_capture_of_its_node_or_else_the_latest(
    kind: str, node: str, capture: str, tmp_path: Path
) -> None:
    name, labels, own = SHOWN[kind]
    labels = labels | {"node": node}
    latest = "rankscope_run_capture_timestamp_seconds"
    captures = [
        series(latest, f"100x{LAST}", **EXPORTER, **RUN, node="node-a", path="/c/llm-1-hang"),
        series(latest, f"200x{LAST}", **EXPORTER, **RUN, node="node-b", path="/c/llm-2-hang"),
        series(latest, f"300x{LAST}", **EXPORTER, run="other", owner="1000", node="node-b", path="/c/other-hang"),
    ]
    fires = expected(name, BEGIN + 1, firing(kind, labels, own))
    annotations = fires["exp_alerts"][0]["exp_annotations"]
    annotations["description"] = f"It waits. Look. Captured on {capture}"
    assert found(tmp_path, [*finding(kind, **labels), *captures], fires) == ""


def test_a_hang_inside_a_collective_has_that_phase(tmp_path: Path) -> None:
    alert = firing("hang", RANK, {"phase": "collective_wait"})
    shown = finding("hang", **RANK, cause="inside_collective")
    assert found(tmp_path, shown, expected("RankscopeRankStuck", BEGIN + 1, alert)) == ""


def test_rank_zero_has_its_own_alert_until_other_ranks_are_late_for_the_same_cause(tmp_path: Path) -> None:
    zero, three = RANK | {"rank": "0", "cause": "other"}, RANK | {"cause": "other"}
    later = f"_x{BEGIN + 10} 0.3x{END - BEGIN - 10} stale _x{LAST - END}"
    of_zero, of_three = firing("straggler", zero, {"cause": "other"}), firing("straggler", three, {"cause": "other"})
    complaints = found(
        tmp_path,
        [*finding("straggler", **zero), *finding("straggler", later, **three)],
        expected("RankscopeRankZeroLagging", BEGIN + 1, of_zero),
        expected("RankscopeRankLagging", BEGIN + 1),
        expected("RankscopeRankZeroLagging", END - 5),
        expected("RankscopeRankLagging", END - 5, of_zero, of_three),
    )
    assert complaints == ""


STOPS = f"_x{BEGIN} 0.3x10 stale _x{LAST}"
STEADY: dict[str, tuple[str, list[tuple[str, dict[str, str]]]]] = {
    "labels of the scraper, and a new pod": (
        "straggler",
        [
            (f"_x{BEGIN} 0.3x15 stale _x{LAST}", {"pod": "exporter-1", "namespace": "monitoring"}),
            (f"_x{BEGIN + 19} 0.3x{END - BEGIN - 19} stale", {"pod": "exporter-2", "instance": "10.0.0.2:10417"}),
        ],
    ),
    "two analyzers, one of which stops": ("network", [(STOPS, {"instance": "one"}), ("", {"instance": "two"})]),
    "failed scrapes and a restart": ("data", [(f"_x{BEGIN} 0.3x10 stale _x{HELD - 3} 0.3x{END} stale", {})]),
}
"""By case: the kind, and the values and other labels of its series."""


@pytest.mark.parametrize("case", STEADY)
def test_an_alert_stays_one_and_the_same_whoever_shows_its_finding(case: str, tmp_path: Path) -> None:
    kind, parts = STEADY[case]
    name, labels, own = SHOWN[kind]
    shown = [series for values, more in parts for series in finding(kind, values, **labels, **more)]
    expectations = [expected(name, at, firing(kind, labels, own)) for at in range(BEGIN + 1, END - 3)]
    assert found(tmp_path, shown, *expectations) == ""


def test_runs_of_one_name_in_two_clusters_or_of_two_owners_are_two(tmp_path: Path) -> None:
    name, labels, own = SHOWN["data"]
    others = [{"cluster": "east"}, {"cluster": "west"}, {"owner": "1001"}]
    shown = [one for other in others for one in finding("data", **labels, **other)]
    alerts = [firing("data", labels, own) | other for other in others]
    assert found(tmp_path, shown, expected(name, BEGIN + 1, *alerts)) == ""


def test_a_fault_that_becomes_critical_has_both_severities_for_two_minutes(tmp_path: Path) -> None:
    name, labels, own = SHOWN["data"]
    before = f"_x{BEGIN} 0.3x15 stale _x{LAST}"
    after = f"_x{BEGIN + 16} 0.6x{END - BEGIN - 16} stale _x{LAST - END}"
    shown = [*finding("data", before, **labels), *finding("data", after, **labels, severity="critical")]
    warning = firing("data", labels, own)
    critical = warning | {"severity": "critical"}
    complaints = found(
        tmp_path,
        shown,
        expected(name, BEGIN + 14, warning),
        expected(name, BEGIN + 18, warning, critical),
        expected(name, BEGIN + 18 + HELD, critical),
    )
    assert complaints == ""


def test_a_run_without_a_judge_is_notified_after_ten_minutes(tmp_path: Path) -> None:
    unjudged = series(
        "rankscope_exporter_run_not_judged_info", f"1x{LAST}", **EXPORTER, **RUN, reason="ranks_elsewhere"
    )
    judged = series("rankscope_run_judged_info", f"1x{LAST}", job="analyzer", instance="b", **RUN, by="analyzer")
    fires = 'count(ALERTS{alertname="RankscopeRunNotDiagnosed",alertstate="firing",reason="no_judge"})'
    for more, times in ([], {9: 0, 12: 1}), ([judged], {12: 0}):
        questions = [
            {
                "expr": f"{fires} or vector(0)",
                "eval_time": f"{at}m",
                "exp_samples": [{"labels": braces({}), "value": n}],
            }
            for at, n in times.items()
        ]
        test = {"interval": f"{INTERVAL}s", "input_series": [unjudged, *more], "promql_expr_test": questions}
        assert complaint(test, tmp_path / "test.yml") == ""


def test_no_rule_records_a_series_and_the_groups_are_small_enough_for_any_service() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert not [rule for rule in rules if "record" in rule]
    assert len(rules) <= 40
    assert max(len(group["rules"]) for group in groups) <= 20
