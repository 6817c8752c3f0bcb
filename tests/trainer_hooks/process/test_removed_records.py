"""A rank whose record is removed while it trains is recorded again with its counts, or the job's log says why not."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from testing.records import publish, record_in
from tests.trainer_hooks.scripts import job

from rankscope.record.reader import read_rank
from rankscope_exporter.ranks.run_directory import RunDirectory

STEP_BY_STEP = """
for line in sys.stdin:
    exec(line)
    step()
    print("stepped", flush=True)
"""
CLOSE_ALL = "import ctypes; [ctypes.CDLL(None).close(number) for number in range(3, 20_000)]"


def remove_file(run_dir: Path) -> None:
    record_in(run_dir).path.unlink()


def test_a_rank_whose_record_is_removed_is_recorded_again_with_all_its_counts(run_dir: Path) -> None:
    directory = RunDirectory([run_dir])
    with job(STEP_BY_STEP, RANKSCOPE_QUIET="1") as process:
        directory.scan()
        for steps, remove, code in (
            (2, remove_file, "pass"),
            (3, shutil.rmtree, "pass"),
            (4, remove_file, CLOSE_ALL),
        ):
            remove(run_dir)
            directory.scan()
            assert process.ask(code) == "stepped"
            (rank,) = directory.scan().ranks
            assert (rank.snapshot.alive, rank.snapshot["steps"]) == (True, steps)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate()
    assert record_in(run_dir).exit_reason == "sigterm"
    assert log.count("removed; recorded again") == 1


def test_a_record_that_has_its_name_is_not_published_again(run_dir: Path) -> None:
    with job(STEP_BY_STEP, RANKSCOPE_QUIET="1") as process:
        before = record_in(run_dir).path.stat().st_ino
        assert process.ask(CLOSE_ALL) == "stepped"
        assert record_in(run_dir).path.stat().st_ino == before


def test_a_rank_whose_name_is_taken_leaves_the_other_record_as_it_is(run_dir: Path) -> None:
    with job(STEP_BY_STEP, RANKSCOPE_QUIET="1") as process:
        name = record_in(run_dir).path.stem
        _, other = publish(run_dir, name, {"steps": 100.0})
        assert process.ask("pass") == "stepped"
        (again,) = set(run_dir.glob("*.rank")) - {other}
        assert (read_rank(other)["steps"], read_rank(again)["steps"]) == (100.0, 2.0)
        assert read_rank(again).alive


def test_a_rank_that_cannot_be_recorded_again_trains_on_and_logs_it_once(run_dir: Path) -> None:
    with job(STEP_BY_STEP, RANKSCOPE_QUIET="1") as process:
        shutil.rmtree(run_dir)
        run_dir.touch()
        assert [process.ask("pass") for _ in range(3)] == ["stepped"] * 3
        _, log = process.communicate()
    run_dir.unlink()
    run_dir.mkdir()
    assert process.returncode == 0
    assert log.count("removed, cannot record it again") == 1


def move(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))


def unlink_one_of_two_names(path: Path) -> None:
    path.with_suffix(".link").hardlink_to(path)
    path.unlink()


@pytest.mark.parametrize(
    ("change", "is_removed"),
    [(Path.unlink, True), (move, False), (unlink_one_of_two_names, False)],
)
def test_a_record_is_removed_once_its_file_has_no_name(
    run_dir: Path, change: Callable[[Path], object], is_removed: bool
) -> None:
    writer, path = publish(run_dir)
    assert not writer.is_removed
    change(path)
    assert writer.is_removed == is_removed
