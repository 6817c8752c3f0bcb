"""The ranks of a machine: the newest record of each, dead ones for ten minutes, and bad files counted by reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope import record
from rankscope.rank_writer import RankWriter
from rankscope.record import PLACES
from rankscope_exporter.run_directory import LABELS, RunDirectory

NOW = 1_700_000_000.0

LIVING_RANK = """
import json, sys
from pathlib import Path
from rankscope.rank_writer import RankWriter
writer = RankWriter()
writer.publish(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
print("published", flush=True)
sys.stdin.read()
"""


def info(**labels: str) -> dict[str, Any]:
    return {**dict.fromkeys(LABELS, ""), "run": "r", "rank": "0", "pid": "1", "phases": [], **labels}


def leave_record(directory: Path, name: str, ended_unix: float = 0.0, **labels: str) -> Path:
    """A record whose writer is gone, as far as a reader in this process can tell."""
    writer = RankWriter()
    writer.publish(directory, name, info(**labels))
    writer.slots[PLACES["started_unix"]] = NOW - 100
    if ended_unix:
        writer.slots[PLACES["ended"]] = record.FINISHED
        writer.slots[PLACES["ended_unix"]] = ended_unix
    assert writer.path is not None
    return writer.path


@pytest.fixture
def living_rank(run_dir: Path) -> Iterator[Callable[..., None]]:
    processes = []

    def start(name: str, **labels: str) -> None:
        import json

        command = [sys.executable, "-c", LIVING_RANK, str(run_dir), name, json.dumps(info(**labels))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"published\n"

    yield start
    for process in processes:
        process.kill()
        process.communicate()


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def test_a_missing_directory_is_an_empty_one(run_dir: Path) -> None:
    assert RunDirectory([run_dir / "missing"]).scan().ranks == ()


def test_a_living_rank_has_no_end(run_dir: Path, living_rank: Callable[..., None]) -> None:
    living_rank("r.0")
    (rank,) = RunDirectory([run_dir]).scan().ranks
    assert rank.snapshot.alive
    assert rank.exit_unix is None


def test_a_record_is_shown_for_ten_minutes_after_its_end(run_dir: Path) -> None:
    leave_record(run_dir, "r.0", ended_unix=NOW)
    clock = Clock()
    directory = RunDirectory([run_dir], clock)
    clock.now = NOW + 599
    assert len(directory.scan().ranks) == 1
    clock.now = NOW + 601
    assert directory.scan().ranks == ()


def test_a_killed_rank_ended_when_that_was_noticed(run_dir: Path) -> None:
    leave_record(run_dir, "r.0")
    clock = Clock()
    directory = RunDirectory([run_dir], clock)
    (noticed,) = directory.scan().ranks
    clock.now += 60
    (later,) = directory.scan().ranks
    assert noticed.exit_unix == later.exit_unix == NOW


def test_of_two_records_of_a_rank_the_living_one_counts(run_dir: Path, living_rank: Callable[..., None]) -> None:
    leave_record(run_dir, "r.0.9", ended_unix=NOW, pid="9")
    living_rank("r.0.5", pid="5")
    (rank,) = RunDirectory([run_dir], Clock()).scan().ranks
    assert rank.snapshot.info["pid"] == "5"


def test_ranks_of_several_directories_are_found(run_dir: Path) -> None:
    for name in ("a", "b"):
        (run_dir / name).mkdir()
        leave_record(run_dir / name, "r", ended_unix=NOW, run=name)
    ranks = RunDirectory([run_dir / "a", run_dir / "b"], Clock()).scan().ranks
    assert sorted(rank.key for rank in ranks) == [("a", "0"), ("b", "0")]


def test_bad_files_are_counted_by_reason_and_cost_the_others_nothing(run_dir: Path) -> None:
    good = leave_record(run_dir, "good", ended_unix=NOW)
    (run_dir / "short.rank").write_bytes(good.read_bytes()[:100])
    (run_dir / "notes.rank").write_text("not a record, " * 2000)
    (run_dir / "link.rank").symlink_to(good)
    (run_dir / "other-file.txt").write_text("none of ours")
    scan = RunDirectory([run_dir], Clock()).scan()
    assert [rank.snapshot.path for rank in scan.ranks] == [good]
    assert scan.skipped == {"truncated": 1, "foreign": 1, "symlink": 1}


@pytest.mark.parametrize(
    "labels", [{"run": "a\nb"}, {"run": "x" * 201}, {"rank": "zero"}, {"node": "\x00"}, {"group": 3}]
)
def test_labels_that_no_hook_writes_are_refused(run_dir: Path, labels: dict[str, Any]) -> None:
    leave_record(run_dir, "odd", ended_unix=NOW, **labels)
    scan = RunDirectory([run_dir], Clock()).scan()
    assert scan.ranks == ()
    assert scan.skipped == {"foreign": 1}


def test_a_bad_file_is_logged_once(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run_dir / "short.rank").write_bytes(b"")
    directory = RunDirectory([run_dir])
    for _ in range(3):
        directory.scan()
    assert len(caplog.records) == 1


def test_a_file_that_may_not_be_read_is_skipped(run_dir: Path) -> None:
    path = leave_record(run_dir, "r", ended_unix=NOW)
    path.chmod(0)
    if os.geteuid() == 0:  # root reads everything: give it something that even root cannot open
        path.unlink()
        path.mkdir()
        assert RunDirectory([run_dir]).scan().skipped == {"foreign": 1}
    else:
        assert RunDirectory([run_dir]).scan().skipped == {"unreadable": 1}
