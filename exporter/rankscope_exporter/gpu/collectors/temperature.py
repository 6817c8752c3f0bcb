"""Temperatures of the GPU die and the memory, and how far they may go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.temperature import margin, margin_thresholds, memory_temperature, thresholds


@dataclass(frozen=True)
class Thresholds:
    """By name, in degrees Celsius; GPUs since Ada tell how far from the slowdown temperature instead."""

    temperatures: Mapping[str, float | None]
    margins: Mapping[str, float | None]


@dataclass(frozen=True)
class Temperatures:
    """What one device reads, in degrees Celsius; None for what it has no sensor of."""

    gpu: float | None
    memory: float | None
    margin: float | None
    thresholds: Thresholds


class TemperatureReader:
    """Thresholds are asked once."""

    def __init__(self) -> None:
        self._thresholds = Cached(read_thresholds)

    def __call__(self, device: Device, tick: Tick) -> Temperatures:
        """Degrees Celsius now; None of what the device does not tell."""
        return Temperatures(
            device.temperature(),
            memory_temperature(device),
            margin(device),
            self._thresholds(device, tick),
        )


def read_thresholds(device: Device, _tick: Tick) -> Thresholds:
    """Of both kinds: most devices have one of them."""
    return Thresholds(thresholds(device), margin_thresholds(device))


GPU = GpuMetrics[Temperatures]()
METRICS = (
    GPU.gauge(
        "temperature_celsius",
        "Temperature of the GPU die.",
        lambda celsius: celsius.gpu,
        source="nvmlDeviceGetTemperature",
    ),
    GPU.gauge(
        "memory_temperature_celsius",
        "Temperature of the GPU's memory (HBM).",
        lambda celsius: celsius.memory,
        source="nvmlDeviceGetFieldValues(MEMORY_TEMP)",
        since="Volta",
    ),
    GPU.gauge(
        "temperature_margin_celsius",
        "How much hotter the GPU may become before it is slowed down (T.Limit).",
        lambda celsius: celsius.margin,
        source="nvmlDeviceGetMarginTemperature",
        since="Ada",
    ),
    GPU.gauge(
        "temperature_threshold_celsius",
        "Temperature at which the GPU slows down or shuts down, or that it or its memory should not exceed.",
        lambda celsius: celsius.thresholds.temperatures,
        "threshold",
        source="nvmlDeviceGetTemperatureThreshold",
        since="Kepler, to Ampere",
    ),
    GPU.gauge(
        "temperature_margin_threshold_celsius",
        "The margin (T.Limit) at which that happens; it may be negative.",
        lambda celsius: celsius.thresholds.margins,
        "threshold",
        source="nvmlDeviceGetFieldValues(TEMPERATURE_…_TLIMIT)",
        since="Ada",
    ),
)

COLLECTOR = GpuCollector(
    "temperature", "temperatures of the GPU die and memory, and thresholds", TemperatureReader, METRICS
)
