"""A run that spans nodes is captured on each node when the analyzer finds that it hangs: it says so when it pulls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from testing.analyzed_job import AnalyzedJob

from rankscope_exporter.capture.stalls import LEAST_SECONDS, Stalls
from rankscope_exporter.diagnosis.readings import Run
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.node_facts.wire import ANALYZER, HANGING, HANGING_LIMIT, read_runs, written_runs
from rankscope_exporter.report.analyzer import KNOWN_FOR, Analyzer
from rankscope_exporter.web.app import create_app

READY: Any = SimpleNamespace(is_ready=True)  # the part of the sampler that the pages use


class Captured:
    """A job on two nodes, and the reasons for which its first node captures it."""

    def __init__(self, directory: Path) -> None:
        self.job = AnalyzedJob(directory)
        self.reasons: list[str] = []
        (node, *_), stalls = self.job.nodes, Stalls()
        node.diagnosis.listeners.append(
            lambda look: self.reasons.extend(reason for _, reason in stalls.update(look, self.hanging()))
        )
        self.job.train(40)

    def hanging(self) -> frozenset[Run]:
        """Return what the analyzer says to the node."""
        return read_runs(written_runs(self.job.analyzer.hanging("node-0")))


@pytest.fixture
def captured(tmp_path: Path) -> Captured:
    return Captured(tmp_path)


def test_a_run_of_several_nodes_is_captured_again_at_the_analyzers_finding(captured: Captured) -> None:
    job = captured.job
    for rank, phase in enumerate(("collective_wait", "data_wait", "collective_wait", "collective_wait")):
        job.job.ranks[rank].enter(phase)
    job.wait(int(LEAST_SECONDS) + 5)
    assert (captured.reasons, job.findings(), captured.hanging()) == (["standstill"], [], frozenset())
    job.wait(400)
    assert [one.kind for one in job.findings()] == ["hang"]
    assert captured.hanging() == {*job.nodes[0].look.readings}
    assert captured.reasons == ["standstill", "hang"]


def test_what_an_analyzer_says_captures_no_run_that_trains(captured: Captured) -> None:
    stalls, job = Stalls(), captured.job
    every = {*job.nodes[0].look.readings}
    found: list[tuple[Run, str]] = []
    job.nodes[0].diagnosis.listeners.append(lambda look: found.extend(stalls.update(look, every)))
    job.train(60)
    assert found == []


def test_the_runs_of_a_pull_are_known_until_the_analyzer_stops_to_pull() -> None:
    now = [0.0]
    analyzer = Analyzer(lambda: now[0])
    analyzer.record_pull("a:1", {("r", "0")})
    analyzer.record_pull("b:1", {("other", "0")})
    assert analyzer.hanging() == {("r", "0")}
    now[0] = KNOWN_FOR + 1.0
    assert not analyzer.hanging()
    analyzer.record_pull("a:1")
    assert not analyzer.hanging()


def test_the_node_reads_them_from_the_request(captured: Captured) -> None:
    node = captured.job.nodes[0]
    reporter = node.reporter()
    app = create_app(Scrape([]), READY, reporter, captured.job.facts[0])
    headers = {ANALYZER: "analyzer-0:10418", HANGING: written_runs([("naïve, run/1", "1000")])}
    assert TestClient(app).get("/api/v1/facts", headers=headers).status_code == 200
    assert reporter.analyzer.hanging() == {("naïve, run/1", "1000")}


@given(st.frozensets(st.tuples(st.text(min_size=1), st.sampled_from(["", "0", "1000"])), max_size=5))
def test_a_header_has_the_names_of_all_runs(runs: frozenset[Run]) -> None:
    assert read_runs(written_runs(runs)) == runs
    assert written_runs(runs).isascii()


def test_a_header_has_a_limited_length() -> None:
    text = written_runs((f"{number:03}" * 30, "1000") for number in range(200))
    assert HANGING_LIMIT / 2 < len(text) <= HANGING_LIMIT
    assert len(read_runs(text)) > 10


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert len(read_runs(text)) <= len(text) + 1
