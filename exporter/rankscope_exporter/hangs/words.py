"""The text of `rankscope hang`: the blocking ranks, their operations, and the ranks that wait for them.

A rank without a position may run on another node, where it may wait like the others. So it is never said to block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from rankscope.record.group_name import LARGEST, format_ranges, name_ranks
from rankscope_exporter.diagnosis.waits import (
    Operation,
    Position,
    Waits,
    blocking_ranks,
    collectives_behind,
    victims,
    waits,
)
from rankscope_exporter.hangs.flight_recorder import Group

UNKNOWN = "collective"
"""The name of an operation of which only the number is known."""
SETS_SHOWN = 8
"""The number of sets of blocking ranks that are shown."""


class Coverage(NamedTuple):
    """Knowledge of the run's ranks that have no position."""

    world_size: int
    """The run's number of ranks; 0 if it is unknown."""
    ended: Mapping[int, str]
    """The ranks that have ended, with the reason."""
    reasons: tuple[str, str]
    """Why one rank, and several ranks, may not be visible."""
    advice: str
    """How to see the others."""


def lines(positions: Sequence[Position], groups: Mapping[str, Group], coverage: Coverage) -> Iterator[str]:
    """Yield a headline, a line for each set of blocking ranks, and a line for the ranks that are not visible here."""
    waiting = waits(positions, {name: group.ranks for name, group in groups.items()})
    late = blocking_ranks(waiting)
    by_rank = {one.rank: one for one in positions}
    every = by_rank.keys() | {rank for group in groups.values() for rank in group.ranks}
    every |= {*range(coverage.world_size if coverage.world_size <= LARGEST else 0)}
    unseen = frozenset(every - by_rank.keys() - coverage.ended.keys())
    known = [ranks for ranks in late if not ranks <= unseen]
    waited_for = unseen & frozenset[int]().union(*late)
    if known:
        blocking = sorted(rank for ranks in known for rank in ranks)
        yield f"{name_ranks(blocking)} of {len(every)} {'block' if len(blocking) > 1 else 'blocks'} the other ranks."
        sets = _joined(known, by_rank)
        for ranks in sets[:SETS_SHOWN]:
            why = _why(ranks, by_rank, groups, coverage.ended)
            yield f"{why} {_waiting(ranks, waiting, by_rank, groups)}"
        if len(sets) > SETS_SHOWN:
            yield f"{len(sets) - SETS_SHOWN} more are not shown."
    elif waited_for:
        others = "ranks that are" if len(waited_for) > 1 else "a rank that is"
        yield f"The ranks here wait for {others} not visible here."
    else:
        yield from _without_blocking_rank(positions, groups, is_whole=not unseen)
    for rank, group, lacks in [*_hosts_behind(by_rank, groups, frozenset[int]().union(*late))][:SETS_SHOWN]:
        fewer = f"{lacks:.0f} collective{'s' * (lacks != 1.0)} fewer than the others of {describe_group(groups[group])}"
        yield f"Rank {rank} waits too, but has issued {fewer}, which wait in the same one: its process may be stopped."
    if unseen:
        waits_in = _waiting(waited_for, waiting, by_rank, groups) if waited_for and not known else ""
        yield " ".join(filter(None, (_not_visible(unseen, len(every), coverage), waits_in, coverage.advice)))


def _joined(late: Sequence[frozenset[int]], by_rank: Mapping[int, Position]) -> Sequence[frozenset[int]]:
    """Return the sets of blocking ranks, with those in the same collective as one set: any of them may be at fault."""
    joined: dict[tuple[str, float] | frozenset[int], frozenset[int]] = {}
    for ranks in late:
        operation = _shared(ranks, by_rank)
        key = (operation.group, operation.number) if operation and operation.has_started else ranks
        joined[key] = joined.get(key, frozenset()) | ranks
    return [*joined.values()]


def _shared(ranks: frozenset[int], by_rank: Mapping[int, Position]) -> Operation | None:
    """Return the collective that all these ranks are in."""
    operations = [by_rank[rank].waits_in if rank in by_rank else None for rank in ranks]
    first = operations[0]
    if first is None or first.is_pairwise or first.peer is not None:
        return None
    is_same = all(one and (one.group, one.number) == (first.group, first.number) for one in operations)
    return first if is_same else None


def _hosts_behind(
    by_rank: Mapping[int, Position], groups: Mapping[str, Group], late: Set[int]
) -> Iterator[tuple[int, str, float]]:
    """Yield waiting ranks whose hosts have issued fewer collectives than all others of a group, with group and number.

    All devices of the group are in the same collective, which the rank has issued. So its device does not stop its host
    more than that of another rank. That is how a second stopped process shows that waits for the first one.
    """
    found = set[int]()
    for name, group in groups.items():
        if any(rank not in by_rank for rank in group.ranks):
            continue
        members = [by_rank[rank] for rank in group.ranks if rank not in late]
        most = max((one.issued.get(name, 0.0) for one in members), default=0.0)
        behind = [one for one in members if one.issued.get(name, 0.0) < most]
        if len(behind) == 1 < len(members) and len({one.completed.get(name) for one in members}) == 1:
            [one] = behind
            if one.rank not in found and one.issued.get(name, 0.0) > one.completed.get(name, most):
                found.add(one.rank)
                yield one.rank, name, most - one.issued[name]


def _not_visible(unseen: frozenset[int], total: int, coverage: Coverage) -> str:
    are_several = len(unseen) > 1
    are = "are" if are_several else "is"
    return f"{name_ranks([*unseen])} of {total} {are} not visible here: {coverage.reasons[are_several]}."


def _waiting(late: frozenset[int], waiting: Waits, by_rank: Mapping[int, Position], groups: Mapping[str, Group]) -> str:
    """Return the ranks that wait, with the operation of the first one that waits directly: if possible a victim."""
    directly = [rank for rank, others in sorted(waiting.items()) if others & late]
    first = min(directly, key=lambda rank: (rank in late, rank))
    operation = by_rank[first].waits_in
    every = [*victims(waiting, late)]
    late_ranks = "them" if len(late) > 1 else "it"
    more = f"; in total {len(every)} ranks wait for {late_ranks}, directly or through others" if len(every) > 1 else ""
    return f"Rank {first} waits in {describe_operation(operation, groups)}{more}." if operation else ""


def _why(
    ranks: frozenset[int], by_rank: Mapping[int, Position], groups: Mapping[str, Group], ended: Mapping[int, str]
) -> str:
    if len(ranks) > 1 and (operation := _shared(ranks, by_rank)):
        described = describe_operation(operation, groups)
        return f"{name_ranks([*ranks])} have not completed {described}, which all ranks have issued."
    if len(ranks) > 1:
        return f"{name_ranks([*ranks])} wait for each other: their order of operations differs, or their link fails."
    [rank] = ranks
    if rank not in by_rank:
        return f"Rank {rank} has ended ({ended[rank]})."
    operation = by_rank[rank].waits_in
    if operation is None:
        behind = collectives_behind(rank, {one.rank: one.issued for one in by_rank.values()})
        if not behind:
            return f"Rank {rank} waits in no operation: it has not issued the next one."
        lacks = f"{behind:.0f} collective{'s' * (behind != 1.0)} fewer"
        return f"Rank {rank} waits in no operation: it has issued {lacks} than the others."
    described = describe_operation(operation, groups)
    if not operation.has_started:
        return f"Rank {rank} has issued {described}, but an earlier kernel on its device does not end."
    return f"Rank {rank} has not completed {described}, which all ranks have issued."


def describe_operation(operation: Operation, groups: Mapping[str, Group]) -> str:
    """Return an operation with its number and group."""
    if operation.peer is not None:
        peers = operation.peer, *operation.more_peers
        return f"a {operation.name} with rank{'s' * bool(operation.more_peers)} {format_ranges(peers)}"
    if operation.is_pairwise:
        return f"a {operation.name} of {describe_group(groups[operation.group])}"
    return f"{operation.name} {operation.number:.0f} of {describe_group(groups[operation.group])}"


def describe_group(group: Group) -> str:
    """Return a group's description and ranks."""
    return f"{group.description or 'group ' + group.name} (ranks {format_ranges(group.ranks)})"


def _different_operations(positions: Sequence[Position]) -> Iterator[tuple[str, float, Mapping[str, Sequence[int]]]]:
    """Yield the collectives in which ranks wait in different operations, with the ranks by operation."""
    called: dict[tuple[str, float], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for one in positions:
        operation = one.waits_in
        if operation and not operation.is_pairwise and operation.peer is None and operation.name != UNKNOWN:
            called[operation.group, operation.number][operation.name].append(one.rank)
    yield from ((*key, names) for key, names in called.items() if len(names) > 1)


def describe_disagreement(group: Group, number: float, called: Mapping[str, Sequence[int]]) -> str:
    """Return that ranks call different operations, or give different sizes, for a collective."""
    each = ", ".join(f"{name_ranks(ranks)}: {name}" for name, ranks in called.items())
    return f"Ranks call different operations for collective {number:.0f} of {describe_group(group)}: {each}."


def _without_blocking_rank(
    positions: Sequence[Position], groups: Mapping[str, Group], *, is_whole: bool
) -> Iterator[str]:
    stuck = [one for one in positions if one.waits_in]
    if not stuck:
        none = f"none of the {len(positions)} ranks{'' if is_whole else ' here'} waits in an operation."
        yield f"No hang in a collective: {none}" if is_whole else none.capitalize()
        return
    if different := [*_different_operations(stuck)]:
        for group, number, called in different:
            yield describe_disagreement(groups[group], number, called)
        return
    no_rank = "No rank is late" if is_whole else "No rank here is late"
    yield f"{no_rank}: {len(stuck)} of {len(positions)} ranks wait in operations that all others have issued."
    first = min(stuck, key=lambda one: one.rank)
    assert first.waits_in is not None
    yield f"Rank {first.rank} is in {describe_operation(first.waits_in, groups)}."
    yield "Likely a network fault, or a kernel that does not finish: check the links, and the GPUs for XID errors."
