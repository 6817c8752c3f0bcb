"""Attack: a record whose process has ended and whose pid is another user's process now, to name that one's GPU."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from testing.records import publish
from testing.users import become
from testing.waiting import eventually
from tests.attacks.ranks.ranks_support import NOW, clock, living
from tests.attacks.users import MALLORY, VICTIM, needs_root
from tests.exporter.ranks.test_lost_locks import DROP_WHEN_ASKED, SHARED, STARTED

from rankscope.record.process_stat import read_process_stat
from rankscope.record.reader import read_rank
from rankscope_exporter.gpu.allocation.occupants import Occupants
from rankscope_exporter.gpu.allocation.processes import GpuProcesses, Process, ProcessTable
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.ranks.run_directory import RankPolicy, RunDirectory

pytestmark = needs_root
CLONE3 = 435
UUID = "GPU-51300000-0000-4000-8000-000000000000"
WORKERS = """
publish_alone = publish

def publish(*arguments, **labels):
    written = publish_alone(*arguments, **labels)
    for _ in range(2):
        if os.fork() == 0:
            time.sleep(600)
    return written
"""


@contextmanager
def process_with_id(pid: int, uid: int) -> Iterator[None]:
    """Start a process of the user with a free pid, as when the kernel's pids have wrapped round."""
    chosen = (ctypes.c_int * 1)(pid)
    arguments = ctypes.create_string_buffer(
        struct.pack("10Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(chosen), 1)
    )
    started = ctypes.CDLL(None, use_errno=True).syscall(CLONE3, arguments, 80)
    if started == 0:
        try:
            become(uid)
            os.execv("/bin/sleep", ["sleep", "600"])
        finally:
            os._exit(1)
    assert started == pid, os.strerror(ctypes.get_errno())
    try:
        eventually(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def node(run_dir: Path) -> Iterator[Callable[..., Rank]]:
    """Return a function that scans the only rank, while these processes of the victim are on the GPU."""
    occupants = Occupants(ProcessTable())
    directory = RunDirectory([run_dir], clock, policy=RankPolicy(is_elsewhere=occupants.is_elsewhere))

    def scan(*pids: int) -> Rank:
        occupants.record(UUID, GpuProcesses([Process(VICTIM, "", pid, "sleep") for pid in pids], 0, len(pids)))
        (rank,) = directory.scan().ranks
        return rank

    yield scan
    directory.close()


def rewrite(path: Path, **labels: Any) -> None:
    """Change the content of a record without its writer."""
    _, other = publish(path.parent, "other", {"started_unix": NOW - 100}, run="train", **labels)
    with path.open("r+b") as file:
        file.write(other.read_bytes())
    other.unlink()


def test_a_later_process_with_the_pid_of_a_dead_rank_is_not_the_rank(run_dir: Path) -> None:
    path = run_dir / "forged.rank"
    with node(run_dir) as scan:
        with living(run_dir, MALLORY, "forged", before=STARTED, uuid=UUID) as forged:
            assert scan().snapshot.lock_pid == forged.pid
            forged.end()
        with process_with_id(forged.pid, VICTIM):
            rewrite(path, process_start=read_process_stat(forged.pid).start, uuid=UUID)
            found = scan(forged.pid).snapshot
    assert (found.alive, found.lock_pid) == (False, 0)


def test_a_lock_that_has_outlived_its_process_does_not_name_a_later_one(run_dir: Path) -> None:
    """The exporter sees the record first when its pid is the other user's."""
    path, hidden = run_dir / "forged.rank", run_dir / "hidden"
    with node(run_dir) as scan:
        with living(run_dir, MALLORY, "forged", before=SHARED, uuid=UUID) as forged:
            eventually(lambda: (run_dir / "child").exists())
            path.rename(hidden)
            forged.end()
        try:
            with process_with_id(forged.pid, VICTIM):
                hidden.rename(path)
                assert read_rank(path).lock_pid == forged.pid, "the kernel names the pid"
                rank = scan(forged.pid)
        finally:
            os.kill(int((run_dir / "child").read_text()), signal.SIGKILL)
    assert rank.snapshot.lock_pid == 0
    assert rank.uuid == ""


@pytest.mark.parametrize("loses_lock", [False, True])
def test_a_rank_is_its_process_and_not_a_worker_or_saver_that_outlives_it(run_dir: Path, *, loses_lock: bool) -> None:
    with node(run_dir) as scan, living(run_dir, VICTIM, "r.0", before=DROP_WHEN_ASKED + WORKERS, uuid=UUID) as mine:
        assert scan(mine.pid).snapshot.lock_pid == mine.pid
        if loses_lock:
            (run_dir / "drop").touch()
            eventually(lambda: (run_dir / "dropped").exists())
        rank = scan(mine.pid)
        assert (rank.snapshot.alive, rank.snapshot.lock_pid, rank.uuid) == (True, mine.pid, UUID)
        workers = [*map(int, Path(f"/proc/{mine.pid}/task/{mine.pid}/children").read_text().split())]
        mine.end()
        try:
            assert len(workers) == 2
            assert scan(*workers).snapshot.exit_reason == "killed"
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
