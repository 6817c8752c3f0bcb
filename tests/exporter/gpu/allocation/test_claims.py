"""Claims come from everybody who answers; who does not answer costs nobody else anything, and nothing grows stale."""

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
from rankscope_exporter.gpu.allocation.processes import UserNames
from rankscope_exporter.ranks.rank import Rank, Scan

UUID = "GPU-51300000-0000-4000-8000-000000000000"
JOB = Holder("slurm", slurm_job_id="7")
POD = Holder("kubernetes", k8s_pod="a")


class Says:
    """A scheduler that says this, or raises it."""

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


def watcher(*schedulers: Says, ranks: Callable[[], Scan | None] = scan, **options: Any) -> ClaimsWatcher:
    return ClaimsWatcher(schedulers, ranks, UserNames(), **options)


def test_a_gpu_is_found_by_its_index_its_uuid_and_its_ranks() -> None:
    watching = watcher(Says("slurm", {"0": [JOB]}), Says("kubernetes", {UUID: [POD]}), ranks=lambda: scan(rank(2)))
    watching.poll()
    claims = watching.claims()
    assert claims.on(0, "nvidia0", UUID) == [JOB, POD, Holder("rank", run="train", rank="2", owner="0", uid="0")]
    assert claims.on(1, "nvidia1", "GPU-other") == []
    assert claims.is_complete


def test_ranks_that_have_ended_or_name_no_gpu_lay_no_claim() -> None:
    watching = watcher(ranks=lambda: scan(rank(0, alive=False), rank(1, uuid="")))
    watching.poll()
    assert watching.claims() == Claims(is_complete=True)


def test_a_ranks_claim_ends_with_its_process_whenever_the_schedulers_were_asked() -> None:
    alive = [True]
    watching = watcher(Says("slurm", {"0": [JOB]}), ranks=lambda: scan(rank(2, alive=alive[0])))
    watching.poll()
    alive[0] = False
    assert watching.claims() == Claims({"0": [JOB]}, is_complete=True)


def test_while_the_ranks_are_not_known_a_gpu_may_be_somebodys() -> None:
    watching = watcher(Says("slurm", {"0": [JOB]}), ranks=lambda: None)
    watching.poll()
    assert watching.claims() == Claims({"0": [JOB]}, is_complete=False)


def test_a_scheduler_that_does_not_answer_leaves_the_others_and_the_claims_incomplete(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    kubelet = Says("kubernetes", OSError("no such socket"))
    watching = watcher(Says("slurm", {"0": [JOB]}), kubelet)
    watching.poll()
    watching.poll()
    assert watching.claims() == Claims({"0": [JOB]}, is_complete=False)
    kubelet.answer = {}
    watching.poll()
    assert watching.claims().is_complete
    assert [record.message for record in caplog.records] == [
        "kubernetes does not say who holds the GPUs: no such socket",
        "kubernetes says again who holds the GPUs",
    ]


def test_claims_that_are_too_old_are_none() -> None:
    now = [100.0]
    watching = watcher(Says("slurm", {"0": [JOB]}), interval=5, monotonic=lambda: now[0])
    assert watching.claims() == Claims(), "nobody was asked yet"
    watching.poll()
    now[0] += 15
    assert watching.claims().on(0, "nvidia0", UUID) == [JOB]
    now[0] += 1
    assert watching.claims() == Claims()


def test_the_thread_asks_again_and_ends_when_told() -> None:
    before = threading.active_count()
    slurm = Says("slurm", {"0": [JOB]})
    watching = watcher(slurm, interval=0.01)
    watching.start()
    eventually(lambda: watching.claims().on(0, "nvidia0", UUID) == [JOB])
    slurm.answer = {}
    eventually(lambda: watching.claims() == Claims(is_complete=True))
    watching.stop()
    assert threading.active_count() == before


def test_a_mistake_of_ours_is_logged_and_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def lookup(uid: int) -> str:
        calls.append(uid)
        if len(calls) == 1:
            raise ValueError("a mistake")
        return "alice"

    users = UserNames(lookup)
    watching = ClaimsWatcher((), scan, users, interval=0.01)
    watching.start()
    eventually(lambda: users.name(7) == "alice")
    watching.stop()
    assert "the claims to GPUs cannot be collected" in caplog.text


def test_users_get_their_names_in_the_watchers_thread() -> None:
    threads: list[str] = []
    users = UserNames(lambda _uid: threads.append(threading.current_thread().name) or "alice")
    watching = ClaimsWatcher((), scan, users, interval=0.01)
    watching.start()
    eventually(lambda: users.name(7) == "alice")
    watching.stop()
    assert threads == ["claims"]
