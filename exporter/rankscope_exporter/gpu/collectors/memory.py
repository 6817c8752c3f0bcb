"""GPU memory: how much there is, how much processes hold, how much the driver keeps."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device, Memory


@dataclass(frozen=True)
class Memories:
    """The device's own memory, and its window into the address space of the PCIe bus."""

    device: Memory | None
    bar1: Memory | None


def read(device: Device, _tick: Tick) -> Memories:
    """Bytes now; None of what the device does not tell."""
    return Memories(device.memory(), device.bar1_memory())


DEVICE = GpuMetrics[Memories](source="nvmlDeviceGetMemoryInfo_v2")
BAR1 = GpuMetrics[Memories](source="nvmlDeviceGetBAR1MemoryInfo", since="Kepler")
METRICS = (
    DEVICE.gauge(
        "memory_total_bytes",
        "Memory of the GPU.",
        lambda memory: memory.device.total if memory.device else None,
    ),
    DEVICE.gauge(
        "memory_used_bytes",
        "Memory that processes have allocated on the GPU, without what the driver reserves.",
        lambda memory: memory.device.used if memory.device else None,
    ),
    DEVICE.gauge(
        "memory_reserved_bytes",
        "Memory that the driver and the firmware keep for themselves.",
        lambda memory: memory.device.reserved if memory.device else None,
    ),
    DEVICE.gauge(
        "memory_free_bytes",
        "Memory that can still be allocated on the GPU.",
        lambda memory: memory.device.free if memory.device else None,
    ),
    BAR1.gauge(
        "bar1_memory_total_bytes",
        "Size of the GPU's window into the PCIe address space (BAR1), by which other devices reach its memory.",
        lambda memory: memory.bar1.total if memory.bar1 else None,
    ),
    BAR1.gauge(
        "bar1_memory_used_bytes",
        "How much of BAR1 is mapped.",
        lambda memory: memory.bar1.used if memory.bar1 else None,
    ),
)

COLLECTOR = GpuCollector("memory", "GPU memory: total, used, reserved, free, BAR1", lambda: read, METRICS)
