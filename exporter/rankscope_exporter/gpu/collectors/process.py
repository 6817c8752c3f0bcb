"""Memory of each process on each GPU. Disabled by default: each process has its own series."""

from __future__ import annotations

from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics
from rankscope_exporter.gpu.collectors.processes import Processes, read

GPU = GpuMetrics[Processes]()
METRICS = (
    GPU.gauge(
        "process_memory_bytes",
        "Memory of one process on the GPU, by its process id on the host.",
        lambda processes: {str(pid): size for pid, size in processes.items()},
        "pid",
        source="nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses",
    ),
)

COLLECTOR = GpuCollector(
    "process", "memory of each process, by pid (one series each)", lambda: read, METRICS, is_on=False
)
