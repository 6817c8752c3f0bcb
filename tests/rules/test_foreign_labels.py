"""Foreign labels change nothing: a Kubernetes operator's, those of replaced targets, and of two clusters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from testing.promtool import PRODUCTION, RULES, complaint, expanded
from validation.month.engine import fire
from validation.month.plan import HANG, Plan, SimulatedEvent
from validation.month.record import simulate
from validation.month.samples import Line, Stretch

SCRAPES = 200
HALF_AN_HOUR = 1800.0
FAULT = {"onset": HALF_AN_HOUR, "heals": 1.5 * HALF_AN_HOUR, "culprit": 3}
FOREIGN = 'namespace="monitoring",container="exporter",service="rankscope",endpoint="metrics"'
REPLACED = (60, 127, 150)
"""First scrapes without the exporter of node 0: before the fault, during its alert, and after it."""
AWAY, LINGERS = 2, 2
"""Scrapes until its successor answers, and scrapes in which the old series exist next to its own."""

Words = list[str]
Relabel = Callable[[str, Words], Iterator[tuple[str, Words]]]


def a_run(name: str, ranks: int = 8, **others: object) -> Plan:
    run = Plan(name, 1, ranks, 1.0, "host", 3000.0, np.ones(ranks), imbalance=0.02, transfer=0.15)
    return Plan(**{**run.__dict__, "skewed": np.zeros(ranks // 8), **others})


EXPECTED = {
    "healthy": (a_run("healthy"), []),
    "a slow rank": (a_run("slow", fault="slow rank", dose=1.3, **FAULT), ["RankscopeRankLagging 3"]),
    "a slow rank of two nodes": (
        a_run("slow-nodes", 16, fault="slow rank", dose=1.5, **FAULT),
        ["RankscopeRankLagging 3"],
    ),
    "a slow rank, by the device's clock": (
        a_run("slow-device", clock="device", fault="slow rank", dose=1.3, **FAULT),
        ["RankscopeRankLagging 3"],
    ),
    "a hang": (a_run("hang", fault=HANG, **{**FAULT, "heals": HALF_AN_HOUR + 420}), ["RankscopeRankStuck 3"]),
    "one rank writes a checkpoint": (
        a_run("checkpoint", events=(SimulatedEvent("checkpoint", HALF_AN_HOUR, 110, 3),)),
        [],
    ),
}


def with_an_operators_labels(series: str, values: Words) -> Iterator[tuple[str, Words]]:
    """Add the labels of a Prometheus operator."""
    yield with_labels(series, f'{FOREIGN},pod="{pod(series, 0)}"'), values


def with_pods_that_are_replaced(series: str, values: Words) -> Iterator[tuple[str, Words]]:
    """Replace pods on the host's network, where the instance stays."""
    for number, life in enumerate(lives(values) if is_of_node_0(series) else [values]):
        yield with_labels(series, f'{FOREIGN},pod="{pod(series, number)}"'), life


def at_new_addresses(series: str, values: Words) -> Iterator[tuple[str, Words]]:
    """Give each pod its own address as the instance, and no other labels."""
    for number, life in enumerate(lives(values) if is_of_node_0(series) else [values]):
        yield re.sub(r'instance="([^"]*)-(\d+)"', rf'instance="\1-\g<2>{number}"', series), life


def lives(values: Words) -> Iterator[Words]:
    """Yield the values of one exporter after the other: the next starts before the last is stale."""
    begins = [0, *(at + AWAY for at in REPLACED)]
    for begin, end in zip(begins, [*REPLACED, len(values)], strict=True):
        life = ["_"] * begin + values[begin:end]
        yield life + ["_"] * (AWAY + LINGERS) + ["stale"] if end < len(values) else life


def is_of_node_0(series: str) -> bool:
    return 'instance="' in series and re.search(r'instance="[^"]*-0"', series) is not None


def pod(series: str, number: int) -> str:
    instance = re.search(r'instance="([^"]*)"', series)
    return f"exporter-{instance[1] if instance else ''}-{number}"


def with_labels(series: str, labels: str) -> str:
    return series[:-1] + f",{labels}}}"


class Relabeled(Stretch):
    """A stretch with the labels of another Prometheus."""

    relabel: Relabel

    def lines(self) -> Iterator[Line]:
        for line in super().lines():
            for series, values in self.relabel(line["series"], expanded(line["values"])):
                yield {"series": series, "values": " ".join(values)}


def stretches(relabel: Relabel, plans: Sequence[Plan]) -> list[Stretch]:
    kind = type("Relabeled", (Relabeled,), {"relabel": staticmethod(relabel)})
    return [kind(plan, simulate(plan), 0, SCRAPES) for plan in plans]


@pytest.mark.parametrize("relabel", [with_an_operators_labels, with_pods_that_are_replaced, at_new_addresses])
def test_foreign_labels_change_no_alert_and_are_in_none(relabel: Relabel, tmp_path: Path) -> None:
    runs = stretches(relabel, [plan for plan, _ in EXPECTED.values()])
    fired = fire(runs, RULES / "15s.yml", tmp_path)
    alerts_of = {case: [dict(one.labels) for one in fired[run]] for case, run in zip(EXPECTED, runs, strict=True)}
    names = {
        case: [" ".join(filter(None, (one["alertname"], one.get("rank")))) for one in alerts]
        for case, alerts in alerts_of.items()
    }
    assert names == {case: expected for case, (_, expected) in EXPECTED.items()}
    assert not [one for alerts in alerts_of.values() for one in alerts if {"pod", "namespace", "endpoint"} & one.keys()]


@pytest.mark.parametrize("relabel", [with_an_operators_labels, with_pods_that_are_replaced, at_new_addresses])
def test_a_rank_is_recorded_once_with_all_its_time_and_without_foreign_labels(relabel: Relabel, tmp_path: Path) -> None:
    plans = [EXPECTED["healthy"][0], EXPECTED["a slow rank, by the device's clock"][0]]
    nothing = [
        '{__name__=~"(rank|run|group|gpu|exporter):rankscope_.+", pod!=""}',
        "count by (run, rank, phase) (rank:rankscope_phase:ratio) > 1",
        "count by (run, rank) (rank:rankscope_rank_info:live) > 1",
        "sum by (run, rank) (rank:rankscope_phase:ratio) < 0.9",
        "sum by (run, rank) (rank:rankscope_phase:ratio) > 1.1",
        "abs(count by (run) (rank:rankscope_rank_info:live) - 8) > 0",
    ]
    questions = [
        {"expr": expression, "eval_time": f"{15 * scrape}s", "exp_samples": []}
        for expression in nothing
        for scrape in range(40, SCRAPES)
    ]
    assert judged(stretches(relabel, plans), questions, tmp_path) == ""


@pytest.mark.parametrize("label", ["cluster", "owner"])
def test_runs_of_one_name_in_two_clusters_or_of_two_owners_are_two_runs(label: str, tmp_path: Path) -> None:
    healthy, slow = EXPECTED["healthy"][0], EXPECTED["a slow rank"][0]

    def labeled(series: str, values: Words) -> Iterator[tuple[str, Words]]:
        value = "b" if "slow" in series else "a"
        instance = re.sub('(instance="|GPU-)(healthy|slow)', r"\1" + value, series)
        named = re.sub("healthy|slow", "llama", instance)
        yield (with_labels(named, f'{label}="{value}"') if label == "cluster" or "run=" in named else named), values

    labels = 'alertname="RankscopeRankLagging",alertstate="firing",cause="backward",group="0-7"'
    others = 'node="llama-0-0",rank="3",run="llama-0",severity="warning",uuid="GPU-b-0-3"'
    questions: list[dict[str, object]] = [
        {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{HALF_AN_HOUR - 15:g}s", "exp_samples": []},
        {
            "expr": 'ALERTS{alertstate="firing"}',
            "eval_time": f"{HALF_AN_HOUR + 240:g}s",
            "exp_samples": [{"labels": f'ALERTS{{{labels},{others},{label}="b"}}', "value": 1}],
        },
        {
            "expr": f'count by ({label}) (rank:rankscope_rank_info:live{{run="llama-0"}})',
            "eval_time": f"{HALF_AN_HOUR:g}s",
            "exp_samples": [{"labels": f'{{{label}="{one}"}}', "value": 8} for one in "ab"],
        },
    ]
    assert judged(stretches(labeled, [healthy, slow]), questions, tmp_path) == ""


def test_another_users_dead_record_alerts_with_its_owner(tmp_path: Path) -> None:
    """Alertmanager compares the owners, so it does not inhibit the run's own alerts."""

    class WithAnotherUser(Relabeled):
        def lines(self) -> Iterator[Line]:
            yield from super().lines()
            common = f'job="rankscope",instance="elsewhere",run="{self.name}",rank="999",owner="1001"'
            for series, value in {
                f"rankscope_rank_up{{{common}}}": 0,
                f'rankscope_rank_info{{{common},group="0-7",node="elsewhere",uuid=""}}': 1,
                f"rankscope_rank_start_timestamp_seconds{{{common}}}": 0,
                f"rankscope_rank_exit_timestamp_seconds{{{common}}}": 2100,
                f'rankscope_rank_exit_info{{{common},reason="killed"}}': 1,
            }.items():
                yield {"series": series, "values": " ".join(["_"] * 140 + [str(value)] * (SCRAPES - 140))}

    def owned(series: str, values: Words) -> Iterator[tuple[str, Words]]:
        yield (with_labels(series, 'owner="1000"') if "run=" in series else series), values

    plan = EXPECTED["a slow rank"][0]
    run = type("Attacked", (WithAnotherUser,), {"relabel": staticmethod(owned)})(plan, simulate(plan), 0, SCRAPES)
    fired = [dict(one.labels) for one in fire([run], RULES / "15s.yml", tmp_path)[run]]
    alerts = {(one["alertname"], one["rank"], one["owner"]) for one in fired}
    assert alerts == {("RankscopeRankLagging", "3", "1000"), ("RankscopeRankCrashed", "999", "1001")}


def judged(runs: Sequence[Stretch], questions: Sequence[dict[str, object]], directory: Path) -> str:
    """Return promtool's complaint about what is not as expected."""
    lines = [line for run in runs for line in run.lines()]
    test = {"interval": "15s", "input_series": lines, "promql_expr_test": questions}
    return complaint(test, PRODUCTION, directory / "test.json")[:4000]
