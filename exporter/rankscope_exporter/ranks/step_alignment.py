"""Comparison of the same step of ranks that train together: which rank waited for which, and in which phase.

Averages over a window do not distinguish a rotating straggler from a slow network: in both cases all ranks wait. In a
single step they differ. The least wait of any rank is transfer, which no rank can avoid. Each rank's wait beyond that
is for late ranks, and the rank that waits least came last.

Steps are measured on the device if all ranks of the group here have steps measured on it, else on the host if the
training threads themselves wait. The two clocks are never mixed in a group (docs/decisions/0013).
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
from rankscope.record.snapshot import DeviceStep, RankSnapshot
from rankscope_exporter.ranks.chosen_steps import AnyStep
from rankscope_exporter.ranks.parallelism import stage
from rankscope_exporter.ranks.rank import Key, Rank

CAUSES = {name: phase for phase, name in enumerate(PHASES) if phase not in (COLLECTIVE_WAIT, STARTUP)}
UNKNOWN = "unknown"

HOST, DEVICE = "host", "device"  # clocks

REMEMBERED = 32  # steps per rank, to compare step numbers and for ranks that are read a moment later
EVIDENCE = 16  # steps that are used to compare two ranks' numbers
MIN_EVIDENCE = 3
# The largest difference between the ends of the same step on two ranks, in steps. It is nearly a whole step if one rank
# is slow between the collective and the end. If ranks count steps differently, the evidence has to be stronger.
MAX_DISTANCE = 0.8
MAX_DISTANCE_OTHER_NUMBERS = 0.25

PLANNED = tuple(phase for phase in range(len(PHASES)) if ABSORBS[phase])

Steps = Mapping[int, AnyStep]
Members = tuple[str, str, str, int | None]
"""Owner, run, group and pipeline stage of ranks that are compared."""


def _no_blame() -> dict[str, float]:
    return dict.fromkeys((*CAUSES, UNKNOWN), 0.0)


@dataclass
class Totals:
    """The sums over the aligned steps of one rank's record, in seconds."""

    steps: int = 0
    """The number of aligned steps; all other fields are sums over them."""
    seconds: float = 0.0
    floor: float = 0.0
    """The least wait of any rank in each step."""
    skew: float = 0.0
    """This rank's wait beyond the floor."""
    blame: dict[str, float] = field(default_factory=_no_blame)
    """The others' mean wait for this rank, by the phase in which it was slower."""

    def add(self, step: AnyStep, floor: float, skew: float) -> None:
        """Add a step with its floor and this rank's skew."""
        self.steps += 1
        self.seconds += step.seconds
        self.floor += floor
        self.skew += skew


@dataclass
class Alignment(Totals):
    """The aligned steps of one rank's record."""

    key: Key = ("", "", "")
    unplanned: Totals = field(default_factory=Totals)
    """The steps without a planned phase on any rank."""
    phases: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    """The seconds of the unplanned steps by phase, without the user's own phases."""


class StepReader:
    """Reads each step of one rank's record once, by one clock."""

    def __init__(self) -> None:
        self.clock: str | None = None
        self._read = 0

    def use(self, clock: str | None) -> bool:
        """Read by this clock from now on. Return whether it is another one: then all steps are read again."""
        if clock == self.clock:
            return False
        self.clock, self._read = clock, 0
        return True

    def new_steps(self, snapshot: RankSnapshot) -> Sequence[AnyStep]:
        """Return the steps in the record that were not read before, in order."""
        if self.clock == DEVICE:
            measured = snapshot.device_steps_after(self._read)
            self._read = measured[-1].nth if measured else self._read
            return measured
        if self.clock == HOST:
            steps = snapshot.steps_after(self._read)
            self._read = steps[-1].number if steps else self._read
            return steps
        return ()


class _Record:
    """One rank's record: the steps that were read last, by one clock, and the number of the last aligned step."""

    def __init__(self, rank: Rank) -> None:
        self.alignment = Alignment(key=rank.key)
        self.began = rank.snapshot["started_monotonic"]
        self.steps: dict[int, AnyStep] = {}
        self.aligned = 0
        self.members: Members = ("", "", "", None)
        self._reader = StepReader()

    @property
    def clock(self) -> str | None:
        """The clock by which the steps are read."""
        return self._reader.clock

    def read(self, rank: Rank, clock: str | None) -> None:
        """Read the new steps by `clock`; after a change of the clock, all steps."""
        if self._reader.use(clock):
            self.steps.clear()
        self.steps.update((step.number, step) for step in self._reader.new_steps(rank.snapshot))

    def forget_old_steps(self) -> None:
        for number in list(islice(self.steps, max(0, len(self.steps) - REMEMBERED))):
            del self.steps[number]


class StepAlignment:
    """The alignment of the ranks of each run and group on this machine. Used by one thread."""

    def __init__(self) -> None:
        self._records: dict[tuple[Path, float, Key], _Record] = {}
        self._missed: dict[tuple[Path, float, Key], _Record] = {}
        """The records of the ranks that the last scan did not have, but the one before."""

    def take(self, ranks: Iterable[Rank]) -> list[Alignment]:
        """Read the new steps and align them. Return the alignment of each rank that has one.

        The alignment of a new record starts at zero. A record that changes may be unreadable in one scan: then the
        steps of its group wait for the next one.
        """
        before, self._records = self._records, {}
        known = self._missed | before
        groups: dict[Members, list[tuple[Rank, _Record]]] = defaultdict(list)
        for rank in sorted(ranks, key=lambda rank: int(rank.key[1])):
            info = rank.snapshot.info
            # A record that changes its key must not continue under the old one, next to the record that has it.
            identity = rank.snapshot.path, rank.snapshot["started_monotonic"], rank.key
            record = self._records[identity] = known.get(identity) or _Record(rank)
            # Different pipeline stages do different work.
            record.members = rank.key[2], rank.key[0], info["group"], stage(rank.snapshot)
            groups[record.members].append((rank, record))
        self._missed = {identity: one for identity, one in before.items() if identity not in self._records}
        waiting = {one.members for one in self._missed.values()}
        for name, members in groups.items():
            clock = clock_of([rank.snapshot for rank, _ in members])
            for rank, record in members:
                record.read(rank, clock)
            if name not in waiting:
                _align([record for _, record in members])
        return [record.alignment for record in self._records.values() if record.alignment.steps]


def clock_of(ranks: Sequence[RankSnapshot]) -> str | None:
    """Return the clock that measures all of these ranks; None if there is none."""
    if all(rank["device_steps"] for rank in ranks):
        return DEVICE
    return HOST if all(map(_waits_on_the_host, ranks)) else None


def _waits_on_the_host(rank: RankSnapshot) -> bool:
    """Return whether the training thread itself waits in collectives. With NCCL the GPU waits, not the thread."""
    backend = rank.info["backend"]
    return backend == "gloo" or not ("nccl" in backend or rank["device_steps"])


def offset(steps: Steps, others: Steps) -> int | None:
    """Return the difference between the other rank's number of a step and this rank's; None if it is unclear.

    It is 0 whenever the ends allow it. A rank that was instrumented later counts fewer steps.
    """
    if _distance(steps, others, 0) < MAX_DISTANCE:
        return 0
    if not (steps and others):
        return None
    step = list(steps.values())[len(steps) // 2]  # the other rank's newest steps may not be read yet
    nearest = min(others.values(), key=lambda other: abs(other.end - step.end))
    candidate = nearest.number - step.number
    return candidate if _distance(steps, others, candidate) < MAX_DISTANCE_OTHER_NUMBERS else None


def _distance(steps: Steps, others: Steps, candidate: int) -> float:
    """Return the median distance of the ends if the numbers differ by `candidate`, in steps; inf without evidence."""
    newest = list(steps)[-EVIDENCE:]
    numbers = [number for number in newest if number + candidate in others]
    if len(numbers) < MIN_EVIDENCE:
        return float("inf")
    distance = median(abs(steps[number].end - others[number + candidate].end) for number in numbers)
    return distance / median(steps[number].seconds for number in numbers)


def _align(records: Sequence[_Record]) -> None:
    """Align every step that all ranks have and that was not aligned before."""
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
    """Return the difference of step numbers; 0 on the device, where measured steps are chosen by their numbers."""
    return 0 if record.clock == DEVICE else offset(record.steps, other.steps)


def _align_step(records: Sequence[_Record], steps: Sequence[AnyStep], began: float) -> None:
    if len(steps) < len(records) or not is_one_step(steps, began):
        return
    if any(step.number <= record.aligned for record, step in zip(records, steps, strict=True)):
        return
    for record, step in zip(records, steps, strict=True):
        record.aligned = step.number
    account([record.alignment for record in records], steps)


def is_one_step(steps: Sequence[AnyStep], began: float) -> bool:
    """Return whether these are the same step. Steps that ended before `began`, the youngest record's start, are not.

    With CUDA the host runs ahead by different numbers of steps, so the issued collectives are the better evidence.
    """
    ends = [step.end for step in steps]
    issued = {step.sequence for step in steps if isinstance(step, DeviceStep)}
    if issued and 0 not in issued:
        return len(issued) == 1 and min(ends) >= began
    limit = MAX_DISTANCE if issued else 1.0
    return max(ends) - min(ends) < limit * max(step.seconds for step in steps)


def account(alignments: Sequence[Alignment], steps: Sequence[AnyStep]) -> None:
    """Add one step to the alignments of all ranks."""
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
    """Return the phase that most exceeds the others' median; unknown if that is less than half of the blame."""
    long_enough = {name: phase for name, phase in CAUSES.items() if step.phases[phase] >= blame / 2}
    excesses = {
        name: step.phases[phase] - median(other.phases[phase] for other in others)
        for name, phase in long_enough.items()
    }
    largest = max(excesses, key=excesses.__getitem__, default=UNKNOWN)
    return largest if excesses.get(largest, 0.0) >= blame / 2 else UNKNOWN
