"""Many alerts of one owner in an hour are one notification; few are notified each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.prometheus.shipped import RULES
from testing import promtool
from testing.promtool import INTERVAL

MINUTE = 60 // INTERVAL  # evaluations
HOUR = 60 * MINUTE
HOSTILE, OTHER = "1001", "1002"
MANY = 'ALERTS{alertname="RankscopeManyAlerts"}'
SINGLE = f'(ALERTS{{alertstate="firing",run!=""}} unless on (owner, severity) {MANY})'
"""Alerts of runs that are notified: those that RankscopeManyAlerts does not inhibit."""

Series = list[dict[str, str]]


def alert(run: str, owner: str, begin: int, end: int, name: str = "RankStuck", severity: str = "critical") -> Series:
    """Return the series of an alert that fires from one evaluation to another."""
    labels = f'alertname="Rankscope{name}",severity="{severity}",run="{run}"' + (f',owner="{owner}"' if owner else "")
    values = f"_x{begin} %dx{end - begin - 1} stale"
    return [
        {"series": f'ALERTS{{{labels},alertstate="firing"}}', "values": values % 1},
        {"series": f"ALERTS_FOR_STATE{{{labels}}}", "values": values % (begin * INTERVAL)},
    ]


def slow(run: str, owner: str, begin: int, end: int) -> Series:
    """Return the same of a warning."""
    return alert(run, owner, begin, end, "DataBound", "warning")


def question(expr: str, at: int, *samples: tuple[str, int]) -> dict[str, Any]:
    """Return the expectation of a query's values by labels, in one evaluation."""
    found = [{"labels": labels, "value": value} for labels, value in samples]
    return {"expr": expr, "eval_time": f"{at * INTERVAL}s", "exp_samples": found}


def alerts_in(span: int) -> str:
    """Return the query for the number of alerts of each owner that were notified in a span."""
    return f"count by (owner) (max_over_time({SINGLE}[{span * INTERVAL}s:{INTERVAL}s]))"


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with only the rules that read these alerts: all rules would take minutes for hours of data."""
    document = yaml.safe_load(RULES.read_text())
    for group in document["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule["alert"] == "RankscopeManyAlerts"]
    path = tmp_path_factory.mktemp("rules") / "rules.yml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def complaint(rules: Path, tmp_path: Path) -> Any:
    """Return the function that returns promtool's complaint about alerts and expectations."""

    def of(alerts: list[Series], *questions: dict[str, Any]) -> str:
        series = [one for alert in alerts for one in alert]
        test = {"interval": f"{INTERVAL}s", "input_series": series, "promql_expr_test": list(questions)}
        return promtool.complaint(test, tmp_path / "test.yml", rules)

    return of


@pytest.mark.parametrize("of", [alert, slow])
def test_a_burst_of_one_owner_is_one_notification_as_long_as_it_lasts(complaint: Any, of: Any) -> None:
    hostile = [of(f"run-{number}", HOSTILE, 20, 4 * HOUR) for number in range(40)]
    other = of("llm", OTHER, 20, 4 * HOUR)
    found = complaint(
        [*hostile, other],
        question(f"count by (owner) ({SINGLE})", 20, (f'{{owner="{OTHER}"}}', 1)),
        question(f"count by (owner) ({SINGLE})", 4 * HOUR - 1, (f'{{owner="{OTHER}"}}', 1)),
        question(f"count by (owner) (count_over_time({MANY}[4h]))", 4 * HOUR - 1, (f'{{owner="{HOSTILE}"}}', 1)),
        question(f"max(count_over_time({MANY}[4h]))", 4 * HOUR - 1, ("{}", 4 * HOUR - 20)),
    )
    assert found == ""


@pytest.mark.parametrize("rank", ["", ',rank="%d"'], ids=["runs", "ranks of one run"])
def test_alerts_that_begin_one_after_the_other_are_bounded_in_each_hour(complaint: Any, rank: str) -> None:
    times = range(20, 4 * HOUR, 2 * MINUTE)
    runs = {time: f'run"{rank % time}'.removesuffix('"') if rank else f"run-{time}" for time in times}
    alerts = [of(runs[time], HOSTILE, time, time + 5 * MINUTE) for time in times for of in (alert, slow)]
    begun = f"changes(count({MANY})[{4 * HOUR * INTERVAL}s:{INTERVAL}s])"
    found = complaint(
        alerts,
        question(alerts_in(HOUR), HOUR, (f'{{owner="{HOSTILE}"}}', 11 + 7)),
        question(alerts_in(HOUR), 2 * HOUR + 20),
        question(alerts_in(HOUR), 4 * HOUR - 1),
        question(begun, 4 * HOUR - 1, ("{}", 1)),
    )
    assert found == ""


@pytest.mark.parametrize("owner", [HOSTILE, "0", ""])
def test_five_runs_that_hang_and_then_crash_in_an_hour_are_each_notified(complaint: Any, owner: str) -> None:
    alerts = []
    for begin in range(20, 20 + 50 * MINUTE, 10 * MINUTE):
        run, crash = f"run-{begin}", begin + 5 * MINUTE
        alerts += [alert(run, owner, begin, crash), alert(run, owner, crash, crash + 10 * MINUTE, "RankCrashed")]
        alerts.append(slow(run, owner, begin, 2 * HOUR))
    labels = f'{{owner="{owner}"}}' if owner else "{}"
    found = complaint(alerts, question(alerts_in(2 * HOUR), 2 * HOUR, (labels, 15)))
    assert found == ""


def test_it_ends_an_hour_after_the_faults_and_the_next_fault_is_notified(complaint: Any) -> None:
    past = [alert(f"run-{number}", OTHER, 20, 40) for number in range(15)]
    left, later = alert("left", OTHER, 20, 4 * HOUR), alert("later", OTHER, 3 * HOUR, 4 * HOUR)
    found = complaint(
        [*past, left, later],
        question(f"count({MANY})", HOUR + 30, ("{}", 1)),
        question(f"count({MANY})", 2 * HOUR + 30),
        question(alerts_in(HOUR), 3 * HOUR + 1, (f'{{owner="{OTHER}"}}', 2)),
    )
    assert found == ""


@pytest.mark.parametrize("end", [40, 4 * HOUR], ids=["ended", "firing"])
def test_its_summary_counts_alerts_that_have_ended_and_those_that_began_long_ago(
    rules: Path, tmp_path: Path, end: int
) -> None:
    alerts = [slow(f"run-{number}", OTHER, 20, end if number else 4 * HOUR) for number in range(9)]
    at = HOUR - 1 if end == 40 else 3 * HOUR
    command = f"`amtool alert query --inhibited 'owner=\"{OTHER}\"' severity=warning`"
    description = f"Until they end and fewer begin, this is their only notification. First list them: {command}."
    expected = {
        "exp_labels": {"owner": OTHER, "severity": "warning"},
        "exp_annotations": {
            "summary": f"9 warning alerts of owner {OTHER} fire, or began within an hour",
            "description": description,
            "runbook_url": "https://github.com/rankscope/rankscope/blob/main/docs/runbooks/RankscopeManyAlerts.md",
        },
    }
    found = {"eval_time": f"{at * INTERVAL}s", "alertname": "RankscopeManyAlerts", "exp_alerts": [expected]}
    series = [one for alert in alerts for one in alert]
    test = {"interval": f"{INTERVAL}s", "input_series": series, "alert_rule_test": [found]}
    assert promtool.complaint(test, tmp_path / "test.yml", rules) == ""


def test_many_old_alerts_do_not_count(complaint: Any) -> None:
    old = [slow(f"run-{number}", OTHER, number * HOUR // 4, 8 * HOUR) for number in range(30)]
    found = complaint(
        old,
        question(f"count_over_time({MANY}[8h])", 8 * HOUR - 1),
        question(f"count by (owner) ({SINGLE})", 8 * HOUR - 1, (f'{{owner="{OTHER}"}}', 30)),
    )
    assert found == ""
