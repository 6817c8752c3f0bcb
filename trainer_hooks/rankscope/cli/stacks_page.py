"""The text of `rankscope stacks`: for each run one sentence about what differs, and the ranks with the same stacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rankscope.cli.printable import printable
from rankscope.cli.rank_stacks import RankStacks
from rankscope.cli.stack_groups import describe_difference, group_stacks
from rankscope.record.group_name import name_ranks

NAME_LIMIT = 200  # characters, as in a label
NODES_SHOWN = 4
PIDS_SHOWN = 8
HANGS_AFTER = 5.0
"""Seconds without progress; few steps take longer."""


def lines(found: Iterable[RankStacks], user: Callable[[int], str] = lambda _: "") -> Iterator[str]:
    """Yield the lines, escaped. `user` names the owner of a run, or returns nothing if that is the caller."""
    trainings = _trainings(found)
    for place, ranks in enumerate(trainings):
        if place:
            yield ""
        for line in _training(ranks, user(next(iter(ranks.values())).owner), is_alone=len(trainings) == 1):
            yield printable(line)


def _trainings(found: Iterable[RankStacks]) -> Sequence[Mapping[int, RankStacks]]:
    """Return the ranks of each training: several of one user may have the same name, each with a rank 0."""
    trainings: dict[tuple[str, int, int], dict[int, RankStacks]] = defaultdict(dict)
    for one in sorted(found, key=lambda one: (one.run, one.owner, one.rank, one.began, one.node, one.pid)):
        same = 0
        while one.rank in trainings[one.run, one.owner, same]:
            same += 1
        trainings[one.run, one.owner, same][one.rank] = one
    return [ranks for _, ranks in sorted(trainings.items())]


def _training(ranks: Mapping[int, RankStacks], user: str, *, is_alone: bool) -> Iterator[str]:
    first = next(iter(ranks.values()))
    nodes = sorted({one.node for one in ranks.values()})
    groups = group_stacks(
        {rank: one.text for rank, one in ranks.items() if not one.reason},
        {rank: one.reason for rank, one in ranks.items() if one.reason},
        {rank: one.operation for rank, one in ranks.items() if one.operation},
        {rank: one.state for rank, one in ranks.items() if one.state},
    )
    place = f", of user {user}" * bool(user)
    sentence = describe_difference(groups, lambda few: f"{name_ranks(few)}{_on(few, ranks, nodes)}")
    named = f"run {printable(first.run, NAME_LIMIT)}{place}"
    yield sentence if is_alone else f"{named[0].upper()}{named[1:]}: {sentence[0].lower()}{sentence[1:]}"
    total = f" of {first.world_size}" if first.world_size > len(ranks) else ""
    counted = f"{len(ranks)}{total} rank{'s' * (len(ranks) != 1 or bool(total))}"
    yield f"=== {named}: {counted}{f' on {len(nodes)} nodes' * (len(nodes) > 1)}"
    if (idle := min(one.idle for one in ranks.values())) < HANGS_AFTER:
        yield f"The run may not hang: a rank has made progress {idle:.1f} s ago."
    for group in groups:
        yield ""
        yield f"{group.title}{_on(group.ranks, ranks, nodes)}: {_details([ranks[rank] for rank in group.ranks])}"
        yield from group.lines or [f"  no stacks: {ranks[group.ranks[0]].reason}"]


def _on(few: Sequence[int], ranks: Mapping[int, RankStacks], nodes: Sequence[str]) -> str:
    """Return the nodes of some ranks, if the training has several."""
    if len(nodes) == 1:
        return ""
    names = sorted({printable(ranks[rank].node or "unknown", NAME_LIMIT) for rank in few})
    return f" ({', '.join(names)})" if len(names) <= NODES_SHOWN else f" ({len(names)} nodes)"


def _details(group: Sequence[RankStacks]) -> str:
    """Return what the records of a group say: the processes, the phase, the step and the collective."""
    pids = [str(one.pid or "unknown") for one in group]
    shown = f"pid{'s' * (len(pids) > 1)} {', '.join(pids)}, " if len(pids) <= PIDS_SHOWN else ""
    phases = sorted({printable(one.phase, NAME_LIMIT) for one in group})
    seconds = _range([one.seconds for one in group], 1)
    operations = sorted({f"{one.operation}{_of(one)}" for one in group if one.operation})
    phase = " or ".join(phases)
    in_phase = f"last in {phase}" if any(one.has_ended for one in group) else f"{phase} for {seconds} s"
    return (
        f"{shown}{in_phase}, step {_range([one.step for one in group], 0)}"
        f"{', in ' * bool(operations)}{' or '.join(operations[:2])}{' or others' * (len(operations) > 2)}"
    )


def _of(one: RankStacks) -> str:
    return f" of ranks {printable(one.group, NAME_LIMIT)}, number {one.number}" if one.group else ""


def _range(numbers: Sequence[float], digits: int) -> str:
    least, most = (f"{number:.{digits}f}" for number in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"
