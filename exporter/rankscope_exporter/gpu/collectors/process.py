"""Every single process on each GPU. Off unless asked for: each process is a series of its own."""

from __future__ import annotations

from rankscope_exporter.gpu.collectors.processes import Processes, read
from rankscope_exporter.gpu.source import GpuMetric, GpuSource, gauge

METRICS: tuple[GpuMetric[Processes], ...] = (
    gauge(
        "process_memory_bytes",
        "Memory of one process on the GPU, by its pid as the driver sees it: that of the host.",
        "nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses",
        lambda processes: {str(pid): size for pid, size in processes.items()},
        labels=("pid",),
    ),
)

SOURCE = GpuSource("process", "memory of each process, by pid (a series each)", lambda: read, METRICS, is_on=False)
