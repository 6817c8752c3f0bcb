"""The order of rules: each comes after all that it reads, so a change reaches its alert in one evaluation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).resolve().parents[2] / "deploy/prometheus/rules"
RECORDED = re.compile(r"\b(?:rank|run|group|gpu|exporter|fault):rankscope_\w+:\w+")
READS_ALERTS = re.compile(r"\bALERTS\b|\bfault:")
HYSTERESIS = {
    "exporter:rankscope_seen:timestamp",
    "fault:rankscope_firing:max",
    "fault:rankscope_flapping:returns",
    "gpu:rankscope_held_unused_since:timestamp",
    "rank:rankscope_rank_info:live",
    "rank:rankscope_rank_info:unseen",
    "rank:rankscope_lag:sustained",
    "rank:rankscope_lag:severe",
    "run:rankscope_finding:ratio",
    "run:rankscope_loss:sustained",
    "run:rankscope_loss:severe",
    "run:rankscope_rotating:ratio",
    "run:rankscope_rotating:cause",
    "run:rankscope_transfer:cause",
    "rank:rankscope_culprit:phase",
    "run:rankscope_lost_gpu_hours:total",
}
"""Rules that read their own previous value."""


def groups(speed: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((RULES / f"{speed}.yml").read_text())["groups"]
    return found


def name_of(rule: dict[str, Any]) -> str:
    return str(rule.get("record", rule.get("alert")))


def early_reads(rules: list[dict[str, Any]]) -> list[str]:
    """Return each rule that reads a series of a later rule, of itself or of no rule."""
    last = {name_of(rule): index for index, rule in enumerate(rules)}
    return [
        f"{name_of(rule)} reads {read}"
        for index, rule in enumerate(rules)
        for read in sorted(set(RECORDED.findall(rule["expr"])))
        if last.get(read, index) >= index and not is_allowed(rule, read, rules[:index])
    ]


def is_allowed(rule: dict[str, Any], read: str, before: list[dict[str, Any]]) -> bool:
    """Return whether the rule may read it: as hysteresis, or by a label of an earlier rule of that name."""
    return (name_of(rule) == read and read in HYSTERESIS) or is_by_label(rule, read, before)


def is_by_label(rule: dict[str, Any], read: str, before: list[dict[str, Any]]) -> bool:
    """Return whether the rule reads an earlier rule of the same name by its label."""
    matched = set(re.findall(re.escape(read) + r'\{(\w+)="(\w+)"\}', rule["expr"]))
    has = {pair for one in before if name_of(one) == read for pair in one.get("labels", {}).items()}
    return bool(matched) and matched <= has and len(re.findall(re.escape(read) + r"\b(?!\{)", rule["expr"])) == 0


def reads_other_alerts(rule: dict[str, Any]) -> bool:
    """Return whether a rule reads other alerts. To keep its labels, an alert may read its own last evaluation."""
    own = f'ALERTS{{alertname="{rule.get("alert")}",'
    return READS_ALERTS.search(rule["expr"].replace(own, "{")) is not None


@pytest.mark.parametrize("speed", ["15s", "5s", "fast"])
def test_the_rules_are_one_group_that_is_evaluated_in_sequence(speed: str) -> None:
    assert [group["name"] for group in groups(speed)] == ["rankscope"]


def test_every_rule_comes_after_all_that_it_reads() -> None:
    (group,) = groups("15s")
    assert early_reads(group["rules"]) == []


def test_only_hysteresis_reads_the_previous_evaluation() -> None:
    (group,) = groups("15s")
    rules = group["rules"]
    own = {
        name_of(rule)
        for index, rule in enumerate(rules)
        if name_of(rule) in RECORDED.findall(rule["expr"]) and not is_by_label(rule, name_of(rule), rules[:index])
    }
    assert own == HYSTERESIS


def test_only_rules_that_read_alerts_come_after_them() -> None:
    (group,) = groups("15s")
    order = [2 if reads_other_alerts(rule) else int("alert" in rule) for rule in group["rules"]]
    assert order == sorted(order)
    assert order[-1] == 2


def test_the_texts_of_alerts_query_recorded_series() -> None:
    (group,) = groups("15s")
    recorded = {rule["record"] for rule in group["rules"] if "record" in rule}
    texts = " ".join(text for rule in group["rules"] for text in rule.get("annotations", {}).values())
    assert set(RECORDED.findall(texts)) <= recorded


def test_a_rule_that_reads_a_later_one_is_found() -> None:
    early = {"record": "run:rankscope_early:ratio", "expr": "run:rankscope_late:ratio > 1"}
    late = {"record": "run:rankscope_late:ratio", "expr": "up"}
    assert early_reads([early, late]) == ["run:rankscope_early:ratio reads run:rankscope_late:ratio"]
    assert early_reads([late, early]) == []
    assert early_reads([early]) == ["run:rankscope_early:ratio reads run:rankscope_late:ratio"]
