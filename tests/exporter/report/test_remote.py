"""Reports of other machines: what a node shows of the analyzer's verdicts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest
from testing.analyzed_job import SLOW, AnalyzedJob

from rankscope.cli.explaining.fetching import Answer, FetchError
from rankscope.cli.explaining.prometheus import Prometheus
from rankscope_exporter.analyzer.page import report_of
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.report.remote import (
    KNOWN_FOR,
    READ_FOR,
    AnalyzedRuns,
    RemoteError,
    fetch_report,
    one_at_a_time,
)
from rankscope_exporter.report.runs import NodeReport
from rankscope_exporter.web.verdict import verdict

URL = "http://analyzer:10417"


class Analyzer:
    """Answers like an analyzer's server, and counts the requests."""

    def __init__(self, job: AnalyzedJob) -> None:
        self.body = as_json(report_of(job.analyzer, {"a": "", "b": ""})).encode()
        self.status, self.asked = 200, 0
        self.server = Prometheus(URL, fetch=self._answer)

    def _answer(self, url: str, _headers: Mapping[str, str]) -> Answer:
        assert url == f"{URL}/api/v1/runs"
        self.asked += 1
        return Answer(self.status, "", self.body)


@pytest.fixture
def job(tmp_path: Path) -> AnalyzedJob:
    return AnalyzedJob(tmp_path).train(40).train(20, SLOW)


@pytest.fixture
def analyzer(job: AnalyzedJob) -> Analyzer:
    return Analyzer(job)


class Viewed:
    """The report of a node that asks the analyzer, and its clock."""

    def __init__(self, analyzer: Analyzer) -> None:
        self.now = 0.0
        self.runs = AnalyzedRuns(analyzer.server, monotonic=lambda: self.now)

    def report(self, node: NodeReport) -> NodeReport:
        return self.runs.add_to(node)


def test_a_node_shows_what_the_analyzer_finds_in_its_run(job: AnalyzedJob, analyzer: Analyzer) -> None:
    viewed, node = Viewed(analyzer), job.nodes[0].reporter().report()
    assert "is not diagnosed here" in verdict(viewed.report(node), (), "").html
    viewed.runs.poll()
    (run,) = viewed.report(node).runs
    (finding,) = run.findings
    assert (finding.kind, finding.rank, finding.node, run.judged_by) == ("straggler", 3, "node-1", URL)
    assert [rank.rank for rank in run.ranks] == [0, 1]
    page = verdict(viewed.report(node), (), "").html
    assert finding.sentence in page
    assert "is not diagnosed here" not in page


def test_an_analyzer_that_is_no_longer_reached_is_no_verdict(job: AnalyzedJob, analyzer: Analyzer) -> None:
    viewed, node = Viewed(analyzer), job.nodes[0].reporter().report()
    viewed.report(node)
    viewed.runs.poll()
    viewed.now = KNOWN_FOR + 1.0
    (run,) = viewed.report(node).runs
    assert (run.is_judged, run.findings, run.judged_by) == (False, [], None)


def test_a_rank_in_a_container_with_a_name_of_its_own_is_known_by_its_gpu(job: AnalyzedJob, analyzer: Analyzer) -> None:
    of_analyzer = report_of(job.analyzer, {"a": "", "b": ""})
    (run,) = of_analyzer.runs
    ranks = [replace(rank, uuid=f"GPU-{rank.rank}") for rank in run.ranks]
    analyzer.body = as_json(replace(of_analyzer, runs=[replace(run, ranks=ranks)])).encode()
    (mine,) = job.nodes[0].reporter().report().runs
    in_pods = [replace(rank, node=f"pod-{rank.rank}", uuid=f"GPU-{rank.rank}") for rank in mine.ranks]
    viewed, node = Viewed(analyzer), NodeReport(0.0, [replace(mine, ranks=in_pods)])
    viewed.report(node)
    viewed.runs.poll()
    assert viewed.report(node).runs[0].is_judged


def test_a_server_that_never_ends_its_answer_is_not_asked_again() -> None:
    began, ends = Event(), Event()

    def slow(_url: str, _headers: Mapping[str, str]) -> Answer:
        began.set()
        ends.wait(10.0)
        return Answer(200, "", b"")

    fetch = one_at_a_time(slow)
    first = Thread(target=fetch, args=(URL, {}))
    first.start()
    began.wait(10.0)
    with pytest.raises(FetchError, match="has not ended"):
        fetch(URL, {})
    ends.set()
    first.join()
    assert fetch(URL, {}).status == 200


def test_the_analyzer_is_only_asked_while_a_user_reads_the_report(job: AnalyzedJob, analyzer: Analyzer) -> None:
    viewed = Viewed(analyzer)
    viewed.runs.poll()
    assert not analyzer.asked
    viewed.report(job.nodes[0].reporter().report())
    viewed.runs.poll()
    viewed.now = READ_FOR + 1.0
    viewed.runs.poll()
    assert analyzer.asked == 1


def test_the_verdict_on_another_job_of_the_same_name_is_not_shown(
    tmp_path: Path, job: AnalyzedJob, analyzer: Analyzer
) -> None:
    other = AnalyzedJob(tmp_path / "elsewhere", nodes=3, ranks=6).train(40)
    viewed, node = Viewed(analyzer), other.nodes[2].reporter().report()
    viewed.report(node)
    viewed.runs.poll()
    assert not viewed.report(node).runs[0].is_judged


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"", "answers 401"),
        (200, b"<html>", "is not a Rankscope exporter or analyzer of this version"),
        (200, b'{"runs": [{"run": 1}], "at": 0}', "is not a Rankscope exporter or analyzer of this version"),
    ],
)
def test_an_answer_that_is_no_report_is_an_error(analyzer: Analyzer, status: int, body: bytes, said: str) -> None:
    analyzer.status, analyzer.body = status, body
    with pytest.raises(RemoteError, match=said):
        fetch_report(analyzer.server)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
def test_a_number_that_no_exporter_sends_is_an_error(analyzer: Analyzer, number: bytes) -> None:
    analyzer.body = re.sub(rb'"at": [\d.]+', b'"at": ' + number, analyzer.body, count=1)
    with pytest.raises(RemoteError, match="is not a Rankscope exporter or analyzer of this version"):
        fetch_report(analyzer.server)
