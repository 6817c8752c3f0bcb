"""PCIe throughput where there is no counter of bytes. Off unless asked for: it blocks 40 ms a reading and GPU."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.links import pcie_throughput

Throughput = Mapping[str, float | None]


def read(device: Device, _tick: Tick) -> Throughput:
    """Bytes a second by direction."""
    return pcie_throughput(device)


GPU = GpuMetrics[Throughput]()
METRICS = (
    GPU.gauge(
        "pcie_throughput_bytes_per_second",
        "Throughput of PCIe over 20 ms, by direction as the GPU sees it; what lies between two readings is not seen.",
        lambda throughput: throughput,
        "direction",
        source="nvmlDeviceGetPcieThroughput",
        since="Maxwell",
    ),
)

COLLECTOR = GpuCollector("pcie_throughput", "PCIe throughput (blocks 40 ms a GPU)", lambda: read, METRICS, is_on=False)
