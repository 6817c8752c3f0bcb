"""Each fault of the gauntlet as series, at both speeds and by both clocks: one alert with the right place and cause.

Decoys do not alert.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from testing import promtool
from tests.rules.diagnosis_cases import ALL_LOADERS_SLOW, CASES, FAULTS, ONLY_BY_THE_DEVICE, SMALL_PIPELINE

BY_BOTH_CLOCKS = tuple(product(("host", "device"), (promtool.PRODUCTION, promtool.FAST)))


@pytest.fixture(scope="module", params=BY_BOTH_CLOCKS, ids=lambda by: f"{by[0]}-{by[1].name}")
def complaint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return promtool's complaint about all cases. They are runs of one test, so the rules are evaluated once."""
    clock, speed = request.param
    path = tmp_path_factory.mktemp(speed.name) / "test.yml"
    cases = [replace(case, clock=clock) for case in CASES + (ONLY_BY_THE_DEVICE if clock == "device" else ())]
    return promtool.complaint(promtool.all_of(cases, speed), speed, path)


@pytest.mark.parametrize("case", CASES + ONLY_BY_THE_DEVICE, ids=lambda case: case.run)
def test_a_fault_alerts_with_its_place_and_cause_and_nothing_else_does(complaint: str, case: promtool.Case) -> None:
    about_it = [part for part in complaint.split("expr:") if f'run=\\"{case.run}\\"' in part.partition("\n")[0]]
    assert not about_it, "\n".join(about_it)


def test_promtool_has_no_other_complaint(complaint: str) -> None:
    assert "promql" not in complaint
    assert complaint.count("FAILED") == 1


def test_the_text_of_every_alert_says_where_with_numbers(complaint: str) -> None:
    for alert in (alert for case in FAULTS for alert in case.alerts):
        assert f'alertname="{alert["alertname"]}"' in complaint
    texts = re.findall(r"Annotations:{(.*)}", complaint)
    assert texts
    for words in texts:
        assert not re.search(r"error expanding|%!|<no value>|NaN|  |\.\.", words), words
        assert re.search(r"description=\"[^\"]*\d", words), words
        assert not re.search(r"(\d\d\.\d|\d\.\d\d|\d{4})\d*( ?%| (s|min|h)\b)", words.replace("0.", ".")), words


def test_the_description_names_a_shortage_of_cpus(complaint: str) -> None:
    texts = [text for text in re.findall(r"Annotations:{(.*)}", complaint) if "threads wait for a CPU" in text]
    assert [re.findall(r"The ranks of run (\S*) slow each other down in turn", text) for text in texts] == [
        ["all-ranks-share-too-few-CPUs"]
    ]


@pytest.mark.parametrize(("clock", "speed"), BY_BOTH_CLOCKS)
def test_the_sends_of_a_pipeline_are_no_small_collectives(clock: str, speed: promtool.Speed, tmp_path: Path) -> None:
    """Not with the other cases: promtool refuses more samples in one query."""
    case = replace(SMALL_PIPELINE, clock=clock)
    assert not promtool.complaint(promtool.all_of([case], speed), speed, tmp_path / "test.yml")


@pytest.mark.parametrize("speed", [promtool.PRODUCTION, promtool.FAST], ids=lambda speed: speed.name)
def test_the_rest_of_a_lag_while_all_loaders_recover_names_no_rank(speed: promtool.Speed, tmp_path: Path) -> None:
    healthy = promtool.everywhere({name: promtool.HEALTHY_RANK[name] for name in ALL_LOADERS_SLOW.ranks[0]})
    case = promtool.Case("all loaders recover", promtool.Fault(healthy), usual=ALL_LOADERS_SLOW)
    span = f"{(speed.quiet + speed.faulty - 1) * speed.interval}s"
    alerts = 'ALERTS{alertstate="firing",alertname=~".*Lagging|.*DataBound"}'
    fired = f"count by (alertname) (max_over_time({alerts}[{span}]))"
    test = {
        **promtool.all_of([case], speed),
        "promql_expr_test": [
            {
                "expr": fired,
                "eval_time": span,
                "exp_samples": [{"labels": '{alertname="RankscopeDataBound"}', "value": 1}],
            }
        ],
    }
    assert promtool.complaint(test, speed, tmp_path / "test.yml") == ""
