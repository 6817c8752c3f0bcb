"""Steps of ranks that train together, laid side by side: who waited for whom in each single step, and in which phase.

A window's averages cannot tell a straggler that rotates from a slow network: in both every rank waits. In one step they
differ. What even the least waiter waited there is transfer, as nobody can be faster; what another waited beyond that,
it waited for somebody, and the least waiter is the one that came last.

By the device's clock where all ranks of a group here have steps that were measured on it, else by the host's where the
training threads themselves wait; never by both in one group (docs/decisions/0013).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import add
from pathlib import Path
from statistics import median

from rankscope.record.layout import ABSORBS, COLLECTIVE_WAIT, PHASES, STARTUP
from rankscope.record.snapshot import DeviceStep
from rankscope_exporter.ranks.parallelism import stage
from rankscope_exporter.ranks.rank import Key, Rank
from rankscope_exporter.ranks.reference_step import AnyStep, Reference, level_of, newest_sampled

CAUSES = {name: phase for phase, name in enumerate(PHASES) if phase not in (COLLECTIVE_WAIT, STARTUP)}
UNKNOWN = "unknown"

HOST, DEVICE = "host", "device"  # clocks

REMEMBERED = 32  # steps a rank, for the comparison of numbers and for ranks that are read a moment later
EVIDENCE = 16  # steps by which two ranks' numbers are compared
LEAST_EVIDENCE = 3
# How far apart two ranks may end the same step, in steps: up to nearly a whole one, as when one of them is slow between
# the collective and the end. That ranks count differently is believed only where it is evident which steps belong.
SAME_NUMBERS = 0.8
OTHER_NUMBERS = 0.25

PLANNED = tuple(phase for phase in range(len(PHASES)) if ABSORBS[phase])

Steps = Mapping[int, AnyStep]


def _no_blame() -> dict[str, float]:
    return dict.fromkeys((*CAUSES, UNKNOWN), 0.0)


@dataclass
class Totals:
    """What the aligned steps of one rank's record amount to. Seconds."""

    steps: int = 0
    """That were aligned: all but the reference is of these."""
    seconds: float = 0.0
    floor: float = 0.0
    """What the least waiter of each step waited."""
    skew: float = 0.0
    """What this rank waited beyond that."""
    blame: dict[str, float] = field(default_factory=_no_blame)
    """What the others waited for this one on average, by the phase in which it was slower than they."""

    def add(self, step: AnyStep, floor: float, skew: float) -> None:
        """Add a step, with what the least waiter waited in it and what this rank waited beyond that."""
        self.steps += 1
        self.seconds += step.seconds
        self.floor += floor
        self.skew += skew


@dataclass
class Alignment(Totals):
    """The aligned steps of one rank's record."""

    key: Key = ("", "", "")
    unplanned: Totals = field(default_factory=Totals)
    """Those without a planned phase in any rank."""
    phases: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    """Of these by phase, without the user's own."""
    reference: Reference | None = None
    """The last step that stands for the others; also of a rank that is alone here. None once it has ended."""


class _Record:
    """One rank's record: the steps that were read last, by one clock, and up to which number they were aligned."""

    def __init__(self, rank: Rank) -> None:
        self.alignment = Alignment(key=rank.key)
        self.began = rank.snapshot["started_monotonic"]
        self.steps: dict[int, AnyStep] = {}
        self.aligned = 0
        self.clock: str | None = None
        self._read = 0

    def read(self, rank: Rank, clock: str | None, reference_interval: float) -> None:
        """Take the steps that are new by `clock`; by another than before, all that there are."""
        if clock != self.clock:
            self.clock, self._read, self.alignment.reference = clock, 0, None
            self.steps.clear()
        news = self._news(rank)
        self.steps.update((step.number, step) for step in news)
        if not rank.snapshot.alive:
            self.alignment.reference = None
        elif clock and (step := newest_sampled(news, level_of(rank.snapshot, reference_interval))):
            self.alignment.reference = Reference(clock, step)

    def _news(self, rank: Rank) -> Sequence[AnyStep]:
        if self.clock == DEVICE:
            measured = rank.snapshot.device_steps_after(self._read)
            self._read = measured[-1].nth if measured else self._read
            return measured
        if self.clock == HOST:
            steps = rank.snapshot.steps_after(self._read)
            self._read = steps[-1].number if steps else self._read
            return steps
        return ()

    def forget_old_steps(self) -> None:
        for number in list(islice(self.steps, max(0, len(self.steps) - REMEMBERED))):
            del self.steps[number]


class StepAlignment:
    """Aligns the ranks of each run and group of this machine. Used by one thread."""

    def __init__(self, reference_interval: float) -> None:
        """`reference_interval` is how many seconds a reference step stands for the others, at least on average."""
        self._reference_interval = reference_interval
        self._records: dict[tuple[Path, float, Key], _Record] = {}

    def take(self, ranks: Iterable[Rank]) -> list[Alignment]:
        """Take the steps that are new and align them. Returns what there is of each rank that has any.

        A rank's new record begins at nothing.
        """
        known, self._records = self._records, {}
        groups: dict[tuple[str, str, str, int | None], list[tuple[Rank, _Record]]] = defaultdict(list)
        for rank in sorted(ranks, key=lambda rank: int(rank.key[1])):
            info = rank.snapshot.info
            # The key, too: a record that says to be another rank now must not go on under its old name beside the one
            # that has that name.
            identity = rank.snapshot.path, rank.snapshot["started_monotonic"], rank.key
            record = self._records[identity] = known.get(identity) or _Record(rank)
            # Ranks of different stages of a pipeline do different work.
            groups[rank.key[2], info["run"], info["group"], stage(rank.snapshot)].append((rank, record))
        for members in groups.values():
            clock = _clock([rank for rank, _ in members])
            for rank, record in members:
                record.read(rank, clock, self._reference_interval)
            _align([record for _, record in members])
        alignments = [record.alignment for record in self._records.values()]
        return [alignment for alignment in alignments if alignment.steps or alignment.reference]


def _clock(ranks: Sequence[Rank]) -> str | None:
    """By which clock they can all be judged; None if there is no such."""
    if all(rank.snapshot["device_steps"] for rank in ranks):
        return DEVICE
    return HOST if all(map(_waits_on_the_host, ranks)) else None


def _waits_on_the_host(rank: Rank) -> bool:
    """Whether the training thread itself waits in collectives. Under NCCL the GPU does, and the ring knows no GPU."""
    backend = rank.snapshot.info["backend"]
    return backend == "gloo" or not ("nccl" in backend or rank.snapshot["device_steps"])


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
    offsets = [_offset(first, other) for other in others]
    if others and None not in offsets:
        began = max(record.began for record in records)
        for number in [number for number in first.steps if number > first.aligned]:
            numbers = [number, *(number + (difference or 0) for difference in offsets)]
            found = [record.steps.get(n) for record, n in zip(records, numbers, strict=True)]
            _align_step(records, [step for step in found if step], began)
    for record in records:
        record.forget_old_steps()


def _offset(record: _Record, other: _Record) -> int | None:
    """Which steps are measured on the device goes by their numbers: by other numbers these would be other steps."""
    return 0 if record.clock == DEVICE else offset(record.steps, other.steps)


def _align_step(records: Sequence[_Record], steps: Sequence[AnyStep], began: float) -> None:
    if len(steps) < len(records) or not _is_one_step(steps, began):
        return
    if any(step.number <= record.aligned for record, step in zip(records, steps, strict=True)):
        return
    for record, step in zip(records, steps, strict=True):
        record.aligned = step.number
    account([record.alignment for record in records], steps)


def _is_one_step(steps: Sequence[AnyStep], began: float) -> bool:
    """Whether all had a part in it. `began` is when the youngest record did: what ended before is of its predecessor.

    Under CUDA the host runs ahead, on each rank by another number of steps: what it had issued by then says more.
    """
    ends = [step.end for step in steps]
    issued = {step.sequence for step in steps if isinstance(step, DeviceStep)}
    if issued and 0 not in issued:
        return len(issued) == 1 and min(ends) >= began
    limit = SAME_NUMBERS if issued else 1.0
    return max(ends) - min(ends) < limit * max(step.seconds for step in steps)


def account(alignments: Sequence[Alignment], steps: Sequence[AnyStep]) -> None:
    """Add one step, as each rank had it."""
    waits = [step.phases[COLLECTIVE_WAIT] for step in steps]
    floor = min(waits)
    last = waits.index(floor)
    blame = (sum(waits) - floor * len(waits)) / (len(waits) - 1)
    others = [step for index, step in enumerate(steps) if index != last]
    cause = _cause(steps[last], others, blame)
    is_planned = any(step.phases[phase] > 0.0 for step in steps for phase in PLANNED)
    for alignment, step, wait in zip(alignments, steps, waits, strict=True):
        alignment.add(step, floor, wait - floor)
        if not is_planned:
            alignment.unplanned.add(step, floor, wait - floor)
            alignment.phases = list(map(add, alignment.phases, step.phases))
    alignments[last].blame[cause] += blame
    if not is_planned:
        alignments[last].unplanned.blame[cause] += blame


def _cause(step: AnyStep, others: Sequence[AnyStep], blame: float) -> str:
    """The phase that most exceeds what it usually takes; unknown if that is not half of what the others waited."""
    long_enough = {name: phase for name, phase in CAUSES.items() if step.phases[phase] >= blame / 2}
    excesses = {
        name: step.phases[phase] - median(other.phases[phase] for other in others)
        for name, phase in long_enough.items()
    }
    largest = max(excesses, key=excesses.__getitem__, default=UNKNOWN)
    return largest if excesses.get(largest, 0.0) >= blame / 2 else UNKNOWN
