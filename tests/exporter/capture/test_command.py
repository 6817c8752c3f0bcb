"""`rankscope capture`: what a user gets of a run on this machine, and why there may be nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest
from testing.programs import python as python_command
from testing.programs import running
from testing.records import living_rank
from tests.trainer_hooks.scripts import TRAIN, watched

from rankscope_exporter.capture.capturing import capture as write_capture
from rankscope_exporter.capture.request import Request

LOITER = """
def loiter():
    print("ready", flush=True)
    sys.stdin.readline()
loiter()
"""


def capture(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankscope.cli.launch", "capture", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("stacks", ["hook", "none"])
def test_a_run_is_captured_into_a_folder_with_all_sources(run_dir: Path, tmp_path: Path, stacks: str) -> None:
    with running(*python_command(TRAIN + LOITER), env=watched()):
        (record,) = run_dir.glob("*.rank")
        run = record.name.rpartition(".0.")[0]
        answer = capture(run, tmp_path, f"--run-dir={run_dir}", f"--stacks={stacks}")
    assert answer.returncode == 0, answer.stderr
    sentence, report = answer.stdout.splitlines()
    figures = json.loads((Path(report).parent / "capture.json").read_text())
    assert (figures["sentence"], figures["reason"], figures["ranks"]) == (sentence, "manual", 1)
    assert escape(sentence) in Path(report).read_text()
    outcome = figures["sources"]["stacks.txt"]["outcome"]
    assert outcome == "ok" if stacks == "hook" else "not permitted" in outcome
    assert {"ranks.txt", "processes.txt", "collectives.txt"} <= {one.name for one in Path(report).parent.iterdir()}


def test_without_a_living_rank_the_reason_is_printed(run_dir: Path, tmp_path: Path) -> None:
    answer = capture("r", tmp_path, f"--run-dir={run_dir}")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("rankscope capture: no living rank of run r in ")


def test_of_a_run_whose_processes_have_ended_no_missing_right_is_the_reason(tmp_path: Path) -> None:
    opened = os.open(tmp_path, os.O_RDONLY)
    figures = write_capture(Request("r", os.geteuid(), "r", "r", "crash", "node-a", []), opened, "none")
    os.close(opened)
    outcomes = {name: source["outcome"] for name, source in figures["sources"].items()}
    assert outcomes["ranks.txt"] == "empty"
    assert outcomes["torch_dumps.txt"].startswith("no process is left")


def test_a_missing_directory_is_one_line(run_dir: Path, tmp_path: Path) -> None:
    with running(*python_command(TRAIN + LOITER), env=watched()):
        (record,) = run_dir.glob("*.rank")
        answer = capture(record.name.rpartition(".0.")[0], tmp_path / "missing", f"--run-dir={run_dir}")
    assert answer.returncode == 2
    assert answer.stderr == f"rankscope capture: {tmp_path / 'missing'}: No such file or directory\n"


def test_a_run_over_gloo_is_not_asked_for_what_nccl_knows(run_dir: Path, tmp_path: Path) -> None:
    with living_rank(run_dir, run="r", backend="gloo", world_size="1"):
        answer = capture("r", tmp_path, f"--run-dir={run_dir}")
    (folder,) = tmp_path.iterdir()
    sources = json.loads((folder / "capture.json").read_text())["sources"]
    assert answer.returncode == 0
    assert sources["ras.txt"]["outcome"] == sources["torch_dumps.txt"]["outcome"] == "the run uses gloo, and not NCCL"
