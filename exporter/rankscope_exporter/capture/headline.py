"""The first sentence of a capture: which rank stands where, why, and what the others wait in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rankscope.cli.printable import printable
from rankscope.cli.stack_groups import describe_difference, group_stacks
from rankscope.record.quantities import count, duration
from rankscope_exporter.capture.process_state import ThreadState, storage_file
from rankscope_exporter.capture.ranks import CapturedRank
from rankscope_exporter.capture.request import Found, Request
from rankscope_exporter.diagnosis.detectors import crash
from rankscope_exporter.diagnosis.standstill import FINISHED, INSIDE, STOPPED
from rankscope_exporter.diagnosis.waits import Operation, Position, blocking_ranks, waits
from rankscope_exporter.hangs.records import HANGS_AFTER, PAIRWISE, find_positions, ranks_of_groups

OPERATIONS_NAMED, RANKS_NAMED = 3, 8
DISK, STOPPED_STATES = "D", ("T", "t")
"""The states of a process that waits in the kernel and cannot be interrupted, and of one that is stopped."""


def sentence(request: Request, ranks: Sequence[CapturedRank]) -> str:
    """Return the sentence, with a full stop."""
    living = [one for one in ranks if one.recorded.snapshot.alive]
    positions = find_positions([one.recorded for one in living], ranks_of_groups([one.recorded for one in living]))
    rank = _blamed(request.found, living, positions)
    parts = [_subject(request, rank, ranks)]
    if details := [*_details(rank, positions)] if rank else []:
        parts[0] += f": it {' and '.join(details)}"
    elif request.found and request.found.cause == INSIDE and (different := different_stacks(living)):
        parts[0] += f": {different[0].lower()}{different[1:].removesuffix('.')}"
    others = [one for one in positions if rank is None or one.rank != rank.number]
    parts += [text] if (text := _waiting(others)) else []
    return printable("; ".join(parts)) + "."


def _blamed(found: Found | None, living: Sequence[CapturedRank], positions: Sequence[Position]) -> CapturedRank | None:
    """Return the rank that the diagnosis names, or else the only one that blocks the others by the records."""
    if found and found.kind == crash.KIND:
        return None
    number = found.rank if found else None
    if found is None:
        late = blocking_ranks(waits(positions, ranks_of_groups([one.recorded for one in living])))
        number = next(iter(late[0])) if len(late) == 1 and len(late[0]) == 1 else None
    return next((one for one in living if one.number == number), None)


def _subject(request: Request, rank: CapturedRank | None, ranks: Sequence[CapturedRank]) -> str:
    found = request.found
    if found and found.kind == crash.KIND:
        return f"{found.short} {duration(found.seconds)} ago"
    if found and found.cause in (INSIDE, STOPPED, FINISHED):
        return f"{found.short} (no progress for {duration(found.seconds)})"
    if found:
        return f"{found.short} for {duration(found.seconds)}"
    living = [one.recorded.snapshot for one in ranks if one.recorded.snapshot.alive]
    if rank:
        snapshot = rank.recorded.snapshot
        since = duration(snapshot.read_monotonic - snapshot.phase_since)
        return f"{rank.wanted.place} is in {snapshot.phase} for {since}, and other ranks wait for it"
    if ended := [one for one in ranks if one.recorded.snapshot.exit_reason in ("killed", "exception")]:
        how = "was killed" if ended[0].recorded.snapshot.exit_reason == "killed" else "ended with an exception"
        return f"{ended[0].wanted.place} {how}"
    if not living:
        return "No rank on this node is alive"
    seconds = min(one.read_monotonic - one.last_progress for one in living)
    if seconds < HANGS_AFTER:
        return f"The run may not hang: a rank has made progress {seconds:.1f} s ago"
    return f"No rank on this node has made progress for {duration(seconds)}"


def _details(rank: CapturedRank, positions: Sequence[Position]) -> Iterator[str]:
    """Yield where the rank stands, as ends of a sentence that begins with `it`."""
    own = next((one.waits_in for one in positions if one.rank == rank.number), None)
    if own and rank.recorded.snapshot.open_operation:
        yield f"is in {_operation(own)}"
    if frame := rank.frame:
        yield f"stands in {frame}"
    main = rank.process.main if rank.process else None
    if main is None:
        return
    if wait := _storage(main):
        yield f"waits in {wait}"
    if main.number in rank.gil_waiters:
        yield "waits for the GIL, which another thread holds"
    elif waiters := len(rank.gil_waiters):
        yield f"keeps {count(waiters, 'other thread')} waiting for the GIL"
    if rank.recorded.snapshot.phase == "data_wait" and rank.waits_for_workers:
        yield _workers(rank)


def _storage(thread: ThreadState) -> str:
    """Return what a thread waits for in storage; empty if it does not."""
    if file := storage_file(thread.call):
        return f"a {thread.call.partition(' ')[0]} of {file}"
    in_kernel = f" ({thread.wait_channel})" if thread.wait_channel else ""
    return f"the kernel without interruption, as for storage{in_kernel}" if thread.state.startswith(DISK) else ""


def _workers(rank: CapturedRank) -> str:
    """Return that it waits for its loader workers, with the one that most probably does not answer."""
    workers = [one.main for one in rank.process.workers if one.main] if rank.process else []
    if not workers:
        return "waits for loader workers that are gone"
    worker = max(workers, key=lambda one: (one.state[:1] in STOPPED_STATES, bool(_storage(one))))
    wait = _storage(worker) or worker.call
    does = f"waits in {wait}" if wait else "runs" if worker.state.startswith("R") else "sleeps"
    does = "is stopped" if worker.state[:1] in STOPPED_STATES else does
    which = "worker" if len(workers) == 1 else f"workers, of {len(workers)} one"
    return f"waits for its loader {which} (pid {worker.number}), which {does}"


def different_stacks(living: Sequence[CapturedRank]) -> str:
    """Return in one sentence how the stacks of the ranks differ; empty if fewer than two have some."""
    texts = {one.number: one.stacks for one in living if one.stacks}
    return describe_difference(group_stacks(texts)) if len(texts) > 1 else ""


def _waiting(positions: Sequence[Position]) -> str:
    """Return what other ranks wait in: `ranks 0, 1 and 3 wait in all_reduce 512`."""
    by_operation: dict[str, list[int]] = defaultdict(list)
    for one in positions:
        if one.waits_in:
            by_operation[_operation(one.waits_in)].append(one.rank)
    ordered = sorted(by_operation.items(), key=lambda item: (-len(item[1]), item[0]))
    return "; ".join(
        f"{_ranks(numbers)} wait{'s' * (len(numbers) == 1)} in {name}" for name, numbers in ordered[:OPERATIONS_NAMED]
    )


def _operation(one: Operation) -> str:
    return one.name if one.name in PAIRWISE else f"{one.name} {one.number:.0f}"


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) > RANKS_NAMED:
        return f"{len(numbers)} ranks"
    *most, last = map(str, sorted(numbers))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
