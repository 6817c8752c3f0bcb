"""What the parts of each GPU did, by GPM: seconds and bytes as counters, of whole GPUs or of MIG instances."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from rankscope_exporter.exposition.metric import Values
from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.gpm import GpmSampler, supports_gpm
from rankscope_exporter.gpu.nvml.mig import gpu_instances

INSTANCES_EVERY = 10.0  # seconds: MIG instances come and go by an administrator's hand
WHOLE_GPU = ""  # as a label's value, which Prometheus treats as a label that is not there

Totals = Mapping[str, Mapping[str, float]]
"""Seconds or bytes by GPU instance and by quantity."""


class GpmMeter:
    """Integrates one GPU's activity, in its own thread.

    After a gap, or when the device was opened anew, the samples from before are no longer compared with: what was
    not watched is not counted.
    """

    def __init__(self) -> None:
        self._device: Device | None = None
        self._samplers: dict[str, GpmSampler] = {}
        self._totals: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._supported = Cached(lambda device, _: supports_gpm(device))
        self._instances = Cached(lambda device, _: _instances(device), INSTANCES_EVERY)

    def __call__(self, device: Device, tick: Tick) -> Totals | None:
        """What was counted so far; None if the device has no GPM."""
        if not self._supported(device, tick):
            return None
        if device is not self._device:
            self._device, self._samplers = device, {}
            device.at_close(self._close)
        instances = self._instances(device, tick)
        for gone in self._samplers.keys() - instances.keys():
            self._samplers.pop(gone).close()
            self._totals.pop(gone, None)
        for label, instance in instances.items():
            sampler = self._samplers.get(label) or GpmSampler(device, instance)
            self._samplers[label] = sampler
            totals = self._totals[label]
            for name, amount in sampler.measure(tick.elapsed).items():
                totals[name] = totals.get(name, 0.0) + amount
        return {label: dict(totals) for label, totals in self._totals.items()}

    def _close(self) -> None:
        while self._samplers:
            self._samplers.popitem()[1].close()


def _instances(device: Device) -> dict[str, int | None]:
    """The GPU instances by their label; a GPU that is not split is one of its own."""
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
        "Time in which any compute or graphics engine was active.",
        _one("graphics"),
        "gpu_instance",
    ),
    GPU.counter(
        "sm_active_seconds_total",
        "Time in which an SM had a warp to run, averaged over all SMs: unlike busy time it tells work from waiting.",
        _one("sm"),
        "gpu_instance",
    ),
    GPU.counter(
        "sm_occupancy_seconds_total",
        "Warps resident on the SMs as a share of the most that could be, integrated over time.",
        _one("sm_occupancy"),
        "gpu_instance",
    ),
    GPU.counter(
        "tensor_active_seconds_total",
        "Time in which the tensor cores worked, averaged over all SMs.",
        _one("tensor"),
        "gpu_instance",
    ),
    GPU.counter(
        "pipe_active_seconds_total",
        "Time in which a pipe of the SMs worked: the tensor cores' kinds, and arithmetic without them by precision.",
        _several(PIPES),
        "gpu_instance",
        "pipe",
    ),
    GPU.counter(
        "dram_active_seconds_total",
        "Time in which the device memory was read or written, as a share of the most that it can do.",
        _one("dram"),
        "gpu_instance",
    ),
    GPU.counter(
        "gpm_pcie_bytes_total",
        "Bytes over PCIe as GPM sees them, by direction.",
        _several(PCIE),
        "gpu_instance",
        "direction",
    ),
    GPU.counter(
        "gpm_nvlink_bytes_total",
        "Bytes over all NVLinks as GPM sees them, by direction.",
        _several(NVLINK),
        "gpu_instance",
        "direction",
    ),
)

COLLECTOR = GpuCollector("gpm", "activity of SMs, tensor cores, memory and links (GPM)", GpmMeter, METRICS)
