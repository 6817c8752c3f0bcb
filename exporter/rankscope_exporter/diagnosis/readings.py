"""What is known of a run at one moment: the state of each rank and GPU, and counters that only increase.

Counters are since the rank began, so that any two readings of a rank give exact sums for the window between them.
What is not known is absent (None, or no key): it is never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from math import isfinite
from typing import Any

from rankscope_exporter.diagnosis.ports import PortFault


@dataclass(frozen=True, slots=True)
class AlignedCounters:
    """Steps that were compared with the same step of all other ranks of the group, and that no planned phase is in.

    Seconds are measured by `clock`, the same one for all ranks of a group.
    """

    steps: float = 0.0
    seconds: float = 0.0
    wait_floor: float = 0.0
    """What the rank waited that waited least in each step."""
    skew: float = 0.0
    """What this rank waited beyond that."""
    blame: Mapping[str, float] = field(default_factory=dict)
    """What the others waited for this rank on average, by the phase in which it was late."""
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CollectiveCounters:
    """Collectives by operation."""

    calls: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, float] = field(default_factory=dict)
    """Payload."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What the training thread waited in them."""
    group_waits: Mapping[str, float] = field(default_factory=dict)
    """The training thread's seconds in collectives by group."""
    device_group_waits: Mapping[str, float] = field(default_factory=dict)
    """The device's seconds in collectives by group, in the steps that were measured on it."""


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """What a rank's process has used, seen from outside. None where that cannot be seen."""

    cpu: float | None = None
    """CPU seconds of all its threads."""
    run_queue: float | None = None
    """Seconds that its main thread waited for CPU time."""
    workers_cpu: float | None = None
    workers_run_queue: float | None = None
    read_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class GpuCounters:
    """Seconds."""

    busy: float | None = None
    throttled: Mapping[str, float] | None = None
    """By the reason that held its clocks down."""
    clock_ratio_seconds: float | None = None
    """The SM clock as a ratio of its maximum, integrated over time."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Everything of a rank that only increases."""

    steps: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the training thread by phase: they sum to the time since the rank began."""
    device_steps: float = 0.0
    device_phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the device by phase, of the steps that were measured on it."""
    device_dry: Mapping[str, float] = field(default_factory=dict)
    """Of these the seconds in which the device had nothing left to do."""
    device_waits: float = 0.0
    micro_steps: float = 0.0
    """Backward passes."""
    step_buckets: tuple[float, ...] = ()
    """Steps by their length, between the bounds of the record's histogram."""
    aligned: AlignedCounters = field(default_factory=AlignedCounters)
    collectives: CollectiveCounters = field(default_factory=CollectiveCounters)
    gc_seconds: float = 0.0
    amp_skipped_steps: float = 0.0
    loader_working: float | None = None
    """Seconds in which loader workers made batches."""
    loader_idle: float | None = None
    process: ProcessCounters = field(default_factory=ProcessCounters)
    gpu: GpuCounters = field(default_factory=GpuCounters)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A rank's GPU now."""

    index: str
    memory_ratio: float | None = None
    """Memory in use, as a ratio of all of it."""
    processes: int | None = None
    idle_seconds: float | None = None
    """Since a kernel last ran."""
    is_link_reduced: bool = False
    """Whether it has fewer PCIe lanes or NVLinks than it can have."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How and when a rank ended."""

    reason: str
    """As rankscope_rank_exit_info: `finished`, `exception`, `interrupted`, `sigterm` or `killed`."""
    at: float


@dataclass(frozen=True, slots=True)
class RankReading:
    """One rank at one moment. Times are seconds of the caller's monotonic clock."""

    rank: int
    at: float
    began: float
    group: str = ""
    """The ranks that it synchronizes with, as rankscope_rank_info has it."""
    node: str = ""
    uuid: str = ""
    """Of its GPU; empty without one."""
    world_size: int = 0
    ended: Ending | None = None
    last_progress: float = 0.0
    phase: str = "other"
    """In which the training thread is."""
    phase_since: float = 0.0
    issued: Mapping[str, float] = field(default_factory=dict)
    """Collectives that it has issued, by group."""
    collective: str = ""
    """The group of the collective that its training thread is in. Empty in none."""
    amp_scale: float | None = None
    checkpoints: float = 0.0
    last_checkpoint: float | None = None
    children: int | None = None
    """Child processes: loader workers, mostly."""
    stage: int | None = None
    """Of the pipeline. None without one."""
    port_fault: PortFault | None = None
    """What is wrong with a network port of its node."""
    settings: Mapping[str, str] = field(default_factory=dict)
    gpu: GpuReading | None = None
    counters: Counters = field(default_factory=Counters)


Run = tuple[str, str]
"""A run's name and its owner."""


def spent(now: Counters, then: Counters) -> Counters:
    """Return what was counted between two readings of a rank. What is not known of either is not known.

    A counter that has decreased belongs to another process: then all of it is new.
    """
    return Counters(
        _less(now.steps, then.steps),
        _less_by_name(now.phases, then.phases),
        _less(now.device_steps, then.device_steps),
        _less_by_name(now.device_phases, then.device_phases),
        _less_by_name(now.device_dry, then.device_dry),
        _less(now.device_waits, then.device_waits),
        _less(now.micro_steps, then.micro_steps),
        tuple(map(_less, now.step_buckets, then.step_buckets or repeat(0.0))),
        _aligned(now.aligned, then.aligned),
        CollectiveCounters(
            _less_by_name(now.collectives.calls, then.collectives.calls),
            _less_by_name(now.collectives.bytes, then.collectives.bytes),
            _less_by_name(now.collectives.seconds, then.collectives.seconds),
            _less_by_name(now.collectives.group_waits, then.collectives.group_waits),
            _less_by_name(now.collectives.device_group_waits, then.collectives.device_group_waits),
        ),
        _less(now.gc_seconds, then.gc_seconds),
        _less(now.amp_skipped_steps, then.amp_skipped_steps),
        _known_less(now.loader_working, then.loader_working),
        _known_less(now.loader_idle, then.loader_idle),
        _process(now.process, then.process),
        _gpu(now.gpu, then.gpu),
    )


def _aligned(now: AlignedCounters, then: AlignedCounters) -> AlignedCounters:
    return AlignedCounters(
        _less(now.steps, then.steps),
        _less(now.seconds, then.seconds),
        _less(now.wait_floor, then.wait_floor),
        _less(now.skew, then.skew),
        _less_by_name(now.blame, then.blame),
        _less_by_name(now.phases, then.phases),
    )


def _process(now: ProcessCounters, then: ProcessCounters) -> ProcessCounters:
    return ProcessCounters(
        _known_less(now.cpu, then.cpu),
        _known_less(now.run_queue, then.run_queue),
        _known_less(now.workers_cpu, then.workers_cpu),
        _known_less(now.workers_run_queue, then.workers_run_queue),
        _known_less(now.read_bytes, then.read_bytes),
    )


def _gpu(now: GpuCounters, then: GpuCounters) -> GpuCounters:
    is_known = now.throttled is not None and then.throttled is not None
    return GpuCounters(
        _known_less(now.busy, then.busy),
        _less_by_name(now.throttled or {}, then.throttled or {}) if is_known else None,
        _known_less(now.clock_ratio_seconds, then.clock_ratio_seconds),
    )


def _less(now: float, then: float) -> float:
    return now - then if now >= then else now


def _known_less(now: float | None, then: float | None) -> float | None:
    return None if now is None or then is None else _less(now, then)


def _less_by_name(now: Mapping[str, float], then: Mapping[str, float]) -> Mapping[str, float]:
    return {name: _less(value, then.get(name, 0.0)) for name, value in now.items()}


NESTED = {
    "aligned": AlignedCounters,
    "collectives": CollectiveCounters,
    "process": ProcessCounters,
    "gpu": GpuCounters,
}


def saved(one: RankReading) -> list[Any]:
    """Return what a window that begins with this reading needs, as JSON can hold it."""
    return [one.rank, one.began, asdict(one.counters)]


def restored(state: Sequence[Any], at: float) -> RankReading:
    """Return a reading of that time from what `saved` returned. Raises TypeError, ValueError or KeyError."""
    rank, began, counters = state
    known = dict(counters)
    nested = {name: kind(**_numbers(known.pop(name))) for name, kind in NESTED.items()}
    buckets = tuple(map(float, known.pop("step_buckets")))
    return RankReading(
        int(rank), at, float(began), counters=Counters(**_numbers(known), **nested, step_buckets=buckets)
    )


def _numbers(values: Any) -> dict[str, Any]:
    """Return the values, each of which is a number, not known, or numbers by name."""
    return {name: _numbers(one) if isinstance(one, dict) else _number(one) for name, one in dict(values).items()}


def _number(value: Any) -> float | None:
    number = None if value is None else float(value)
    if number is not None and not isfinite(number):
        raise ValueError(f"{value!r} is no number that a counter has")
    return number
