"""Holders of each GPU, and its time by state of use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankscope_exporter.flags import flag
from rankscope_exporter.gpu.allocation.claims import Claims, Scheduler
from rankscope_exporter.gpu.allocation.holder import LABELS, Holder, labels
from rankscope_exporter.gpu.allocation.idleness import STATES, Facts, UnusedMemory, UnusedSince, are_stuck, classify
from rankscope_exporter.gpu.allocation.occupants import Occupants
from rankscope_exporter.gpu.allocation.pod_resources import PodResources
from rankscope_exporter.gpu.allocation.processes import ProcessTable, UserNames, holders_of, look_up
from rankscope_exporter.gpu.allocation.slurm import SlurmJobs
from rankscope_exporter.gpu.busy_meter import BusyMeter
from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.mig import MigInstance, mig_instances

INSTANCES_EVERY = 5.0  # seconds: about ten driver calls per instance


@dataclass(frozen=True, kw_only=True)
class AllocationFlags:
    """Sources of GPU holders in addition to processes and ranks."""

    slurm_dir: Path | None = flag(
        "--collector.allocation.slurm-dir",
        type=Path,
        metavar="DIR",
        help="directory of the Slurm prolog's files, one per GPU with its jobs (deploy/slurm), as for dcgm-exporter",
    )
    kubelet_socket: Path | None = flag(
        "--collector.allocation.kubelet-socket",
        type=Path,
        metavar="PATH",
        help="the kubelet's pod resources socket, usually /var/lib/kubelet/pod-resources/kubelet.sock; "
        "needs rankscope[kubernetes]",
    )
    procfs: Path = flag(
        "--path.procfs",
        type=Path,
        default=Path("/proc"),
        metavar="DIR",
        help="procfs that shows the host's processes (default: %(default)s)",
    )


# The scheduler for each setting of AllocationFlags.
SCHEDULERS: Mapping[str, Callable[[Path], Scheduler]] = {"slurm_dir": SlurmJobs, "kubelet_socket": PodResources}


@dataclass(frozen=True)
class Allocation:
    """Current holders and state, and seconds by state since the exporter first saw the GPU."""

    holders: Sequence[Holder]
    state: str
    seconds: Mapping[str, float]
    unused_since: UnusedSince | None = None
    """The time since which memory is in use without a kernel and a rank, in unix seconds."""


class AllocationMeter:
    """Integrator of the states of one GPU. The state at a reading counts for the time since the previous one."""

    def __init__(
        self,
        claims: Callable[[], Claims],
        processes: ProcessTable,
        users: UserNames,
        occupants: Occupants | None = None,
    ) -> None:
        self._claims = claims
        self._occupants = occupants
        self._processes = processes
        self._users = users
        self._busy = BusyMeter()
        self._unused = UnusedMemory()
        self._instances = Cached(lambda device, _: mig_instances(device), INSTANCES_EVERY)
        self._file = Cached(lambda device, _: _device_file(device))
        # Every state starts at 0, because a counter that first appears with a value never shows that increase.
        self._seconds = dict.fromkeys(STATES, 0.0)

    def __call__(self, device: Device, tick: Tick) -> Allocation | None:
        """Return holders, state and times; None if the device reports neither its processes nor its utilization."""
        pids, load = device.pids(), self._busy(device, tick)
        if pids is None and load is None:
            return None
        claims, split_into = self._claims(), self._instances(device, tick)
        instances = _instance_uuids(split_into or ())
        hides_instances = split_into is not None and not instances
        claimed = claims.find_holders(device.index, self._file(device, tick), device.uuid, *instances)
        ranks = claims.find_ranks(device.uuid, *instances)
        seen = look_up(pids, self._processes)
        if self._occupants:
            self._occupants.record(device.uuid, seen, instances)
        memory, idle_for = _share_in_use(device), load.idle_for if load else None
        facts = Facts(
            is_allocated=bool(claimed) or (False if self._are_all_known(claims, device, hides_instances) else None),
            # If processes are not visible, living ranks are the only known processes.
            processes=seen.count if seen.count is not None else len(ranks) or None,
            dead=seen.dead,
            memory=None if seen.count else memory,
            idle_for=idle_for,
            is_stuck=are_stuck([rank.snapshot for rank in ranks]),
        )
        state = classify(facts)
        self._seconds[state] += tick.elapsed
        since = self._unused.update(tick.steady, memory, bool(ranks), idle_for)
        unused_since = since and since._replace(at=tick.unix - (tick.steady - since.at))
        holders = [*claimed, *holders_of(seen.living, self._users)]
        return Allocation(holders, state, dict(self._seconds), unused_since)

    def _are_all_known(self, claims: Claims, device: Device, hides_instances: bool) -> bool:
        """Return whether all holders are known.

        They are not if a scheduler names a UUID that several GPUs report, or an instance that no GPU shows: a container
        without privileges does not see the instances of a GPU in MIG mode.
        """
        if hides_instances and any(name.startswith("MIG-") and not self._is_seen(name) for name in claims.holders):
            return False
        return claims.is_complete and (
            device.uuid == device.reported_uuid or device.reported_uuid not in claims.holders
        )

    def _is_seen(self, instance: str) -> bool:
        return self._occupants is not None and self._occupants.has_instance(instance)


RANKS = ("run", "rank", "owner")


def _ranks(holders: Sequence[Holder]) -> tuple[str, ...]:
    found = labels(holders) if holders else {}
    return tuple(found.get(name, "") for name in RANKS)


GPU = GpuMetrics[Allocation]()
METRICS = (
    GPU.gauge(
        "allocation_info",
        "Holders of the GPU, as far as they are known. There is one series per GPU, so joins do not multiply series: "
        "labels list several holders separated by commas. `source` is the best of `slurm`, `kubernetes`, `container`, "
        "`user`, `process`, `rank`. Absent if no holder is known.",
        lambda allocation: {tuple(labels(allocation.holders).values()): 1} if allocation.holders else None,
        *LABELS,
        source="Slurm prolog files, kubelet, /proc, rank records",
    ),
    GPU.gauge(
        "state_info",
        "Current state of use of the GPU. `run`, `rank` and `owner` are those of the living ranks on it, as in "
        "`rankscope_gpu_allocation_info`; empty without one.",
        lambda allocation: {(allocation.state, *_ranks(allocation.holders)): 1},
        "state",
        *RANKS,
        source="as above, and nvmlDeviceGetSamples(GPU_UTILIZATION)",
    ),
    GPU.counter(
        "state_seconds_total",
        "The GPU's time by state of use. Each observed second has exactly one state: `working` (including pauses "
        "up to 60 s), `free`, `allocated_no_process` (a scheduler or a rank claims it), `process_no_work`, "
        "`memory_held_by_dead`, `suspected_hang` (kernels run, but no rank has made progress for 5 min, or for 30 min "
        "in start-up, checkpoint and evaluation), `unknown`. Limits and reasons: `allocation/idleness.py`.",
        lambda allocation: allocation.seconds,
        "state",
        source="as above, integrated",
    ),
    GPU.gauge(
        "memory_unused_since_timestamp_seconds",
        "Time since which more than 5% of the memory has been in use, no kernel has run, and no rank has been alive on "
        "the GPU. `since` is what came last: its `allocation`, the end of the last `rank`, or a `kernel` after both or "
        "before the exporter's start. Absent while the memory is used, with pauses up to 60 s.",
        lambda allocation: {one.what: one.at} if (one := allocation.unused_since) else None,
        "since",
        source="as above, and nvmlDeviceGetMemoryInfo_v2",
    ),
)


def _instance_uuids(instances: Iterable[MigInstance]) -> Collection[str]:
    """Return the UUIDs of the MIG instances in two forms: the driver's (`MIG-…`) and the ranks' (`GPU-…`)."""
    uuids = [instance.uuid for instance in instances if instance.uuid]
    return [*uuids, *(f"GPU-{uuid.removeprefix('MIG-')}" for uuid in uuids)]


def _device_file(device: Device) -> str:
    """Return the name of the device file. If the minor number is unknown, the index is used."""
    number = device.minor_number()
    return f"nvidia{device.index if number is None else number}"


def _share_in_use(device: Device) -> float | None:
    memory = device.memory()
    return memory.used / memory.total if memory and memory.total else None


def watching(
    claims: Callable[[], Claims], processes: ProcessTable, users: UserNames, occupants: Occupants | None = None
) -> GpuCollector[Allocation]:
    """Return the collector with these sources. It records each GPU's processes in `occupants`."""
    return replace(COLLECTOR, reader=lambda: AllocationMeter(claims, processes, users, occupants))


COLLECTOR: GpuCollector[Allocation] = GpuCollector(
    "allocation",
    "GPU holders (Slurm job, pod, container, user, ranks), and GPU time by state of use",
    lambda: AllocationMeter(lambda: Claims(is_complete=True), ProcessTable(), UserNames()),
    METRICS,
)
