"""Claims combine all sources. A failing scheduler does not affect the others, and stale claims are dropped."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from testing.records import rank_snapshot
from testing.waiting import eventually

from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.gpu.allocation.claims import Claims, ClaimsWatcher
from rankscope_exporter.gpu.allocation.holder import Holder
from rankscope_exporter.ranks.rank import Rank, Scan

UUID = "GPU-51300000-0000-4000-8000-000000000000"
JOB = Holder("slurm", slurm_job_id="7")
POD = Holder("kubernetes", k8s_pod="a")


class FakeScheduler:
    """A scheduler that returns or raises the given answer."""

    def __init__(self, name: str, answer: Mapping[str, Sequence[Holder]] | Exception) -> None:
        self.name = name
        self.answer = answer

    def holders(self) -> Mapping[str, Sequence[Holder]]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def rank(number: int, uuid: str = UUID, alive: bool = True) -> RankSnapshot:
    return rank_snapshot(alive=alive, run="train", rank=str(number), uuid=uuid)


def scan(*snapshots: RankSnapshot) -> Scan:
    return Scan([Rank(snapshot, None, owner=0) for snapshot in snapshots], Counter())


def watcher(*schedulers: FakeScheduler, ranks: Callable[[], Scan | None] = scan, **options: Any) -> ClaimsWatcher:
    return ClaimsWatcher(schedulers, ranks, **options)


def test_a_gpu_matches_by_index_uuid_and_ranks() -> None:
    schedulers = FakeScheduler("slurm", {"0": [JOB]}), FakeScheduler("kubernetes", {UUID: [POD]})
    claims_watcher = watcher(*schedulers, ranks=lambda: scan(rank(2)))
    claims_watcher.poll()
    claims = claims_watcher.claims()
    claim_of_rank = Holder("rank", run="train", rank="2", owner="0", uid="0")
    assert claims.find_holders(0, "nvidia0", UUID) == [JOB, POD, claim_of_rank]
    assert claims.find_holders(1, "nvidia1", "GPU-other") == []
    assert claims.is_complete


def test_ended_ranks_and_ranks_without_a_gpu_make_no_claim() -> None:
    claims_watcher = watcher(ranks=lambda: scan(rank(0, alive=False), rank(1, uuid="")))
    claims_watcher.poll()
    assert claims_watcher.claims() == Claims(is_complete=True)


def test_a_ranks_claim_ends_with_its_process_without_another_poll() -> None:
    alive = [True]
    claims_watcher = watcher(FakeScheduler("slurm", {"0": [JOB]}), ranks=lambda: scan(rank(2, alive=alive[0])))
    claims_watcher.poll()
    alive[0] = False
    assert claims_watcher.claims() == Claims({"0": [JOB]}, is_complete=True)


def test_claims_are_incomplete_while_ranks_are_unknown() -> None:
    claims_watcher = watcher(FakeScheduler("slurm", {"0": [JOB]}), ranks=lambda: None)
    claims_watcher.poll()
    assert claims_watcher.claims() == Claims({"0": [JOB]}, is_complete=False)


def test_a_failing_scheduler_makes_claims_incomplete_and_keeps_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    kubelet = FakeScheduler("kubernetes", OSError("no such socket"))
    claims_watcher = watcher(FakeScheduler("slurm", {"0": [JOB]}), kubelet)
    claims_watcher.poll()
    claims_watcher.poll()
    assert claims_watcher.claims() == Claims({"0": [JOB]}, is_complete=False)
    kubelet.answer = {}
    claims_watcher.poll()
    assert claims_watcher.claims().is_complete
    assert [record.message for record in caplog.records] == [
        "kubernetes query for GPU holders failed: no such socket",
        "kubernetes query for GPU holders recovered",
    ]


def test_stale_claims_are_dropped() -> None:
    now = [100.0]
    claims_watcher = watcher(FakeScheduler("slurm", {"0": [JOB]}), interval=5, monotonic=lambda: now[0])
    assert claims_watcher.claims() == Claims(), "not polled yet"
    claims_watcher.poll()
    now[0] += 15
    assert claims_watcher.claims().find_holders(0, "nvidia0", UUID) == [JOB]
    now[0] += 1
    assert claims_watcher.claims() == Claims()


def test_the_thread_polls_repeatedly_and_stops_on_request() -> None:
    before = threading.active_count()
    slurm = FakeScheduler("slurm", {"0": [JOB]})
    claims_watcher = watcher(slurm, interval=0.01)
    claims_watcher.start()
    eventually(lambda: claims_watcher.claims().find_holders(0, "nvidia0", UUID) == [JOB])
    slurm.answer = {}
    eventually(lambda: claims_watcher.claims() == Claims(is_complete=True))
    claims_watcher.stop()
    assert threading.active_count() == before
