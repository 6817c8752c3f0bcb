"""Processes of a fake procfs, and the test's own processes in the real one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rankscope_exporter.gpu.allocation import processes
from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.gpu.allocation.processes import (
    Process,
    ProcessTable,
    UserNames,
    holders_of,
    look_up,
    name_of_user,
)

ID = "c0ffee" * 10 + "c0de"


class Procfs:
    """A fake procfs. With `kthreadd` it is a host's procfs."""

    def __init__(self, path: Path, kthreadd: bool = True) -> None:
        self.path = path
        if kthreadd:
            self.write(2, comm="kthreadd\n")

    def write(self, pid: int, **files: str) -> None:
        (self.path / str(pid)).mkdir()
        for name, text in files.items():
            (self.path / str(pid) / name).write_text(text)

    def process(self, pid: int, cgroup: str = "0::/\n", uid: int = 1000, state: str = "S (sleeping)") -> None:
        status = f"Name:\ttrain\nState:\t{state}\nPid:\t{pid}\nUid:\t{uid}\t0\t0\t0\nGid:\t1\t1\t1\t1\n"
        self.write(pid, status=status, cgroup=cgroup)


@pytest.mark.parametrize(
    ("cgroup", "holder"),
    [
        ("0::/slurmstepd.scope/job_7/step_0\n", Holder("slurm", slurm_job_id="7", user="alice", uid="1000")),
        (f"0::/docker-{ID}.scope\n", Holder("container", container_id=ID, user="alice", uid="1000")),
        ("0::/user.slice\n", Holder("user", user="alice", uid="1000")),
    ],
)
def test_a_process_shows_its_job_or_container_and_its_user(cgroup: str, holder: Holder) -> None:
    users = UserNames({1000: "alice"}.__getitem__)
    users.name(1000)
    users.resolve()
    assert holders_of([Process(1000, cgroup)], users) == [holder]


def test_a_user_is_looked_up_once_and_only_by_resolve() -> None:
    asked: list[int] = []
    users = UserNames(lambda uid: asked.append(uid) or f"user{uid}")
    assert users.name(7) == ""
    assert asked == []
    users.resolve()
    users.resolve()
    assert users.name(7) == "user7"
    assert asked == [7]


def test_a_holder_without_a_name_is_its_number_once_it_is_looked_up() -> None:
    users, process = UserNames(), Process(4_000_000_000, "0::/\n")
    assert [holder.user for holder in holders_of([process], users)] == [""]
    users.resolve()
    assert [holder.user for holder in holders_of([process], users)] == ["4000000000"]
    assert users.name(4_000_000_000) == ""


def test_living_processes_are_distinguished_from_dead_ones_and_zombies(tmp_path: Path) -> None:
    procfs = Procfs(tmp_path)
    procfs.process(10)
    procfs.process(11, state="Z (zombie)")
    seen = look_up({10, 11, 12}, ProcessTable(tmp_path))
    assert (seen.living, seen.dead, seen.count) == ([Process(1000, "0::/\n", 10, "train")], 2, 1)


def test_without_the_hosts_processes_none_counts_as_dead(tmp_path: Path) -> None:
    procfs = Procfs(tmp_path, kthreadd=False)
    procfs.write(2, comm="python\n")
    procfs.process(10)
    seen = look_up({10, 12}, ProcessTable(tmp_path))
    assert (seen.living, seen.dead, seen.count) == ([None, None], 0, 2)
    assert holders_of(seen.living, UserNames()) == [Holder("process")] * 2, "pid 10 may be another process on the host"
    assert look_up(set(), ProcessTable(tmp_path)).count is None, "an empty list means unknown"


def test_a_hidden_process_counts_as_living_without_a_name(tmp_path: Path) -> None:
    class Forbidding(ProcessTable):
        def find(self, pid: int) -> Process | None:
            if pid == 10:
                raise PermissionError(13, "Permission denied")
            return super().find(pid)

    seen = look_up({10}, Forbidding(tmp_path, sees_all=True))
    assert (seen.living, seen.dead, seen.count) == ([None], 0, 1)


def test_an_unrelated_error_does_not_mean_that_a_process_ended(tmp_path: Path) -> None:
    (tmp_path / "10" / "status").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        look_up({10}, ProcessTable(tmp_path, sees_all=True))


def test_a_driver_that_never_lists_processes_leaves_their_number_unknown(tmp_path: Path) -> None:
    Procfs(tmp_path)
    assert look_up(None, ProcessTable(tmp_path)).count is None
    assert look_up(set(), ProcessTable(tmp_path)).count == 0


def test_a_real_process_is_found_until_it_ends() -> None:
    table = ProcessTable(sees_all=True)
    with subprocess.Popen(["sleep", "60"]) as process:
        found = table.find(process.pid)
        assert found is not None
        assert found.uid == os.getuid()
        assert found.cgroup == Path("/proc/self/cgroup").read_text()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert table.find(process.pid) is None, "a zombie"
    assert table.find(process.pid) is None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the uids that are looked up, of which half have no name. At most ten names are cached."""
    monkeypatch.setattr(processes, "MAX_NAMES", 10)
    monkeypatch.setattr(processes, "LOOKUPS_AT_ONCE", 5)
    return []


def test_user_names_are_looked_up_at_a_limited_rate(asked: list[int]) -> None:
    users = UserNames(lambda uid: asked.append(uid) or "")
    for poll in range(20):
        for uid in range(1000 * poll, 1000 * poll + 1000):
            users.name(uid)
        users.resolve()
    assert len(asked) == 5 + 19


def test_new_uids_evict_no_older_names_and_the_cache_is_bounded(asked: list[int]) -> None:
    users = UserNames(lambda uid: asked.append(uid) or (str(uid) if uid % 2 else ""))
    known = range(1, 6)
    assert [users.name(uid) for uid in known] == [""] * 5
    users.resolve()
    for uid in range(1000, 1100):
        users.name(uid)
        users.resolve()
    assert [users.name(uid) for uid in known] == ["1", "", "3", "", "5"]
    users.resolve()
    assert len(users._names) == 10
    assert len(asked) == 105, "none is looked up twice"


def test_every_uid_in_use_is_looked_up_in_the_end(asked: list[int]) -> None:
    users = UserNames(lambda uid: asked.append(uid) or str(uid))
    for _ in range(50):
        names = [users.name(uid) for uid in range(30)]
        users.resolve()
    assert names == [*map(str, range(30))], "names in use are not evicted"
    assert sorted(asked) == [*range(30)]


def test_an_unknown_uid_has_no_name() -> None:
    assert name_of_user(0) == "root"
    assert name_of_user(4_000_000_000) == ""
