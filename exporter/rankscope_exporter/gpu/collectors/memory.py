"""GPU memory: total, used by processes, and reserved by the driver."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device, Memory


@dataclass(frozen=True)
class Memories:
    """The device's own memory, and BAR1, its window in the PCIe address space."""

    device: Memory | None
    bar1: Memory | None


def read(device: Device, _tick: Tick) -> Memories:
    """Return current bytes; None for memory that the device does not report."""
    return Memories(device.memory(), device.bar1_memory())


DEVICE = GpuMetrics[Memories](source="nvmlDeviceGetMemoryInfo_v2")
BAR1 = GpuMetrics[Memories](source="nvmlDeviceGetBAR1MemoryInfo", since="Kepler")
METRICS = (
    DEVICE.gauge(
        "memory_total_bytes",
        "Total memory of the GPU.",
        lambda memory: memory.device.total if memory.device else None,
    ),
    DEVICE.gauge(
        "memory_used_bytes",
        "Memory allocated on the GPU by processes, without the driver's reserved memory.",
        lambda memory: memory.device.used if memory.device else None,
    ),
    DEVICE.gauge(
        "memory_reserved_bytes",
        "Memory reserved by the driver and the firmware.",
        lambda memory: memory.device.reserved if memory.device else None,
    ),
    DEVICE.gauge(
        "memory_free_bytes",
        "Memory available for allocation on the GPU.",
        lambda memory: memory.device.free if memory.device else None,
    ),
    BAR1.gauge(
        "bar1_memory_total_bytes",
        "Size of BAR1, the window in the PCIe address space through which other devices access the GPU's memory.",
        lambda memory: memory.bar1.total if memory.bar1 else None,
    ),
    BAR1.gauge(
        "bar1_memory_used_bytes",
        "Mapped part of BAR1.",
        lambda memory: memory.bar1.used if memory.bar1 else None,
    ),
)

COLLECTOR = GpuCollector("memory", "GPU memory: total, used, reserved, free, BAR1", lambda: read, METRICS)
