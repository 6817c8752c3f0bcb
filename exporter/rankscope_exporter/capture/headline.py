"""The first sentence of a capture: which rank stands where, why, and what the others wait in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rankscope.cli.printable import printable
from rankscope.cli.stack_groups import StackGroup, group_stacks
from rankscope.record.quantities import count, duration
from rankscope_exporter.capture.process_state import ThreadState, storage_file
from rankscope_exporter.capture.ranks import CapturedRank
from rankscope_exporter.capture.request import Found, Request
from rankscope_exporter.diagnosis.detectors import crash
from rankscope_exporter.diagnosis.standstill import FINISHED, INSIDE, STOPPED
from rankscope_exporter.diagnosis.waits import Operation, Position, blocking_ranks, waits
from rankscope_exporter.hangs.records import HANGS_AFTER, PAIRWISE, find_positions, ranks_of_groups
from rankscope_exporter.report.describe import FAILED

OPERATIONS_NAMED, RANKS_NAMED = 3, 8
DISK, STOPPED_STATES = "D", ("T", "t")
"""The states of a process that waits in the kernel and cannot be interrupted, and of one that is stopped."""


def sentence(request: Request, ranks: Sequence[CapturedRank]) -> str:
    """Return the sentence, with a full stop."""
    living = [one for one in ranks if one.recorded.snapshot.alive]
    positions = find_positions([one.recorded for one in living], ranks_of_groups([one.recorded for one in living]))
    rank = _blamed(request.found, living, positions)
    different = None if rank or _is_crash(request.found) else _different(living)
    parts = [_subject(request, rank, different, ranks)]
    if details := [*_details(rank or different, positions)]:
        parts[0] += f": it {' and '.join(details)}"
    others = [one for one in living if one not in (rank, different)]
    waiting = _waiting([one for one in positions if one.rank in {other.number for other in others}])
    parts += [text] if (text := waiting or _standing(others)) else []
    return printable("; ".join(parts)) + "."


def _is_crash(found: Found | None) -> bool:
    return found is not None and found.kind == crash.KIND


def _blamed(found: Found | None, living: Sequence[CapturedRank], positions: Sequence[Position]) -> CapturedRank | None:
    """Return the rank that the diagnosis names, or else the only one that blocks the others by the records."""
    if found and (found.kind == crash.KIND or found.cause == INSIDE):
        return None
    number = found.rank if found else None
    if found is None:
        late = blocking_ranks(waits(positions, ranks_of_groups([one.recorded for one in living])))
        number = next(iter(late[0])) if len(late) == 1 and len(late[0]) == 1 else None
    return next((one for one in living if one.number == number), None)


def _different(living: Sequence[CapturedRank]) -> CapturedRank | None:
    """Return the only rank that holds the GIL, waits for storage or stands elsewhere than all others; None if unclear.

    The collectives name none, such as on a device whose hosts have issued equally many.
    """
    holding = [one for one in living if one.gil_waiters]
    storing = [one for one in living if one.process and one.process.main and _storage(one.process.main)]
    groups = _groups(living)
    is_alone = len(groups) == 2 and len(groups[0].ranks) == 1 < len(groups[1].ranks) and groups[0].verb == "stand"
    alone = [one for one in living if is_alone and one.number == groups[0].ranks[0]]
    return next((found[0] for found in (holding, storing, alone) if len(found) == 1 and len(living) > 1), None)


def _groups(living: Sequence[CapturedRank]) -> Sequence[StackGroup]:
    operations = {one.number: one.recorded.snapshot.open_operation for one in living}
    texts = {one.number: one.stacks for one in living if one.stacks}
    return group_stacks(texts, operations={rank: name for rank, name in operations.items() if name}) if texts else ()


def _subject(
    request: Request, rank: CapturedRank | None, different: CapturedRank | None, ranks: Sequence[CapturedRank]
) -> str:
    found = request.found
    if found and found.kind == crash.KIND:
        return f"{found.short} {duration(found.seconds)} ago"
    if different:
        seconds = found.seconds if found else _idle([different])
        return f"{different.wanted.place} differs from the other ranks (no progress for {duration(seconds)})"
    if found and found.cause in (INSIDE, STOPPED, FINISHED):
        return f"{found.short} (no progress for {duration(found.seconds)})"
    if found:
        return f"{found.short} for {duration(found.seconds)}"
    if rank:
        snapshot = rank.recorded.snapshot
        since = duration(snapshot.read_monotonic - snapshot.phase_since)
        return f"{rank.wanted.place} is in {snapshot.phase} for {since}, and other ranks wait for it"
    if ended := [one for one in ranks if one.recorded.snapshot.exit_reason in FAILED]:
        reason = ended[0].recorded.snapshot.exit_reason or ""
        return f"{ended[0].wanted.place} {FAILED[reason][0]}"
    living = [one for one in ranks if one.recorded.snapshot.alive]
    if not living:
        return "No rank on this node is alive"
    if (seconds := _idle(living)) < HANGS_AFTER:
        return f"The run may not hang: a rank has made progress {seconds:.1f} s ago"
    return f"No rank on this node has made progress for {duration(seconds)}"


def _idle(living: Sequence[CapturedRank]) -> float:
    """Return the seconds since any of these ranks made progress."""
    snapshots = [one.recorded.snapshot for one in living]
    return min(one.read_monotonic - one.last_progress for one in snapshots)


def _details(rank: CapturedRank | None, positions: Sequence[Position]) -> Iterator[str]:
    """Yield where the rank stands, as ends of a sentence that begins with `it`."""
    if rank is None:
        return
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


def _standing(ranks: Sequence[CapturedRank]) -> str:
    """Return where ranks stand that wait in no known operation: `ranks 0 and 1 stand in train.py:7 in train`."""
    by_place: dict[str, list[int]] = defaultdict(list)
    for one in ranks:
        if frame := one.frame:
            by_place[str(frame)].append(one.number)
    ordered = sorted(by_place.items(), key=lambda item: (-len(item[1]), item[0]))
    return "; ".join(
        f"{_ranks(numbers)} stand{'s' * (len(numbers) == 1)} in {place}"
        for place, numbers in ordered[:OPERATIONS_NAMED]
    )


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
