"""Temperature of the GPU die."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from rankscope_exporter.nvml.device import Device
from rankscope_exporter.source import Gpu, GpuSource, Tick, gauge


def read(device: Device, _tick: Tick) -> float | None:
    """Degrees Celsius."""
    return device.temperature()


def families(readings: Mapping[Gpu, float | None]) -> Iterable[Metric]:
    """The temperature."""
    yield gauge("temperature_celsius", "Temperature of the GPU die.", readings, lambda celsius: celsius)


SOURCE = GpuSource("temperature", "temperature of the GPU die", lambda: read, families)
