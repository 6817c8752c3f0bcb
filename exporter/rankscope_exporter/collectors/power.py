"""Power, its limit, and energy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from rankscope_exporter.nvml.device import Device
from rankscope_exporter.source import Gpu, GpuSource, Tick, counter, gauge


@dataclass(frozen=True)
class Power:
    """Watts and joules."""

    watts: float | None
    limit_watts: float | None
    joules: float | None


def read(device: Device, _tick: Tick) -> Power:
    """Power now, and energy since the driver was loaded."""
    return Power(device.power(), device.power_limit(), device.energy())


def families(readings: Mapping[Gpu, Power | None]) -> Iterable[Metric]:
    """Power, limit and energy."""
    text = "Power that the GPU draws now; the rate of the energy counter is the true average."
    yield gauge("power_watts", text, readings, lambda power: power.watts)
    text = "Power limit that the driver enforces now."
    yield gauge("power_limit_watts", text, readings, lambda power: power.limit_watts)
    text = "Energy that the GPU has used since its driver was loaded."
    yield counter("energy_joules", text, readings, lambda power: power.joules)


SOURCE = GpuSource("power", "power, its limit, and energy", lambda: read, families)
