"""Records of elastic restarts, and of several runs on one node."""

from __future__ import annotations

import subprocess
from pathlib import Path

from testing.torchrun import environment, torchrun

from rankscope.record.reader import read_rank

JOBS = Path(__file__).parents[1] / "jobs"


def start(run: str) -> subprocess.Popen[str]:
    """Start a job of two ranks that fails once and is restarted by torchrun."""
    variables = {"RANKSCOPE": "1", **({"RANKSCOPE_RUN": run} if run else {})}
    command = torchrun(2, JOBS / "restarted.py", options=("--max-restarts=1", "--standalone"))
    return subprocess.Popen(command, env=environment(**variables), text=True, stderr=subprocess.PIPE)


def test_two_restarted_runs_on_a_node_have_only_the_records_of_their_own_last_attempts(run_dir: Path) -> None:
    jobs = [start("one"), start("")]  # the second has torchrun's own id, the same in both attempts
    for job in jobs:
        _, errors = job.communicate()
        assert job.returncode == 0, errors
    records = [*map(read_rank, run_dir.glob("*.rank"))]
    found = sorted((rank.info["run"], rank.info["rank"], rank["steps"], rank.exit_reason) for rank in records)
    (other,) = {run for run, *_ in found} - {"one"}
    assert found == sorted((run, rank, 4, "finished") for run in ("one", other) for rank in ("0", "1"))
    meetings = {(rank.info["run"], rank.info["rendezvous"]) for rank in records}
    assert len(meetings) == len({rendezvous for _, rendezvous in meetings} - {""}) == 2
