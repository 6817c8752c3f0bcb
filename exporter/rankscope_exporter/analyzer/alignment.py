"""Comparison of the same step of ranks on several nodes, as `ranks/step_alignment.py` compares those of one node.

Clocks of nodes differ, so the ends of steps do not show whether two ranks count them alike. Equal numbers are the same
step if the ranks have issued equally many collectives by then, or if the lengths of their last steps agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import NamedTuple

from rankscope.record.snapshot import DeviceStep
from rankscope_exporter.diagnosis.readings import AlignedCounters, RankReading, Run
from rankscope_exporter.ranks.chosen_steps import AnyStep
from rankscope_exporter.ranks.readings import aligned_counters
from rankscope_exporter.ranks.step_alignment import EVIDENCE, MIN_EVIDENCE, Alignment, account, is_one_step

REMEMBERED = 128
"""Steps of a rank that wait for those of other nodes: at most eight a second are sent."""
MAX_DIFFERENCE = 0.25
"""The largest median difference between the lengths of the same step on two nodes, as a ratio of the step."""


class Process(NamedTuple):
    """A rank's process, by what never changes: its node's boot, and its own start by the node's clock."""

    boot: str
    began: float
    run: Run
    rank: int


class Present(NamedTuple):
    """A rank that is judged now."""

    process: Process
    reading: RankReading


@dataclass
class _Member:
    """One process: its steps that were not compared yet, and the counters of those that were."""

    alignment: Alignment = field(default_factory=Alignment)
    clock: str | None = None
    steps: dict[int, AnyStep] = field(default_factory=dict)
    aligned: int = 0
    """The number of the last compared step."""


class NodesAlignment:
    """The compared steps of all runs. Used by one thread."""

    def __init__(self) -> None:
        self._members: dict[Process, _Member] = {}

    def add(self, process: Process, clock: str | None, steps: Iterable[AnyStep]) -> None:
        """Add the new steps of a process. After a change of the clock, the earlier ones do not count."""
        member = self._members.setdefault(process, _Member())
        if clock != member.clock:
            member.clock = clock
            member.steps.clear()
        member.steps.update((step.number, step) for step in steps)
        for number in list(islice(member.steps, max(0, len(member.steps) - REMEMBERED))):
            del member.steps[number]

    def align(self, runs: Mapping[Run, Sequence[Present]]) -> Mapping[Process, AlignedCounters]:
        """Compare the steps that all ranks of a group have. Return the counters of each process.

        `runs` has runs without a missing rank.
        """
        for ranks in runs.values():
            groups: dict[tuple[str, int | None], list[Process]] = defaultdict(list)
            for one in sorted(ranks, key=lambda one: one.reading.rank):
                groups[one.reading.group, one.reading.stage].append(one.process)
            for processes in groups.values():
                if len(processes) > 1:
                    self._align(processes)
        return {
            process: aligned_counters(member.alignment)
            for process, member in self._members.items()
            if member.alignment.steps
        }

    def keep(self, processes: Iterable[Process]) -> None:
        """Forget all other processes."""
        self._members = {one: self._members[one] for one in processes if one in self._members}

    def _align(self, processes: Sequence[Process]) -> None:
        members = [self._members.get(process) or _Member() for process in processes]
        clocks = {member.clock for member in members}
        if len(clocks) > 1 or None in clocks:
            return
        nodes: dict[str, list[int]] = defaultdict(list)
        for index, process in enumerate(processes):
            nodes[process.boot].append(index)
        first, newest = min(members, key=lambda member: len(member.steps)), max(member.aligned for member in members)
        numbers = [one for one in first.steps if one > newest and all(one in member.steps for member in members)]
        is_known = all(_agree(members[0], members[indices[0]]) for indices in nodes.values())
        for number in sorted(numbers):
            steps = [member.steps[number] for member in members]
            if _is_one_step(steps, nodes.values(), is_known):
                account([member.alignment for member in members], steps)
                for member in members:
                    member.aligned = number


def _is_one_step(steps: Sequence[AnyStep], nodes: Iterable[Sequence[int]], is_known: bool) -> bool:
    """Return whether these are the same step. `nodes` are the indices of the ranks that share a clock."""
    issued = {step.sequence for step in steps if isinstance(step, DeviceStep)}
    if issued and 0 not in issued:
        return len(issued) == 1
    return is_known and all(is_one_step([steps[index] for index in indices], 0.0) for indices in nodes)


def _agree(one: _Member, other: _Member) -> bool:
    """Return whether the lengths of the last steps show that both count steps alike."""
    if one is other:
        return True
    numbers = [number for number in one.steps if number in other.steps][-EVIDENCE:]
    if len(numbers) < MIN_EVIDENCE:
        return False
    difference = median(abs(one.steps[number].seconds - other.steps[number].seconds) for number in numbers)
    return difference < MAX_DIFFERENCE * median(one.steps[number].seconds for number in numbers)
