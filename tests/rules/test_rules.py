"""The committed rules: valid, tested by promtool and documented."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.prometheus import fast
from testing import rule_tests
from testing.promtool import HEALTHY_GPU, HEALTHY_RANK, HOST_WAITS
from testing.simulated_ranks import gpu_series, rank_series
from tests.rules.diagnosis_cases import CASES, DEVICE_FAULTS, FAULTS, ONLY_BY_THE_DEVICE
from validation.gauntlet.runbooks import queries

from rankscope.record import phases

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/rules"
RUNBOOKS = ROOT / "docs/runbooks"
RULE_TESTS = sorted((ROOT / "tests/rules").glob("*.test.yml"))
SPEEDS = ("15s", "5s", "fast")


def succeeds(*command: object) -> str:
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules(speed: str) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((RULES / f"{speed}.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


ALERTS = {rule["alert"]: rule for rule in rules("15s") if "alert" in rule}


@pytest.mark.parametrize("speed", SPEEDS)
def test_promtool_accepts_the_rules(speed: str) -> None:
    assert "SUCCESS" in succeeds("promtool", "check", "rules", "--lint-fatal", RULES / f"{speed}.yml")


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.name.removesuffix(".test.yml"))
def test_the_rules_pass_their_promtool_test(path: Path) -> None:
    found = rule_tests.answer(path, RULES / "15s.yml")
    assert found.holds, found.output


def test_all_speeds_have_the_same_rules_except_for_thresholds() -> None:
    names = [[rule.get("alert", rule.get("record")) for rule in rules(speed)] for speed in SPEEDS]
    assert names[0] == names[1] == names[2]
    assert rules("15s") != rules("fast")


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_is_wrong_and_where_to_read_on(name: str) -> None:
    alert = ALERTS[name]
    assert re.fullmatch(r"Rankscope([A-Z][a-z]+)+", name)
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    # Both words if the label depends on the XID; promtool's tests check which.
    assert set(re.findall("warning|critical", alert["labels"]["severity"]))
    page = f"https://github.com/rankscope/rankscope/blob/main/docs/runbooks/{name}.md"
    assert alert["annotations"]["runbook_url"] == page
    assert (RUNBOOKS / f"{name}.md").read_text().startswith(f"# {name}\n")


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_quiet_first_and_then_fires_in_its_promtool_test(name: str) -> None:
    if name in {alert["alertname"] for case in FAULTS + DEVICE_FAULTS for alert in case.alerts}:
        return  # test_diagnosis.py has it
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
    known = {rule["record"] for rule in rules("15s") if "record" in rule}
    known |= set(re.findall(r"`(rankscope_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    for alert in ALERTS:
        blocks = "\n".join(query.text for query in queries(alert))
        named = set(re.findall(r"(?:\w+:)?rankscope_\w+(?::\w+)?", blocks))
        assert named <= known, f"{alert}: {named - known}"


BASE_LABELS = {"rank": {"run", "rank"}, "gpu": {"gpu", "uuid"}, "exporter": set(), "run": {"run"}, "finding": {"run"}}
BASE_LABELS |= {"network": {"port"}, "analyzer": {"run", "owner"}}
EVERYWHERE = {"job", "instance", "le"}


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
    assert not [selector for rule in rules("15s") for selector in unknown_selectors(rule["expr"])]


def test_the_series_of_the_tests_are_those_that_the_exporter_has() -> None:
    figures = {*HEALTHY_RANK, *HEALTHY_GPU}
    figures |= {
        name
        for case in CASES + ONLY_BY_THE_DEVICE
        for fault in (case.fault, case.usual)
        for made in (fault.ranks, fault.gpus)
        for one in made.values()
        for name in one
    }
    assert not unknown_selectors("\n".join(figures - {HOST_WAITS}))
    assert not unknown_selectors("\n".join((*rank_series(0, 1, age=1.0), *gpu_series(0, age=1.0))))


def test_prometheus_accepts_the_shipped_configuration() -> None:
    assert "1 rule files found" in succeeds("promtool", "check", "config", ROOT / "deploy/prometheus/prometheus.yml")


def test_prometheus_accepts_the_fast_configuration(tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(fast.prometheus_config(["127.0.0.1:1", "127.0.0.1:2"], alertmanager="127.0.0.1:3"))
    assert "1 rule files found" in succeeds("promtool", "check", "config", path)
    config = yaml.safe_load(path.read_text())
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:1", "127.0.0.1:2"]
    assert config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == ["127.0.0.1:3"]


def test_every_cause_of_lost_time_has_its_definition_in_the_docs() -> None:
    causes = yaml.safe_load((RULES.parent / "causes.yml").read_text())["lost"]
    page = (ROOT / "docs/lost-time.md").read_text()
    assert [cause for cause, fields in causes.items() if f"| `{cause}` | {fields['meaning']} |\n" not in page] == []
    lost = [rule for rule in rules("15s") if rule.get("record") == "run:rankscope_lost:ratio"]
    assert {rule["labels"]["cause"] for rule in lost if "labels" in rule} <= set(causes)


def test_every_entry_with_texts_is_an_alert_or_a_finding() -> None:
    assert {name for name, texts in CAUSES["alerts"].items() if "finding" not in texts} <= set(ALERTS)


CAUSES = yaml.safe_load((RULES.parent / "causes.yml").read_text())
WITH_WORDS = {alert: set("|".join(of["causes"]).split("|")) for alert, of in CAUSES["alerts"].items() if "causes" in of}
OF_FINDINGS = ("expert_imbalance", "finished", "stopped", "node_missing", "parallelism", "clocks")
"""Causes that only an exporter or the analyzer finds."""
WITHOUT_WORDS = {"overdue"}  # RankscopeCheckpointOverdue


def test_every_cause_in_a_rule_has_words_or_is_lost_time() -> None:
    named = {cause for rule in rules("15s") for cause in re.findall(r'"cause", "(\w+)"', rule["expr"])}
    assert named - WITHOUT_WORDS <= set().union(*WITH_WORDS.values()) | set(CAUSES["lost"])


def test_every_cause_with_words_is_in_a_rule() -> None:
    named = " ".join([*phases.NAMES, *OF_FINDINGS, *(rule["expr"] for rule in rules("15s"))])
    words = set().union(*WITH_WORDS.values())
    assert {cause for cause in words if not re.search(rf"(\b|_){cause}\b", named)} == set()
