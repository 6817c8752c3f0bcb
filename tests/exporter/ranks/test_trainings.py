"""Trainings that share a run's name: each launcher's ranks are a run of their own, and no rank hides another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testing.programs import Program, python, running
from testing.records import IMPORTS, LIVE, living_rank

from rankscope_exporter.ranks.run_directory import RunDirectory

LAUNCH = f"""
import subprocess
ranks = []
for rank in json.loads(sys.argv[5]):
    own = json.dumps({{"rank": rank, "world_size": "4", "group": "0-3", **info}})
    command = [sys.executable, "-c", {IMPORTS + LIVE!r}, str(directory), f"{{name}}.{{rank}}", own, "{{}}"]
    ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    ranks[-1].stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""
TWO = ["0", "1"]
FIRST, SECOND = {("r", "0"), ("r", "1")}, {("r (2)", "0"), ("r (2)", "1")}


@contextmanager
def launcher(run_dir: Path, job: str, ranks: list[str], **labels: str) -> Iterator[Program]:
    """Start a process that starts these ranks of run `r`. Their records name the job as node."""
    arguments = run_dir, job, json.dumps({"node": job, **labels}), "{}", json.dumps(ranks)
    with running(*python(IMPORTS + LAUNCH, *arguments)) as program:
        yield program


def shown(directory: RunDirectory, node: str) -> set[tuple[str, str]]:
    """Return runs and ranks of the living ranks of a job."""
    ranks = directory.scan().ranks
    return {one.key[:2] for one in ranks if one.snapshot.alive and one.snapshot.info["node"] == node}


def test_two_trainings_with_one_name_are_both_shown(run_dir: Path) -> None:
    with launcher(run_dir, "a", TWO), launcher(run_dir, "b", TWO):
        directory = RunDirectory([run_dir])
        scan = directory.scan()
        assert {one.key[:2] for one in scan.ranks} == FIRST | SECOND
        assert not scan.skipped
        assert shown(directory, "a") == FIRST


def test_a_training_keeps_its_name_until_its_end(run_dir: Path) -> None:
    directory = RunDirectory([run_dir])
    with launcher(run_dir, "b", TWO) as before:
        with launcher(run_dir, "a", TWO):
            assert shown(directory, "b") == FIRST
            assert shown(directory, "a") == SECOND
            before.end()
            assert shown(directory, "a") == SECOND
        with launcher(run_dir, "c", TWO):
            assert shown(directory, "c") == FIRST


def test_two_launchers_of_one_training_are_one_run(run_dir: Path) -> None:
    with launcher(run_dir, "a", TWO), launcher(run_dir, "a2", ["2", "3"]), launcher(run_dir, "b", TWO):
        directory = RunDirectory([run_dir])
        assert shown(directory, "a") == FIRST
        assert shown(directory, "a2") == {("r", "2"), ("r", "3")}
        assert shown(directory, "b") == SECOND


def test_ranks_of_launchers_with_one_rank_each_compete(run_dir: Path) -> None:
    """Pods have one rank each. It is not known which of them train together."""
    with launcher(run_dir, "a", ["0"]), launcher(run_dir, "b", ["0"]):
        scan = RunDirectory([run_dir]).scan()
        assert [one.key[:2] for one in scan.ranks] == [("r", "0")]
        assert scan.skipped == {"duplicate": 1}


def test_a_rank_that_its_launcher_starts_again_is_no_training(run_dir: Path) -> None:
    with living_rank(run_dir, "r.0", node="a"), living_rank(run_dir, "r.1", rank="1", node="a"):
        directory = RunDirectory([run_dir])
        with living_rank(run_dir, "r.0.2", node="b"):
            assert shown(directory, "a") | shown(directory, "b") == FIRST
