"""A rank that has lost its lock is alive while its process is; a lock that outlives its process keeps no rank alive."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from testing.records import living_rank
from testing.waiting import eventually

from rankscope.record.reader import read_rank
from rankscope_exporter.ranks.run_directory import RunDirectory

STARTED = """
from rankscope.record.process_stat import own_start
info["process_start"] = own_start()
"""
DROP_WHEN_ASKED = """
import threading

def drop():
    while not (directory / "drop").exists():
        time.sleep(0.01)
    (directory / "r.0.rank").open("rb").close()
    (directory / "dropped").touch()

threading.Thread(target=drop, daemon=True).start()
"""
SHARED = """
CLONE_FILES, CLONE = 0x400, {"x86_64": 56, "aarch64": 220}[platform.machine()]

def share():
    if ctypes.CDLL(None).syscall(CLONE, CLONE_FILES | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        (directory / "child.part").write_text(str(os.getpid()))
        (directory / "child.part").rename(directory / "child")
        time.sleep(600)

publish_alone = publish

def publish(*arguments, **labels):
    written = publish_alone(*arguments, **labels)
    share()
    return written
"""


def drop_lock(run_dir: Path) -> None:
    (run_dir / "drop").touch()
    eventually(lambda: (run_dir / "dropped").exists())
    assert read_rank(run_dir / "r.0.rank").exit_reason == "killed"


def test_a_rank_that_has_lost_its_lock_is_alive_until_its_process_ends(run_dir: Path) -> None:
    directory = RunDirectory([run_dir])
    with living_rank(run_dir, before=STARTED + DROP_WHEN_ASKED) as rank:
        assert directory.scan().ranks[0].snapshot.lock_pid == rank.pid
        drop_lock(run_dir)
        for _ in range(2):
            (shown,) = directory.scan().ranks
            assert (shown.snapshot.exit_reason, shown.snapshot.lock_pid) == (None, rank.pid)
        rank.end()
        assert directory.scan().ranks[0].snapshot.exit_reason == "killed"


@pytest.mark.parametrize(("age", "reason"), [(0.0, None), (600.0, "killed"), (-600.0, "killed")])
def test_a_rank_with_an_unknown_process_is_alive_while_it_makes_progress(
    run_dir: Path, age: float, reason: str | None
) -> None:
    with living_rank(run_dir, slots={"started_monotonic": time.monotonic() - age}, before=DROP_WHEN_ASKED):
        drop_lock(run_dir)
        assert RunDirectory([run_dir]).scan().ranks[0].snapshot.exit_reason == reason


def test_a_lock_that_another_process_holds_does_not_keep_a_rank_alive(run_dir: Path) -> None:
    with living_rank(run_dir, before=STARTED + SHARED) as rank:
        eventually(lambda: (run_dir / "child").exists())
        assert read_rank(run_dir / "r.0.rank").alive
        rank.end()
        ended = read_rank(run_dir / "r.0.rank")
        os.kill(int((run_dir / "child").read_text()), signal.SIGKILL)
    assert ended.exit_reason == "killed"


def test_a_later_process_with_the_same_pid_is_not_the_rank(run_dir: Path) -> None:
    with living_rank(run_dir, process_start=1):
        assert not read_rank(run_dir / "r.0.rank").alive
