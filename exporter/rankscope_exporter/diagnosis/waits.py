"""The graph of waits between the ranks of a hanging run, and the ranks that block all others.

A rank waits in its first operation that has not completed. In a collective, it waits for the ranks of the group that
have not issued it, and for ranks that have issued it but whose devices are still in an earlier operation. In a send or
receive, it waits for its peer, or if that is unknown, for the ranks of the group that are in no operation of it. The
chain of waits leads to the ranks that wait for no other rank: those block the run.
All other ranks are victims, even if other ranks wait for them.

Both counts are needed. By issued operations alone, a rank with a stuck device looks like the others. By completed
operations alone, early ranks look like late ones. The method is that of the flight recorder's analyzers
(torch.distributed.flight_recorder; NVIDIA's resiliency extension), with the chain added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rankscope.record.group_name import members
from rankscope.record.layout import MAX_GROUPS


@dataclass(frozen=True)
class Operation:
    """The operation that a rank waits in."""

    name: str
    """The name in torch, such as `all_reduce`."""
    group: str
    """The key of its group."""
    number: float
    """The number of the collective within its group."""
    peer: int | None = None
    """The other rank of a send or receive."""
    more_peers: Sequence[int] = ()
    """The other ranks of a batch of sends and receives, without `peer`."""
    is_pairwise: bool = False
    """Whether it is a send or receive. `peer` is None if its other rank is unknown."""
    has_started: bool = True
    """False if other ranks' devices have started it, but the one of this rank has not: it is in an earlier kernel."""


@dataclass(frozen=True)
class Position:
    """The position of one rank. Counts are by group, of collectives that all ranks of the group issue."""

    rank: int
    issued: Mapping[str, float] = field(default_factory=dict)
    completed: Mapping[str, float] = field(default_factory=dict)
    """Groups without a known count are absent."""
    waits_in: Operation | None = None
    """Its first operation that has not completed; None if it does not wait."""


Waits = Mapping[int, frozenset[int]]
"""By rank: the ranks that it waits for directly."""


def waits(positions: Sequence[Position], groups: Mapping[str, Sequence[int]]) -> Waits:
    """Return the ranks that each rank waits for. A rank of a group without a position has issued nothing."""
    by_rank = {one.rank: one for one in positions}
    return {one.rank: frozenset(_waited_for(one, by_rank, groups)) for one in positions}


def _waited_for(one: Position, by_rank: Mapping[int, Position], groups: Mapping[str, Sequence[int]]) -> set[int]:
    operation = one.waits_in
    if operation is None or not operation.has_started:
        return set()
    if operation.peer is not None:
        return {operation.peer, *operation.more_peers}
    others = [rank for rank in groups.get(operation.group, ()) if rank != one.rank]
    if operation.is_pairwise:
        known = {rank for rank in others if rank in by_rank and not _is_in(by_rank[rank], operation.group)}
        return known or {rank for rank in others if rank not in by_rank}
    return {rank for rank in others if rank not in by_rank or not _has_reached(by_rank[rank], operation)}


def _is_in(one: Position, group: str) -> bool:
    return one.waits_in is not None and one.waits_in.group == group


def _has_reached(one: Position, operation: Operation) -> bool:
    """Return whether a rank has reached a collective, and its device as well if its completed operations are known."""
    group, number = operation.group, operation.number
    if one.issued.get(group, 0.0) < number:
        return False
    own = one.waits_in
    is_in_it = own is not None and own.has_started and (own.group, own.number) == (group, number)
    return is_in_it or one.completed.get(group, number) >= number


def with_unused_groups(issued: Mapping[int, Mapping[str, float]]) -> Mapping[int, Mapping[str, float]]:
    """Return the numbers of issued collectives by rank and group, with 0 for groups that a member has not used yet.

    The ranks of a group are known by its name. A rank with as many groups as a record has may have used others.
    """
    ranks = {group: members(group) for counts in issued.values() for group in counts}
    return {
        rank: counts if len(counts) >= MAX_GROUPS else {**_unused(rank, ranks), **counts}
        for rank, counts in issued.items()
    }


def _unused(rank: int, groups: Mapping[str, Sequence[int]]) -> Mapping[str, float]:
    return {group: 0.0 for group, ranks in groups.items() if rank in ranks}


def unfinished_group(rank: int, issued: Mapping[int, Mapping[str, float]]) -> str | None:
    """Return the first group in which a rank has issued a collective that another rank has not; None without one.

    `issued` is as in `collectives_behind`. With CUDA, the host does not wait in collectives and is in none.
    """
    for group, count in issued[rank].items():
        if any(counts.get(group, count) < count for counts in issued.values()):
            return group
    return None


def collectives_behind(rank: int, issued: Mapping[int, Mapping[str, float]]) -> float:
    """Return how many collectives fewer than another rank this one has issued, in the group where it lacks most.

    `issued` has the number of issued collectives by rank and group. It is 0 if the rank lacks none or has no numbers.
    """
    own = issued.get(rank, {})
    return max((counts.get(group, 0.0) - own[group] for counts in issued.values() for group in own), default=0.0)


def blocking_ranks(waiting: Waits) -> Sequence[frozenset[int]]:
    """Return the ranks that other ranks wait for and that wait for no other rank, in sets ordered by their least rank.

    Ranks that wait for each other are one set if they wait for no other rank. Empty if no rank waits.
    """
    ranks = {*waiting, *(rank for late in waiting.values() for rank in late)}
    reached = {rank: _reachable(waiting, rank) for rank in ranks}
    waited_for = {late for rank, others in waiting.items() for late in others if late != rank}
    found = []
    for rank, others in sorted(reached.items()):
        ring = {rank} | {other for other in others if rank in reached[other]}
        is_last = others <= ring
        if is_last and rank in waited_for and rank == min(ring):
            found.append(frozenset(ring))
    return found


def _reachable(waiting: Waits, begin: int) -> set[int]:
    """Return all ranks that a rank waits for, directly or through others. Equal sets are followed once."""
    found, taken = set[int](), set[frozenset[int]]()
    to_do = [waiting.get(begin, frozenset())]
    while to_do:
        late = to_do.pop()
        if late not in taken:
            taken.add(late)
            to_do += [waiting.get(rank, frozenset()) for rank in late - found]
            found |= late
    return found


def victims(waiting: Waits, late: frozenset[int]) -> Iterator[int]:
    """Yield the ranks that wait for one of the late ranks, directly or through others."""
    for rank in sorted(waiting):
        if rank not in late and not late.isdisjoint(_reachable(waiting, rank)):
            yield rank
