"""The driver's own counters of throttled time."""

from __future__ import annotations

import pynvml

from rankscope_exporter.gpu.nvml.device import Device

# Nanoseconds by reason (nvml.h: NVML_FI_DEV_PERF_POLICY_…, NVML_FI_DEV_CLOCKS_EVENT_…).
_REASON_COUNTERS = {
    "sw_power_cap": pynvml.NVML_FI_DEV_PERF_POLICY_POWER,
    "sync_boost": pynvml.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST,
    "board_limit": pynvml.NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT,
    "reliability": pynvml.NVML_FI_DEV_PERF_POLICY_RELIABILITY,
}
# Bindings of drivers 575.51 to 580.65 number these three 251 to 253, which other versions use for power smoothing.
# Since 580.82 they have these numbers (nvidia-ml-py of those versions). Older drivers are not queried.
_THERMAL_COUNTERS = {"sw_thermal_slowdown": 269, "hw_thermal_slowdown": 270, "hw_power_brake_slowdown": 271}
_THERMAL_COUNTERS_SINCE = (580, 82)


def clock_event_seconds(device: Device) -> dict[str, float]:
    """Return the seconds of each reason since the driver was loaded, for reasons that the driver counts."""
    is_new = _version(device.driver_version()) >= _THERMAL_COUNTERS_SINCE
    fields = _REASON_COUNTERS | _THERMAL_COUNTERS if is_new else _REASON_COUNTERS
    values = dict(zip(fields, device.fields(*fields.values()), strict=True))
    return {reason: value / 1e9 for reason, value in values.items() if value is not None}


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (text or "").split(".") if part.isdecimal())
