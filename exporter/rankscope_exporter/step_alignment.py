"""Steps of ranks that train together, laid side by side: who waited for whom in each single step, and in which phase.

A window's averages cannot tell a straggler that rotates from a slow network: in both every rank waits. In one step they
differ. What even the least waiter waited there is transfer, as nobody can be faster; what another waited beyond that,
it waited for somebody, and the least waiter is the one that came last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median

from rankscope.rank_snapshot import Step
from rankscope.record import COLLECTIVE_WAIT, PHASES, STARTUP
from rankscope_exporter.run_directory import Key, Rank

CAUSES = {name: phase for phase, name in enumerate(PHASES) if phase not in (COLLECTIVE_WAIT, STARTUP)}
UNKNOWN = "unknown"

REMEMBERED = 32  # steps a rank, for the comparison of numbers and for ranks that are read a moment later
EVIDENCE = 16  # steps by which two ranks' numbers are compared
LEAST_EVIDENCE = 3
# How far apart two ranks may end the same step, in steps: up to nearly a whole one, as when one of them is slow between
# the collective and the end. That ranks count differently is believed only where it is evident which steps belong.
SAME_NUMBERS = 0.8
OTHER_NUMBERS = 0.25

Steps = Mapping[int, Step]


def _no_blame() -> dict[str, float]:
    return dict.fromkeys((*CAUSES, UNKNOWN), 0.0)


@dataclass
class Alignment:
    """What the aligned steps of one rank's record amount to. Seconds."""

    key: Key
    steps: int = 0
    seconds: float = 0.0
    floor: float = 0.0
    """What the least waiter of each step waited."""
    skew: float = 0.0
    """What this rank waited beyond that."""
    blame: dict[str, float] = field(default_factory=_no_blame)
    """What the others waited for this one on average, by the phase in which it was slower than they."""


class _Record:
    """One rank's record: the steps that were read last, and up to which number they have been aligned."""

    def __init__(self, key: Key) -> None:
        self.alignment = Alignment(key)
        self.steps: dict[int, Step] = {}
        self.aligned = 0
        self._read = 0

    def read(self, rank: Rank) -> None:
        for step in rank.snapshot.steps_after(self._read):
            self.steps[step.number] = step
            self._read = step.number

    def forget_old_steps(self) -> None:
        for number in list(islice(self.steps, max(0, len(self.steps) - REMEMBERED))):
            del self.steps[number]


class StepAlignment:
    """Aligns the ranks of each run and group of this machine. Used by one thread."""

    def __init__(self) -> None:
        self._records: dict[tuple[Path, float], _Record] = {}

    def take(self, ranks: Iterable[Rank]) -> list[Alignment]:
        """Take the steps that are new and align them. Returns what there is of each rank that has any.

        A rank's new record begins at nothing.
        """
        known, self._records = self._records, {}
        groups: dict[tuple[int, str, str], list[_Record]] = defaultdict(list)
        for rank in sorted(ranks, key=lambda rank: int(rank.key[1])):
            info = rank.snapshot.info
            identity = rank.snapshot.path, rank.snapshot["started_monotonic"]
            record = self._records[identity] = known.get(identity) or _Record(rank.key)
            if _waits_on_the_host(rank):  # else its steps would only pile up
                record.read(rank)
                groups[rank.owner, info["run"], info["group"]].append(record)
        for records in groups.values():
            _align(records)
        return [record.alignment for record in self._records.values() if record.alignment.steps]


def _waits_on_the_host(rank: Rank) -> bool:
    """Whether the training thread itself waits in collectives. Under NCCL the GPU does, and the ring knows no GPU."""
    backend = rank.snapshot.info["backend"]
    return backend == "gloo" or not ("nccl" in backend or rank.snapshot.device_seconds)


def offset(steps: Steps, others: Steps) -> int | None:
    """What to add to a step's number to have the other rank's number of the same step; None if that is not evident.

    0 wherever the ends allow it. A rank that was instrumented later counts fewer steps.
    """
    if _distance(steps, others, 0) < SAME_NUMBERS:
        return 0
    if not (steps and others):
        return None
    step = list(steps.values())[len(steps) // 2]  # of the newest the other may not have been read yet
    nearest = min(others.values(), key=lambda other: abs(other.end - step.end))
    candidate = nearest.number - step.number
    return candidate if _distance(steps, others, candidate) < OTHER_NUMBERS else None


def _distance(steps: Steps, others: Steps, candidate: int) -> float:
    """How far apart the ends usually lie if the numbers differ by `candidate`, in steps; infinite without evidence."""
    newest = list(steps)[-EVIDENCE:]
    numbers = [number for number in newest if number + candidate in others]
    if len(numbers) < LEAST_EVIDENCE:
        return float("inf")
    distance = median(abs(steps[number].end - others[number + candidate].end) for number in numbers)
    return distance / median(steps[number].seconds for number in numbers)


def _align(records: Sequence[_Record]) -> None:
    """Account for every step that all ranks have and that was not aligned before."""
    first, *others = records
    offsets = [offset(first.steps, other.steps) for other in others]
    if others and None not in offsets:
        for number in [number for number in first.steps if number > first.aligned]:
            numbers = [number, *(number + (difference or 0) for difference in offsets)]
            _align_step(records, [record.steps.get(n) for record, n in zip(records, numbers, strict=True)])
    for record in records:
        record.forget_old_steps()


def _align_step(records: Sequence[_Record], found: Iterable[Step | None]) -> None:
    steps = [step for step in found if step]
    if len(steps) < len(records) or not _is_one_step(steps):
        return
    if any(step.number <= record.aligned for record, step in zip(records, steps, strict=True)):
        return
    for record, step in zip(records, steps, strict=True):
        record.aligned = step.number
    account([record.alignment for record in records], steps)


def _is_one_step(steps: Sequence[Step]) -> bool:
    ends = [step.end for step in steps]
    return max(ends) - min(ends) < max(step.seconds for step in steps)


def account(alignments: Sequence[Alignment], steps: Sequence[Step]) -> None:
    """Add one step, as each rank had it."""
    waits = [step.phases[COLLECTIVE_WAIT] for step in steps]
    floor = min(waits)
    for alignment, step, wait in zip(alignments, steps, waits, strict=True):
        alignment.steps += 1
        alignment.seconds += step.seconds
        alignment.floor += floor
        alignment.skew += wait - floor
    last = waits.index(floor)
    blame = (sum(waits) - floor * len(waits)) / (len(waits) - 1)
    others = [step for place, step in enumerate(steps) if place != last]
    alignments[last].blame[_cause(steps[last], others, blame)] += blame


def _cause(step: Step, others: Sequence[Step], blame: float) -> str:
    """The phase that most exceeds what it usually takes; unknown if that is not half of what the others waited."""
    long_enough = {name: phase for name, phase in CAUSES.items() if step.phases[phase] >= blame / 2}
    excesses = {
        name: step.phases[phase] - median(other.phases[phase] for other in others)
        for name, phase in long_enough.items()
    }
    largest = max(excesses, key=excesses.__getitem__, default=UNKNOWN)
    return largest if excesses.get(largest, 0.0) >= blame / 2 else UNKNOWN
