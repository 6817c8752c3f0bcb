"""Activity of each GPU's units from GPM: counters of seconds and bytes for whole GPUs or MIG instances."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.gpm import sampler_of
from rankscope_exporter.gpu.nvml.mig import gpu_instances

INSTANCES_EVERY = 10.0  # seconds: administrators create and delete MIG instances
WHOLE_GPU = ""  # label value, which Prometheus treats as an absent label

Totals = Mapping[str, Mapping[str, float]]
"""Seconds or bytes by GPU instance and by quantity."""


class GpmMeter:
    """Integrator of one GPU's activity, in the GPU's thread.

    After a gap, or after the device is reopened, earlier samples are dropped: time without samples does not count.
    """

    def __init__(self) -> None:
        self._totals: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._supported = Cached(lambda device, _: device.supports_gpm())
        self._instances = Cached(lambda device, _: _instances(device), INSTANCES_EVERY)

    def __call__(self, device: Device, tick: Tick) -> Totals | None:
        """Return the totals so far; None if the device has no GPM."""
        if not self._supported(device, tick):
            return None
        instances = self._instances(device, tick)
        for gone in self._totals.keys() - instances.keys():
            del self._totals[gone]
        for closed in device.gpm_samplers.keys() - set(instances.values()):
            device.gpm_samplers.pop(closed).close()
        for label, instance in instances.items():
            totals = self._totals[label]
            for name, amount in sampler_of(device, instance).measure(tick.elapsed, tick.steady).items():
                totals[name] = totals.get(name, 0.0) + amount
        return {label: dict(totals) for label, totals in self._totals.items()}


def _instances(device: Device) -> dict[str, int | None]:
    """Return the GPU instances by label; a GPU that is not split counts as one instance."""
    instances = gpu_instances(device)
    return {str(instance): instance for instance in instances} if instances else {WHOLE_GPU: None}


def _one(quantity: str) -> Callable[[Totals], Values]:
    return lambda totals: {instance: counts[quantity] for instance, counts in totals.items() if quantity in counts}


def _several(quantities: Mapping[str, str]) -> Callable[[Totals], Values]:
    return lambda totals: {
        (instance, label): counts[quantity]
        for instance, counts in totals.items()
        for label, quantity in quantities.items()
        if quantity in counts
    }


PIPES = {name: name for name in ("tensor_hmma", "tensor_imma", "tensor_dfma", "fp64", "fp32", "fp16")}
PCIE = {"transmit": "pcie_transmit", "receive": "pcie_receive"}
NVLINK = {"transmit": "nvlink_transmit", "receive": "nvlink_receive"}

GPU = GpuMetrics[Totals](source="nvmlGpmMetricsGet", since="Hopper")
METRICS = (
    GPU.counter(
        "graphics_active_seconds_total",
        "Time in which a compute or graphics engine was active.",
        _one("graphics"),
        "gpu_instance",
    ),
    GPU.counter(
        "sm_active_seconds_total",
        "Time in which an SM had an active warp, averaged over all SMs. Unlike busy time, it excludes waiting.",
        _one("sm"),
        "gpu_instance",
    ),
    GPU.counter(
        "sm_occupancy_seconds_total",
        "Resident warps as a share of the maximum, averaged over all SMs and integrated over time.",
        _one("sm_occupancy"),
        "gpu_instance",
    ),
    GPU.counter(
        "tensor_active_seconds_total",
        "Time in which the tensor cores were active, averaged over all SMs.",
        _one("tensor"),
        "gpu_instance",
    ),
    GPU.counter(
        "pipe_active_seconds_total",
        "Time in which an SM pipe was active: tensor cores by type, and other arithmetic by precision.",
        _several(PIPES),
        "gpu_instance",
        "pipe",
    ),
    GPU.counter(
        "dram_active_seconds_total",
        "Time in which device memory was read or written, as a share of its maximum bandwidth.",
        _one("dram"),
        "gpu_instance",
    ),
    GPU.counter(
        "gpm_pcie_bytes_total",
        "Bytes over PCIe according to GPM, by direction.",
        _several(PCIE),
        "gpu_instance",
        "direction",
    ),
    GPU.counter(
        "gpm_nvlink_bytes_total",
        "Bytes over all NVLinks according to GPM, by direction.",
        _several(NVLINK),
        "gpu_instance",
        "direction",
    ),
)

COLLECTOR = GpuCollector("gpm", "activity of SMs, tensor cores, memory and links (GPM)", GpmMeter, METRICS)
