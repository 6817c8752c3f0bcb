"""Power draw, power limits and energy."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Reader
from rankscope_exporter.gpu.nvml.device import PowerLimits


@dataclass(frozen=True)
class Power:
    """A device's power draw and limits in watts, and energy used in joules."""

    watts: float | None
    limit_watts: float | None
    joules: float | None
    limits: PowerLimits


def reader() -> Reader[Power]:
    """Return a reader of power, and of energy since the driver was loaded. It reads the limits' range once."""
    limits = Cached(lambda device, _: device.power_limits())
    return lambda device, tick: Power(device.power(), device.power_limit(), device.energy(), limits(device, tick))


GPU = GpuMetrics[Power](since="Kepler")
METRICS = (
    GPU.gauge(
        "power_watts",
        "Current power draw of the GPU. The rate of the energy counter is its real average.",
        lambda power: power.watts,
        source="nvmlDeviceGetPowerUsage",
    ),
    GPU.gauge(
        "power_limit_watts",
        "Power limit currently enforced by the driver.",
        lambda power: power.limit_watts,
        source="nvmlDeviceGetEnforcedPowerLimit",
    ),
    GPU.gauge(
        "power_limit_default_watts",
        "Default power limit after the driver is loaded.",
        lambda power: power.limits.default,
        source="nvmlDeviceGetPowerManagementDefaultLimit",
    ),
    GPU.gauge(
        "power_limit_min_watts",
        "Lowest configurable power limit.",
        lambda power: power.limits.lowest,
        source="nvmlDeviceGetPowerManagementLimitConstraints",
    ),
    GPU.gauge(
        "power_limit_max_watts",
        "Highest configurable power limit.",
        lambda power: power.limits.highest,
        source="nvmlDeviceGetPowerManagementLimitConstraints",
    ),
    GPU.counter(
        "energy_joules_total",
        "Energy used by the GPU since its driver was loaded.",
        lambda power: power.joules,
        source="nvmlDeviceGetTotalEnergyConsumption",
        since="Volta",
    ),
)

COLLECTOR = GpuCollector("power", "power, its limits, and energy", reader, METRICS)
