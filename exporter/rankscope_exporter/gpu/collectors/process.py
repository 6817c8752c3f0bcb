"""Every single process on each GPU. Off unless asked for: each process is a series of its own."""

from __future__ import annotations

from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics
from rankscope_exporter.gpu.collectors.processes import Processes, read

GPU = GpuMetrics[Processes]()
METRICS = (
    GPU.gauge(
        "process_memory_bytes",
        "Memory of one process on the GPU, by its pid as the driver sees it: that of the host.",
        lambda processes: {str(pid): size for pid, size in processes.items()},
        "pid",
        source="nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses",
    ),
)

COLLECTOR = GpuCollector(
    "process", "memory of each process, by pid (a series each)", lambda: read, METRICS, is_on=False
)
