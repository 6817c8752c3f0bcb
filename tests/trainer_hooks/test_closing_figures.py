"""A rank's summary in its tracker's run: its content and time; a tracker cannot block the job."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testing.own_record import fail

from rankscope import closing_figures
from rankscope.closing_figures import ClosingFigures
from rankscope.guard import Guard
from rankscope.trackers import Figures, TrackerRun

FIGURES: Figures = {"summary": "100 steps", "data_wait_ratio": 0.4}


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_TRACKER_SUMMARY", "1")


@pytest.fixture
def closing() -> Iterator[ClosingFigures]:
    made = ClosingFigures(Guard("trackers", fail), lambda: FIGURES)
    yield made
    made.forget()


def run_of(written: list[Any], source: Any = None) -> TrackerRun:
    return TrackerRun("1", str, written.append, source)


class Run:
    """The part of a W&B run that ends it."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def finish(self) -> None:
        self._finish()

    def _finish(self) -> None:
        self.events.append("finished")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()


def test_nothing_is_written_or_patched_unless_it_is_enabled(closing: ClosingFigures) -> None:
    run, before, threads = Run(), vars(Run)["_finish"], threading.active_count()
    closing.watch("wandb", run_of(run.events, run))
    closing.write()
    run.finish()
    assert run.events == ["finished"]
    assert vars(Run)["_finish"] is before
    assert threading.active_count() == threads


@pytest.mark.usefixtures("enabled")
def test_each_run_gets_the_figures_once(closing: ClosingFigures) -> None:
    first: list[Any] = []
    second: list[Any] = []
    closing.watch("wandb", run_of(first))
    closing.watch("mlflow", run_of(second))
    closing.write()
    closing.write()
    assert (first, second) == ([FIGURES], [FIGURES])


@pytest.mark.usefixtures("enabled")
def test_a_run_that_a_with_block_ends_gets_the_figures_first(closing: ClosingFigures) -> None:
    with Run() as run:
        closing.watch("wandb", run_of(run.events, run))
    assert run.events == [FIGURES, "finished"]


@pytest.mark.usefixtures("enabled")
def test_another_run_of_the_same_class_gets_no_figures(closing: ClosingFigures) -> None:
    run, other = Run(), Run()
    closing.watch("wandb", run_of(run.events, run))
    other.finish()
    assert (run.events, other.events) == ([], ["finished"])


@pytest.mark.usefixtures("enabled")
def test_without_a_step_nothing_is_written() -> None:
    closing = ClosingFigures(Guard("trackers", fail), dict)
    written: list[Any] = []
    closing.watch("wandb", run_of(written))
    closing.write()
    closing.forget()
    assert written == []


@pytest.mark.usefixtures("enabled")
def test_a_tracker_that_raises_does_not_affect_another(closing: ClosingFigures) -> None:
    def refuse(_: Figures) -> None:
        raise ConnectionError

    written: list[Any] = []
    closing.watch("wandb", TrackerRun("1", str, refuse))
    closing.watch("mlflow", run_of(written))
    closing.write()
    assert written == [FIGURES]


@pytest.mark.usefixtures("enabled")
def test_a_tracker_that_never_answers_does_not_block_the_job(
    closing: ClosingFigures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(closing_figures, "LONGEST_WAIT", 0.01)
    answer, written = threading.Event(), threading.Event()

    def wait(_: Figures) -> None:
        answer.wait()
        written.set()

    closing.watch("mlflow", TrackerRun("1", str, wait))
    closing.write()
    assert not written.is_set()
    assert "trackers took more than" in caplog.text
    answer.set()
    assert written.wait(10)


@pytest.mark.usefixtures("enabled")
def test_everything_is_restored(closing: ClosingFigures) -> None:
    run, before = Run(), vars(Run)["_finish"]
    closing.watch("wandb", run_of(run.events, run))
    assert vars(Run)["_finish"] is not before
    closing.forget()
    assert vars(Run)["_finish"] is before
    for thread in threading.enumerate():
        if thread.name == "rankscope-trackers":
            thread.join(10)
            assert not thread.is_alive()


WANDB = '''
"""A module that ends its run in an exit function, like W&B, and accepts nothing afterwards."""
import atexit, os

class Summary:
    def update(self, values):
        assert run is not None, "the run has ended"
        print("summary", sorted(values), values["rankscope/summary"], flush=True)

class Run:
    id, disabled, offline, url, summary = "x1", False, True, None, Summary()
    def finish(self):
        self._finish()
    def _finish(self):
        global run
        run = None

run = None

def init():
    global run
    run = Run()
    atexit.register(run.finish)
'''
TRAIN = """
import os, sys, rankscope, torch, wandb
wandb.init()
model = torch.nn.Linear(2, 2)
for _ in range(4):
    model(torch.ones(1, 2)).sum().backward()
    rankscope.step()
"""
ENDINGS = ["", "wandb.run.finish()", "raise KeyError", "sys.exit(3)", "os._exit(0)"]
NAMES = ["clock", "collective_wait_ratio", "computing_ratio", "data_wait_ratio", "rank", "summary"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_figures_are_written_before_the_end_of_the_run_for_every_end_of_the_job(
    tmp_path: Path, run_dir: Path, ending: str
) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    switches = {"RANKSCOPE": "1", "RANKSCOPE_RUN_DIR": str(run_dir), "RANKSCOPE_TRACKER_SUMMARY": "1"}
    environment = {**os.environ, **switches, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", TRAIN + ending]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    (line,) = job.stdout.splitlines()
    assert line.startswith(f"summary {[f'rankscope/{name}' for name in NAMES]} 4 steps in ")
