"""The committed rules: valid, tested by promtool and documented."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.prometheus import fast
from deploy.prometheus.shipped import CAUSES, HERE, RULES
from tests.rules.test_findings import SHOWN
from validation.gauntlet.runbooks import queries

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = ROOT / "docs/runbooks"
RULE_TESTS = sorted((ROOT / "tests/rules").glob("*.test.yml"))
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}


def succeeds(*command: object) -> str:
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("rules", [RULES, fast.write_rules()], ids=["shipped", "fast"])
def test_promtool_accepts_the_rules(rules: Path) -> None:
    assert "SUCCESS" in succeeds("promtool", "check", "rules", "--lint-fatal", rules)


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.name.removesuffix(".test.yml"))
def test_the_rules_pass_their_promtool_test(path: Path) -> None:
    succeeds("promtool", "test", "rules", path)


def test_the_fast_rules_differ_only_in_times() -> None:
    numbers = re.compile(r"\d+(\.\d+)?(ms|s|m|h)?")
    shipped, quick = (yaml.safe_dump(yaml.safe_load(text), width=100_000) for text in (RULES.read_text(), fast.rules()))
    assert numbers.sub("N", shipped) == numbers.sub("N", quick)
    times = [re.findall(r"for: (\d+)(\w+)", text) for text in (shipped, quick)]
    seconds = [[int(number) * {**fast.SECONDS, "ms": 0.001}[unit] for number, unit in found] for found in times]
    assert [before / fast.TIMES_AS_FAST for before in seconds[0]] == pytest.approx(seconds[1], rel=0.01)
    assert "> 43200" in shipped
    assert "> 1440" in quick


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_is_wrong_and_where_to_read_on(name: str) -> None:
    alert = ALERTS[name]
    assert re.fullmatch(r"Rankscope([A-Z][a-z]+)+", name)
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    page = f"https://github.com/rankscope/rankscope/blob/main/docs/runbooks/{name}.md"
    assert alert["annotations"]["runbook_url"] == page
    assert (RUNBOOKS / f"{name}.md").read_text().startswith(f"# {name}\n")


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_aggregated_to_labels_with_the_cluster(name: str) -> None:
    assert "cluster" in kept_labels(ALERTS[name])


def kept_labels(alert: dict[str, Any]) -> list[str]:
    """Return the labels of the outermost aggregation, which comes first in each expression."""
    found = re.search(r"\bby \(([^)]*)\)", alert["expr"])
    return re.findall(r"\w+", found[1]) if found else []


def test_an_alert_about_a_run_is_evaluated_with_the_bound_of_their_number_or_waits_for_it() -> None:
    groups = {
        group["name"]: {rule["alert"] for rule in group["rules"]}
        for group in yaml.safe_load(RULES.read_text())["groups"]
    }
    about_runs = {name for name, alert in ALERTS.items() if "run" in kept_labels(alert)}
    at_leisure = groups["rankscope-runs-at-leisure"]
    assert about_runs <= groups["rankscope-runs"] | at_leisure
    routes = yaml.safe_load((ROOT / "deploy/alertmanager/alertmanager.yml").read_text())["route"]["routes"]
    (waits,) = (route["matchers"] for route in routes if "matchers" in route and "|" in route["matchers"][0])
    (pattern,) = re.findall(r'^alertname=~"(.*)"$', waits[0])
    assert {name for name in ALERTS if re.fullmatch(pattern, name)} == at_leisure


OF_FINDINGS = {alert for alert, *_ in SHOWN.values()} | {"RankscopeRankZeroLagging"}
"""test_findings.py tests them, and test_many_alerts.py RankscopeManyAlerts."""


@pytest.mark.parametrize("name", sorted(ALERTS.keys() - OF_FINDINGS - {"RankscopeManyAlerts"}))
def test_every_other_alert_is_quiet_first_and_then_fires_in_its_promtool_test(name: str) -> None:
    document = yaml.safe_load((ROOT / f"tests/rules/{name}.test.yml").read_text())
    cases = [
        case for test in document["tests"] for case in test.get("alert_rule_test", ()) if case["alertname"] == name
    ]
    fires = [bool(case["exp_alerts"]) for case in cases]
    assert not fires[0]
    assert any(fires)


def test_every_runbook_has_an_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("Rankscope*.md")} == set(ALERTS)


def test_every_query_in_a_runbook_names_only_series_that_exist() -> None:
    known = set(re.findall(r"`(rankscope_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    for alert in ALERTS:
        blocks = "\n".join(query.text for query in queries(alert))
        named = set(re.findall(r"(?:\w+:)?rankscope_\w+(?::\w+)?", blocks))
        assert named <= known, f"{alert}: {named - known}"


BASE_LABELS = {
    "rank": {"run", "rank", "owner"},
    "gpu": {"gpu", "uuid"},
    "exporter": set(),
    "run": {"run", "owner"},
    "finding": {"run", "owner"},
}
BASE_LABELS |= {"network": {"port"}, "analyzer": {"run", "owner"}}
EVERYWHERE = {"job", "instance", "cluster", "le"}


def exported() -> dict[str, set[str]]:
    """Return the labels of every metric in the reference, which is generated from the collectors."""
    rows = re.findall(
        r"^\| `(rankscope_([a-z]+)_\w+)` \|[^|]*\|[^|]*\|([^|]*)\|", (ROOT / "docs/metrics.md").read_text(), re.M
    )
    return {name: {*re.findall(r"\w+", more), *BASE_LABELS[kind], *EVERYWHERE} for name, kind, more in rows}


def unknown_selectors(text: str) -> list[str]:
    """Return the selectors in the text with a metric or a label that the exporter does not have."""
    labels = exported()
    found = []
    for name, matchers in re.findall(r"(?<![\w:])(rankscope_\w+)(?![\w:])(?:\{([^}]*)\})?", text):
        known = labels.get(name) or labels.get(name.removesuffix("_bucket"))
        asked = set(re.findall(r"(\w+)\s*[=!]", matchers))
        if known is None or not asked <= known:
            found.append(f"{name}{{{matchers}}}")
    return found


def test_the_rules_query_series_and_labels_of_the_exporter() -> None:
    texts = [text for rule in ALERTS.values() for text in (rule["expr"], *rule["annotations"].values())]
    assert not [selector for text in texts for selector in unknown_selectors(text)]


def test_prometheus_accepts_the_shipped_configuration() -> None:
    assert "1 rule files found" in succeeds("promtool", "check", "config", HERE / "prometheus.yml")


def test_prometheus_accepts_the_fast_configuration(tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(fast.prometheus_config(["127.0.0.1:1", "127.0.0.1:2"], alertmanager="127.0.0.1:3"))
    assert "1 rule files found" in succeeds("promtool", "check", "config", path)
    config = yaml.safe_load(path.read_text())
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == ["127.0.0.1:3"]


def test_every_cause_of_lost_time_has_its_definition_in_the_docs() -> None:
    causes = yaml.safe_load(CAUSES.read_text())["lost"]
    page = (ROOT / "docs/lost-time.md").read_text()
    assert [cause for cause, fields in causes.items() if f"| `{cause}` | {fields['meaning']} |\n" not in page] == []


def test_every_entry_with_texts_is_an_alert_or_a_finding() -> None:
    entries = yaml.safe_load(CAUSES.read_text())["alerts"]
    assert {name for name, texts in entries.items() if "finding" not in texts} <= set(ALERTS)
