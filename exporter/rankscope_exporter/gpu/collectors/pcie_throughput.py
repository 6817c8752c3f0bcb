"""PCIe throughput for GPUs without byte counters. Disabled by default: a reading blocks 40 ms per GPU."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics
from rankscope_exporter.gpu.nvml.links import pcie_throughput

Throughput = Mapping[str, float | None]
"""Bytes per second by direction."""

GPU = GpuMetrics[Throughput]()
METRICS = (
    GPU.gauge(
        "pcie_throughput_bytes_per_second",
        "PCIe throughput over 20 ms, by direction from the GPU's view. Traffic between two readings is not included.",
        lambda throughput: throughput,
        "direction",
        source="nvmlDeviceGetPcieThroughput",
        since="Maxwell",
    ),
)

COLLECTOR = GpuCollector(
    "pcie_throughput",
    "PCIe throughput (blocks 40 ms/GPU)",
    lambda: lambda device, _: pcie_throughput(device),
    METRICS,
    is_on=False,
)
