"""What rank 0 says on standard error, and that saying it never costs the job anything."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from testing.clock import Clock

from rankscope.announcements import Announcer, beginning, duration, figures, percent, say, summary
from rankscope.cli import launch
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.writer import SHARED_MEMORY_RUN_DIR, RankWriter
from rankscope.timeline.steps import BACKWARD_PASS, OPTIMIZER_STEP
from rankscope.timeline.timeline import Timeline

TRAIN = """
import contextlib, os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (batch,) in DataLoader(TensorDataset(torch.ones(8, 2)), num_workers=WORKERS):
    model(batch).sum().backward()
    optimizer.step()
"""


def job(
    run_dir: Path, code: str = "", variables: Mapping[str, str] = MappingProxyType({}), **how: Any
) -> subprocess.CompletedProcess[str]:
    """A script that trains with so many loader workers and then does what `code` says, watched."""
    environment = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN": "job", "RANKSCOPE_RUN_DIR": str(run_dir)}
    command = [sys.executable, "-c", TRAIN.replace("WORKERS", str(how.pop("workers", 0))) + code]
    pipes = {"stderr": subprocess.PIPE, **how}
    return subprocess.run(command, env={**environment, **variables}, text=True, check=False, timeout=120, **pipes)


def said(process: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in process.stderr.splitlines() if line.startswith("rankscope: ")]


def test_one_line_at_the_beginning_and_one_at_the_end(run_dir: Path) -> None:
    first, last = said(job(run_dir))
    (path,) = run_dir.glob("*.rank")
    assert first == f"rankscope: {beginning('job', path)}"
    assert last.startswith("rankscope: 8 steps in ")
    assert " of start-up, by the clock of the host: " in last


@pytest.mark.parametrize("variables", [{"RANKSCOPE_QUIET": "1"}, {"RANKSCOPE_QUIET": "True"}, {"RANK": "3"}], ids=str)
def test_none_if_it_is_to_be_quiet_or_of_another_rank(run_dir: Path, variables: dict[str, str]) -> None:
    assert said(job(run_dir, variables=variables)) == []
    assert len(list(run_dir.glob("*.rank"))) == 1


def test_of_a_record_that_cannot_be_made_only_that_and_why(run_dir: Path) -> None:
    (run_dir / "file").touch()
    (line,) = said(job(run_dir / "file"))
    assert line.startswith("rankscope: no record of this rank, training goes on: ")
    assert str(run_dir / "file") in line


def test_of_a_process_that_does_not_train_nothing(run_dir: Path) -> None:
    variables = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN_DIR": str(run_dir)}
    command = [sys.executable, "-c", "import torch"]
    assert subprocess.run(command, env=variables, capture_output=True, check=True).stderr == b""


FORKS = """
for _ in range(2):
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
"""


def test_not_again_in_loader_workers_and_forked_children(run_dir: Path) -> None:
    assert len(said(job(run_dir, FORKS, workers=2))) == 2


@pytest.mark.parametrize(("code", "ending"), [("raise KeyError('lost')", "KeyError: 'lost'"), ("sys.exit(3)", "")])
def test_a_job_that_fails_says_it_before_its_traceback(run_dir: Path, code: str, ending: str) -> None:
    process = job(run_dir, code)
    assert process.returncode != 0
    assert len(said(process)) == 2
    assert process.stderr.splitlines()[-1].startswith(ending or "rankscope: 8 steps")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_killed_says_nothing_at_its_end(run_dir: Path, number: int) -> None:
    process = job(run_dir, f"os.kill(os.getpid(), {int(number)})")
    assert process.returncode == -number
    assert len(said(process)) == 1


OWN = """
class Own:
    def flush(self):
        pass
    def fileno(self):
        raise RuntimeError("the job's own")
sys.stderr = Own()
"""


@pytest.mark.parametrize("code", ["sys.stderr.close()", "sys.stderr = None", "os.close(2)", OWN])
def test_without_a_standard_error_a_job_ends_as_it_would(run_dir: Path, code: str) -> None:
    assert job(run_dir, code).returncode == 0


@pytest.mark.parametrize("code", ["", "signal.signal(signal.SIGPIPE, signal.SIG_DFL)"])
def test_one_that_is_broken_neither_fails_nor_kills_the_job(run_dir: Path, code: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert job(run_dir, code, stderr=writing).returncode == 0
    os.close(writing)


def test_one_that_nobody_reads_holds_nobody_up(run_dir: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x" * fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ))
    assert job(run_dir, stderr=writing).returncode == 0
    os.close(writing)
    os.close(reading)


def test_whatever_a_name_holds_a_line_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "errors").open("w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        say("run a\nb\x1b[2J\udcff " + "x" * 10000)
    written = (tmp_path / "errors").read_bytes()
    assert written.startswith(b"rankscope: run a?b?[2J? xxx")
    assert written.count(b"\n") == 1
    assert written.endswith(b"x\n")


def test_the_exporter_is_told_where_the_record_is_unless_it_looks_there_anyway(tmp_path: Path) -> None:
    assert "rankscope-exporter. " in beginning("r", SHARED_MEMORY_RUN_DIR / "r.0.1.rank")
    there = tmp_path / "my runs" / "r.0.1.rank"
    assert f"rankscope-exporter --run-dir '{tmp_path / 'my runs'}'. " in beginning("r", there)
    assert beginning("my run", there).endswith("rankscope explain --run 'my run'")


def snapshot(
    host: dict[str, float], device: dict[str, float] | None = None, world_size: int = 1, steps: int = 100
) -> RankSnapshot:
    """Of a record with so many seconds of the host and of the device, by phase."""
    slots = [0.0] * layout.SLOTS
    slots[INDEX["steps"]] = float(steps)
    slots[INDEX["device_steps"]] = float(bool(device))
    for field, seconds in (("phase_seconds", host), ("device_seconds", device or {})):
        for phase, value in seconds.items():
            slots[INDEX[field] + layout.PHASES.index(phase)] = value
    info = {"world_size": str(world_size)}
    return RankSnapshot(Path(), True, tuple(slots), info, last_words_at=None, read_monotonic=sum(host.values()))


HELD_UP = {"startup": 8.0, "data_wait": 42.0, "forward": 30.0, "backward": 21.0, "collective_wait": 5.0, "other": 2.0}
COMPUTING = {"startup": 8.0, "forward": 470.0, "backward": 500.0, "optimizer": 20.0, "data_wait": 8.6, "other": 1.4}


def test_it_names_the_largest_phases_and_what_kept_the_rank_from_computing() -> None:
    assert summary(snapshot(HELD_UP), OPTIMIZER_STEP) == (
        "100 steps in 100 s after 8.0 s of start-up, by the clock of the host: "
        "42 % data_wait, 30 % forward, 21 % backward. Most beside computing: data_wait, the next batch is waited for."
    )


def test_of_a_rank_that_computes_most_of_the_time_it_says_so() -> None:
    assert summary(snapshot(COMPUTING), OPTIMIZER_STEP) == (
        "100 steps in 17 min after 8.0 s of start-up, by the clock of the host: "
        "50 % backward, 47 % forward, 2.0 % optimizer. 99 % is computing."
    )


def test_among_others_it_says_how_long_it_waited_for_them_and_does_not_judge() -> None:
    line = summary(snapshot(HELD_UP, world_size=4), OPTIMIZER_STEP)
    assert line.endswith("It waited for others 5.0 % of the time; which rank is late, only all of them together tell.")


def test_where_the_device_was_measured_its_clock_tells_but_for_planned_phases() -> None:
    host, device = {"startup": 8.0, "device_wait": 90.0, "checkpoint": 10.0}, {"forward": 3.0, "backward": 6.0}
    line = summary(snapshot(host, device), OPTIMIZER_STEP)
    assert "by the clock of the device: 60 % backward, 30 % forward, 10 % checkpoint." in line


def test_steps_that_are_backward_passes_are_called_so() -> None:
    assert summary(snapshot(HELD_UP), BACKWARD_PASS).startswith("100 steps (backward passes) in 100 s")


def test_the_time_after_the_last_event_is_in_no_phase_of_the_closing_line(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(time.monotonic() - 1000)
    writer = RankWriter()
    info = {"run": "job", "rank": "0", "world_size": "1"}
    writer.publish(run_dir, "job.0", info)
    timeline = Timeline(writer, clock)
    timeline.step()
    opened = timeline.enter(layout.FORWARD)
    clock.now += 10
    timeline.leave(opened)
    timeline.step()
    Announcer(timeline, lambda: info).end()
    assert "2 steps in 10 s after 0.0 s of start-up, by the clock of the host: 100 % forward." in capfd.readouterr().err


def test_without_a_step_there_is_nothing_to_share() -> None:
    found = snapshot({"startup": 34.2}, steps=0)
    assert summary(found, OPTIMIZER_STEP) == "no step in 34 s"
    assert figures(found, OPTIMIZER_STEP) == {}


def test_a_tracker_gets_the_line_and_the_ratios_that_it_is_made_of() -> None:
    found = snapshot(HELD_UP, world_size=4)
    assert figures(found, OPTIMIZER_STEP) == {
        "summary": summary(found, OPTIMIZER_STEP),
        "rank": "",  # of a process that is not known to be one
        "clock": "host",
        "computing_ratio": 0.51,
        "data_wait_ratio": 0.42,
        "collective_wait_ratio": 0.05,
    }


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.0, "100 %"), (0.424, "42 %"), (0.0996, "10 %"), (0.0424, "4.2 %"), (0.0042, "0.4 %"), (0.0, "under 0.1 %")],
)
def test_a_share_has_two_digits(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "0.0 s"), (8.24, "8.2 s"), (34.2, "34 s"), (720.0, "12 min"), (19440.0, "5.4 h")]
)
def test_a_time_has_as_many_digits_as_a_person_wants(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("run", ["mine", "my run", "-c-20261125T190000-1f2e", "--help", "-", "a=b", "it's"])
def test_the_command_that_is_printed_is_one_that_the_parser_takes(tmp_path: Path, run: str) -> None:
    program, *command = shlex.split(beginning(run, tmp_path / "r.0.1.rank").partition("With Prometheus: ")[2])
    assert program == "rankscope"
    assert launch.make_parser().parse_args(command).run == run
