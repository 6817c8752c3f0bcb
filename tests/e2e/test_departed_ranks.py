"""Real ranks over gloo, one of which ends in mid-training: the finding names it, and not those that lose it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from testing.exporter_process import eventually, exporter
from testing.programs import running

FINISHED = "finished before the other ranks, and then a rank that needed it failed"
EXCEPTION, TERMINATED = "ended with an exception", "was ended by SIGTERM, and then a rank that needed it failed"
WITHIN = 240.0
SAYS = {
    "os_exit": FINISHED,
    "os_exit_3": EXCEPTION,
    "sys_exit": FINISHED,
    "sigkill": "was killed",
    "sigterm": TERMINATED,
    "returns": FINISHED,
    "lingers": FINISHED,
    "error": EXCEPTION,
    "error_at_the_end": EXCEPTION,
}
HEALTHY = ("ends", "join")
BY_THE_LAUNCHER = {"sigterm"}
"""Ways in which the launcher may end all ranks before one fails: then it is a planned stop."""


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_rank_that_ended_first_is_named_and_no_healthy_end_is(ranks: int, tmp_path: Path, free_port: int) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    ways = [*SAYS, *HEALTHY]
    last = {way: 0 if way == "error_at_the_end" else ranks - 1 for way in ways}
    expected = {way: f"Rank {last[way]} of run {way} {says}" for way, says in SAYS.items()}
    may_lack = BY_THE_LAUNCHER if ranks > 2 else set()
    found: dict[str, str] = {}

    def are_all_found(url: str) -> bool:
        try:
            with urlopen(f"{url}/api/v1/runs", timeout=20) as answer:
                runs = json.load(answer)["runs"]
        except OSError:  # a busy machine: the ranks were read too long ago
            return False
        for run in runs:
            sentences = (one["sentence"] for one in run["findings"] if one["kind"] == "crash")
            found.update((run["run"], re.sub(r" \(.*?\)", "", one)) for one in sentences)
        have_all_ended = {run["run"] for run in runs if not run["living"]} == {*ways}
        return have_all_ended and found.keys() >= expected.keys() - may_lack

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        exporter(free_port, f"--run-dir={run_dir}") as url,
        running(sys.executable, "-m", "testing.departing_jobs", run_dir, ranks, *ways, env=environment),
    ):
        eventually(lambda: are_all_found(url), WITHIN)
    assert found == {way: expected[way] for way in found}
