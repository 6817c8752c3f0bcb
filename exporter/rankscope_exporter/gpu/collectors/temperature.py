"""Temperatures of the GPU die and memory, and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Reader
from rankscope_exporter.gpu.nvml.temperature import margin, margin_thresholds, memory_temperature, thresholds


@dataclass(frozen=True)
class Temperatures:
    """A device's temperatures in degrees Celsius; None if it lacks the sensor."""

    gpu: float | None
    memory: float | None
    margin: float | None
    thresholds: Mapping[str, float | None]
    margin_thresholds: Mapping[str, float | None]
    """Margins to the slowdown temperature, which GPUs since Ada report instead of thresholds."""


def reader() -> Reader[Temperatures]:
    """Return a reader of temperatures. It reads the thresholds once; most devices have only one kind."""
    limits = Cached(lambda device, _: (thresholds(device), margin_thresholds(device)))
    return lambda device, tick: Temperatures(
        device.temperature(), memory_temperature(device), margin(device), *limits(device, tick)
    )


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
        "Temperature increase until the GPU is slowed down (T.Limit).",
        lambda celsius: celsius.margin,
        source="nvmlDeviceGetMarginTemperature",
        since="Ada",
    ),
    GPU.gauge(
        "temperature_threshold_celsius",
        "Temperature at which the GPU slows down or shuts down, or that the GPU or its memory should not exceed.",
        lambda celsius: celsius.thresholds,
        "threshold",
        source="nvmlDeviceGetTemperatureThreshold",
        since="Kepler, to Ampere",
    ),
    GPU.gauge(
        "temperature_margin_threshold_celsius",
        "Margin (T.Limit) at which the GPU reaches the threshold. It may be negative.",
        lambda celsius: celsius.margin_thresholds,
        "threshold",
        source="nvmlDeviceGetFieldValues(TEMPERATURE_…_TLIMIT)",
        since="Ada",
    ),
)

COLLECTOR = GpuCollector("temperature", "temperatures of the GPU die and memory, and thresholds", reader, METRICS)
