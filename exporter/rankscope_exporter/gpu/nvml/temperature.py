"""A GPU's memory temperature, thermal margin and thresholds."""

from __future__ import annotations

import pynvml

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import ask
from rankscope_exporter.gpu.nvml.fields import known

_THRESHOLDS = {
    "shutdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
    "slowdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    "memory_max": pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX,
    "gpu_max": pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
}
_MARGIN_THRESHOLDS = {
    "shutdown": pynvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT,
    "slowdown": pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT,
    "memory_max": pynvml.NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT,
    "gpu_max": pynvml.NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT,
}


def memory_temperature(device: Device) -> float | None:
    """Return degrees Celsius. 0 becomes None: a device without the sensor may report it."""
    return device.fields(pynvml.NVML_FI_DEV_MEMORY_TEMP)[0] or None


def margin(device: Device) -> float | None:
    """Return the degrees Celsius until the device slows down (T.Limit); Ada and later."""
    return known(ask(pynvml.nvmlDeviceGetMarginTemperature, device.handle))


def thresholds(device: Device) -> dict[str, float | None]:
    """Return the thresholds in degrees Celsius by name."""
    call = pynvml.nvmlDeviceGetTemperatureThreshold
    return {name: known(ask(call, device.handle, number)) for name, number in _THRESHOLDS.items()}


def margin_thresholds(device: Device) -> dict[str, float | None]:
    """Return the margin of each threshold in degrees Celsius; Ada and later."""
    return dict(zip(_MARGIN_THRESHOLDS, device.fields(*_MARGIN_THRESHOLDS.values()), strict=True))
