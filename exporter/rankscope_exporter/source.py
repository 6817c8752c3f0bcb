"""What a source of GPU metrics is: how a reading is taken from a device, and what readings look like on /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from prometheus_client.core import Metric

from rankscope_exporter.families import CounterMetricFamily, GaugeMetricFamily
from rankscope_exporter.nvml.device import Device

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


@dataclass(frozen=True, eq=False)
class GpuSource(Generic[R]):
    """One source: file = source = `--collector.<name>` = value of the label `collector`."""

    name: str
    help: str
    """One line for --help."""
    reader: Callable[[], Reader[R]]
    """Makes the function that reads a device: one for each GPU, kept while the exporter lives, so it may count."""
    families: Callable[[Mapping[Gpu, R | None]], Iterable[Metric]]
    """The metrics of all GPUs; None where a GPU is down or does not have this."""


class Readings(Protocol):
    """Where the last readings are."""

    def readings(self, source: GpuSource[R]) -> Mapping[Gpu, R | None]:
        """The source's last reading of every GPU ever seen. Raises what its reader raised by mistake."""


class SourceCollector(Generic[R]):
    """A source as a collector: a scrape takes the last readings and never asks the driver."""

    def __init__(self, source: GpuSource[R], readings: Readings) -> None:
        self.name = source.name
        self.help = source.help
        self._source = source
        self._readings = readings

    def collect(self) -> Iterable[Metric]:
        """The metrics of this moment."""
        readings = self._readings.readings(self._source)
        return self._source.families(readings)


def gauge(
    name: str, text: str, readings: Mapping[Gpu, R | None], value: Callable[[R], float | None]
) -> GaugeMetricFamily:
    """A gauge with one value for each GPU that has it."""
    family = GaugeMetricFamily(f"rankscope_gpu_{name}", text, labels=GPU_LABELS)
    for gpu, number in _values(readings, value):
        family.add_metric(gpu.values(), number)
    return family


def counter(
    name: str, text: str, readings: Mapping[Gpu, R | None], value: Callable[[R], float | None]
) -> CounterMetricFamily:
    """As `gauge`; `_total` is added to the name."""
    family = CounterMetricFamily(f"rankscope_gpu_{name}", text, labels=GPU_LABELS)
    for gpu, number in _values(readings, value):
        family.add_metric(gpu.values(), number)
    return family


def by_label(
    family: GaugeMetricFamily | CounterMetricFamily,
    readings: Mapping[Gpu, R | None],
    values: Callable[[R], Mapping[str, float | None]],
) -> Metric:
    """Add several values for each GPU, told apart by the family's one label more."""
    for gpu, reading in readings.items():
        for label, number in values(reading).items() if reading is not None else ():
            if number is not None:
                family.add_metric(gpu.values(label), number)
    return family


def _values(readings: Mapping[Gpu, R | None], value: Callable[[R], float | None]) -> Iterable[tuple[Gpu, float]]:
    for gpu, reading in readings.items():
        number = None if reading is None else value(reading)
        if number is not None:
            yield gpu, number
