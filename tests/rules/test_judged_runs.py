"""Runs that an exporter judges: its findings alert, and the rules about all others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from testing import promtool
from testing.promtool import PRODUCTION, Case, Fault
from tests.rules.diagnosis_cases import late

ROOT = Path(__file__).resolve().parents[2]
CAUSES = ROOT / "deploy/prometheus/causes.yml"
WITH_RUNBOOK = {path.stem for path in (ROOT / "docs/runbooks").glob("Rankscope*.md")}
SLOW = Case("slow rank", Fault(late(2, "other")))
RUN = SLOW.run
JUDGED = f'rankscope_run_judged_info{{instance="{RUN}",run="{RUN}",by="node-a"}}'
RANK = f'rankscope_rank_up{{instance="{RUN}",run="{RUN}",rank="%d"}}'
OTHER = "other"
"""Another target."""
FIRST, LAST = PRODUCTION.quiet + 40, PRODUCTION.quiet + PRODUCTION.faulty - 1
"""Evaluations: the rules have found the rank long before the first."""


def finding(metric: str, kind: str = "straggler", rank: str = "2", cause: str = "other", more: str = "") -> str:
    where = f',rank="{rank}",group="0-3",node="node-a",gpu="{rank}",uuid="GPU-{RUN}-{rank}"' if rank else ""
    labels = f'instance="{RUN}",run="{RUN}",kind="{kind}",cause="{cause}",severity="warning"{where}{more}'
    return f"{metric}{{{labels}}}"


def between(first: int, last: int, value: str) -> str:
    """Return the values of a series that exists from one sample to another."""
    return f"_x{first} {value}x{last - first - 1} stale"


def judged(first: int, last: int, *series: str) -> list[dict[str, str]]:
    return [{"series": one, "values": between(first, last, "1")} for one in (JUDGED, *series)]


def shown_by_another(*series: str, instance: str = OTHER, value: str = "1") -> list[dict[str, str]]:
    """Return series of another target, from the first sample to the last."""
    names = [one.replace(f'instance="{RUN}"', f'instance="{instance}"') for one in series]
    return [{"series": name, "values": f"{value}x{LAST + 2}"} for name in names]


def firing(alert: str, more: str = "") -> str:
    return f'ALERTS{{alertstate="firing",alertname="Rankscope{alert}",run="{RUN}"{more}}}'


def expecting(series: list[dict[str, str]], case: Case, **expected: int) -> dict[str, Any]:
    """Return a test that expects a number of series of each alert in every evaluation since FIRST."""
    test = promtool.all_of([case], PRODUCTION)
    span = f"{(LAST - FIRST) * 15}s"
    questions = []
    for alert, count in expected.items():
        each = f"(count({firing(alert)}) or vector(0))"
        for over in ("min", "max"):
            expr = f"{over}_over_time({each}[{span}:15s])"
            questions.append(
                {"expr": expr, "eval_time": f"{LAST * 15}s", "exp_samples": [{"labels": "{}", "value": count}]}
            )
    return {
        **test,
        "input_series": [*test["input_series"], *series],
        "promql_expr_test": questions,
        "alert_rule_test": [],
    }


def test_a_fault_stays_one_alert_when_an_exporter_starts_and_stops_judging(tmp_path: Path) -> None:
    series = judged(FIRST + 10, FIRST + 25, finding("rankscope_finding_ratio"))
    assert promtool.complaint(expecting(series, SLOW, RankLagging=1), PRODUCTION, tmp_path / "test.yml") == ""


def test_a_fault_stays_one_alert_while_the_exporter_that_judges_does_not_answer(tmp_path: Path) -> None:
    healthy = Case(SLOW.name, Fault())
    series = judged(0, LAST + 2, finding("rankscope_finding_ratio"))
    for one in series:
        one["values"] = f"1x{FIRST + 9} stale _x1 1x{LAST}"
    assert promtool.complaint(expecting(series, healthy, RankLagging=1), PRODUCTION, tmp_path / "test.yml") == ""


def test_the_rules_are_silent_about_a_judged_run_without_findings(tmp_path: Path) -> None:
    series = judged(0, LAST + 2)
    test = expecting(series, SLOW, RankLagging=0, RotatingStraggler=0)
    assert promtool.complaint(test, PRODUCTION, tmp_path / "test.yml") == ""


def test_a_finding_of_a_run_that_no_exporter_judges_yet_does_not_alert_twice(tmp_path: Path) -> None:
    series = judged(0, LAST + 2, finding("rankscope_finding_ratio"))[1:]
    assert promtool.complaint(expecting(series, SLOW, RankLagging=1), PRODUCTION, tmp_path / "test.yml") == ""


def test_two_exporters_that_judge_one_run_make_one_alert(tmp_path: Path) -> None:
    series = judged(0, LAST + 2, finding("rankscope_finding_ratio"))
    series += shown_by_another(JUDGED, *(RANK % rank for rank in range(4)))
    series += shown_by_another(finding("rankscope_finding_ratio", cause="unknown"), value="0.5")
    assert promtool.complaint(expecting(series, SLOW, RankLagging=1), PRODUCTION, tmp_path / "test.yml") == ""


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        shown_by_another(RANK % 2),
        [*shown_by_another(RANK % 2, value="4"), *shown_by_another(RANK % 9, instance="third", value="-3")],
        shown_by_another(*(RANK % rank for rank in (4, 5, 6, 7)), value="0"),
    ],
    ids=["none", "one", "impossible values", "others that have ended"],
)
def test_a_target_without_all_living_ranks_of_a_run_does_not_silence_the_rules(
    tmp_path: Path, ranks: list[dict[str, str]]
) -> None:
    test = expecting([*shown_by_another(JUDGED), *ranks], SLOW, RankLagging=1)
    assert promtool.complaint(test, PRODUCTION, tmp_path / "test.yml") == ""


def test_a_target_without_ranks_of_a_run_has_no_findings_about_it(tmp_path: Path) -> None:
    found = shown_by_another(JUDGED, finding("rankscope_finding_ratio"))
    test = expecting([*judged(0, LAST + 2), *found], Case(SLOW.name, Fault()), RankLagging=0)
    assert promtool.complaint(test, PRODUCTION, tmp_path / "test.yml") == ""


def test_a_target_with_a_forged_rank_does_not_silence_the_findings_of_another(tmp_path: Path) -> None:
    series = [*judged(0, LAST + 2, finding("rankscope_finding_ratio")), *shown_by_another(JUDGED, RANK % 9)]
    test = expecting(series, Case(SLOW.name, Fault()), RankLagging=1)
    assert promtool.complaint(test, PRODUCTION, tmp_path / "test.yml") == ""


ALERTS = yaml.safe_load(CAUSES.read_text())["alerts"]
KINDS = {
    texts["finding"]: alert.removeprefix("Rankscope")
    for alert, texts in ALERTS.items()
    if "finding" in texts and alert in WITH_RUNBOOK and alert != "RankscopeRankZeroLagging"
}
RANKS = {texts["finding"] for texts in ALERTS.values() if "{place}" in texts.get("summary", "")}
EVIDENCE = {"hang": "stalled", "checkpoint_overdue": "age", "loss_scale_collapse": "scale"}


@pytest.fixture(scope="module")
def complaint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return promtool's complaint about one finding of each kind, which shows their texts."""
    series = judged(0, LAST + 2)
    for kind in KINDS:
        place = {"kind": kind, "rank": "2" if kind in RANKS else "", "cause": "other" if kind in RANKS else "unknown"}
        series.append({"series": finding("rankscope_finding_ratio", **place), "values": "0.4x200"})
        since = finding("rankscope_finding_since_timestamp_seconds", **place)
        series.append({"series": since, "values": "60x200"})
        if kind in EVIDENCE:
            evidence = finding("rankscope_finding_evidence", **place, more=f',name="{EVIDENCE[kind]}"')
            series.append({"series": evidence, "values": "20000x200"})
    test = expecting(series, Case(SLOW.name, Fault()), **dict.fromkeys(KINDS.values(), 1))
    names = [f"Rankscope{name}" for name in KINDS.values()]
    test["alert_rule_test"] = [{"alertname": name, "eval_time": f"{LAST * 15}s", "exp_alerts": []} for name in names]
    return promtool.complaint(test, PRODUCTION, tmp_path_factory.mktemp("kinds") / "test.yml")


@pytest.mark.parametrize("alert", KINDS.values())
def test_each_kind_of_finding_is_one_alert(complaint: str, alert: str) -> None:
    assert f'alertname=\\"Rankscope{alert}\\"' not in complaint
    assert complaint.count(f'alertname="Rankscope{alert}"') == 1


def test_each_text_is_complete(complaint: str) -> None:
    assert "error expanding" not in complaint
    assert "<no value>" not in complaint


@pytest.mark.parametrize(
    ("ranks", "place", "named", "command"),
    [
        ("4-7", "node node-a", "Set of ranks 4-7 (node node-a)", "stacks --rank 4-7` on node-a"),
        ("0,2,5", "", "Set of ranks 0,2,5", "stacks --rank 0,2,5` on its node"),
        ("12 ranks", "", "Set of 12 ranks", "stacks` on its node"),
    ],
)
def test_a_set_of_ranks_is_named_by_its_place_and_its_waits(
    tmp_path: Path, ranks: str, place: str, named: str, command: str
) -> None:
    where = f',rank="{ranks}",node="{"node-a" if place else ""}",place="{place}"'
    found = {finding("rankscope_finding_ratio", rank="", more=where): 0.4}
    for name, value in (("wait", 0.05), ("group_wait", 0.45)):
        found[finding("rankscope_finding_evidence", rank="", more=f'{where},name="{name}"')] = value
    series = [{"series": one, "values": f"{value}x{LAST + 2}"} for one, value in found.items()]
    test = expecting([*judged(0, LAST + 2), *series], SLOW)
    alert = {"alertname": "RankscopeRankLagging", "eval_time": f"{LAST * 15}s", "exp_alerts": []}
    test["alert_rule_test"] = [alert]
    complaint = promtool.complaint(test, PRODUCTION, tmp_path / "test.yml")
    assert f'summary="{named} slows down run {RUN} by 40%: extra work outside the model"' in complaint
    assert "These ranks wait 5% of the time in collectives, their peers 45%. First run" in complaint
    assert f"`rankscope {command} to see where it is." in complaint


ANALYZER = "analyzer"


def judged_by_an_analyzer(ranks: int, *series: str) -> list[dict[str, str]]:
    """Return the series of an analyzer that judges the run, with so many ranks, and these findings."""
    judged = shown_by_another(JUDGED, *series, instance=ANALYZER)
    counted = f'rankscope_analyzer_run_ranks{{instance="{ANALYZER}",run="{RUN}"}}'
    return [*judged, *shown_by_another(counted, instance=ANALYZER, value=str(ranks))]


def test_findings_of_an_analyzer_alert_and_the_rules_are_silent(tmp_path: Path) -> None:
    series = judged_by_an_analyzer(4, finding("rankscope_finding_ratio", "network", rank="", cause="network"))
    test = expecting(series, SLOW, RankLagging=0, RotatingStraggler=0, TransferBound=1)
    assert promtool.complaint(test, PRODUCTION, tmp_path / "test.yml") == ""


def test_an_analyzer_that_knows_fewer_ranks_silences_no_rule(tmp_path: Path) -> None:
    test = expecting(judged_by_an_analyzer(3), SLOW, RankLagging=1)
    assert promtool.complaint(test, PRODUCTION, tmp_path / "test.yml") == ""
