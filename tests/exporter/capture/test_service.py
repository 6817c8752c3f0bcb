"""The exporter's captures: whose run is next, how much they cost, and what is shown of them."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from testing.judged_job import HUNG, JudgedJob

from rankscope.record.layout import INDEX
from rankscope_exporter.capture import service
from rankscope_exporter.capture.service import BURST_SECONDS, CPU_RATIO, CaptureService
from rankscope_exporter.capture.settings import CaptureFlags
from rankscope_exporter.report.runs import CaptureReport

UID = str(os.geteuid())


@dataclass
class Program:
    """The capturing process, and the two clocks of the service."""

    now: float = 100.0
    cpu: float = 0.0
    takes: float = 0.1
    """CPU seconds of a capture."""
    error: Any = None
    """What the process answers instead, or raises."""
    captured: list[dict[str, Any]] = field(default_factory=list)
    pruned: int = 0
    """How often it only removed and listed captures."""

    def output(self, _service: CaptureService, text: str) -> str:
        job = json.loads(text)
        self.cpu += self.takes
        if isinstance(self.error, Exception):
            raise self.error
        if self.error:
            return json.dumps(self.error)
        if not job["request"]:
            self.pruned += 1
            return json.dumps({"kept": []})
        request = json.loads(job["request"])
        self.captured.append(request)
        name = f"{request['run']}-{len(self.captured)}"
        kept = [[name, 2e9, request["label"], str(request["owner"]), 10, "It hangs."]]
        answer = {"name": name, "reason": "hang", "seconds": 1.0, "bytes": 10, "kept": kept, "dumps": [{"rank": 0}]}
        return json.dumps(answer)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    made = Program()
    monkeypatch.setattr(CaptureService, "_output", lambda *arguments: made.output(*arguments))
    return made


@pytest.fixture
def captures(program: Program, tmp_path: Path) -> CaptureService:
    flags = CaptureFlags(capture_dir=tmp_path)
    return CaptureService(flags, "node-a", lambda: program.now, lambda: program.cpu)


def hung(run_dir: Path, captures: CaptureService, **labels: str) -> JudgedJob:
    """Return a job that stands still and waits for its capture."""
    job = JudgedJob(run_dir, **labels).trained(30)
    job.diagnosis.listeners = [captures.on_look]
    job.poll(job.now)
    job.wait(35, HUNG)
    return job


def shown(captures: CaptureService) -> dict[str, dict[tuple[str, ...], float]]:
    return {one.name: {tuple(s.labels.values()): s.value for s in one.samples} for one in captures.collect()}


def test_a_run_that_hangs_is_captured_once_with_its_ranks_and_verdict(
    run_dir: Path, captures: CaptureService, program: Program
) -> None:
    hung(run_dir, captures)
    captures.capture_next()
    captures.capture_next()
    (request,) = program.captured
    assert [one["rank"] for one in request["ranks"]] == [0, 1, 2, 3]
    assert request["found"]["short"] == "Rank 2 (node-a) is stuck in data_wait"
    assert request["reason"] == "standstill"
    assert shown(captures)["rankscope_exporter_captures"][("standstill",)] == 1.0


def test_the_latest_capture_of_a_run_is_shown_with_its_path(
    run_dir: Path, captures: CaptureService, tmp_path: Path
) -> None:
    hung(run_dir, captures)
    assert shown(captures)["rankscope_run_capture_timestamp_seconds"] == {}
    captures.capture_next()
    labels = ("node-a", UID, str(tmp_path / "r-1"), "r")
    assert shown(captures)["rankscope_run_capture_timestamp_seconds"] == {labels: 2e9}
    assert captures.reports() == {("r", UID): [CaptureReport("node-a", str(tmp_path / "r-1"), 2e9)]}


def test_a_capture_of_an_earlier_run_of_that_name_is_not_shown(
    run_dir: Path, captures: CaptureService, program: Program
) -> None:
    job = JudgedJob(run_dir).trained(5)
    job.diagnosis.listeners = [captures.on_look]
    job.poll(job.now)
    program.error = {"kept": [["r-0", 1.0, "r", UID, 10, ""]]}
    for rank in job.job.ranks:
        rank.writer.slots[INDEX["started_unix"]] = 5.0
    job.poll(job.now)
    captures.capture_next()
    assert shown(captures)["rankscope_run_capture_timestamp_seconds"] == {}


def test_a_later_capture_gets_the_places_of_dumps_that_an_earlier_one_found(
    run_dir: Path, captures: CaptureService, program: Program
) -> None:
    job = hung(run_dir, captures)
    captures.capture_next()
    job.wait(400, HUNG)
    captures.capture_next()
    assert [request["reason"] for request in program.captured] == ["standstill", "hang"]
    assert program.captured[1]["dumps"] == [{"rank": 0}]


def test_a_run_that_makes_progress_before_its_turn_is_not_captured(
    run_dir: Path, captures: CaptureService, program: Program
) -> None:
    job = hung(run_dir, captures)
    for rank in job.job.ranks:
        rank.spend("forward", 36.0)
    job.train(3)
    captures.capture_next()
    assert program.captured == []


def test_captures_use_two_percent_of_a_core_on_average(
    run_dir: Path, captures: CaptureService, program: Program
) -> None:
    program.takes = BURST_SECONDS + 1.0
    job = hung(run_dir, captures)
    captures.capture_next()  # the list of captures uses all
    assert program.captured == []
    program.now += 0.9 / CPU_RATIO
    captures.capture_next()
    assert program.captured == []
    program.now += 0.2 / CPU_RATIO
    captures.capture_next()
    assert len(program.captured) == 1
    job.wait(400, HUNG)
    captures.capture_next()
    assert len(program.captured) == 1


def test_old_captures_are_removed_also_if_no_run_hangs(captures: CaptureService, program: Program) -> None:
    for _ in range(3):
        captures.capture_next()
    assert program.pruned == 1
    program.now += service.PRUNE_INTERVAL
    captures.capture_next()
    assert program.pruned == 2


def test_a_full_disk_is_logged_once_and_tried_again_at_the_next_standstill(
    run_dir: Path, captures: CaptureService, program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    job = hung(run_dir, captures)
    captures.capture_next()
    captures.capture_next()
    program.captured.clear()
    program.error = {"reason": "no_space", "error": "No space left on device"}
    with caplog.at_level(logging.WARNING):
        job.wait(400, HUNG)
        for _ in range(5):
            captures.capture_next()
        for rank in job.job.ranks:
            rank.spend("forward", 401.0)
        job.train(3)
        job.wait(900, HUNG)
        captures.capture_next()
    assert len([one for one in caplog.records if "No space left" in one.getMessage()]) == 1
    assert shown(captures)["rankscope_exporter_captures_failed"][("no_space",)] == 2.0


def test_a_standstill_whose_capture_failed_is_not_captured_at_its_finding(
    run_dir: Path, captures: CaptureService, program: Program
) -> None:
    captures.capture_next()
    job = hung(run_dir, captures)
    program.error = {"reason": "no_space", "error": "No space left on device"}
    captures.capture_next()
    program.error = None
    job.wait(400, HUNG)
    captures.capture_next()
    assert [one.kind for one in job.report().findings] == ["hang"]
    assert program.captured == []


def test_users_take_turns(run_dir: Path, captures: CaptureService, program: Program) -> None:
    hung(run_dir, captures)
    flood = {(f"flood{number}", "61002"): ("hang", 61002) for number in range(5)}
    captures._waiting = {**flood, **captures._waiting}
    for _ in range(2):
        program.now += 1.0
        captures.capture_next()
    assert [request["owner"] for request in program.captured] == [int(UID)]
    assert len(captures._waiting) == len(flood) - 1


def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> CaptureService:
    """Return a service whose process runs a shell script."""
    monkeypatch.setattr(service, "PROGRAM", ("sh", "-c", script))
    return CaptureService(CaptureFlags(capture_dir=tmp_path), "node-a")


def test_the_complaint_of_the_process_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures = failing(tmp_path, monkeypatch, "echo no space left >&2; exit 1")
    captures.capture_next()
    assert "no space left" in caplog.text
    assert shown(captures)["rankscope_exporter_captures_failed"][("error",)] == 1.0


def test_a_process_that_cannot_be_killed_is_not_waited_for_and_stays_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = failing(tmp_path, monkeypatch, f"echo $$ >> {tmp_path}/pids; exec sleep 1000")
    monkeypatch.setattr(service, "WITHIN", 0.5)
    with monkeypatch.context() as undying:
        undying.setattr(service.subprocess.Popen, "kill", lambda _: None)
        for _ in range(3):
            captures._prune_at = 0.0
            captures.capture_next()
    process = captures._process
    assert process
    assert process.poll() is None
    assert (tmp_path / "pids").read_text().split() == [str(process.pid)]
    assert captures._failed["timeout"] == 3
    process.kill()
    process.communicate()
