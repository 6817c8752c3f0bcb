"""Records of elastic restarts, and of several runs on one node."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from testing.torchrun import environment, torchrun

from rankscope.record.reader import read_rank
from rankscope.record.snapshot import RankSnapshot

JOBS = Path(__file__).parents[1] / "jobs"


def start(run: str | None, *options: str) -> subprocess.Popen[str]:
    """Start a job of two ranks that fails once and is restarted by torchrun."""
    variables = {"RANKSCOPE": "1", **({"RANKSCOPE_RUN": run} if run else {})}
    command = torchrun(2, JOBS / "restarted.py", options=("--max-restarts=1", *options))
    return subprocess.Popen(command, env=environment(**variables), text=True, stderr=subprocess.PIPE)


def records(run_dir: Path) -> list[RankSnapshot]:
    return sorted(map(read_rank, run_dir.glob("*.rank")), key=lambda rank: (rank.info["run"], rank.info["rank"]))


@pytest.mark.parametrize("run", ["job", None])  # None: torchrun's own id, the same in both attempts
def test_a_restarted_run_has_only_the_records_of_its_last_attempt(run_dir: Path, run: str | None) -> None:
    with start(run, "--standalone") as job:
        _, errors = job.communicate()
    assert job.returncode == 0, errors
    found = records(run_dir)
    assert [(rank.info["rank"], rank["steps"], rank.exit_reason) for rank in found] == [
        ("0", 4, "finished"),
        ("1", 4, "finished"),
    ]
    assert len({rank.info["run"] for rank in found}) == 1


def test_two_concurrent_runs_on_a_node_have_separate_records(run_dir: Path) -> None:
    jobs = [start(run, "--standalone") for run in ("one", "two")]
    for job in jobs:
        job.communicate()
    expected = [(run, rank, 4, "finished") for run in ("one", "two") for rank in ("0", "1")]
    found = [(rank.info["run"], rank.info["rank"], rank["steps"], rank.exit_reason) for rank in records(run_dir)]
    assert found == expected
