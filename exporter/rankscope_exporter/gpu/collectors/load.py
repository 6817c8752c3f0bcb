"""GPU time as a counter: how long a kernel ran, whatever the scrape interval, and when one last did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device, Engine, UtilizationSample

ENGINES: tuple[Engine, ...] = ("gpu", "memory", "encoder", "decoder")

# The longest sample period that NVIDIA documents (nvidia-smi --help-query-gpu, utilization.gpu: "between 1 second and
# 1/6 second depending on the product").
LONGEST_SAMPLE_US = 1_000_000


@dataclass(frozen=True)
class Load:
    """Seconds of kernels since the exporter first saw the GPU, and the unix time at which one was last seen."""

    busy_seconds: float
    last_busy: float


class BusyMeter:
    """Integrates the utilisation of one GPU, or of one of its engines.

    The driver keeps about 20 s of samples; all that came since the reading before are added up, so bursts between two
    readings count. What was never seen, because the ring had run over, is not invented. A GPU without a ring is
    integrated from its instantaneous utilisation, which misses what happens between readings.
    """

    def __init__(self, engine: Engine = "gpu") -> None:
        self._engine = engine
        self._busy_seconds = 0.0
        self._last_busy: float | None = None
        self._cursor_us: int | None = None  # the last sample that was counted

    def __call__(self, device: Device, tick: Tick) -> Load | None:
        """Add what happened since the reading before. None if the device tells nothing of its utilisation."""
        if device.samples_utilization(self._engine):
            self._drain(device)
        elif not self._integrate(device.utilization(self._engine), tick):
            return None
        if self._last_busy is None:
            self._last_busy = tick.unix
        return Load(self._busy_seconds, self._last_busy)

    def _drain(self, device: Device) -> None:
        # One microsecond early, so that the last sample counted comes again if the ring still holds it: then, and
        # only then, it is certain that none between it and the next was lost.
        since = 0 if self._cursor_us is None else self._cursor_us - 1
        samples = sorted(device.utilization_samples(since, self._engine) or (), key=lambda sample: sample.timestamp_us)
        if not samples:  # not even the last one: the clock was set back, or the driver began anew
            self._cursor_us = None
            return
        busy = [sample.timestamp_us for sample in samples if sample.percent > 0]
        if busy:
            self._last_busy = max(self._last_busy or 0.0, busy[-1] / 1e6)
        if self._cursor_us is not None:  # the samples from before the exporter's time belong to nobody's counter
            self._busy_seconds += _busy_seconds(samples, self._cursor_us)
        self._cursor_us = samples[-1].timestamp_us

    def _integrate(self, utilization: float | None, tick: Tick) -> bool:
        if utilization is None:
            return False
        self._busy_seconds += utilization * tick.elapsed
        if utilization > 0:
            self._last_busy = tick.unix
        return True


def _busy_seconds(samples: Sequence[UtilizationSample], cursor_us: int) -> float:
    """Busy time after the cursor: each sample's percent covers the time since the sample before it."""
    contiguous = samples[0].timestamp_us <= cursor_us
    before, busy_us = cursor_us, 0.0
    for sample in samples:
        covered = sample.timestamp_us - before
        if covered > 0:
            if contiguous or covered <= LONGEST_SAMPLE_US:
                busy_us += covered * min(sample.percent, 100) / 100
            before, contiguous = sample.timestamp_us, True
    return busy_us / 1e6


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
