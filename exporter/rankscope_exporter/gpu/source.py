"""What a source of GPU metrics is: how a reading is taken from a device, and what readings look like on /metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from prometheus_client.core import Metric

from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.exposition.sample_cache import Lines, Texts, Values, families
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
    """Seconds."""
    elapsed: float
    """Seconds since the reading before, over which a rate may be integrated; 0 after a gap: nobody saw what was."""


Reader = Callable[[Device, Tick], R | None]


@dataclass(frozen=True)
class GpuMetric(Declaration, Generic[R]):
    """A metric with GPU_LABELS first, and how its values come out of a reading; None is absent."""

    value: Callable[[R], Values] = field(kw_only=True)
    when_down: float | None = None

    def values(self, reading: R | None) -> Values:
        """Of a GPU that was read, or that is down."""
        return self.when_down if reading is None else self.value(reading)


def gauge(
    name: str,
    text: str,
    source: str,
    value: Callable[[R], Values],
    *,
    labels: tuple[str, ...] = (),
    since: str = "any",
    when_down: float | None = None,
) -> GpuMetric[R]:
    """Declare `rankscope_gpu_…`; `labels` are those besides GPU_LABELS."""
    name, labels = f"rankscope_gpu_{name}", (*GPU_LABELS, *labels)
    return GpuMetric("gauge", name, text, labels, source, since, value=value, when_down=when_down)


def counter(
    name: str,
    text: str,
    source: str,
    value: Callable[[R], Values],
    *,
    labels: tuple[str, ...] = (),
    since: str = "any",
) -> GpuMetric[R]:
    """As `gauge`; the name ends in `_total`."""
    name, labels = f"rankscope_gpu_{name}", (*GPU_LABELS, *labels)
    return GpuMetric("counter", name, text, labels, source, since, value=value)


@dataclass(frozen=True, eq=False)
class GpuSource(Generic[R]):
    """One source: file = source = `--collector.<name>` = value of the label `collector`."""

    name: str
    help: str
    """One line for --help."""
    reader: Callable[[], Reader[R]]
    """Makes the function that reads a device: one for each GPU, kept while the exporter lives, so it may count."""
    metrics: tuple[GpuMetric[R], ...]
    is_on: bool = True
    """Whether it is, unless the configuration says otherwise."""

    def lines(self, gpu: Gpu) -> Lines[R | None]:
        """Writes what is read of a GPU, as long as it has this index."""
        return Lines(self.metrics, gpu.values())

    def families(self, readings: Mapping[Gpu, R | None]) -> list[Metric]:
        """The metrics of all GPUs; None is a GPU that is down or does not have this."""
        return families(self.metrics, [self.lines(gpu).write(reading) for gpu, reading in readings.items()])


class Seldom(Generic[R]):
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

    def texts(self, source: GpuSource[Any]) -> list[Texts]:
        """What the source says of every GPU ever seen. Raises what its reader raised by mistake."""


class SourceCollector:
    """A source as a collector: a scrape takes what the last readings said and never asks the driver."""

    def __init__(self, source: GpuSource[Any], readings: Readings) -> None:
        self.name = source.name
        self.help = source.help
        self._source = source
        self._readings = readings

    def collect(self) -> Iterable[Metric]:
        """The metrics of this moment."""
        return families(self._source.metrics, self._readings.texts(self._source))
