"""Who waits for whom when a run stands still, and for whom all of them wait in the end.

A rank waits in its first operation that has not completed. In a collective it waits for the ranks of the group that
have not issued it, and for those that have, but whose devices are still in an earlier operation. In a receive or send
it waits for its peer. Blame follows this chain to the ranks that wait for nobody: a rank that waits for another one is
a victim, whatever it holds up itself.

Both counts are needed. By what was issued alone, a rank whose device stands still is like the others; by what was
completed alone, ranks that are only early are like those that are late. The method is that of the flight recorder's
analyzers (torch.distributed.flight_recorder; NVIDIA's resiliency extension), with the chain added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Operation:
    """What a rank waits in."""

    name: str
    """As torch calls it, such as `all_reduce`."""
    group: str
    """A key of the groups."""
    number: float
    """Of the collective within its group."""
    peer: int | None = None
    """The other rank of a send or receive."""


@dataclass(frozen=True)
class Position:
    """Where one rank stands. Counts are by group and of collectives that all of its ranks issue."""

    rank: int
    issued: Mapping[str, float] = field(default_factory=dict)
    completed: Mapping[str, float] = field(default_factory=dict)
    """Absent where it is not known."""
    waits_in: Operation | None = None
    """Its first operation that has not completed. None if it waits in none."""


Waits = Mapping[int, frozenset[int]]
"""By rank those that it waits for directly."""


def waits(positions: Sequence[Position], groups: Mapping[str, Sequence[int]]) -> Waits:
    """Return for whom each rank waits. A rank of a group that has no position has issued nothing."""
    by_rank = {one.rank: one for one in positions}
    return {one.rank: frozenset(_waited_for(one, by_rank, groups)) for one in positions}


def _waited_for(one: Position, by_rank: Mapping[int, Position], groups: Mapping[str, Sequence[int]]) -> set[int]:
    operation = one.waits_in
    if operation is None:
        return set()
    if operation.peer is not None:
        return {operation.peer}
    others = [rank for rank in groups.get(operation.group, ()) if rank != one.rank]
    return {rank for rank in others if rank not in by_rank or not _has_come(by_rank[rank], operation)}


def _has_come(one: Position, operation: Operation) -> bool:
    """Return whether a rank has come to a collective: its device too, where it is known what that has completed."""
    group, number = operation.group, operation.number
    if one.issued.get(group, 0.0) < number:
        return False
    is_in_it = one.waits_in is not None and (one.waits_in.group, one.waits_in.number) == (group, number)
    return is_in_it or one.completed.get(group, number) >= number


def held_up_by(waiting: Waits) -> Sequence[frozenset[int]]:
    """Return the ranks for whom others wait and who wait for nobody.

    Ranks that wait for each other are one of these sets if they wait for nobody else. Each set is in the order of its
    least rank. Empty if nobody waits for anybody.
    """
    everyone = {*waiting, *(rank for late in waiting.values() for rank in late)}
    reached = {rank: _reached(waiting, rank) for rank in everyone}
    found = []
    for rank, others in sorted(reached.items()):
        ring = {rank} | {other for other in others if rank in reached[other]}
        is_last = others <= ring
        is_waited_for = any(rank in reached[other] for other in reached if other not in ring) or len(ring) > 1
        if is_last and is_waited_for and rank == min(ring):
            found.append(frozenset(ring))
    return found


def _reached(waiting: Waits, begin: int) -> set[int]:
    """Return everyone that a rank waits for, directly or through others. Those who wait for the same are taken once."""
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
    """Yield the ranks that wait for one of these, directly or through others."""
    for rank in sorted(waiting):
        if rank not in late and not late.isdisjoint(_reached(waiting, rank)):
            yield rank
