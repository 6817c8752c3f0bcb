"""Power, its limits, and energy."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_exporter.gpu.nvml.device import Device, PowerLimits
from rankscope_exporter.gpu.source import GpuMetric, GpuSource, Seldom, Tick, counter, gauge


@dataclass(frozen=True)
class Power:
    """Watts and joules."""

    watts: float | None
    limit_watts: float | None
    joules: float | None
    limits: PowerLimits


class PowerReader:
    """Between which limits the limit may be set is asked once."""

    def __init__(self) -> None:
        self._limits = Seldom(lambda device, _: device.power_limits())

    def __call__(self, device: Device, tick: Tick) -> Power:
        """Power now, and energy since the driver was loaded."""
        return Power(device.power(), device.power_limit(), device.energy(), self._limits(device, tick))


METRICS: tuple[GpuMetric[Power], ...] = (
    gauge(
        "power_watts",
        "Power that the GPU draws now; the rate of the energy counter is the true average.",
        "nvmlDeviceGetPowerUsage",
        lambda power: power.watts,
        since="Kepler",
    ),
    gauge(
        "power_limit_watts",
        "Power limit that the driver enforces now.",
        "nvmlDeviceGetEnforcedPowerLimit",
        lambda power: power.limit_watts,
        since="Kepler",
    ),
    gauge(
        "power_limit_default_watts",
        "Power limit after the driver was loaded.",
        "nvmlDeviceGetPowerManagementDefaultLimit",
        lambda power: power.limits.default,
        since="Kepler",
    ),
    gauge(
        "power_limit_min_watts",
        "Lowest power limit that can be set.",
        "nvmlDeviceGetPowerManagementLimitConstraints",
        lambda power: power.limits.lowest,
        since="Kepler",
    ),
    gauge(
        "power_limit_max_watts",
        "Highest power limit that can be set.",
        "nvmlDeviceGetPowerManagementLimitConstraints",
        lambda power: power.limits.highest,
        since="Kepler",
    ),
    counter(
        "energy_joules_total",
        "Energy that the GPU has used since its driver was loaded.",
        "nvmlDeviceGetTotalEnergyConsumption",
        lambda power: power.joules,
        since="Volta",
    ),
)

SOURCE = GpuSource("power", "power, its limits, and energy", PowerReader, METRICS)
