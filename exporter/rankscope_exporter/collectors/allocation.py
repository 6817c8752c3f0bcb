"""Who holds each GPU, and what its time goes to: work, or one of the ways of being idle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from prometheus_client.core import Metric

from rankscope_exporter.allocation.claims import Claims
from rankscope_exporter.allocation.holder import LABELS, Holder, labels
from rankscope_exporter.allocation.idleness import STATES, Facts, are_stuck, classify
from rankscope_exporter.allocation.processes import ProcessTable, UserNames, holders_of, look_up
from rankscope_exporter.families import CounterMetricFamily, GaugeMetricFamily
from rankscope_exporter.nvml.device import Device
from rankscope_exporter.source import GPU_LABELS, Gpu, GpuSource, Tick, by_label


@dataclass(frozen=True)
class Allocation:
    """Holders and state now, and seconds by state since the exporter first saw the GPU."""

    holders: Sequence[Holder]
    state: str
    seconds: Mapping[str, float]


class LastKernel:
    """For how long one GPU has run no kernel, by the driver's ring of samples or else by its utilisation now."""

    def __init__(self) -> None:
        self._seen: float | None = None
        self._cursor_us = 0  # the first time all that the ring holds: some 20 s from before the exporter began

    def __call__(self, device: Device, tick: Tick) -> float | None:
        """Seconds; infinite if none was ever seen, None if the device does not tell."""
        if device.samples_utilization():
            samples = device.utilization_samples(self._cursor_us) or ()
            busy = max((sample.timestamp_us / 1e6 for sample in samples if sample.percent > 0), default=None)
            # None newer: then all of them the next time, for the clock may have been set back.
            self._cursor_us = max((sample.timestamp_us for sample in samples), default=0)
        else:
            utilization = device.utilization()
            if utilization is None:
                return None
            busy = tick.unix if utilization > 0 else None
        self._seen = self._seen if busy is None else busy
        if self._seen is None:
            return math.inf
        self._seen = min(self._seen, tick.unix)  # else a clock that is set back would show a kernel for as long
        return tick.unix - self._seen


class AllocationMeter:
    """Looks at one GPU and integrates its states: the one at a reading is taken to have held since the last."""

    def __init__(self, claims: Callable[[], Claims], processes: ProcessTable, users: UserNames) -> None:
        self._claims = claims
        self._processes = processes
        self._users = users
        self._last_kernel = LastKernel()
        # Each from 0 on, because a counter that is born with its first second never increases by that second.
        self._seconds = dict.fromkeys(STATES, 0.0)

    def __call__(self, device: Device, tick: Tick) -> Allocation | None:
        """Who holds it and what it does. None if the device tells neither its processes nor its utilisation."""
        pids, idle_for = device.pids(), self._last_kernel(device, tick)
        if pids is None and idle_for is None:
            return None
        claims = self._claims()
        claimed, ranks = claims.on(device.index, device.uuid), claims.ranks.get(device.uuid, ())
        seen = look_up(pids, self._processes)
        facts = Facts(
            allocated=bool(claimed) or (False if claims.is_complete else None),
            # Where processes cannot be seen, living ranks are the processes that one knows of.
            processes=seen.count if seen.count is not None else len(ranks) or None,
            dead=seen.dead,
            memory=None if seen.count else _share_in_use(device),
            idle_for=idle_for,
            is_stuck=are_stuck(ranks),
        )
        state = classify(facts)
        self._seconds[state] += tick.elapsed
        return Allocation([*claimed, *holders_of(seen.living, self._users)], state, dict(self._seconds))


def families(readings: Mapping[Gpu, Allocation | None]) -> Iterable[Metric]:
    """One info series for each GPU that somebody holds, its state, and its seconds by state."""
    text = "Who holds the GPU; one series a GPU, absent while nobody is known to."
    info = GaugeMetricFamily("rankscope_gpu_allocation_info", text, labels=(*GPU_LABELS, *LABELS))
    text = "What the GPU's time goes to now."
    state = GaugeMetricFamily("rankscope_gpu_state_info", text, labels=(*GPU_LABELS, "state"))
    for gpu, allocation in readings.items():
        if allocation and allocation.holders:
            info.add_metric(gpu.values(*labels(allocation.holders).values()), 1)
        if allocation:
            state.add_metric(gpu.values(allocation.state), 1)
    text = "The GPU's time by what it went to; the states partition the time in which it was watched."
    seconds = CounterMetricFamily("rankscope_gpu_state_seconds", text, labels=(*GPU_LABELS, "state"))
    return info, state, by_label(seconds, readings, lambda allocation: allocation.seconds)


def _share_in_use(device: Device) -> float | None:
    memory = device.memory()
    return memory.used / memory.total if memory and memory.total else None


def watching(claims: Callable[[], Claims], processes: ProcessTable, users: UserNames) -> GpuSource[Allocation]:
    """The source with these eyes on the world."""
    return replace(SOURCE, reader=lambda: AllocationMeter(claims, processes, users))


SOURCE: GpuSource[Allocation] = GpuSource(
    "allocation",
    "who holds each GPU (Slurm job, pod, container, user, ranks), and its time by state of use",
    lambda: AllocationMeter(lambda: Claims(is_complete=True), ProcessTable(), UserNames()),
    families,
)
