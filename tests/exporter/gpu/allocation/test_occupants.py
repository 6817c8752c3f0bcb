"""Evidence against a rank's claim to a GPU. A true claim is never rejected."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.gpu.allocation.claims import ClaimsWatcher
from rankscope_exporter.gpu.allocation.occupants import Occupants
from rankscope_exporter.gpu.allocation.processes import GpuProcesses, Process, ProcessTable
from rankscope_exporter.ranks.rank import Rank, Scan

UUID = "GPU-51300000-0000-4000-8000-000000000000"
OWNER, OTHER, PID = 61_002, 61_001, 4711


class Scenario:
    """Processes on the GPU of a rank that belongs to OWNER. PID holds the lock of the rank's record."""

    def __init__(self, procfs: Path, lock_pid: int = PID) -> None:
        self.now = 100.0
        self.occupants = Occupants(ProcessTable(procfs), lambda: self.now)
        info = {"run": "train", "rank": "0", "uuid": UUID}
        self.rank = Rank(RankSnapshot(Path("x"), True, (), info, None, 0.0, lock_pid), None, OWNER)

    def __call__(self, *processes: Process | None, count: int | None = 1, later: float = 0.0) -> bool:
        self.occupants.record(UUID, GpuProcesses(processes, 0, count))
        self.now += later
        return self.occupants.is_elsewhere(self.rank)


@pytest.fixture
def is_elsewhere(tmp_path: Path) -> Scenario:
    (tmp_path / str(PID)).mkdir()
    (tmp_path / str(PID) / "status").write_text("Name:\tpython\nState:\tS (sleeping)\nUid:\t300000\t0\t0\t0\n")
    return Scenario(tmp_path)


def test_only_other_users_processes_contradict_a_claim(is_elsewhere: Scenario) -> None:
    assert is_elsewhere(Process(OTHER, "", 7, "python"))


def test_processes_seen_some_seconds_ago_are_no_evidence(is_elsewhere: Scenario) -> None:
    assert not is_elsewhere(Process(OTHER, "", 7, "python"), later=6.0)


def test_a_gpu_without_processes_is_no_evidence(is_elsewhere: Scenario) -> None:
    assert not is_elsewhere(count=0)


def test_a_gpu_with_unknown_processes_is_no_evidence(is_elsewhere: Scenario) -> None:
    assert is_elsewhere(Process(OTHER, "", 7, "python"))
    assert not is_elsewhere(Process(OTHER, "", 7, "python"), None, count=2)


def test_an_mps_server_is_no_evidence_because_its_clients_may_not_be_listed(is_elsewhere: Scenario) -> None:
    assert not is_elsewhere(Process(0, "", 7, "nvidia-cuda-mps"))


def test_another_process_of_the_owner_confirms_the_claim(is_elsewhere: Scenario) -> None:
    assert not is_elsewhere(Process(OTHER, "", 7, "python"), Process(OWNER, "", 8, "python"), count=2)


def test_the_lock_holders_process_confirms_the_claim_for_any_file_owner(is_elsewhere: Scenario) -> None:
    """Files and processes have different uids in a pod with idmapped volumes."""
    assert not is_elsewhere(Process(300_000, "", PID, "python"))


def test_another_process_of_the_lock_holders_user_confirms_the_claim(is_elsewhere: Scenario) -> None:
    assert not is_elsewhere(Process(300_000, "", 8, "python"))


def test_a_rank_without_a_visible_process_is_checked_by_its_file_owner(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, lock_pid=0)
    assert scenario(Process(OTHER, "", 7, "python"))
    assert not scenario(Process(OWNER, "", 7, "python"))


def test_a_gpu_that_the_node_lacks_contradicts_a_claim() -> None:
    scenario = Scenario(Path("/nonexistent"))
    assert not scenario(count=0), "GPUs are unknown"
    scenario.occupants.lacks = lambda uuid: uuid == UUID
    assert scenario(count=0)
    scenario.occupants.lacks = lambda uuid: uuid != UUID
    assert not scenario(count=0)


def test_a_rank_on_a_mig_instance_is_checked_on_the_parent_gpu(is_elsewhere: Scenario) -> None:
    gpu, other = "GPU-of-the-instance", Process(OTHER, "", 7, "python")
    is_elsewhere.occupants.lacks = lambda uuid: uuid != gpu
    is_elsewhere.occupants.record(gpu, GpuProcesses((), 0, 0), instances=[UUID])
    assert not is_elsewhere.occupants.is_elsewhere(is_elsewhere.rank)
    is_elsewhere.occupants.record(gpu, GpuProcesses([other], 0, 1), instances=[UUID])
    assert is_elsewhere.occupants.is_elsewhere(is_elsewhere.rank)


def test_a_contradicted_rank_makes_no_claim(is_elsewhere: Scenario) -> None:
    from dataclasses import replace

    elsewhere = replace(is_elsewhere.rank, is_elsewhere=True)
    watcher = ClaimsWatcher((), lambda: Scan([elsewhere], Counter()))
    assert watcher.claims().ranks == {}


def test_a_process_is_looked_up_once_for_all_its_records(
    is_elsewhere: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []
    find = ProcessTable.find
    monkeypatch.setattr(ProcessTable, "find", lambda table, pid: looked_up.append(pid) or find(table, pid))
    assert is_elsewhere(Process(OTHER, "", 7, "python"))
    assert all(is_elsewhere.occupants.is_elsewhere(is_elsewhere.rank) for _ in range(128))
    assert looked_up == [PID]
    assert is_elsewhere(Process(OTHER, "", 7, "python"), later=1.0)
    assert looked_up == [PID, PID]
