"""GPM of the simulated driver: samples, and a GPU's activity between two of them (Hopper and later).

It enforces the real driver's constraints: it rejects a sample of another thread and does not compare samples that are
too close.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml

from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.mig import mig_devices
from rankscope_exporter.simulation.symbols import symbol
from rankscope_exporter.simulation.timeline import Seconds

SHORTEST = 0.1  # seconds
SYMBOLS = ("nvmlGpmSampleGet", "nvmlGpmMigSampleGet")

# Percent while computing, and while waiting in a collective's kernel.
RATIOS = {
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: (100, 100),
    pynvml.NVML_GPM_METRIC_SM_UTIL: (95, 15),
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: (50, 5),
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: (50, 2),
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: (60, 0),
    pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL: (50, 0),
    pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL: (10, 0),
    pynvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL: (0, 0),
    pynvml.NVML_GPM_METRIC_FP64_UTIL: (0, 0),
    pynvml.NVML_GPM_METRIC_FP32_UTIL: (20, 0),
    pynvml.NVML_GPM_METRIC_FP16_UTIL: (10, 0),
}
# MiB per second, from the corresponding counters.
RATES: Mapping[int, Callable[[SimulatedGpu, float], float]] = {
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: lambda gpu, t: gpu.pcie_bytes(t),
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: lambda gpu, t: gpu.pcie_bytes(t),
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: lambda gpu, t: gpu.nvlink_bytes(t),
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: lambda gpu, t: gpu.nvlink_bytes(t),
}


@symbol("nvmlGpmQueryDeviceSupport")
def _supports(gpu: SimulatedGpu, _t: float, support: Any) -> None:
    support.isSupportedDevice = gpu.model.since("hopper")


@dataclass
class Sample:
    """One buffer: its thread and its last content."""

    thread: int
    gpu: SimulatedGpu | None = None
    instance: int | None = None
    t: float = 0.0


def fill(sample: Sample | None, gpu: SimulatedGpu, instance: int | None, t: float) -> int | None:
    """Sample a GPU that has GPM and is not split, or one of its instances. Return an NVML code or None."""
    if sample is None or sample.thread != threading.get_ident():
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    instances: set[int | None] = {device.gpu_instance for device in mig_devices(gpu)}
    if not gpu.model.since("hopper") or instance not in (instances or {None}):
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
    sample.gpu, sample.instance, sample.t = gpu, instance, t
    return None


def compare(before: Sample, after: Sample, request: Any) -> int | None:
    """Fill the request's metrics with the activity between two samples of one GPU or instance."""
    is_same = before.gpu is after.gpu and before.instance == after.instance
    is_own = before.thread == after.thread == threading.get_ident()
    if after.gpu is None or not is_same or not is_own:
        return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    for metric in request.metrics[: request.numMetrics]:
        is_far_enough = after.t - before.t >= SHORTEST
        value = _between(after.gpu, after.instance, metric.metricId, before.t, after.t) if is_far_enough else None
        metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if value is None else pynvml.NVML_SUCCESS
        metric.value = value or 0.0
    return None


def _between(gpu: SimulatedGpu, instance: int | None, metric: int, start: float, end: float) -> float | None:
    if metric in RATIOS:
        spent: Seconds = gpu.seconds(end) - gpu.seconds(start)
        computing, waiting = RATIOS[metric]
        return (computing * spent.computing + waiting * spent.waiting) / (end - start)
    if metric in RATES and instance is None:  # the links belong to the whole GPU
        return (RATES[metric](gpu, end) - RATES[metric](gpu, start)) / (end - start) / 2**20
    return None
