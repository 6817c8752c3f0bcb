"""Who holds each GPU, and what its time goes to: work, or one of the ways of being idle."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankscope_exporter.flags import flag
from rankscope_exporter.gpu.allocation.claims import Claims, Scheduler
from rankscope_exporter.gpu.allocation.holder import LABELS, Holder, labels
from rankscope_exporter.gpu.allocation.idleness import STATES, Facts, are_stuck, classify
from rankscope_exporter.gpu.allocation.occupants import Occupants
from rankscope_exporter.gpu.allocation.pod_resources import PodResources
from rankscope_exporter.gpu.allocation.processes import ProcessTable, UserNames, holders_of, look_up
from rankscope_exporter.gpu.allocation.slurm import SlurmJobs
from rankscope_exporter.gpu.busy_meter import BusyMeter
from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.mig import mig_instances

INSTANCES_EVERY = 5.0  # seconds: some ten calls an instance


@dataclass(frozen=True, kw_only=True)
class AllocationFlags:
    """Where the collector asks who holds a GPU, in addition to the processes on it and the ranks."""

    slurm_dir: Path | None = flag(
        "--collector.allocation.slurm-dir",
        type=Path,
        metavar="DIR",
        help="where Slurm's prolog leaves one file a GPU with its jobs (deploy/slurm), as for dcgm-exporter",
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
        help="where the host's processes are seen (default: %(default)s)",
    )


# The scheduler that each setting of AllocationFlags configures.
SCHEDULERS: Mapping[str, Callable[[Path], Scheduler]] = {"slurm_dir": SlurmJobs, "kubelet_socket": PodResources}


@dataclass(frozen=True)
class Allocation:
    """Holders and state now, and seconds by state since the exporter first saw the GPU."""

    holders: Sequence[Holder]
    state: str
    seconds: Mapping[str, float]


class AllocationMeter:
    """Looks at one GPU and integrates its states: the one at a reading is taken to have held since the last."""

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
        self._instances = Cached(lambda device, _: _instance_uuids(device), INSTANCES_EVERY)
        self._file = Cached(lambda device, _: _device_file(device))
        # Each from 0 on, because a counter that is born with its first second never increases by that second.
        self._seconds = dict.fromkeys(STATES, 0.0)

    def __call__(self, device: Device, tick: Tick) -> Allocation | None:
        """Who holds it and what it does. None if the device tells neither its processes nor its utilization."""
        pids, load = device.pids(), self._busy(device, tick)
        if pids is None and load is None:
            return None
        claims, instances = self._claims(), self._instances(device, tick)
        claimed = claims.on(device.index, self._file(device, tick), device.uuid, *instances)
        ranks = claims.ranks_on(device.uuid, *instances)
        seen = look_up(pids, self._processes)
        if self._occupants:
            self._occupants.see(device.uuid, seen, instances)
        facts = Facts(
            allocated=bool(claimed) or (False if _are_all_known(claims, device) else None),
            # Where processes cannot be seen, living ranks are the processes that one knows of.
            processes=seen.count if seen.count is not None else len(ranks) or None,
            dead=seen.dead,
            memory=None if seen.count else _share_in_use(device),
            idle_for=load.idle_for if load else None,
            is_stuck=are_stuck([rank.snapshot for rank in ranks]),
        )
        state = classify(facts)
        self._seconds[state] += tick.elapsed
        return Allocation([*claimed, *holders_of(seen.living, self._users)], state, dict(self._seconds))


GPU = GpuMetrics[Allocation]()
METRICS = (
    GPU.gauge(
        "allocation_info",
        "Who holds the GPU, as far as it is known; one series a GPU, so that joining it multiplies nothing: several "
        "holders stand in one label with commas. `source` is the best of `slurm`, `kubernetes`, `container`, `user`, "
        "`process`, `rank`. Absent while nobody is known to hold it.",
        lambda allocation: {tuple(labels(allocation.holders).values()): 1} if allocation.holders else None,
        *LABELS,
        source="Slurm's files, the kubelet, /proc, rank records",
    ),
    GPU.gauge(
        "state_info",
        "What the GPU's time goes to now.",
        lambda allocation: {allocation.state: 1},
        "state",
        source="the same, and nvmlDeviceGetSamples(GPU_UTILIZATION)",
    ),
    GPU.counter(
        "state_seconds_total",
        "The GPU's time by what it went to; the states partition the time in which it was watched: `working` (a pause "
        "of up to 60 s included), `free`, `allocated_no_process` (a scheduler or a rank claims it), `process_no_work`, "
        "`memory_held_by_dead`, `suspected_hang` (kernels run, and no rank on it has made progress for 5 min, in "
        "start-up, checkpoint and evaluation 30), `unknown`. Limits and reasons: `allocation/idleness.py`.",
        lambda allocation: allocation.seconds,
        "state",
        source="the same, integrated",
    ),
)


def _are_all_known(claims: Claims, device: Device) -> bool:
    """Return whether no other process can hold the GPU; one that holds a UUID that several GPUs report may."""
    return claims.is_complete and (device.uuid == device.reported_uuid or device.reported_uuid not in claims.holders)


def _instance_uuids(device: Device) -> Collection[str]:
    """Return the UUIDs of the MIG instances: the driver's (`MIG-…`), and as ranks name theirs (`GPU-…`)."""
    uuids = [instance.uuid for instance in mig_instances(device) or () if instance.uuid]
    return [*uuids, *(f"GPU-{uuid.removeprefix('MIG-')}" for uuid in uuids)]


def _device_file(device: Device) -> str:
    """Return the name of its device file; where the driver does not say, the index stands for the minor number."""
    number = device.minor_number()
    return f"nvidia{device.index if number is None else number}"


def _share_in_use(device: Device) -> float | None:
    memory = device.memory()
    return memory.used / memory.total if memory and memory.total else None


def watching(
    claims: Callable[[], Claims], processes: ProcessTable, users: UserNames, occupants: Occupants | None = None
) -> GpuCollector[Allocation]:
    """The collector with these eyes on the world. `occupants` are told who is on each GPU."""
    return replace(COLLECTOR, reader=lambda: AllocationMeter(claims, processes, users, occupants))


COLLECTOR: GpuCollector[Allocation] = GpuCollector(
    "allocation",
    "who holds each GPU (Slurm job, pod, container, user, ranks), and its time by state of use",
    lambda: AllocationMeter(lambda: Claims(is_complete=True), ProcessTable(), UserNames()),
    METRICS,
)
