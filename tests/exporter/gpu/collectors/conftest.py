"""Exported metrics of one collector on a simulated GPU, over several readings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rankscope_exporter.gpu.collector import Gpu, GpuCollector, Tick

GPU0 = Gpu(0, "GPU-0")
Published = dict[str, dict[Any, float]]


class CollectedGpu:
    """A collector that reads a simulated machine's first GPU."""

    def __init__(self, machine: Any, collector: GpuCollector[Any]) -> None:
        self.machine = machine
        self.device = machine.device()
        self._collector = collector
        self._read = collector.reader()
        self._last: float | None = None

    def reopen(self) -> None:
        """Reopen the device, as after a failure."""
        self.device.close()
        self.device = self.machine.device()

    def after(self, seconds: float, *, gap: bool = False) -> Published:
        """Return the exported values after so many seconds, by name and by labels other than the GPU's."""
        clock = self.machine.clock
        clock.advance(seconds)
        elapsed = 0.0 if gap or self._last is None else clock() - self._last
        self._last = clock()
        reading = self._read(self.device, Tick(clock(), elapsed))
        found: Published = {}
        for metric, family in zip(self._collector.metrics, self._collector.families({GPU0: reading}), strict=True):
            for sample in family.samples:
                found.setdefault(sample.name, {})[_key(metric.labels, sample.labels)] = sample.value
        return found


def _key(names: tuple[str, ...], labels: dict[str, str]) -> Any:
    more = [labels[name] for name in names if name not in ("gpu", "uuid")]
    return more[0] if len(more) == 1 else tuple(more)


@pytest.fixture
def watch(machine: Callable[..., Any]) -> Callable[[str, GpuCollector[Any]], CollectedGpu]:
    """Return a function that creates a machine from a scenario's YAML, read by a collector."""
    return lambda scenario, collector: CollectedGpu(machine(scenario), collector)


class Metered:
    """The first GPU of a simulated machine, read by a meter."""

    def __init__(self, machine: Any, meter: Callable[[Any, Tick], Any]) -> None:
        self.machine, self.clock = machine, machine.clock
        self.device, self._meter = machine.device(), meter

    def after(self, seconds: float, elapsed: float | None = None) -> Any:
        """Return the reading after so many seconds. `elapsed` overrides the time that the meter gets."""
        self.clock.advance(seconds)
        return self._meter(self.device, Tick(self.clock(), seconds if elapsed is None else elapsed))


@pytest.fixture
def metered(machine: Callable[..., Any]) -> Callable[..., Metered]:
    """Return a function that creates a machine from a scenario's YAML, read by a meter."""
    return lambda scenario, meter: Metered(machine(scenario), meter)
