"""The lines of rank 0 on standard error; printing them never harms the job."""

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
from tests.trainer_hooks.scripts import WITHOUT_TORCH

from rankscope.announcements import Announcer, figures, first_line, print_line, summary
from rankscope.cli import launch
from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.writer import SHARED_MEMORY_RUN_DIR, RankWriter
from rankscope.timeline.steps import BACKWARD_PASS, OPTIMIZER_STEP
from rankscope.timeline.timeline import Timeline

TRAIN = """
import os, signal, sys
import rankscope, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(2, 2)
for (batch,) in DataLoader(TensorDataset(torch.ones(8, 2)), num_workers=WORKERS):
    model(batch).sum().backward()
    rankscope.step()
"""


def job(
    run_dir: Path, code: str = "", rank: str = TRAIN, variables: Mapping[str, str] = MappingProxyType({}), **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script that trains, with a number of loader workers if it is watched, and then executes `code`."""
    environment = {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN": "job", "RANKSCOPE_RUN_DIR": str(run_dir)}
    command = [sys.executable, "-c", rank.replace("WORKERS", str(how.pop("workers", 0))) + code]
    pipes = {"stderr": subprocess.PIPE, **how}
    return subprocess.run(command, env={**environment, **variables}, text=True, check=False, timeout=120, **pipes)


def hook_lines(process: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in process.stderr.splitlines() if line.startswith("rankscope: ")]


def test_one_line_at_the_start_and_one_at_the_end(run_dir: Path) -> None:
    first, last = hook_lines(job(run_dir))
    (path,) = run_dir.glob("*.rank")
    assert first == f"rankscope: {first_line('job', path)}"
    assert last.startswith("rankscope: 8 steps in ")
    assert " of startup (host clock): " in last


@pytest.mark.parametrize("program", ["true", "missing-program"])
def test_one_line_at_the_end_if_the_script_executes_another_program(run_dir: Path, program: str) -> None:
    code = f"try:\n    os.execvp('{program}', ['{program}'])\nexcept OSError:\n    rankscope.step()"
    number = 8 if program == "true" else 9
    assert [line.split(" in ")[0] for line in hook_lines(job(run_dir, code))[1:]] == [f"rankscope: {number} steps"]


@pytest.mark.parametrize("variables", [{"RANKSCOPE_QUIET": "1"}, {"RANKSCOPE_QUIET": "True"}, {"RANK": "3"}], ids=str)
def test_no_line_if_quiet_or_not_rank_0(run_dir: Path, variables: dict[str, str]) -> None:
    rank = TRAIN if "1" in variables.values() else WITHOUT_TORCH
    assert hook_lines(job(run_dir, rank=rank, variables=variables)) == []
    assert len(list(run_dir.glob("*.rank"))) == 1


def test_only_one_warning_if_the_record_cannot_be_made(run_dir: Path) -> None:
    (run_dir / "file").touch()
    (line,) = hook_lines(job(run_dir / "file"))
    assert line.startswith("rankscope: cannot record this rank; training continues: ")
    assert str(run_dir / "file") in line


def test_no_line_in_a_process_that_does_not_train(run_dir: Path) -> None:
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


def test_loader_workers_and_forked_children_do_not_repeat_the_lines(run_dir: Path) -> None:
    assert len(hook_lines(job(run_dir, FORKS, workers=2))) == 2


@pytest.mark.parametrize(("code", "ending"), [("raise KeyError('lost')", "KeyError: 'lost'"), ("sys.exit(3)", "")])
def test_a_failing_job_prints_the_line_before_its_traceback(run_dir: Path, code: str, ending: str) -> None:
    process = job(run_dir, code, TRAIN if ending else WITHOUT_TORCH)
    assert process.returncode != 0
    assert len(hook_lines(process)) == 2
    assert process.stderr.splitlines()[-1].startswith(ending or "rankscope: 8 steps")


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, TRAIN), (signal.SIGKILL, WITHOUT_TORCH)])
def test_a_killed_job_prints_no_line_at_its_end(run_dir: Path, number: int, rank: str) -> None:
    process = job(run_dir, f"os.kill(os.getpid(), {int(number)})", rank)
    assert process.returncode == -number
    assert len(hook_lines(process)) == 1


OWN = """
class Own:
    def flush(self):
        pass
    def fileno(self):
        os._exit(3)  # the hook has asked it
sys.stderr = Own()
"""


@pytest.mark.parametrize("code", ["sys.stderr.close()", "sys.stderr = None", "os.close(2)", OWN])
def test_a_job_without_standard_error_ends_normally(run_dir: Path, code: str) -> None:
    assert job(run_dir, code, TRAIN if code == "os.close(2)" else WITHOUT_TORCH).returncode == 0


@pytest.mark.parametrize("code", ["", "signal.signal(signal.SIGPIPE, signal.SIG_DFL)"])
def test_a_broken_pipe_does_not_harm_the_job(run_dir: Path, code: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert job(run_dir, code, WITHOUT_TORCH if code else TRAIN, stderr=writing).returncode == 0
    os.close(writing)


def test_a_full_pipe_does_not_block_the_job(run_dir: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"x" * fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ))
    assert job(run_dir, rank=WITHOUT_TORCH, stderr=writing).returncode == 0
    os.close(writing)
    os.close(reading)


def test_unprintable_characters_do_not_break_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "errors").open("w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        print_line("run a\nb\x1b[2J\udcff " + "x" * 10000)
    written = (tmp_path / "errors").read_bytes()
    assert written.startswith(b"rankscope: run a?b?[2J? xxx")
    assert written.count(b"\n") == 1
    assert written.endswith(b"x\n")


def test_the_command_names_the_run_directory_unless_it_is_the_default(tmp_path: Path) -> None:
    assert "rankscope top. " in first_line("r", SHARED_MEMORY_RUN_DIR / "r.0.1.rank")
    there = tmp_path / "my runs" / "r.0.1.rank"
    assert f"rankscope top --run-dir '{tmp_path / 'my runs'}'. " in first_line("r", there)
    assert first_line("my run", there).endswith("rankscope explain --run 'my run'")


def snapshot(
    host: dict[str, float], device: dict[str, float] | None = None, world_size: int = 1, steps: int = 100
) -> RankSnapshot:
    """Return a snapshot with these seconds of the host and of the device, by phase."""
    slots = [0.0] * layout.SLOTS
    slots[INDEX["steps"]] = float(steps)
    slots[INDEX["device_steps"]] = float(bool(device))
    for field, seconds in (("phase_seconds", host), ("device_seconds", device or {})):
        for phase, value in seconds.items():
            slots[INDEX[field] + layout.PHASES.index(phase)] = value
    info = {"world_size": str(world_size)}
    return RankSnapshot(Path(), True, tuple(slots), info, last_words_at=None, read_monotonic=sum(host.values()))


SLOW = {"startup": 8.0, "data_wait": 42.0, "forward": 30.0, "backward": 21.0, "collective_wait": 5.0, "other": 2.0}
COMPUTING = {"startup": 8.0, "forward": 470.0, "backward": 500.0, "optimizer": 20.0, "data_wait": 8.6, "other": 1.4}


def test_the_line_names_the_largest_phases_and_the_largest_besides_computing() -> None:
    assert summary(snapshot(SLOW), OPTIMIZER_STEP) == (
        "100 steps in 1.7 min after 8 s of startup (host clock): 42% data_wait, 30% forward, 21% backward. "
        "Largest phase besides computing: data_wait (waiting for the next batch)."
    )


def test_the_line_shows_the_share_of_computing_if_it_is_large() -> None:
    assert summary(snapshot(COMPUTING), OPTIMIZER_STEP) == (
        "100 steps in 17 min after 8 s of startup (host clock): "
        "50% backward, 47% forward, 2% optimizer. 99% is computing."
    )


def test_with_several_ranks_the_line_shows_the_wait_for_the_others() -> None:
    line = summary(snapshot(SLOW, world_size=4), OPTIMIZER_STEP)
    assert line.endswith(" 5% is waiting for other ranks; compare all ranks to find the straggler.")


def test_a_measured_device_gives_all_phases_but_the_planned_ones() -> None:
    host, device = {"startup": 8.0, "device_wait": 90.0, "checkpoint": 10.0}, {"forward": 3.0, "backward": 6.0}
    line = summary(snapshot(host, device), OPTIMIZER_STEP)
    assert "(device clock): 60% backward, 30% forward, 10% checkpoint." in line


def test_the_line_shows_that_steps_are_backward_passes() -> None:
    assert summary(snapshot(SLOW), BACKWARD_PASS).startswith("100 steps (backward passes) in 1.7 min")


def test_the_closing_line_omits_the_time_after_the_last_event(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    with (tmp_path / "errors").open("w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        Announcer(timeline, lambda: info).end()
    written = (tmp_path / "errors").read_text()
    assert "2 steps in 10 s after 0 s of startup (host clock): 100% forward." in written


def test_without_a_step_there_are_no_figures() -> None:
    found = snapshot({"startup": 34.2}, steps=0)
    assert summary(found, OPTIMIZER_STEP) == "no step in 34 s"
    assert figures(found, OPTIMIZER_STEP) == {}


def test_a_tracker_gets_the_line_and_its_ratios() -> None:
    found = snapshot(SLOW, world_size=4)
    assert figures(found, OPTIMIZER_STEP) == {
        "summary": summary(found, OPTIMIZER_STEP),
        "rank": "",  # not known to be a rank
        "clock": "host",
        "computing_ratio": 0.51,
        "data_wait_ratio": 0.42,
        "collective_wait_ratio": 0.05,
    }


@pytest.mark.parametrize("run", ["mine", "my run", "-c-20261125T190000-1f2e", "--help", "-", "a=b", "it's"])
def test_the_parser_accepts_the_printed_command(tmp_path: Path, run: str) -> None:
    program, *command = shlex.split(first_line(run, tmp_path / "r.0.1.rank").partition("With Prometheus: ")[2])
    assert program == "rankscope"
    assert launch.make_parser().parse_args(command).run == run
