"""GPU memory: how much there is, how much processes hold, how much the driver keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from rankscope_exporter.nvml.device import Device, Memory
from rankscope_exporter.source import Gpu, GpuSource, Tick, gauge


def read(device: Device, _tick: Tick) -> Memory | None:
    """The memory now."""
    return device.memory()


def families(readings: Mapping[Gpu, Memory | None]) -> Iterable[Metric]:
    """Total, used and reserved."""
    yield gauge("memory_total_bytes", "Memory of the GPU.", readings, lambda memory: memory.total)
    text = "Memory that processes have allocated on the GPU."
    yield gauge("memory_used_bytes", text, readings, lambda memory: memory.used)
    text = "Memory that the driver and the firmware keep for themselves."
    yield gauge("memory_reserved_bytes", text, readings, lambda memory: memory.reserved)


SOURCE = GpuSource("memory", "GPU memory: total, used, reserved", lambda: read, families)
