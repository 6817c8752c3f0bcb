"""The first sentence of a capture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from testing.records import rank_snapshot

from rankscope.cli.living_ranks import RecordedRank
from rankscope.record import layout
from rankscope_exporter.capture.headline import sentence
from rankscope_exporter.capture.process_state import ProcessState, ThreadState
from rankscope_exporter.capture.ranks import CapturedRank
from rankscope_exporter.capture.request import Found, Request, WantedRank

ALL_REDUCE = float(1 + layout.OPS.index("all_reduce"))
IN_FILTER = """Current thread 0x00007f0 (most recent call first):
  File "/home/a/dataset.py", line 31 in filter
  File "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 700 in __next__
  File "/home/a/train.py", line 7 in <module>
"""
OF_WORKERS = """Current thread 0x00007f0 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/queues.py", line 122 in get
  File "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1275 in _try_get_data
  File "/home/a/train.py", line 7 in <module>
"""
STUCK = Found("hang", "data_wait", 2, "", "Rank 2 (node-a, GPU 2) is stuck in data_wait", 156.0, "", "", True)


def rank(number: int, issued: float = 512.0, **changes: Any) -> CapturedRank:
    """Return a rank that waits in the collective `issued`, unless `changes` say something else."""
    slots = {
        "group_collectives": issued,
        "collective_op": ALL_REDUCE,
        "collective_group": 0.0,
        "started_monotonic": 1.0,
    }
    slots |= changes.pop("slots", {})
    snapshot = rank_snapshot(slots, changes.pop("alive", True), rank=str(number), groups=["0-3"], world_size="4")
    wanted = WantedRank(number, "x", f"Rank {number} (node-a, GPU {number})")
    return replace(CapturedRank(wanted, RecordedRank(snapshot, 1000)), **changes)


def late(**changes: Any) -> CapturedRank:
    phase = float(layout.PHASES.index("data_wait"))
    return rank(2, 511.0, slots={"collective_op": 0.0, "phase": phase}, **changes)


def process(
    call: str = "", state: str = "S (sleeping)", *workers: ProcessState, name: str = "python", is_stopped: bool = False
) -> ProcessState:
    threads = (ThreadState(7, name, state, call, "nfs_wait", "", 0),)
    return ProcessState(7, 1, "", "", threads, workers, is_stopped)


def request(found: Found | None = STUCK) -> Request:
    return Request("r", 1000, "r", "r", "hang", "node-a", (), found)


def said(two: CapturedRank, found: Found | None = STUCK) -> str:
    return sentence(request(found), [rank(0), rank(1), two, rank(3)])


def test_it_names_the_rank_its_place_and_what_the_others_wait_in() -> None:
    assert said(late(stacks=IN_FILTER)) == (
        "Rank 2 (node-a, GPU 2) is stuck in data_wait for 2.6 min: it stands in dataset.py:31 in filter; "
        "ranks 0, 1 and 3 wait in all_reduce 512."
    )


def loading(*workers: ProcessState) -> dict[str, Any]:
    """Return the changes of a rank that waits for its loader workers."""
    return {"process": process("", "S (sleeping)", *workers), "stacks": OF_WORKERS}


def in_call(call: str, state: str = "S (sleeping)", **changes: Any) -> dict[str, Any]:
    return {"process": process(call, state), **changes}


POLLING, STUCK_IN_FILE = process("poll"), process("read of /mnt/x")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (in_call("read of /mnt/data/shard-3"), "it waits in a read of /mnt/data/shard-3;"),
        (in_call("", "D (disk sleep)"), "in the kernel without interruption, as for storage (nfs_wait);"),
        (in_call("poll", gil_waiters=frozenset({8})), "it keeps 1 other thread waiting for the GIL;"),
        (in_call("futex", gil_waiters=frozenset({7})), "it waits for the GIL, which another thread holds;"),
        (loading(), "waits for loader workers that are gone;"),
        (loading(STUCK_IN_FILE), "waits for its loader worker (pid 7), which waits in a read of /mnt/x;"),
        (
            loading(process(), process("", "D (disk sleep)", is_stopped=True)),
            "waits for its loader workers, of 2 one (pid 7), which is stopped;",
        ),
        (
            loading(POLLING, process("", "R (running)"), POLLING),
            "waits for its loader workers, of 3 one (pid 7), which runs;",
        ),
        (loading(POLLING, POLLING), "waits for its 2 loader workers;"),
        (
            loading(STUCK_IN_FILE, process("futex", name="pt_data_worker")),
            "waits for its loader worker (pid 7), which waits for a lock or another thread;",
        ),
        (in_call("openat"), "it waits to open a file;"),
        (in_call("flock of /mnt/x.lock"), "it waits for a lock on /mnt/x.lock;"),
        (in_call("write of pipe:[12] (its output)"), "it waits to write its output;"),
        (in_call("recvfrom"), "it waits for data from a socket;"),
        (in_call("futex", stacks=IN_FILTER), "in filter and waits for a lock or another thread;"),
        (in_call("", "D (disk sleep)", is_stopped=True), "for 2.6 min; ranks"),
    ],
)
def test_it_says_what_the_kernel_shows(changes: dict[str, Any], says: str) -> None:
    assert says in said(late(**changes))


def test_a_stopped_rank_is_named_with_its_reason() -> None:
    found = replace(STUCK, cause="stopped", short="Rank 2 (node-a, GPU 2) is stopped, and the other ranks wait for it")
    assert said(late(), found).startswith(f"{found.short} (no progress for 2.6 min); ranks 0, 1 and 3 wait")


def test_a_crash_names_the_dead_rank() -> None:
    found = replace(STUCK, kind="crash", cause="killed", short="Rank 2 (node-a, GPU 2) was killed", seconds=4.0)
    assert said(late(alive=False), found) == (
        "Rank 2 (node-a, GPU 2) was killed 4 s ago; ranks 0, 1 and 3 wait in all_reduce 512."
    )


def test_a_crash_names_the_rank_that_left_and_not_the_one_that_lost_it() -> None:
    short = "Rank 2 (node-a, GPU 2) finished before the other ranks, and then a rank that needed it failed"
    found = replace(STUCK, kind="crash", cause="finished", short=short, seconds=4.0)
    failed = rank(0, alive=False, slots={"ended": layout.EXCEPTION, "ended_unix": 9.0})
    assert sentence(request(found), [failed, late(alive=False)]) == f"{short} 4 s ago."


def test_without_a_diagnosis_the_rank_that_blocks_the_others_by_the_records_is_named() -> None:
    text = said(late(stacks=IN_FILTER), None)
    assert text.startswith("Rank 2 (node-a, GPU 2) is in data_wait for ")
    assert "and other ranks wait for it: it stands in dataset.py:31 in filter; ranks 0, 1 and 3 wait" in text


def test_without_a_diagnosis_and_a_late_rank_no_rank_is_blamed() -> None:
    text = sentence(request(None), [rank(number) for number in range(4)])
    assert text.startswith("No rank on this node has made progress for ")
    assert text.endswith("; ranks 0, 1, 2 and 3 wait in all_reduce 512.")


def test_without_a_living_rank_it_says_so() -> None:
    assert sentence(request(None), []) == "No rank on this node is alive."


INSIDE = replace(STUCK, cause="inside_collective", rank=0, short="Every rank is inside a collective")
IN_READ = """Current thread 0x00007f0 (most recent call first):
  File "/home/a/train.py", line 40 in read_loss
"""


def unclear(**changes: Any) -> str:
    """Return the sentence about ranks that have issued equally many collectives, of which rank 2 has these changes."""
    slots = {"collective_op": 0.0}
    ranks = [rank(number, slots=slots, stacks=IN_READ) for number in (0, 1, 3)]
    return sentence(request(INSIDE), [*ranks, rank(2, slots=slots, **{"stacks": IN_READ, **changes})])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stacks": IN_FILTER}, "it stands in dataset.py:31 in filter;"),
        (in_call("poll", gil_waiters=frozenset({8})), "keeps 1 other thread waiting for the GIL;"),
        (in_call("read of /mnt/x"), "waits in a read of /mnt/x;"),
        (in_call("newfstatat"), "waits for the attributes of a file;"),
    ],
)
def test_if_the_collectives_name_no_rank_the_one_that_differs_is_named(changes: dict[str, Any], says: str) -> None:
    text = unclear(**changes)
    assert text.startswith(
        "Rank 2 (node-a, GPU 2) differs from the other ranks (no progress for 2.6 min): it stands in "
    )
    assert says in text
    assert text.endswith("; ranks 0, 1 and 3 stand in train.py:40 in read_loss.")


def test_if_no_rank_differs_none_is_named() -> None:
    assert unclear() == (
        "Every rank is inside a collective (no progress for 2.6 min); "
        "ranks 0, 1, 2 and 3 stand in train.py:40 in read_loss."
    )


def test_text_of_a_hostile_rank_stays_on_one_printable_line() -> None:
    stacks = IN_FILTER.replace("filter", "\x1b]0;owned\x07\u202efilter")
    assert said(late(stacks=stacks)).isprintable()


def test_the_seconds_are_those_of_the_capture_and_not_of_the_request() -> None:
    assert request(replace(STUCK, seconds=30.0)).until(50.0).found == replace(STUCK, seconds=30.0)
    asked = replace(request(replace(STUCK, seconds=30.0)), at=40.0)
    assert asked.until(50.0).found == replace(STUCK, seconds=40.0)


def test_a_second_late_rank_is_named_too() -> None:
    ranks = [rank(0), rank(1, 511.0, slots={"collective_op": 0.0}, stacks=IN_READ), late(stacks=IN_FILTER), rank(3)]
    assert sentence(request(), ranks).endswith(
        "in filter; rank 1 stands in train.py:40 in read_loss; ranks 0 and 3 wait in all_reduce 512."
    )
    stopped = rank(1, 511.0, is_stopped=True)
    assert "; rank 1 is stopped; ranks 0 and 3 wait" in sentence(request(), [rank(0), stopped, late(), rank(3)])


def test_a_rank_in_another_collective_than_all_others_is_named() -> None:
    broadcast = {"collective_op": float(1 + layout.OPS.index("broadcast"))}
    ranks = [rank(0, slots=broadcast, stacks=IN_READ), *(rank(number) for number in (1, 2, 3))]
    assert sentence(request(INSIDE), ranks) == (
        "Rank 0 (node-a, GPU 0) has called another collective than the other ranks (no progress for 2.6 min): "
        "it is in broadcast 512 and stands in train.py:40 in read_loss; ranks 1, 2 and 3 wait in all_reduce 512."
    )
    alike = [rank(number, slots=broadcast if number < 2 else {}) for number in range(4)]
    assert sentence(request(INSIDE), alike) == (
        "The ranks have called different collectives (no progress for 2.6 min); "
        "ranks 2 and 3 wait in all_reduce 512; ranks 0 and 1 wait in broadcast 512."
    )


def test_before_an_exception_the_rank_that_finished_too_early_is_named() -> None:
    failed = Found("crash", "exception", 0, "", "Rank 0 (node-a, GPU 0) ended with an exception", 4.0, "", "", True)
    ended = {"ended": layout.EXCEPTION, "ended_unix": 9.0}
    failures = [rank(number, alive=False, slots={**ended, "steps": 40.0}) for number in (0, 1, 3)]

    def crashed(issued: float, at: float, steps: float = 40.0) -> str:
        slots = {"ended": layout.FINISHED, "ended_unix": at, "steps": steps}
        return sentence(request(failed), [*failures, rank(2, issued, alive=False, slots=slots)])

    assert crashed(511.0, 8.0) == (
        "Rank 2 (node-a, GPU 2) finished with fewer collectives than the other ranks, "
        "and then rank 0 (node-a, GPU 0) ended with an exception 4 s ago."
    )
    assert "finished with fewer steps than the other ranks, and then" in crashed(512.0, 8.0, 39.0)
    for text in (crashed(512.0, 8.0), crashed(511.0, 10.0)):
        assert text == "Rank 0 (node-a, GPU 0) ended with an exception 4 s ago."


def test_a_thread_that_waits_for_storage_is_named_if_no_other_rank_has_one() -> None:
    def threads(*calls: str) -> ProcessState:
        of_process = (ThreadState(7 + place, "python", "S", call, "", "", 0) for place, call in enumerate(calls))
        return ProcessState(7, 1, "", "", tuple(of_process))

    prefetching = late(process=threads("futex", "poll", "read of /mnt/x"))
    assert "waits for a lock or another thread and has a thread that waits in a read of /mnt/x;" in said(prefetching)
    ranks = [rank(0, process=threads("futex", "read of /tmp/pipe")), rank(1), prefetching, rank(3)]
    assert "has a thread" not in sentence(request(), ranks)


def test_without_a_diagnosis_the_first_failure_is_named() -> None:
    def failed(number: int, at: float) -> CapturedRank:
        return rank(number, alive=False, slots={"ended": layout.EXCEPTION, "ended_unix": at})

    ranks = [failed(0, 9.0), failed(1, 8.0), failed(2, 10.0)]
    assert sentence(request(None), ranks) == "Rank 1 (node-a, GPU 1) ended with an exception."
    assert sentence(request(None), [*ranks, rank(3, alive=False)]) == "Rank 3 (node-a, GPU 3) was killed."


def test_without_a_diagnosis_an_exception_of_its_own_is_named_before_lost_connections() -> None:
    def failed(number: int, at: float, lost: float) -> CapturedRank:
        return rank(number, alive=False, slots={"ended": layout.EXCEPTION, "ended_unix": at, "lost_peer": lost})

    victim = failed(0, 8.0, 1.0)
    text = sentence(request(None), [victim, failed(1, 9.0, 1.0)])
    assert text == "Rank 0 (node-a, GPU 0) ended with an exception: it lost its connection to another rank."
    assert sentence(request(None), [victim, failed(2, 9.0, 0.0)]) == "Rank 2 (node-a, GPU 2) ended with an exception."


def test_ranks_that_wait_for_each_other_are_named() -> None:
    def waiting(number: int, group: int, *issued: float) -> CapturedRank:
        slots = {"collective_op": ALL_REDUCE, "collective_group": float(group), "started_monotonic": 1.0}
        snapshot = rank_snapshot(slots, rank=str(number), groups=["0-2", "0,2"], world_size="3")
        begin = layout.INDEX["group_collectives"]
        values = (*snapshot.slots[:begin], *issued, *snapshot.slots[begin + len(issued) :])
        place = WantedRank(number, "x", f"Rank {number}")
        return CapturedRank(place, RecordedRank(replace(snapshot, slots=values), 1000))

    ranks = [waiting(0, 0, 46.0, 0.0), waiting(1, 0, 46.0, 0.0), waiting(2, 1, 45.0, 1.0)]
    assert sentence(request(INSIDE), ranks) == (
        "Ranks 0 and 2 wait for each other (no progress for 2.6 min); "
        "ranks 0 and 1 wait in all_reduce 46; rank 2 waits in all_reduce 1."
    )


def test_no_other_rank_is_named_if_the_diagnosis_names_one_that_has_ended() -> None:
    found = replace(
        STUCK, cause="finished", short="Rank 2 (node-a, GPU 2) has finished, and the other ranks wait for it"
    )
    storing = rank(0, process=process("read of /mnt/x"))
    text = sentence(request(found), [storing, rank(1), rank(3), rank(2, 511.0, alive=False)])
    assert text == f"{found.short} (no progress for 2.6 min); ranks 0, 1 and 3 wait in all_reduce 512."


def test_a_rank_without_a_record_is_named_if_no_other_one_is() -> None:
    text = sentence(request(None), [rank(number) for number in (0, 1, 3)])
    assert "(rank 2 is not visible here: on another node, ended, or not yet training); ranks 0, 1 and 3 wait" in text


def test_loader_workers_of_an_evaluation_are_named_too() -> None:
    phase = {"collective_op": 0.0, "phase": float(layout.PHASES.index("evaluation"))}
    text = said(rank(2, 511.0, slots=phase, **loading(STUCK_IN_FILE)))
    assert "waits for its loader worker (pid 7), which waits in a read of /mnt/x; ranks 0, 1 and 3 wait" in text
