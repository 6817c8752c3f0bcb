"""The processes on each GPU: their number and total memory."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device

Processes = Mapping[int, int | None]
"""Bytes by pid; None if the driver does not report the size."""


def read(device: Device, _tick: Tick) -> Processes | None:
    """Return the current processes. A process with compute and graphics contexts counts once."""
    return device.processes()


def total(processes: Processes) -> int | None:
    """Return the total bytes of all processes; None unless all are known."""
    known = [size for size in processes.values() if size is not None]
    return sum(known) if len(known) == len(processes) else None


GPU = GpuMetrics[Processes](source="nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses")
METRICS = (
    GPU.gauge(
        "processes",
        "Number of processes with a compute or graphics context on the GPU. Each pid counts once.",
        len,
    ),
    GPU.gauge(
        "processes_memory_bytes",
        "Total memory of these processes.",
        total,
    ),
)

COLLECTOR = GpuCollector("processes", "number and memory of the processes on each GPU", lambda: read, METRICS)
