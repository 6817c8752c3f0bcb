"""GPU time as a counter: how long a kernel ran, whatever the scrape interval, and when one last did."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rankscope_exporter.gpu.busy_meter import BusyMeter, Load
from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device, Engine

ENGINES: tuple[Engine, ...] = ("gpu", "memory", "encoder", "decoder")

Loads = Mapping[Engine, Load | None]


class LoadReader:
    """A meter for each engine."""

    def __init__(self) -> None:
        self._meters = {engine: BusyMeter(engine) for engine in ENGINES}

    def __call__(self, device: Device, tick: Tick) -> Loads:
        """Busy seconds so far by engine; None of an engine that tells nothing."""
        return {engine: meter(device, tick) for engine, meter in self._meters.items()}


def _busy(engine: Engine) -> Callable[[Loads], float | None]:
    return lambda loads: load.busy_seconds if (load := loads[engine]) else None


GPU = GpuMetrics[Loads](since="Kepler")
METRICS = (
    GPU.counter(
        "busy_seconds_total",
        "Time in which a kernel was running on the GPU; its rate is the true busy ratio.",
        _busy("gpu"),
        source="nvmlDeviceGetSamples(GPU_UTILIZATION), integrated",
    ),
    GPU.gauge(
        "last_busy_timestamp_seconds",
        "When a kernel was last seen running on the GPU, in unix time; for one never seen busy when it was first seen.",
        lambda loads: load.last_busy if (load := loads["gpu"]) else None,
        source="nvmlDeviceGetSamples(GPU_UTILIZATION)",
    ),
    GPU.counter(
        "memory_busy_seconds_total",
        "Time in which the device memory was being read or written.",
        _busy("memory"),
        source="nvmlDeviceGetSamples(MEMORY_UTILIZATION), integrated",
    ),
    GPU.counter(
        "encoder_busy_seconds_total",
        "Time in which the video encoder ran.",
        _busy("encoder"),
        source="nvmlDeviceGetSamples(ENC_UTILIZATION), integrated",
    ),
    GPU.counter(
        "decoder_busy_seconds_total",
        "Time in which the video decoder ran.",
        _busy("decoder"),
        source="nvmlDeviceGetSamples(DEC_UTILIZATION), integrated",
    ),
)

COLLECTOR = GpuCollector("load", "GPU time: how long kernels ran, and when one last did", LoadReader, METRICS)
