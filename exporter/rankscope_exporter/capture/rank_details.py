"""The words for where one rank stands and what it waits for, as ends of a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankscope.record.quantities import count
from rankscope_exporter.capture.process_state import ProcessState
from rankscope_exporter.capture.ranks import CapturedRank
from rankscope_exporter.capture.thread_waits import other_wait, storage_wait
from rankscope_exporter.diagnosis.waits import Operation, Position
from rankscope_exporter.hangs.records import PAIRWISE

WORKER = "pt_data_worker"
"""The name that torch gives to its loader workers, since 2.6."""
IDLE = "waits in poll"
"""What a loader worker does that has no work."""
ENDED = ("Z", "X")
"""The states of a process that has ended."""


def details(rank: CapturedRank | None, positions: Sequence[Position], others: Sequence[CapturedRank]) -> Iterator[str]:
    """Yield where the rank stands, as ends of a sentence that begins with `it`."""
    if rank is None:
        return
    own = next((one.waits_in for one in positions if one.rank == rank.number), None)
    is_in_operation = own is not None and bool(rank.recorded.snapshot.open_operation)
    if own and is_in_operation:
        yield f"is in {operation_name(own)}"
    if frame := rank.frame:
        yield f"stands in {frame}"
    yield from _by_kernel(rank, others, is_in_operation=is_in_operation)


def _by_kernel(rank: CapturedRank, others: Sequence[CapturedRank], *, is_in_operation: bool) -> Iterator[str]:
    """Yield what the kernel shows of the rank's process."""
    main = rank.process.main if rank.process else None
    if main is None or rank.is_stopped:
        return
    if wait := storage(rank):
        yield f"waits {wait}"
    if main.number in rank.gil_waiters:
        yield "waits for the GIL, which another thread holds"
    elif waiters := len(rank.gil_waiters):
        yield f"keeps {count(waiters, 'other thread')} waiting for the GIL"
    elif rank.waits_for_workers:
        yield _workers(rank)
    elif not (wait or is_in_operation) and (wait := other_wait(main)):
        yield f"waits {wait}"
        if not any(map(_of_threads, others)) and (waits := _of_threads(rank)):
            yield f"has a thread that waits {waits[0]}"


def _of_threads(rank: CapturedRank) -> Sequence[str]:
    """Return what threads of a rank wait for in storage, without the main one."""
    threads = rank.process.threads[1:] if rank.process else ()
    return [wait for one in threads if (wait := storage_wait(one))]


def storage(rank: CapturedRank) -> str:
    """Return what the main thread of a rank waits for in storage, after `waits`; empty if it does not."""
    main = rank.process.main if rank.process else None
    return storage_wait(main) if main and not rank.is_stopped else ""


def _workers(rank: CapturedRank) -> str:
    """Return that it waits for its loader workers, with the one that does not answer if only one is not idle."""
    children = [one for one in rank.process.workers if one.main] if rank.process else []
    workers = [one for one in children if one.main and one.main.name.startswith(WORKER)] or children
    if not workers:
        return "waits for loader workers that are gone"
    stuck = [one for one in workers if one.is_stopped or (one.main and storage_wait(one.main))]
    busy = stuck or [one for one in workers if _does(one) != IDLE]
    if not stuck and len(workers) > 1 != len(busy):
        return f"waits for its {len(workers)} loader workers"
    one = (busy or workers)[0]
    which = "worker" if len(workers) == 1 else f"workers, of {len(workers)} one"
    return f"waits for its loader {which} (pid {one.pid}), which {_does(one)}"


def _does(worker: ProcessState) -> str:
    """Return what a loader worker does."""
    if worker.is_stopped:
        return "is stopped"
    if worker.main is None or worker.main.state.startswith(ENDED):
        return "has ended"
    if worker.main.state.startswith("R"):
        return "runs"
    wait = storage_wait(worker.main) or other_wait(worker.main) or (worker.main.call and f"in {worker.main.call}")
    return f"waits {wait}" if wait else "sleeps"


def operation_name(one: Operation) -> str:
    """Return an operation with its number: `all_reduce 512`."""
    return one.name if one.name in PAIRWISE else f"{one.name} {one.number:.0f}"
