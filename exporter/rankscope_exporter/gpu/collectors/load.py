"""Busy time of each GPU as counters that do not depend on the scrape interval, and the last busy time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rankscope_exporter.gpu.busy_meter import BusyMeter, Load
from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics, Reader
from rankscope_exporter.gpu.nvml.device import Engine

ENGINES: tuple[Engine, ...] = ("gpu", "memory", "encoder", "decoder")

Loads = Mapping[Engine, Load | None]


def reader() -> Reader[Loads]:
    """Return a reader of the load of each engine; None for an engine that reports no utilization."""
    meters = {engine: BusyMeter(engine) for engine in ENGINES}
    return lambda device, tick: {engine: meter(device, tick) for engine, meter in meters.items()}


def _busy(engine: Engine) -> Callable[[Loads], float | None]:
    return lambda loads: load.busy_seconds if (load := loads[engine]) else None


GPU = GpuMetrics[Loads](since="Kepler")
METRICS = (
    GPU.counter(
        "busy_seconds_total",
        "Time in which a kernel was running on the GPU. Its rate is the real utilization.",
        _busy("gpu"),
        source="nvmlGpmMetricsGet (Hopper and later), else nvmlDeviceGetSamples(GPU_UTILIZATION), integrated",
    ),
    GPU.gauge(
        "last_busy_timestamp_seconds",
        "Unix time when a kernel or a large copy to or from the host was last running on the GPU; if never busy, when "
        "the exporter first saw it.",
        lambda loads: load.last_busy if (load := loads["gpu"]) else None,
        source="nvmlGpmMetricsGet (Hopper and later), else nvmlDeviceGetSamples(GPU_UTILIZATION)",
    ),
    GPU.counter(
        "memory_busy_seconds_total",
        "Time in which device memory was read or written.",
        _busy("memory"),
        source="nvmlDeviceGetSamples(MEMORY_UTILIZATION), integrated",
    ),
    GPU.counter(
        "encoder_busy_seconds_total",
        "Time in which the video encoder was active.",
        _busy("encoder"),
        source="nvmlDeviceGetSamples(ENC_UTILIZATION), integrated",
    ),
    GPU.counter(
        "decoder_busy_seconds_total",
        "Time in which the video decoder was active.",
        _busy("decoder"),
        source="nvmlDeviceGetSamples(DEC_UTILIZATION), integrated",
    ),
)

COLLECTOR = GpuCollector("load", "GPU busy time, and when a kernel last ran", reader, METRICS)
