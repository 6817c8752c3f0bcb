"""GPU readings for the diagnosis: the last readings of the enabled collectors, by UUID."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from rankscope_exporter.diagnosis.readings import GpuCounters, GpuReading
from rankscope_exporter.gpu.collector import Gpu, GpuCollector
from rankscope_exporter.gpu.collectors import clocks, ecc, load, memory, nvlink, pcie, power, processes
from rankscope_exporter.gpu.collectors.allocation import Allocation
from rankscope_exporter.gpu.nvml.device import Memory
from rankscope_exporter.gpu.sampler import Sampler

GROUP_REASON = "sync_boost"
"""Reason that lowers the clocks of all GPUs of a group alike, so that none is slower than the others."""


class RankGpu(NamedTuple):
    """A GPU's current reading and its counters."""

    reading: GpuReading
    counters: GpuCounters
    joules: float | None = None
    """Energy used since the driver was loaded."""
    memory: Memory | None = None
    pids: Collection[int] = ()
    """The processes on it, in the driver's pid namespace."""
    namespace: str = ""
    """The Kubernetes namespace of all pods that have it; empty if unknown, or of several."""
    sizes: Mapping[int, int | None] = MappingProxyType({})
    """The bytes of these processes, as far as the driver knows them."""

    def without(self, uuids: Mapping[int, str], own: str) -> GpuReading:
        """Return the reading without the processes whose GPU in `uuids` (by pid) is another one than `own`.

        It has the memory of the processes that are no ranks of the run, if it is known which ones these are.

        Each rank of a run has a context on GPU 0, too, if it calls torch.load without map_location.
        """
        elsewhere = sum(uuids.get(pid, own) != own for pid in self.pids)
        reading = replace(self.reading, processes=len(self.pids) - elsewhere) if elsewhere else self.reading
        own_pids = {pid for pid, uuid in uuids.items() if uuid == own}
        foreign = {pid: size for pid, size in self.sizes.items() if pid not in uuids}
        known = [size for size in foreign.values() if size is not None]
        # The pid of a rank that cannot be seen is 0: its process would count as another one.
        if not own_pids or not own_pids <= self.sizes.keys() or len(known) < len(foreign):
            return reading
        largest = max(foreign, key=lambda pid: foreign[pid] or 0, default=None)
        return replace(reading, foreign_bytes=float(sum(known)), foreign_pid=largest)


class GpuFaults(NamedTuple):
    """The state of a GPU's hardware, also of a lost GPU."""

    gpu: str
    """Its index."""
    is_lost: bool = False
    """True if it does not answer."""
    xids: Mapping[int, int] = {}
    """The number of XID events by code since the exporter's start."""
    uncorrected_errors: float | None = None
    """Uncorrected memory errors since the driver was loaded."""


class RankGpus:
    """GPU readings by UUID, for one thread. Integrates the clock, which the driver does not count."""

    def __init__(self, collectors: Collection[str]) -> None:
        """Initialize with the names of the enabled collectors."""
        self.sampler: Sampler | None = None
        """Assigned after construction; until then no GPU is known."""
        self.allocation: GpuCollector[Allocation] | None = None
        """The enabled collector of that name, assigned likewise; without it, no pod is known."""
        self._collectors = collectors
        self._clock_seconds: dict[str, tuple[float, float]] = {}
        self._first_seen: dict[str, float] = {}

    def __call__(self, at: float) -> Mapping[str, RankGpu]:
        """Return the readings at `at`, in monotonic seconds. A GPU that does not answer is absent."""
        found: dict[Gpu, dict[str, Any]] = {}
        for one in (load, clocks, memory, power, processes, pcie, nvlink):
            for gpu, value in self._read(one.COLLECTOR).items():
                if value is not None:
                    found.setdefault(gpu, {})[one.COLLECTOR.name] = value
        for gpu, held in (self._read(self.allocation) if self.allocation else {}).items():
            if held and gpu in found:
                found[gpu]["namespaces"] = {one.k8s_namespace for one in held.holders if one.source == "kubernetes"}
        return {gpu.uuid: self._gpu(gpu, values, at) for gpu, values in found.items()}

    def faults(self) -> Mapping[str, GpuFaults]:
        """Return what the driver reports of the hardware of all GPUs, by UUID."""
        if self.sampler is None:
            return {}
        lost = {gpu for gpu, reading in self.sampler.latest().gpus if reading is None}
        memory_errors = self._read(ecc.COLLECTOR)
        return {
            one.uuid: GpuFaults(
                str(one.index),
                is_lost=one in lost,
                xids=events.counts or {},
                uncorrected_errors=_uncorrected(memory_errors.get(one)),
            )
            for one, events in self.sampler.xids().items()
        }

    def _read(self, collector: GpuCollector[Any]) -> Mapping[Gpu, Any]:
        return self.sampler.readings(collector) if self.sampler and collector.name in self._collectors else {}

    def _gpu(self, gpu: Gpu, values: Mapping[str, Any], at: float) -> RankGpu:
        busy = (values.get("load") or {}).get("gpu")
        device = values["memory"].device if "memory" in values else None
        clock = values.get("clocks")
        reasons = clock.throttled_seconds if clock else None
        reading = GpuReading(
            index=str(gpu.index),
            memory_ratio=device.used / device.total if device and device.total else None,
            processes=len(values["processes"]) if "processes" in values else None,
            idle_seconds=self._idle(gpu.uuid, busy.idle_for, at) if busy else None,
            is_power_limit_lowered=_is_power_limit_lowered(values),
            is_link_reduced=_is_link_reduced(values),
            total_bytes=float(device.total) if device and device.total else None,
        )
        namespaces = values.get("namespaces", ())
        throttled = (
            None if reasons is None else {name: spent for name, spent in reasons.items() if name != GROUP_REASON}
        )
        counters = GpuCounters(busy.busy_seconds if busy else None, throttled, self._clock(gpu.uuid, clock, at))
        return RankGpu(
            reading,
            counters,
            values["power"].joules if "power" in values else None,
            device,
            values.get("processes", ()),
            next(iter(namespaces)) if len(namespaces) == 1 else "",
            values.get("processes", {}),
        )

    def _idle(self, uuid: str, idle_for: float, at: float) -> float:
        """Return the seconds since a kernel last ran, or since the GPU was first seen if none ran."""
        return min(idle_for, at - self._first_seen.setdefault(uuid, at))

    def _clock(self, uuid: str, clock: clocks.Clocks | None, at: float) -> float | None:
        now, highest = (clock.hertz.get("sm"), clock.max_hertz.get("sm")) if clock else (None, None)
        if not (now and highest):
            self._clock_seconds.pop(uuid, None)
            return None
        before, seconds = self._clock_seconds.get(uuid, (at, 0.0))
        seconds += now / highest * max(at - before, 0.0)
        self._clock_seconds[uuid] = at, seconds
        return seconds


def _uncorrected(errors: ecc.Ecc | None) -> float | None:
    known = (number for (kind, _), number in errors.errors.items() if kind == "uncorrected") if errors else ()
    return sum(number for number in known if number is not None) if errors else None


def _is_power_limit_lowered(values: Mapping[str, Any]) -> bool | None:
    power = values.get("power")
    return _is_below(power.limit_watts, power.limits.default) if power else None


def _is_link_reduced(values: Mapping[str, Any]) -> bool | None:
    pcie, nvlinks = values.get("pcie"), values.get("nvlink")
    is_narrow = _is_below(pcie.link.width, pcie.best.width) if pcie else None
    return not all(nvlinks.states) or is_narrow if nvlinks else is_narrow


def _is_below(value: float | None, usual: float | None) -> bool | None:
    return value < usual if value and usual else None
