"""The processes that use each GPU: how many, and what memory they hold together."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device

Processes = Mapping[int, int | None]
"""Bytes by pid; None if the driver does not tell them."""


def read(device: Device, _tick: Tick) -> Processes | None:
    """The processes now; one with both kinds of context counts once."""
    return device.processes()


def total(processes: Processes) -> int | None:
    """Bytes of all processes; None unless all are known."""
    known = [size for size in processes.values() if size is not None]
    return sum(known) if len(known) == len(processes) else None


GPU = GpuMetrics[Processes](source="nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses")
METRICS = (
    GPU.gauge(
        "processes",
        "Processes with a compute or graphics context on the GPU, each pid once.",
        len,
    ),
    GPU.gauge(
        "processes_memory_bytes",
        "Memory that these processes hold together.",
        total,
    ),
)

COLLECTOR = GpuCollector("processes", "number and memory of the processes on each GPU", lambda: read, METRICS)
