"""The first sentence of a capture: which rank stands where, why, and what the others wait in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rankscope.cli.printable import printable
from rankscope.cli.stack_groups import StackGroup, group_stacks
from rankscope.record.quantities import duration
from rankscope_exporter.capture.rank_details import details, operation_name, storage
from rankscope_exporter.capture.ranks import CapturedRank
from rankscope_exporter.capture.request import Found, Request
from rankscope_exporter.diagnosis.detectors import crash
from rankscope_exporter.diagnosis.standstill import FINISHED, INSIDE, STOPPED
from rankscope_exporter.diagnosis.waits import (
    Position,
    blocking_ranks,
    collectives_behind,
    waits,
    with_unused_groups,
)
from rankscope_exporter.hangs.records import HANGS_AFTER, PAIRWISE, find_positions, ranks_of_groups
from rankscope_exporter.hangs.words import UNKNOWN
from rankscope_exporter.report.describe import FAILED

OPERATIONS_NAMED, RANKS_NAMED = 3, 8
EXCEPTION = "exception"
"""The cause of a crash whose exception says nothing about memory."""


def sentence(request: Request, ranks: Sequence[CapturedRank]) -> str:
    """Return the sentence, with a full stop."""
    living = [one for one in ranks if one.recorded.snapshot.alive]
    positions = find_positions([one.recorded for one in living], ranks_of_groups([one.recorded for one in living]))
    rank = _blamed(request.found, living, positions)
    is_unclear = rank is None and (request.found is None or request.found.cause == INSIDE)
    unlike = _in_another_operation(living, positions) if is_unclear else None
    different = _different(living) if is_unclear and not unlike else None
    named = rank or unlike or different
    others = [one for one in living if one is not named]
    subject = _several(request.found, living, positions) if is_unclear and not named else ""
    subject = subject or (_unlike(request.found, unlike) if unlike else _subject(request, rank, different, ranks))
    *most, last = [*details(named, positions, others)] or [""]
    if last:
        subject += f": it {' and '.join(filter(None, (', '.join(most), last)))}"
    operations = {one.rank for one in positions if one.waits_in}
    standing = [one for one in others if one.is_stopped or one.number not in operations]
    waiting = {one.number for one in others if one not in standing}
    parts = (subject, _standing(standing), _waiting([one for one in positions if one.rank in waiting]))
    return printable("; ".join(filter(None, parts))) + "."


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
    called = _called(living, positions)
    alone = [ranks[0] for ranks in called.values() if len(ranks) == 1] if len(called) == 2 else []
    return next((one for one in living if [one.number] == alone), None)


def _called(living: Sequence[CapturedRank], positions: Sequence[Position]) -> Mapping[str, Sequence[int]]:
    """Return the ranks by their operation; nothing unless all are in the same collective of the same group."""
    by_name: dict[str, list[int]] = defaultdict(list)
    own = [(one.rank, one.waits_in) for one in positions if one.waits_in]
    for rank, wait in own:
        by_name[wait.name].append(rank)
    is_same = len({(wait.group, wait.number) for _, wait in own}) == 1 and len(own) == len(living)
    return by_name if is_same and not {*PAIRWISE, UNKNOWN} & by_name.keys() else {}


def _several(found: Found | None, living: Sequence[CapturedRank], positions: Sequence[Position]) -> str:
    """Return what several ranks do that none of them is to blame for; empty without such ranks."""
    late = blocking_ranks(waits(positions, ranks_of_groups([one.recorded for one in living])))
    seconds = duration(found.seconds if found else _idle(living)) if living else ""
    if len(_called(living, positions)) > 1:
        return f"The ranks have called different collectives (no progress for {seconds})"
    if len(late) == 1 and 1 < len(late[0]) <= RANKS_NAMED:
        return f"R{_ranks([*late[0]])[1:]} wait for each other (no progress for {seconds})"
    return ""


def _unlike(found: Found | None, rank: CapturedRank) -> str:
    seconds = duration(found.seconds if found else _idle([rank]))
    return f"{rank.wanted.place} has called another collective than the other ranks (no progress for {seconds})"


def _different(living: Sequence[CapturedRank]) -> CapturedRank | None:
    """Return the only rank that holds the GIL, waits for storage or stands elsewhere than all others; None if unclear.

    The collectives name none, such as on a device whose hosts have issued equally many.
    """
    holding = [one for one in living if one.gil_waiters]
    storing = [one for one in living if storage(one)]
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
        return _after_finished(f"{found.short} {duration(found.seconds)} ago", found.cause, ranks)
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
    if failed := _failed(ranks):
        reason = failed.recorded.snapshot.exit_reason or ""
        why = ": it lost its connection to another rank" if _has_lost_peer(failed) else ""
        return _after_finished(f"{failed.wanted.place} {FAILED[reason][0]}{why}", reason, ranks)
    living = [one for one in ranks if one.recorded.snapshot.alive]
    if not living:
        return "No rank on this node is alive"
    if (seconds := _idle(living)) < HANGS_AFTER:
        return f"The run may not hang: a rank has made progress {seconds:.1f} s ago"
    return f"No rank on this node has made progress for {duration(seconds)}{_hidden(living, ranks)}"


def _hidden(living: Sequence[CapturedRank], ranks: Sequence[CapturedRank]) -> str:
    """Return the ranks of the same groups that have no record here, as an addition in parentheses."""
    members = {rank for group in ranks_of_groups([one.recorded for one in living]).values() for rank in group}
    hidden = members - {one.number for one in ranks}
    if not 0 < len(hidden) <= RANKS_NAMED:
        return ""
    are = "is" if len(hidden) == 1 else "are"
    return f" ({_ranks([*hidden])} {are} not visible here: on another node, ended, or not yet training)"


def _failed(ranks: Sequence[CapturedRank]) -> CapturedRank | None:
    """Return the rank that was killed first, or else ended first with an exception, if possible not by a lost peer."""
    failed = [one for one in ranks if one.recorded.snapshot.exit_reason in FAILED]
    return min(failed, key=_precedence, default=None)


def _precedence(one: CapturedRank) -> tuple[bool, bool, float]:
    return one.recorded.snapshot.exit_reason == EXCEPTION, _has_lost_peer(one), _ended_at(one)


def _has_lost_peer(one: CapturedRank) -> bool:
    snapshot = one.recorded.snapshot
    return snapshot.exit_reason == EXCEPTION and bool(snapshot["lost_peer"])


def _after_finished(text: str, cause: str, ranks: Sequence[CapturedRank]) -> str:
    """Return the text about an exception, after the rank that finished before and did fewer collectives or steps.

    gloo then ends the others with an exception: their peer has closed the connection.
    """
    failed = _failed(ranks)
    if cause != EXCEPTION or failed is None:
        return text
    issued = with_unused_groups({one.number: one.recorded.snapshot.issued for one in ranks})
    finished = [one for one in ranks if one.recorded.snapshot.exit_reason == FINISHED]
    for first in sorted(finished, key=_ended_at):
        is_behind = collectives_behind(first.number, issued) > 0.0
        fewer = "collectives" if is_behind else "steps"
        has_less_steps = first.recorded.snapshot["steps"] < failed.recorded.snapshot["steps"]
        if _ended_at(first) <= _ended_at(failed) and (is_behind or has_less_steps):
            place = first.wanted.place
            return f"{place} finished with fewer {fewer} than the other ranks, and then {text[0].lower()}{text[1:]}"
    return text


def _ended_at(rank: CapturedRank) -> float:
    """Return when a rank ended; of one that was killed, when it last made progress."""
    snapshot = rank.recorded.snapshot
    return snapshot.unix_field("ended_unix") if snapshot["ended_unix"] else snapshot.unix(snapshot.last_progress)


def _idle(living: Sequence[CapturedRank]) -> float:
    """Return the seconds since any of these ranks made progress."""
    snapshots = [one.recorded.snapshot for one in living]
    return min(one.read_monotonic - one.last_progress for one in snapshots)


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
            by_operation[operation_name(one.waits_in)].append(one.rank)
    ordered = sorted(by_operation.items(), key=lambda item: (-len(item[1]), item[0]))
    return "; ".join(
        f"{_ranks(numbers)} wait{'s' * (len(numbers) == 1)} in {name}" for name, numbers in ordered[:OPERATIONS_NAMED]
    )


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) > RANKS_NAMED:
        return f"{len(numbers)} ranks"
    *most, last = map(str, sorted(numbers))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
