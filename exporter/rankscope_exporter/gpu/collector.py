"""GPU collectors: reading a value from a device, and exporting the last readings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from prometheus_client.core import Metric

from rankscope_exporter.exposition.metric import MetricTable, ReadMetric, whole
from rankscope_exporter.exposition.sample_cache import SampleCache, Texts, families
from rankscope_exporter.gpu.nvml.device import Device

R = TypeVar("R")

GPU_LABELS = ("gpu", "uuid")


@dataclass(frozen=True)
class Gpu:
    """The labels of a GPU: its NVML index on this machine, and its UUID."""

    index: int
    uuid: str

    def values(self, *more: str) -> list[str]:
        """Return the values of GPU_LABELS followed by `more`."""
        return [str(self.index), self.uuid, *more]


@dataclass(frozen=True)
class Tick:
    """Time of a reading."""

    unix: float
    """Seconds since 1970."""
    elapsed: float
    """Seconds since the previous reading, over which a rate may be integrated; 0 after a gap without readings."""
    monotonic: float | None = None
    """Seconds of a monotonic clock; None if `unix` is monotonic, like simulated time."""

    @property
    def steady(self) -> float:
        """Seconds of the clock that measures durations."""
        return self.unix if self.monotonic is None else self.monotonic


Reader = Callable[[Device, Tick], R | None]


class GpuMetrics(MetricTable[R | None, R]):
    """Table of metrics read as `R`: absent while the GPU is down or if it lacks the value."""

    def __init__(self, *, source: str = "", since: str = "any") -> None:
        super().__init__("rankscope_gpu_", GPU_LABELS, whole, source=source, since=since)


@dataclass(frozen=True, eq=False)
class GpuCollector(Generic[R]):
    """A collector of GPU metrics: file = collector = `--collector.<name>` = value of the label `collector`."""

    name: str
    help: str
    """One line for --help."""
    reader: Callable[[], Reader[R]]
    """Creates a device's reader: one per GPU, kept for the exporter's lifetime, so it may accumulate counts."""
    metrics: tuple[ReadMetric[R | None], ...]
    is_on: bool = True
    """True if enabled by default."""

    def cache(self, gpu: Gpu) -> SampleCache[R | None]:
        """Return a sample cache for a GPU at this index."""
        return SampleCache(self.metrics, gpu.values())

    def families(self, readings: Mapping[Gpu, R | None]) -> list[Metric]:
        """Return the metrics of all GPUs; a reading is None if the GPU is down or lacks the value."""
        return families(self.metrics, [self.cache(gpu).write(reading) for gpu, reading in readings.items()])


class Cached(Generic[R]):
    """Reader that caches a rarely changing value for some seconds, so that it costs little.

    Reads again after a device is reopened, because it may have been reset, repaired or replaced.
    """

    def __init__(self, read: Callable[[Device, Tick], R], seconds: float = math.inf) -> None:
        self._read = read
        self._seconds = seconds
        self._device: Device | None = None
        self._asked = -math.inf
        self._reading: R | None = None

    def __call__(self, device: Device, tick: Tick) -> R:
        """Return the cached reading. Raises the reader's exception and retries on the next call."""
        if device is not self._device or not 0 <= tick.unix - self._asked < self._seconds:
            self._device = None
            self._reading = self._read(device, tick)
            self._device, self._asked = device, tick.unix
        return cast("R", self._reading)


class SampledCollector:
    """A GPU collector during a scrape: returns the readings that are kept and never calls the driver."""

    def __init__(self, collector: GpuCollector[Any], texts: Callable[[GpuCollector[Any]], Sequence[Texts]]) -> None:
        """`texts` returns the collector's lines of every GPU ever seen, or raises the reader's exception."""
        self.name = collector.name
        self._collector = collector
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics."""
        return families(self._collector.metrics, self._texts(self._collector))
