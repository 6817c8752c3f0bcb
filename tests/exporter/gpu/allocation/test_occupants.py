"""What takes away a rank's claim to a GPU, and what is no evidence: a true claim is never taken away."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.gpu.allocation.claims import ClaimsWatcher
from rankscope_exporter.gpu.allocation.occupants import Occupants
from rankscope_exporter.gpu.allocation.processes import Process, ProcessTable, Seen, UserNames
from rankscope_exporter.ranks.rank import Rank, Scan

UUID = "GPU-51300000-0000-4000-8000-000000000000"
OWNER, OTHER, PID = 61_002, 61_001, 4711


class Asking:
    """Who is on the GPU, and whether that contradicts a rank of OWNER whose record's lock PID holds."""

    def __init__(self, procfs: Path, lock_pid: int = PID) -> None:
        self.now = 100.0
        self.occupants = Occupants(ProcessTable(procfs), lambda: self.now)
        info = {"run": "train", "rank": "0", "uuid": UUID}
        self.rank = Rank(RankSnapshot(Path("x"), True, (), info, None, 0.0, lock_pid), None, OWNER)

    def __call__(self, *processes: Process | None, count: int | None = 1, later: float = 0.0) -> bool:
        self.occupants.see(UUID, Seen(processes, 0, count))
        self.now += later
        return self.occupants.is_elsewhere(self.rank)


@pytest.fixture
def is_elsewhere(tmp_path: Path) -> Asking:
    (tmp_path / str(PID)).mkdir()
    (tmp_path / str(PID) / "status").write_text("Name:\tpython\nState:\tS (sleeping)\nUid:\t300000\t0\t0\t0\n")
    return Asking(tmp_path)


def test_processes_of_others_alone_contradict(is_elsewhere: Asking) -> None:
    assert is_elsewhere(Process(OTHER, "", 7, "python"))


def test_what_was_seen_some_seconds_ago_is_no_evidence(is_elsewhere: Asking) -> None:
    assert not is_elsewhere(Process(OTHER, "", 7, "python"), later=6.0)


def test_a_gpu_without_processes_is_none(is_elsewhere: Asking) -> None:
    assert not is_elsewhere(count=0)


def test_nor_is_one_whose_processes_cannot_all_be_looked_up(is_elsewhere: Asking) -> None:
    assert is_elsewhere(Process(OTHER, "", 7, "python"))
    assert not is_elsewhere(Process(OTHER, "", 7, "python"), None, count=2)


def test_nor_is_a_server_that_works_for_clients_which_the_driver_may_not_list(is_elsewhere: Asking) -> None:
    assert not is_elsewhere(Process(0, "", 7, "nvidia-cuda-mps"))


def test_another_process_of_the_owner_is_enough(is_elsewhere: Asking) -> None:
    assert not is_elsewhere(Process(OTHER, "", 7, "python"), Process(OWNER, "", 8, "python"), count=2)


def test_the_process_of_the_lock_is_believed_whoever_owns_its_file(is_elsewhere: Asking) -> None:
    """As in a pod whose volumes are idmapped: the file belongs to another uid than the process."""
    assert not is_elsewhere(Process(300_000, "", PID, "python"))


def test_so_is_another_process_of_its_user(is_elsewhere: Asking) -> None:
    assert not is_elsewhere(Process(300_000, "", 8, "python"))


def test_a_rank_whose_process_cannot_be_seen_is_judged_by_its_file(tmp_path: Path) -> None:
    asking = Asking(tmp_path, lock_pid=0)
    assert asking(Process(OTHER, "", 7, "python"))
    assert not asking(Process(OWNER, "", 7, "python"))


def test_a_gpu_that_the_node_does_not_have_contradicts() -> None:
    asking = Asking(Path("/nonexistent"))
    assert not asking(count=0), "while that is not known"
    asking.occupants.lacks = lambda uuid: uuid == UUID
    assert asking(count=0)
    asking.occupants.lacks = lambda uuid: uuid != UUID
    assert not asking(count=0)


def test_a_rank_on_a_mig_instance_is_on_the_gpu_that_has_it(is_elsewhere: Asking) -> None:
    gpu, other = "GPU-of-the-instance", Process(OTHER, "", 7, "python")
    is_elsewhere.occupants.lacks = lambda uuid: uuid != gpu
    is_elsewhere.occupants.see(gpu, Seen((), 0, 0), instances=[UUID])
    assert not is_elsewhere.occupants.is_elsewhere(is_elsewhere.rank)
    is_elsewhere.occupants.see(gpu, Seen([other], 0, 1), instances=[UUID])
    assert is_elsewhere.occupants.is_elsewhere(is_elsewhere.rank)


def test_a_contradicted_rank_lays_no_claim(is_elsewhere: Asking) -> None:
    from dataclasses import replace

    elsewhere = replace(is_elsewhere.rank, is_elsewhere=True)
    watching = ClaimsWatcher((), lambda: Scan([elsewhere], Counter()), UserNames())
    assert watching.claims().ranks == {}


def test_a_process_is_looked_up_once_whatever_number_of_records_it_holds(
    is_elsewhere: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []
    find = ProcessTable.find
    monkeypatch.setattr(ProcessTable, "find", lambda table, pid: looked_up.append(pid) or find(table, pid))  # type: ignore[func-returns-value]
    assert is_elsewhere(Process(OTHER, "", 7, "python"))
    assert all(is_elsewhere.occupants.is_elsewhere(is_elsewhere.rank) for _ in range(128))
    assert looked_up == [PID]
    assert is_elsewhere(Process(OTHER, "", 7, "python"), later=1.0)
    assert looked_up == [PID, PID]
