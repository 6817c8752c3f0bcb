"""Processes that become ranks: forked workers that train, and ranks in a new process group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from testing.records import record_in
from tests.trainer_hooks.scripts import watched

from rankscope.record.reader import read_rank
from rankscope.record.snapshot import RankSnapshot

JOB = Path(__file__).parents[1] / "jobs" / "other_ranks.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the parent directory of the scenarios' run directories."""
    path = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-W", "ignore", JOB, path]
    done = subprocess.run(command, env=watched(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


def newest_by_rank(run_dir: Path) -> dict[str, RankSnapshot]:
    records = sorted(map(read_rank, run_dir.glob("*.rank")), key=lambda record: record["started_unix"])
    return {str(record.info["rank"]): record for record in records}


def test_ranks_forked_after_their_parent_has_trained_have_records(runs: Path) -> None:
    found = [read_rank(path) for path in (runs / "forked_ranks").glob("*.rank")]
    found_as = sorted((rank.info["rank"], rank.info["world_size"], rank.info["group"], rank["steps"]) for rank in found)
    assert found_as == [("0", "1", "0", 2), ("0", "2", "0-1", 3), ("1", "2", "0-1", 3)]


def test_ranks_that_swap_numbers_in_a_new_group_start_new_records(runs: Path) -> None:
    found = newest_by_rank(runs / "swapped_ranks")
    assert {rank: record["steps"] for rank, record in found.items()} == {"0": 4, "1": 4}
    # The process that was started first was rank 0 in the first group.
    assert int(found["1"].info["pid"]) < int(found["0"].info["pid"])


def test_a_process_that_stays_the_same_rank_keeps_its_record(runs: Path) -> None:
    record = record_in(runs / "same_rank")
    assert record["steps"] == 2 + 3 + 4
    assert record.info["backend"] == "gloo"


def test_processes_that_train_at_once_without_a_group_are_separate_ranks(runs: Path) -> None:
    found = newest_by_rank(runs / "hogwild")
    identities = sorted((rank.info["rank"], rank.info["group"], rank.info["world_size"]) for rank in found.values())
    assert identities == [("0", "0", "1"), ("1", "1", "1")]
    assert [rank["steps"] for rank in found.values()] == [2, 2]


def test_a_program_started_by_a_rank_is_a_rank_only_if_it_trains(runs: Path) -> None:
    found = newest_by_rank(runs / "programs_of_a_rank")
    assert {rank: record["steps"] for rank, record in found.items()} == {"0": 2, "1": 1}


@pytest.mark.parametrize("scenario", ["helper_of_a_rank", "evaluator_of_a_rank"])
def test_a_forked_helper_of_a_rank_has_no_record(runs: Path, scenario: str) -> None:
    assert record_in(runs / scenario)["steps"] == 2
