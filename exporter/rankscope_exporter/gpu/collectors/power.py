"""Power, its limits, and energy."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device, PowerLimits


@dataclass(frozen=True)
class Power:
    """What one device draws and may draw, in watts, and has drawn in all, in joules."""

    watts: float | None
    limit_watts: float | None
    joules: float | None
    limits: PowerLimits


class PowerReader:
    """Between which limits the limit may be set is asked once."""

    def __init__(self) -> None:
        self._limits = Cached(lambda device, _: device.power_limits())

    def __call__(self, device: Device, tick: Tick) -> Power:
        """Power now, and energy since the driver was loaded."""
        return Power(device.power(), device.power_limit(), device.energy(), self._limits(device, tick))


GPU = GpuMetrics[Power](since="Kepler")
METRICS = (
    GPU.gauge(
        "power_watts",
        "Power that the GPU draws now; the rate of the energy counter is the true average.",
        lambda power: power.watts,
        source="nvmlDeviceGetPowerUsage",
    ),
    GPU.gauge(
        "power_limit_watts",
        "Power limit that the driver enforces now.",
        lambda power: power.limit_watts,
        source="nvmlDeviceGetEnforcedPowerLimit",
    ),
    GPU.gauge(
        "power_limit_default_watts",
        "Power limit after the driver was loaded.",
        lambda power: power.limits.default,
        source="nvmlDeviceGetPowerManagementDefaultLimit",
    ),
    GPU.gauge(
        "power_limit_min_watts",
        "Lowest power limit that can be set.",
        lambda power: power.limits.lowest,
        source="nvmlDeviceGetPowerManagementLimitConstraints",
    ),
    GPU.gauge(
        "power_limit_max_watts",
        "Highest power limit that can be set.",
        lambda power: power.limits.highest,
        source="nvmlDeviceGetPowerManagementLimitConstraints",
    ),
    GPU.counter(
        "energy_joules_total",
        "Energy that the GPU has used since its driver was loaded.",
        lambda power: power.joules,
        source="nvmlDeviceGetTotalEnergyConsumption",
        since="Volta",
    ),
)

COLLECTOR = GpuCollector("power", "power, its limits, and energy", PowerReader, METRICS)
