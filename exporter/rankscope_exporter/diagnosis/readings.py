"""What is known of a run at one moment: the state of each rank and GPU, and counters that only increase.

Counters are since the rank began, so that any two readings of a rank give exact sums for the window between them.
What is not known is absent (None, or no key): it is never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

NOTHING: Mapping[str, float] = MappingProxyType({})


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
    amp_scale: float | None = None
    checkpoints: float = 0.0
    last_checkpoint: float | None = None
    children: int | None = None
    """Child processes: loader workers, mostly."""
    settings: Mapping[str, str] = field(default_factory=dict)
    gpu: GpuReading | None = None
    counters: Counters = field(default_factory=Counters)


Run = tuple[str, str]
"""A run's name and its owner."""


def difference(now: object, then: object) -> object:
    """Return what was counted between two values of one field of `Counters`; None if one of them is not known.

    A counter that has decreased belongs to another process: then all of it is new.
    """
    if isinstance(now, int | float) and isinstance(then, int | float):
        return now - then if now >= then else now
    if isinstance(now, Mapping) and isinstance(then, Mapping):
        return {key: difference(value, then.get(key, 0.0)) for key, value in now.items()}
    if isinstance(now, tuple) and isinstance(then, tuple):
        then = then or (0.0,) * len(now)
        return tuple(difference(new, old) for new, old in zip(now, then, strict=True))
    if now is None or then is None:
        return None
    return type(now)(*(difference(getattr(now, one.name), getattr(then, one.name)) for one in fields(now)))  # type: ignore[arg-type]
