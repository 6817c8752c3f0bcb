"""Readings of a run at one moment: the state of each rank and GPU, and counters that only increase.

Counters start when the rank begins, so that two readings of a rank give exact sums for the window between them. An
unknown value is absent (None, or no key), never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import repeat
from operator import attrgetter
from typing import Any

from rankscope_exporter.diagnosis.counters import increase
from rankscope_exporter.diagnosis.ports import PortFault
from rankscope_exporter.diagnosis.saved import Time

UNKNOWN_NODE = "unknown"
"""The name of a node that has never had an exporter."""
READING_BYTES, NUMBER_BYTES = 2000, 60
"""About how much memory a reading takes without its numbers by name, and each of these."""


@dataclass(frozen=True, slots=True)
class AlignedCounters:
    """Steps without a planned phase that were compared with the same step of all other ranks of the group.

    Seconds are measured by `clock`, the same one for all ranks of a group.
    """

    steps: float = 0.0
    seconds: float = 0.0
    wait_floor: float = 0.0
    """The least wait of any rank in each step."""
    skew: float = 0.0
    """This rank's wait beyond `wait_floor`."""
    blame: Mapping[str, float] = field(default_factory=dict)
    """The others' mean wait for this rank, by the phase in which it was late."""
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CollectiveCounters:
    """Collectives by operation."""

    calls: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes of payload."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the training thread waited in them."""
    group_waits: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the training thread waited in collectives, by group."""
    device_group_waits: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the device waited in collectives, by group, in the steps that were measured on it."""


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """The resources that a rank's process has used, read from /proc. None if they cannot be read."""

    cpu: float | None = None
    """CPU seconds of all its threads."""
    run_queue: float | None = None
    """Seconds that its main thread waited for CPU time."""
    workers_cpu: float | None = None
    workers_run_queue: float | None = None
    read_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class GpuCounters:
    """Counters of a rank's GPU, in seconds."""

    busy: float | None = None
    throttled: Mapping[str, float] | None = None
    """Seconds by the reason for throttling."""
    clock_ratio_seconds: float | None = None
    """The SM clock as a ratio of its maximum, integrated over time."""


@dataclass(frozen=True, slots=True)
class Counters:
    """All counters of a rank."""

    steps: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the training thread by phase. They sum to the time since the rank began."""
    device_steps: float = 0.0
    device_phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the device by phase, in the steps that were measured on it."""
    device_dry: Mapping[str, float] = field(default_factory=dict)
    """The part of `device_phases` in which the device had finished all issued work."""
    device_waits: float = 0.0
    micro_steps: float = 0.0
    """Backward passes."""
    step_buckets: tuple[float, ...] = ()
    """The number of steps by length, between the bounds of the record's histogram."""
    aligned: AlignedCounters = field(default_factory=AlignedCounters)
    collectives: CollectiveCounters = field(default_factory=CollectiveCounters)
    gc_seconds: float = 0.0
    amp_skipped_steps: float = 0.0
    samples: float | None = None
    tokens: float | None = None
    copied_bytes: float | None = None
    """Bytes of the copies from the host to the GPU that the training thread waited for."""
    loader_working: float | None = None
    """Seconds in which loader workers made batches."""
    loader_idle: float | None = None
    process: ProcessCounters = field(default_factory=ProcessCounters)
    gpu: GpuCounters = field(default_factory=GpuCounters)

    @property
    def iterations(self) -> float:
        """Return the number of steps, with those that a gradient scaler skipped: they take as long as others."""
        return self.steps + self.amp_skipped_steps


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A rank's GPU now."""

    index: str
    memory_ratio: float | None = None
    """Used memory as a ratio of all memory."""
    processes: int | None = None
    """The number of processes on it, without the ranks of the run that have another GPU."""
    idle_seconds: float | None = None
    """Seconds since a kernel last ran."""
    is_power_limit_lowered: bool | None = None
    """True if its power limit is below its default."""
    is_link_reduced: bool | None = None
    """True if it has fewer PCIe lanes or NVLinks than it supports."""
    total_bytes: float | None = None
    """All memory of the GPU; of a GPU with MIG, more than a rank can use."""
    foreign_bytes: float | None = None
    """Memory of the processes on it that are no ranks of the run."""
    foreign_pid: int | None = None
    """The pid of the largest of these processes, as the driver has it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason and time of a rank's end."""

    reason: str
    """The reason as in rankscope_rank_exit_info: `finished`, `exception`, `interrupted`, `sigterm` or `killed`."""
    at: Time
    exhausted: str = ""
    """The memory that the exception lacked, one of layout.EXHAUSTED; empty if it says nothing of it."""
    phase: str = ""
    """The phase of that exception; empty if it is unknown."""
    requested_bytes: float | None = None
    """The size of the allocation that failed."""
    has_lost_peer: bool = False
    """True if the exception says that the connection to another rank broke."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A rank's memory on its GPU, in torch's caching allocator, in bytes."""

    allocated: float
    """Of the tensors at the end of the last step."""
    reserved: float
    """By the allocator, used or not."""
    peak: float
    """The most that was allocated at any time."""
    capacity: float | None = None
    """The memory of the GPU or MIG instance, or the part of it that this process may use."""
    retries: float = 0.0
    """Allocations for which the allocator first had to free its cache."""
    failures: float = 0.0
    """Allocations that failed."""


@dataclass(frozen=True, slots=True)
class LoggedValues:
    """A number that the script logs in some of its steps, such as the loss."""

    values: float
    not_finite: float = 0.0
    """How many of the last ones were NaN or infinite."""
    since_step: float = 0.0
    """The step of the first of these."""


@dataclass(frozen=True, slots=True)
class RankReading:
    """One rank at one moment. Times are seconds of the caller's monotonic clock."""

    rank: int
    at: Time
    began: float
    group: str = ""
    """The ranks that it synchronizes with, as in rankscope_rank_info."""
    node: str = ""
    uuid: str = ""
    """The UUID of its GPU; empty without one."""
    world_size: int = 0
    ended: Ending | None = None
    last_progress: Time = 0.0
    phase: str = "other"
    """The current phase of the training thread."""
    phase_since: Time = 0.0
    issued: Mapping[str, float] = field(default_factory=dict)
    """The number of collectives that it has issued, by group."""
    collective: str = ""
    """The group of the collective that its training thread is in; empty outside of collectives."""
    operation: str = ""
    """That collective, one of layout.OPS."""
    amp_scale: float | None = None
    checkpoints: float = 0.0
    last_checkpoint: Time | None = None
    is_stopped: bool = False
    """True if the kernel does not run its process, by a signal, a debugger or a cgroup's freezer."""
    children: int | None = None
    """The number of child processes, mostly loader workers."""
    stage: int | None = None
    """The pipeline stage. None without a pipeline."""
    coordinates: Mapping[str, int] = field(default_factory=dict)
    """Its place by kind of parallelism, such as `cp`. Unknown kinds are absent."""
    port_fault: PortFault | None = None
    """A fault of a network port of its node."""
    parallelism: tuple[str, ...] = ()
    """The kinds of parallelism that need collectives within a step: `tp`, `cp`, `ep`, `fsdp`."""
    gpu: GpuReading | None = None
    memory: DeviceMemory | None = None
    """None without CUDA."""
    loss: LoggedValues | None = None
    gradient_norm: LoggedValues | None = None
    """None if the script logs none, or only tensors."""
    oom_killed_at: Time | None = None
    """When the kernel's out-of-memory killer last ended a process of the rank's node; None if it did not while the
    exporter ran, or if that is unknown."""
    counters: Counters = field(default_factory=Counters)
    clock_error: float = 0.0
    """The error of its times compared with those of other nodes, in seconds; 0 if all ranks are on one node."""
    has_left: bool = False
    """True if it has destroyed its process group and not trained since, whether its process runs or was ended later."""
    is_missing: bool = False
    """True if its node does not answer: all else is its last reading, and what it does is unknown."""


def reading_bytes(reading: RankReading) -> int:
    """Return about how much memory a reading takes: most of it is numbers by phase, group and operation."""
    counters, collectives, aligned = reading.counters, reading.counters.collectives, reading.counters.aligned
    by_name = (
        reading.issued,
        *(counters.phases, counters.device_phases, counters.device_dry, aligned.phases, aligned.blame),
        *(collectives.calls, collectives.bytes, collectives.seconds),
        *(collectives.group_waits, collectives.device_group_waits),
    )
    return READING_BYTES + NUMBER_BYTES * sum(map(len, by_name))


def are_stopped(ranks: Iterable[RankReading]) -> bool:
    """Return whether all living ranks are stopped, as by a scheduler that suspends their job."""
    living = [one for one in ranks if one.ended is None]
    return bool(living) and all(one.is_stopped for one in living)


Run = tuple[str, ...]
"""A run's name and its owner, and the number of its only rank if other trainings have the same name and owner."""


def run_title(run: Run) -> str:
    """Return the run's name, with its rank's number if others have the same name: `sweep (rank 2)`."""
    return f"{run[0]} (rank {run[2]})" if len(run) > 2 else run[0]


def spent(now: Counters, then: Counters) -> Counters:
    """Return the increase of the counters between two readings of a rank. It is unknown if either value is unknown.

    A counter that has decreased belongs to a new process, so all of it counts.
    """
    return Counters(*map(_spent, _FIELDS[Counters](now), _FIELDS[Counters](then)))


def _spent(now: Any, then: Any) -> Any:
    """Return the increase of a counter, of counters by name or by position, or of those of a dataclass."""
    if (kind := type(now)) is float and type(then) is float:  # as `increase`, without a call for each of them
        return now - then if now >= then else now
    if kind in _FIELDS:
        return kind(*map(_spent, _FIELDS[kind](now), _FIELDS[kind](then)))
    if now is None or then is None or isinstance(now, (float, int)):
        return increase(now, then)
    if isinstance(now, tuple):
        return tuple(map(increase, now, then or repeat(0.0)))
    before = then.get
    return {name: value - base if value >= (base := before(name, 0.0)) else value for name, value in now.items()}


_FIELDS = {
    kind: attrgetter(*(one.name for one in fields(kind)))
    for kind in (Counters, AlignedCounters, CollectiveCounters, ProcessCounters, GpuCounters)
}
"""Functions that return the values of a kind's fields."""
