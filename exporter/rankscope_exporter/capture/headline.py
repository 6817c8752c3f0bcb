"""The first sentence of a capture: which rank stands where, why, and what the others wait in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rankscope.cli.printable import printable
from rankscope.cli.stack_groups import StackGroup, group_stacks
from rankscope.record.quantities import count, duration
from rankscope_exporter.capture.process_state import ProcessState
from rankscope_exporter.capture.ranks import CapturedRank
from rankscope_exporter.capture.request import Found, Request
from rankscope_exporter.capture.thread_waits import other_wait, storage_wait
from rankscope_exporter.diagnosis.detectors import crash
from rankscope_exporter.diagnosis.standstill import FINISHED, INSIDE, STOPPED
from rankscope_exporter.diagnosis.waits import (
    Operation,
    Position,
    blocking_ranks,
    collectives_behind,
    waits,
    with_unused_groups,
)
from rankscope_exporter.hangs.records import HANGS_AFTER, PAIRWISE, find_positions, ranks_of_groups
from rankscope_exporter.report.describe import FAILED

OPERATIONS_NAMED, RANKS_NAMED = 3, 8
EXCEPTION = "exception"
"""The cause of a crash whose exception says nothing about memory."""
WORKER = "pt_data_worker"
"""The name that torch gives to its loader workers, since 2.6."""
IDLE = "waits in poll"
"""What a loader worker does that has no work."""
ENDED = ("Z", "X")
"""The states of a process that has ended."""


def sentence(request: Request, ranks: Sequence[CapturedRank]) -> str:
    """Return the sentence, with a full stop."""
    living = [one for one in ranks if one.recorded.snapshot.alive]
    positions = find_positions([one.recorded for one in living], ranks_of_groups([one.recorded for one in living]))
    rank = _blamed(request.found, living, positions)
    unlike = None if rank or _is_crash(request.found) else _in_another_operation(living, positions)
    different = None if rank or unlike or _is_crash(request.found) else _different(living)
    named = rank or unlike or different
    ring = "" if rank else _ring(living, positions)
    others = [one for one in living if one is not named]
    subject = _unlike(request.found, unlike) if unlike else _subject(request, rank, different, ranks, ring)
    if details := [*_details(named, positions, others)]:
        subject += f": it {' and '.join(details)}"
    operations = {one.rank for one in positions if one.waits_in}
    standing = [one for one in others if one.is_stopped or one.number not in operations]
    waiting = {one.number for one in others if one not in standing}
    parts = (subject, _standing(standing), _waiting([one for one in positions if one.rank in waiting]))
    return printable("; ".join(filter(None, parts))) + "."


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


def _in_another_operation(living: Sequence[CapturedRank], positions: Sequence[Position]) -> CapturedRank | None:
    """Return the only rank that is in another operation than the others for the same collective of their group."""
    own = [(one.rank, one.waits_in) for one in positions if one.waits_in and one.waits_in.name not in PAIRWISE]
    if len(own) < max(len(living), 3) or len({(wait.group, wait.number) for _, wait in own}) > 1:
        return None
    names = [wait.name for _, wait in own]
    alone = {rank for rank, wait in own if names.count(wait.name) == 1}
    return next((one for one in living if {one.number} == alone and len({*names}) == 2), None)


def _ring(living: Sequence[CapturedRank], positions: Sequence[Position]) -> str:
    """Return the ranks that block the others and wait for each other, after a colon; empty without any."""
    late = blocking_ranks(waits(positions, ranks_of_groups([one.recorded for one in living])))
    return f": {_ranks([*late[0]])} wait for each other" if len(late) == 1 < len(late[0]) else ""


def _unlike(found: Found | None, rank: CapturedRank) -> str:
    seconds = duration(found.seconds if found else _idle([rank]))
    return f"{rank.wanted.place} has called another collective than the other ranks (no progress for {seconds})"


def _different(living: Sequence[CapturedRank]) -> CapturedRank | None:
    """Return the only rank that holds the GIL, waits for storage or stands elsewhere than all others; None if unclear.

    The collectives name none, such as on a device whose hosts have issued equally many.
    """
    holding = [one for one in living if one.gil_waiters]
    storing = [one for one in living if _storage(one)]
    groups = _groups(living)
    is_alone = len(groups) == 2 and len(groups[0].ranks) == 1 < len(groups[1].ranks) and groups[0].verb == "stand"
    alone = [one for one in living if is_alone and one.number == groups[0].ranks[0]]
    return next((found[0] for found in (holding, storing, alone) if len(found) == 1 and len(living) > 1), None)


def _groups(living: Sequence[CapturedRank]) -> Sequence[StackGroup]:
    operations = {one.number: one.recorded.snapshot.open_operation for one in living}
    texts = {one.number: one.stacks for one in living if one.stacks}
    return group_stacks(texts, operations={rank: name for rank, name in operations.items() if name}) if texts else ()


def _subject(
    request: Request,
    rank: CapturedRank | None,
    different: CapturedRank | None,
    ranks: Sequence[CapturedRank],
    ring: str,
) -> str:
    found = request.found
    if found and found.kind == crash.KIND:
        first = _finished_behind(found, ranks)
        before = (
            f"{first.wanted.place} finished with fewer collectives than the other ranks, and then " if first else ""
        )
        short = f"{found.short[0].lower()}{found.short[1:]}" if first else found.short
        return f"{before}{short} {duration(found.seconds)} ago"
    if different:
        seconds = found.seconds if found else _idle([different])
        return f"{different.wanted.place} differs from the other ranks (no progress for {duration(seconds)})"
    if found and found.cause in (INSIDE, STOPPED, FINISHED):
        return f"{found.short} (no progress for {duration(found.seconds)}){ring}"
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


def _finished_behind(found: Found, ranks: Sequence[CapturedRank]) -> CapturedRank | None:
    """Return the first rank that finished before another one failed and had issued fewer collectives.

    gloo then ends the others with an exception: their peer has closed the connection.
    """
    if found.cause != EXCEPTION:
        return None
    issued = with_unused_groups({one.number: one.recorded.snapshot.issued for one in ranks})
    failed_at = min((_ended_at(one) for one in ranks if one.recorded.snapshot.exit_reason in FAILED), default=0.0)
    finished = [one for one in ranks if one.recorded.snapshot.exit_reason == FINISHED]
    behind = [one for one in finished if _ended_at(one) <= failed_at and collectives_behind(one.number, issued) > 0.0]
    return min(behind, key=_ended_at, default=None)


def _ended_at(rank: CapturedRank) -> float:
    return rank.recorded.snapshot.unix_field("ended_unix") or 0.0


def _idle(living: Sequence[CapturedRank]) -> float:
    """Return the seconds since any of these ranks made progress."""
    snapshots = [one.recorded.snapshot for one in living]
    return min(one.read_monotonic - one.last_progress for one in snapshots)


def _details(rank: CapturedRank | None, positions: Sequence[Position], others: Sequence[CapturedRank]) -> Iterator[str]:
    """Yield where the rank stands, as ends of a sentence that begins with `it`."""
    if rank is None:
        return
    own = next((one.waits_in for one in positions if one.rank == rank.number), None)
    is_in_operation = own is not None and bool(rank.recorded.snapshot.open_operation)
    if own and is_in_operation:
        yield f"is in {_operation(own)}"
    if frame := rank.frame:
        yield f"stands in {frame}"
    yield from _by_kernel(rank, others, is_in_operation=is_in_operation)


def _by_kernel(rank: CapturedRank, others: Sequence[CapturedRank], *, is_in_operation: bool) -> Iterator[str]:
    """Yield what the kernel shows of the rank's process."""
    main = rank.process.main if rank.process else None
    if main is None or rank.is_stopped:
        return
    if wait := _storage(rank):
        yield f"waits {wait}"
    if main.number in rank.gil_waiters:
        yield "waits for the GIL, which another thread holds"
    elif waiters := len(rank.gil_waiters):
        yield f"keeps {count(waiters, 'other thread')} waiting for the GIL"
    elif rank.recorded.snapshot.phase == "data_wait" and rank.waits_for_workers:
        yield _workers(rank)
    elif not (wait or is_in_operation) and (wait := other_wait(main)):
        yield f"waits {wait}"
        if not any(map(_of_threads, others)) and (waits := _of_threads(rank)):
            yield f"has a thread that waits {waits[0]}"


def _of_threads(rank: CapturedRank) -> Sequence[str]:
    """Return what threads of a rank wait for in storage, without the main one."""
    threads = rank.process.threads[1:] if rank.process else ()
    return [wait for one in threads if (wait := storage_wait(one))]


def _storage(rank: CapturedRank) -> str:
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


def _standing(ranks: Sequence[CapturedRank]) -> str:
    """Return where ranks are that wait in no known operation: `ranks 0 and 1 stand in train.py:7 in train`."""
    by_place: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for one in ranks:
        by_place[_where(one)].append(one.number)
    ordered = sorted(by_place.items(), key=lambda item: (-len(item[1]), item[0]))
    return "; ".join(
        f"{_ranks(numbers)} {verb if len(numbers) == 1 else of_several} {place}"
        for (verb, of_several, place), numbers in ordered[:OPERATIONS_NAMED]
    )


def _where(rank: CapturedRank) -> tuple[str, str, str]:
    """Return the verb for this rank, for several ranks, and the place."""
    if rank.is_stopped:
        return "is", "are", "stopped"
    return (
        ("stands", "stand", f"in {rank.frame}") if rank.frame else ("is", "are", f"in {rank.recorded.snapshot.phase}")
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
