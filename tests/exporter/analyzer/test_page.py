"""The analyzer's pages: what they say of runs, missing nodes and targets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from testing.analyzed_job import SLOW, AnalyzedJob

from rankscope_exporter.analyzer.metrics import METRICS, AnalyzerCollector
from rankscope_exporter.analyzer.page import as_html, create_analyzer_app, report_of
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.report.rates import INTERVAL
from rankscope_exporter.web.charts import FEWEST_POINTS

ANSWER = {"a": "", "b": ""}
ONE_ANSWERS = {"a": "", "b": "connection refused"}


@pytest.fixture
def job(tmp_path: Path) -> AnalyzedJob:
    return AnalyzedJob(tmp_path).train(40)


def client(job: AnalyzedJob, targets: Mapping[str, str]) -> TestClient:
    collector = AnalyzerCollector(job.analyzer, lambda: targets)
    return TestClient(create_analyzer_app(Scrape([collector]), job.analyzer, collector))


def test_a_healthy_run_is_said_to_be_one(job: AnalyzedJob) -> None:
    page = client(job, ANSWER).get("/").text
    assert "2 of 2 targets answer" in page
    assert "No problem found</b> in 1 run, 4 ranks." in page
    assert [page.count(f'<td class="text">{node}<') for node in ("node-0", "node-1")] == [2, 2]


def test_a_finding_has_its_sentence_and_advice(job: AnalyzedJob) -> None:
    job.train(20, SLOW)
    pages = client(job, ANSWER)
    (run,) = pages.get("/api/v1/runs").json()["runs"]
    (finding,) = run["findings"]
    assert (finding["kind"], finding["rank"], finding["node"], run["is_judged"]) == ("straggler", 3, "node-1", True)
    page = pages.get("/").text
    assert finding["sentence"] in page
    assert finding["advice"] in page
    assert "No problem found" not in page


def test_a_run_has_a_chart_of_its_speed_and_no_pids(job: AnalyzedJob) -> None:
    collector = AnalyzerCollector(job.analyzer, lambda: ANSWER)
    for _ in range(2 * FEWEST_POINTS):
        collector.show(job.train(int(INTERVAL) + 1).diagnosis)
    page = as_html(report_of(job.analyzer, ANSWER), collector.rates)
    assert re.search(r"Steps per second, last 10 min <svg .*?<polyline", page)
    assert ">steps</th>" in page
    assert ">pid</th>" not in page


def test_a_node_that_does_not_answer_is_named(job: AnalyzedJob) -> None:
    job.silent = {1}
    job.train(20)
    pages = client(job, ONE_ANSWERS)
    page = pages.get("/").text
    assert "Run r is not fully diagnosed: no answer from node-1." in page
    assert "1 of 2 targets answer" in page
    assert '<td class="text">b</td><td class="text">connection refused</td>' in page
    assert "No problem found" not in page
    answer = pages.get("/api/v1/runs").json()
    assert answer["runs"][0]["missing_nodes"] == ["node-1"]
    assert (answer["exporters"], answer["failures"]) == (["a", "b"], {"b": "connection refused"})


def test_it_is_ready_when_a_target_has_answered(job: AnalyzedJob) -> None:
    assert client(job, ONE_ANSWERS).get("/-/ready").status_code == 200
    assert client(job, {"b": "connection refused"}).get("/-/ready").status_code == 503


def test_its_metrics_are_the_declared_ones_and_those_of_findings(job: AnalyzedJob) -> None:
    collector = AnalyzerCollector(job.analyzer, lambda: ANSWER)
    job.train(20, SLOW)
    collector.show(job.diagnosis)
    found = {family.name: family.samples for family in collector.collect()}
    assert {declared.name for declared in METRICS} <= found.keys()
    (ratio,) = found["rankscope_finding_ratio"]
    assert (ratio.labels["kind"], ratio.labels["rank"], ratio.labels["node"]) == ("straggler", "3", "node-1")
    (judged,) = found["rankscope_run_judged_info"]
    assert judged.labels["by"] == "analyzer"
    assert [one.value for one in found["rankscope_analyzer_run_ranks"]] == [4.0]
    (peak,) = found["rankscope_finding_peak_ratio"]
    assert peak.labels == ratio.labels
    assert peak.value >= ratio.value


def test_a_finding_that_has_ended_is_shown_with_its_end(job: AnalyzedJob) -> None:
    job.train(20, SLOW).train(40)
    assert not job.findings()
    (entry,) = job.diagnosis.findings
    assert (entry["kind"], entry["rank"]) == ("straggler", "3")
    assert entry["end"] > entry["begin"]


def test_the_gpu_time_of_the_whole_run_is_divided_by_cause(job: AnalyzedJob) -> None:
    collector = AnalyzerCollector(job.analyzer, lambda: ANSWER)
    job.train(60, SLOW)
    collector.show(job.diagnosis)
    (family,) = (one for one in collector.collect() if one.name == "rankscope_run_gpu_seconds")
    spent = {sample.labels["cause"]: sample.value for sample in family.samples}
    assert {sample.labels["node"] for sample in family.samples} == {""}
    counted = sum(sum(one.counters.phases.values()) for one in job.diagnosis.look.readings[("r", "0")])
    assert sum(spent.values()) == pytest.approx(counted)
    assert spent["straggler"] > 10.0


@pytest.mark.parametrize(
    ("targets", "said"),
    [({"b": "timed out"}, "No target answers"), (ONE_ANSWERS, "No run spans the nodes of the targets")],
)
def test_without_an_answer_no_run_is_known(tmp_path: Path, targets: Mapping[str, str], said: str) -> None:
    page = client(AnalyzedJob(tmp_path), targets).get("/").text
    assert said in page
    assert "No problem found" not in page
