"""The captures of a run on the status page and in `rankscope top`: only while it stands still or has failed."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric
from rich.console import Console
from testing.judged_job import HUNG, JudgedJob

from rankscope_exporter.ledger import journal
from rankscope_exporter.ledger.owner_files import OwnerFiles
from rankscope_exporter.report.runs import CaptureReport, NodeReport, Reporter, RunReport
from rankscope_exporter.top import node as top_node
from rankscope_exporter.top.servers import NodeState, merged
from rankscope_exporter.top.view import Screen, Shown, View
from rankscope_exporter.web.status_page import render_status

PATH = "/captures/r-20261129T190000Z-hang"
SAID = f"Captured on node-a in {PATH}"


def reporter(job: JudgedJob, path: str = PATH) -> Reporter:
    """Return a reporter that knows a capture of the run."""
    made = job.reporter()
    name, owner = job.report().run, job.report().owner
    made.captures = lambda: {(name, owner): [CaptureReport("node-a", path, 1e9)]}
    return made


def page(of: Reporter) -> str:
    metrics: list[Metric] = []
    return render_status(metrics, of, time.time(), "node-a")


def screen(node: NodeReport) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(View(Shown(node), Screen(200, has_color=False)))
    return out.getvalue()


@pytest.fixture
def hung(run_dir: Path) -> JudgedJob:
    job = JudgedJob(run_dir).trained(60)
    job.wait(120, HUNG)
    return job


@pytest.mark.parametrize("seconds", [20, 120], ids=["a standstill before the alert", "a hang"])
def test_a_run_that_stands_still_has_its_capture(run_dir: Path, seconds: int) -> None:
    job = JudgedJob(run_dir).trained(60)
    job.wait(seconds, HUNG)
    report = reporter(job).report()
    assert page(reporter(job)).count(SAID) == screen(report).count(SAID) == 1


def test_a_crashed_run_has_its_capture(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(60)
    for second in range(1, 8):
        job.poll(job.now + second, ended=[2])
    assert SAID in page(reporter(job))


def test_a_run_that_is_not_diagnosed_here_has_its_capture(run_dir: Path) -> None:
    job = JudgedJob(run_dir, world_size="8", group="0-7").trained(20)
    job.wait(40, HUNG)
    report = reporter(job).report()
    assert page(reporter(job)).count(SAID) == screen(report).count(SAID) == 1
    assert SAID not in page(reporter(job.trained(3)))


def test_a_run_that_trains_again_has_none(run_dir: Path) -> None:
    job = JudgedJob(run_dir).trained(60)
    assert reporter(job).report().runs[0].captures == ()
    assert SAID not in page(reporter(job))


def test_the_path_is_text_and_no_link(hung: JudgedJob) -> None:
    text = page(reporter(hung, "/captures/<a href=x>`&"))
    assert "in /captures/&lt;a href=x&gt;`&amp;</span>" in text


def test_trainings_of_one_name_have_none(hung: JudgedJob) -> None:
    made = reporter(hung)
    made.complete = lambda node: replace(node, runs=[*node.runs, *node.runs])
    assert [run.captures for run in made.report().runs] == [(), ()]


def test_a_run_of_several_nodes_has_the_captures_of_all(hung: JudgedJob) -> None:
    (run,) = reporter(hung).report().runs

    def on(node: str, **changes: Any) -> RunReport:
        return replace(run, captures=[CaptureReport(node, PATH, 1e9)], **changes)

    def nodes(*runs: RunReport) -> list[str]:
        (found,) = merged([NodeState("", "", 0.0, runs=[one]) for one in runs], 1.0).runs
        return [one.node for one in found.captures]

    assert nodes(replace(run, captures=()), on("a", judged_by="x"), on("b", judged_by="x")) == ["a", "b"]
    assert nodes(on("a", is_judged=False), on("b", is_judged=False)) == ["a", "b"]


def test_without_an_exporter_they_are_read_from_its_journal(
    hung: JudgedJob, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_node, "STATE_DIR", state_dir)
    run = hung.report()
    began = min(rank.snapshot.unix(rank.snapshot["started_monotonic"]) for rank in hung.look.scan.ranks)
    entry = {"entry": journal.CAPTURED, "run": run.run, "owner": run.owner, "training": ""}
    written = journal.Journal(OwnerFiles(state_dir))
    for at, path in ((began - 9.0, tmp_path), (began + 9.0, tmp_path), (began + 10.0, tmp_path / "removed")):
        written.append(run.owner, {**entry, "at": at, "path": str(path)})
    node: Any = SimpleNamespace(ranks=SimpleNamespace(scan=lambda: hung.look.scan))
    assert top_node.captures_of(node) == {(run.run, run.owner): [CaptureReport("node-a", str(tmp_path), began + 9.0)]}
    monkeypatch.setattr(top_node, "STATE_DIR", tmp_path / "missing")
    assert top_node.captures_of(node) == {}
