"""GPM: activity of GPU units between two samples (Hopper and later), for a whole GPU or a MIG instance.

One thread creates, fills and compares a device's samples: sharing one between threads was reported to panic the kernel.
Unlike DCGM's profiling, GPM takes no lock that conflicts with Nsight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pynvml

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import ask, perform

# Percent of the time between two samples.
RATIOS = {
    "graphics": pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    "sm": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "dram": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "tensor": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "tensor_hmma": pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL,
    "tensor_imma": pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL,
    "tensor_dfma": pynvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL,
    "fp64": pynvml.NVML_GPM_METRIC_FP64_UTIL,
    "fp32": pynvml.NVML_GPM_METRIC_FP32_UTIL,
    "fp16": pynvml.NVML_GPM_METRIC_FP16_UTIL,
}
# MiB per second.
RATES = {
    "pcie_transmit": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "pcie_receive": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    "nvlink_transmit": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    "nvlink_receive": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
}
SHORTEST = 0.1  # seconds between two samples; NVML does not compare closer ones
MIB = 2**20


class GpmSampler:
    """Samples of one device or MIG instance. Not thread-safe."""

    def __init__(self, device: Device, gpu_instance: int | None = None) -> None:
        """Allocate the samples. Raises DriverError; call `Device.supports_gpm` first."""
        self._device = device
        self._gpu_instance = gpu_instance
        self._request = pynvml.c_nvmlGpmMetricsGet_t()  # kept because it is about 20 kB
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(RATIOS) + len(RATES)
        for index, metric in enumerate((*RATIOS.values(), *RATES.values())):
            self._request.metrics[index].metricId = metric
        self._last, self._spare = ask(pynvml.nvmlGpmSampleAlloc), ask(pynvml.nvmlGpmSampleAlloc)
        self._has_last = False
        self._elapsed = 0.0
        self._measured_at: float | None = None
        self.latest: Mapping[str, float] = {}
        """What the last call of `measure` returned."""

    def measure(self, elapsed: float, at: float) -> Mapping[str, float]:
        """Return seconds and bytes since the last call, for the quantities that this device has.

        `elapsed` is the number of seconds since the previous call; 0 starts over and ignores earlier samples. Calls
        with the same `at` (seconds of any clock) return the same: several collectors read the device at once.
        """
        if at != self._measured_at:
            self._measured_at, self.latest = at, self._measure(elapsed)
        return self.latest

    def _measure(self, elapsed: float) -> Mapping[str, float]:
        self._elapsed += elapsed
        if not elapsed:
            self._has_last = False
        elif self._elapsed <= SHORTEST:
            return {}
        had_last, self._has_last = self._has_last, self._take(self._spare)
        if not self._has_last:
            return {}
        self._last, self._spare = self._spare, self._last
        covered, self._elapsed = self._elapsed, 0.0
        return dict(self._compare(covered)) if had_last else {}

    def close(self) -> None:
        """Free the samples. Raises DriverError."""
        for sample in (self._last, self._spare):
            perform(pynvml.nvmlGpmSampleFree, sample)

    def _take(self, sample: Any) -> bool:
        if self._gpu_instance is None:
            return perform(pynvml.nvmlGpmSampleGet, self._device.handle, sample)
        return perform(pynvml.nvmlGpmMigSampleGet, self._device.handle, self._gpu_instance, sample)

    def _compare(self, seconds: float) -> Iterable[tuple[str, float]]:
        self._request.sample1, self._request.sample2 = self._spare, self._last
        if not perform(pynvml.nvmlGpmMetricsGet, self._request):
            return
        for name, metric in zip((*RATIOS, *RATES), self._request.metrics, strict=False):
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and metric.value >= 0:  # False for NaN
                rate = min(metric.value, 100.0) / 100 if name in RATIOS else metric.value * MIB
                yield name, rate * seconds


def sampler_of(device: Device, gpu_instance: int | None = None) -> GpmSampler:
    """Return the sampler that all collectors of a device share, until the device is closed. Raises DriverError."""
    samplers = device.gpm_samplers
    sampler: GpmSampler | None = samplers.get(gpu_instance)
    if sampler is None:
        sampler = GpmSampler(device, gpu_instance)
        if not samplers:
            device.at_close(lambda: _close(samplers))
        samplers[gpu_instance] = sampler
    return sampler


def _close(samplers: dict[int | None, GpmSampler]) -> None:
    while samplers:
        samplers.popitem()[1].close()
