"""What a collector of GPU metrics is: how a reading is taken from a device, and what readings look like on /metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

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
        """Label values in the order of GPU_LABELS and what follows them."""
        return [str(self.index), self.uuid, *more]


@dataclass(frozen=True)
class Tick:
    """When a reading is taken."""

    unix: float
    """Seconds since 1970."""
    elapsed: float
    """Seconds since the reading before, over which a rate may be integrated; 0 after a gap: nobody saw what was."""
    monotonic: float | None = None
    """Seconds of a clock that is never set; None if `unix` is one, as simulated time is."""

    @property
    def steady(self) -> float:
        """Seconds of the clock by which to measure how much time has passed."""
        return self.unix if self.monotonic is None else self.monotonic


Reader = Callable[[Device, Tick], R | None]


class GpuMetrics(MetricTable[R | None, R]):
    """The table of what is read as `R`: absent while the GPU is down or does not have it."""

    def __init__(self, *, source: str = "", since: str = "any") -> None:
        super().__init__("rankscope_gpu_", GPU_LABELS, whole, source=source, since=since)


@dataclass(frozen=True, eq=False)
class GpuCollector(Generic[R]):
    """Read from each device: file = collector = `--collector.<name>` = value of the label `collector`."""

    name: str
    help: str
    """One line for --help."""
    reader: Callable[[], Reader[R]]
    """Makes the function that reads a device: one for each GPU, kept while the exporter lives, so it may count."""
    metrics: tuple[ReadMetric[R | None], ...]
    is_on: bool = True
    """Whether it is, unless the configuration says otherwise."""

    def cache(self, gpu: Gpu) -> SampleCache[R | None]:
        """Of what is read of a GPU, as long as it has this index."""
        return SampleCache(self.metrics, gpu.values())

    def families(self, readings: Mapping[Gpu, R | None]) -> list[Metric]:
        """The metrics of all GPUs; None is a GPU that is down or does not have this."""
        return families(self.metrics, [self.cache(gpu).write(reading) for gpu, reading in readings.items()])


class Cached(Generic[R]):
    """A reader of what changes seldom, so that it costs little: asks anew after so many seconds.

    Also of a device that was opened anew, because that may be one that was reset, repaired or exchanged.
    """

    def __init__(self, read: Callable[[Device, Tick], R], seconds: float = math.inf) -> None:
        self._read = read
        self._seconds = seconds
        self._device: Device | None = None
        self._asked = -math.inf
        self._reading: R | None = None

    def __call__(self, device: Device, tick: Tick) -> R:
        """The last reading. Raises what reading raises, and then asks again the next time."""
        if device is not self._device or not 0 <= tick.unix - self._asked < self._seconds:
            self._device = None
            self._reading = self._read(device, tick)
            self._device, self._asked = device, tick.unix
        return cast("R", self._reading)


class Readings(Protocol):
    """Where the last readings are."""

    def texts(self, collector: GpuCollector[Any]) -> list[Texts]:
        """What the collector says of every GPU ever seen. Raises what its reader raised by mistake."""


class SampledCollector:
    """A GPU collector as a scrape asks it: takes what the last readings said and never asks the driver."""

    def __init__(self, collector: GpuCollector[Any], readings: Readings) -> None:
        self.name = collector.name
        self._collector = collector
        self._readings = readings

    def collect(self) -> Iterable[Metric]:
        """The metrics of this moment."""
        return families(self._collector.metrics, self._readings.texts(self._collector))
