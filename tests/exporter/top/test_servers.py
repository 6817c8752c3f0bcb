"""The servers that `rankscope top --url` asks: what they know together, and those that do not answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from threading import Event

import pytest
from testing.analyzed_job import AnalyzedJob
from testing.simulated_job import lagging
from testing.waiting import eventually

from rankscope.cli.explaining.fetching import Answer
from rankscope.cli.explaining.prometheus import Prometheus
from rankscope_exporter.analyzer.page import report_of
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.report.gpus import GpuProblem, GpusReport
from rankscope_exporter.report.remote import KNOWN_FOR
from rankscope_exporter.top import servers
from rankscope_exporter.top.command import show_remote
from rankscope_exporter.top.servers import NodeState, Servers, merged, node_name

A, B, ANALYZER = "http://node-0:10417", "http://node-1:10417", "http://analyzer:10418"
NO_GPUS = as_json(GpusReport(0.0, ())).encode()


class World:
    """Exporters of two nodes and an analyzer, by URL. `down` do not answer, and `stuck` never end an answer."""

    def __init__(self, job: AnalyzedJob) -> None:
        reports = {url: as_json(node.reporter().report()) for url, node in zip((A, B), job.nodes, strict=True)}
        reports[ANALYZER] = as_json(report_of(job.analyzer, {A: "", B: ""}))
        self.bodies = {url: text.encode() for url, text in reports.items()}
        self.down: set[str] = set()
        self.stuck: dict[str, Event] = {}
        self.credentials: dict[str, str] = {}
        self.now = 0.0

    def connect(self, url: str) -> Prometheus:
        return Prometheus(url, fetch=self.answer)

    def answer(self, url: str, headers: Mapping[str, str]) -> Answer:
        server, _, page = url.partition("/api/v1/")
        self.credentials[server] = headers.get("Authorization", "")
        if server in self.down:
            raise ConnectionRefusedError(111, "Connection refused")
        if server in self.stuck:
            self.stuck[server].wait()
        if page == "runs":
            return Answer(HTTPStatus.OK, "", self.bodies[server])
        return Answer(HTTPStatus.NOT_FOUND, "", b"") if server == ANALYZER else Answer(HTTPStatus.OK, "", NO_GPUS)

    def servers(self, *urls: str) -> Servers:
        return Servers(map(self.connect, urls), self.connect, lambda: self.now)


@pytest.fixture
def job(tmp_path: Path) -> AnalyzedJob:
    return AnalyzedJob(tmp_path).train(40).train(20, lagging("forward", laggard=3))


@pytest.fixture
def world(job: AnalyzedJob) -> World:
    return World(job)


def by_name(asked: Servers) -> dict[str, NodeState]:
    return {node.name: node for node in asked.nodes()}


def test_the_exporters_of_an_analyzer_are_asked_too_without_the_users_password(world: World) -> None:
    asked = world.servers(ANALYZER.replace("//", "//alice:secret@"))
    with asked.asking():
        eventually(lambda: {A, B} <= world.credentials.keys() and not asked.wait(10))
        eventually(lambda: all(not node.error for node in asked.nodes()))
    assert [node.is_analyzer for node in asked.nodes()] == [True, False, False]
    assert world.credentials[ANALYZER].startswith("Basic ")
    assert (world.credentials[A], world.credentials[B]) == ("", "")


def test_a_run_on_several_nodes_is_shown_once_as_the_analyzer_diagnoses_it(world: World) -> None:
    asked = world.servers(A, B, ANALYZER)
    with asked.asking():
        assert asked.wait(10) == []
    (run,) = merged(asked.nodes(), 1.0).runs
    assert [one.kind for one in run.findings] == ["straggler"]
    assert [rank.rank for rank in run.ranks] == [0, 1, 2, 3]


def test_the_problems_of_gpus_that_an_exporter_knows_are_shown(job: AnalyzedJob, world: World) -> None:
    lost = GpuProblem("gpu_lost", "", "critical", "0", "GPU-a", 0.0, 240.0, 0.0, "GPU 0 is lost", "", "Drain it.")
    world.bodies[A] = as_json(replace(job.nodes[0].reporter().report(), gpu_problems=[lost])).encode()
    asked = world.servers(A, B)
    with asked.asking():
        asked.wait(10)
    assert [list(node.gpu_problems) for node in asked.nodes()] == [[lost], []]


def test_without_an_analyzer_a_run_has_the_ranks_of_all_nodes_and_is_not_diagnosed(world: World) -> None:
    asked = world.servers(A, B)
    with asked.asking():
        asked.wait(10)
    (run,) = merged(asked.nodes(), 1.0).runs
    assert (run.is_judged, run.living, list(run.nodes)) == (False, 4, ["node-0", "node-1"])
    assert run.not_judged_reason == "4 of its 4 ranks are on these 2 nodes, of which none knows the others"


def test_jobs_of_one_name_on_two_nodes_are_two_runs(world: World) -> None:
    asked = world.servers(ANALYZER)
    with asked.asking():
        asked.wait(10)
    (node, *_) = asked.nodes()
    (run,) = node.runs
    elsewhere = replace(run, ranks=[replace(rank, node="node-9") for rank in run.ranks])
    nodes = [node, node, replace(node, runs=[elsewhere])]
    assert len(merged(nodes, 1.0).runs) == 2


def test_a_server_that_never_answers_does_not_delay_another(world: World) -> None:
    world.stuck[A] = Event()
    asked = world.servers(A, B)
    with asked.asking():
        eventually(lambda: not by_name(asked)["node-1"].error)
        assert by_name(asked)["node-0"].error.startswith("no answer for ")
        world.stuck[A].set()


def test_what_a_silent_server_has_said_is_dropped_after_a_while(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "INTERVAL", 0.0)
    asked = world.servers(A)
    with asked.asking():
        asked.wait(10)
        world.down.add(A)
        eventually(lambda: by_name(asked)["node-0"].error)
        state = by_name(asked)["node-0"]
        assert state.error == f"cannot reach {A}: Connection refused"
        assert state.runs
        world.now = KNOWN_FOR + 1.0
        assert not by_name(asked)["node-0"].runs


def test_a_node_that_only_its_analyzer_reaches_is_not_called_silent(world: World) -> None:
    world.down = {B}
    asked = world.servers(ANALYZER)
    with asked.asking():
        eventually(lambda: len(asked.nodes()) == 3 and by_name(asked)["node-1"].error.startswith("cannot"))
        assert by_name(asked)["node-1"].is_only_unreachable
    asked = world.servers(B, ANALYZER)
    with asked.asking():
        asked.wait(10)
        assert not by_name(asked)["node-1"].is_only_unreachable


@pytest.mark.parametrize("text", ["http://[::1", "http://node-0:99999", "file:///etc/passwd", "x"])
def test_a_text_that_is_no_url_is_not_asked_and_the_others_are(world: World, text: str) -> None:
    world.bodies[ANALYZER] = world.bodies[ANALYZER].replace(A.encode(), text.encode())
    asked = world.servers(ANALYZER)
    with asked.asking():
        eventually(lambda: [node.error for node in asked.nodes()] == ["", ""])
    assert B in world.credentials


def test_at_most_so_many_exporters_of_an_analyzer_are_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "SERVERS_LIMIT", 2)
    asked = world.servers(ANALYZER)
    with asked.asking():
        eventually(lambda: len(asked.nodes()) == 2)
        assert asked.left_out == 1


def test_top_shows_the_ranks_of_all_nodes(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_remote([ANALYZER], once=True, is_json=False, fetch=world.answer) == 0
    shown = capsys.readouterr().out
    assert "Rank 3 (node-1) slows down run r" in shown
    assert [shown.count(f"  {node}\n") for node in ("node-0", "node-1")] == [2, 2]
    assert "2 of 2 nodes answer" in shown
    (late,) = [line for line in shown.splitlines() if line.startswith("node-1 ")]
    (other,) = [line for line in shown.splitlines() if line.startswith("node-0 ")]
    assert (late.split()[1:3], other.split()[1]) == (["1", "problem"], "ok")


def test_top_says_why_it_shows_nothing(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.down = {A, B}
    assert show_remote([A, B], once=True, is_json=False, fetch=world.answer) == 2
    hint = "Connection refused (set --url)"
    assert capsys.readouterr().err.splitlines() == [f"rankscope top: cannot reach {url}: {hint}" for url in (A, B)]
    assert show_remote(["ftp://node"], once=True, is_json=False) == 2


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://node1:10417", "node1"),
        ("https://node1", "node1"),
        ("http://node1:9401/exporter", "node1:9401/exporter"),
    ],
)
def test_a_node_is_named_by_its_host_and_an_unusual_port(url: str, name: str) -> None:
    assert node_name(url) == name
