"""A simulated machine with collectors read as by the sampler, exported under dcgm-exporter's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from rankscope_exporter.dcgm.collector import Averages, DcgmCollector
from rankscope_exporter.gpu.collector import Gpu, GpuCollector, Tick
from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.xid_watcher import Xids
from rankscope_exporter.registry import GPU_COLLECTORS

Labels = dict[str, str]


class Sampled:
    """A sampler that reads every collector of every GPU on request. The test sets XIDs."""

    def __init__(self, machine: Any, gpus: int, collectors: Iterable[GpuCollector[Any]]) -> None:
        averages = Averages(collectors)
        self._clock = machine.clock
        self.devices = [machine.device(index) for index in range(gpus)]
        self._readers = [{collector: collector.reader() for collector in averages.collectors} for _ in self.devices]
        self._readings: dict[GpuCollector[Any], dict[Gpu, Any]] = {}
        self.gpus = [Gpu(device.index, device.uuid) for device in self.devices]
        self.lost: set[int] = set()
        self.xid_times: dict[Gpu, dict[int, float]] = {}
        self._collector = DcgmCollector(averages, self)

    def values(self, collector: GpuCollector[Any]) -> Mapping[Gpu, Any]:
        return self._readings[collector]

    def xids(self) -> Mapping[Gpu, Xids]:
        times = {gpu: self.xid_times.get(gpu, {}) for gpu in self.gpus}
        return {gpu: Xids(dict.fromkeys(last, 1), last) for gpu, last in times.items()}

    def after(self, seconds: int, *, gap: bool = False) -> dict[str, list[tuple[Labels, float]]]:
        """Return labels and values by name after one reading per second, or a single reading after a gap."""
        for _ in range(1 if gap else seconds):
            self._clock.advance(seconds if gap else 1)
            self._read(0.0 if gap else 1.0)
        return self.published()

    def published(self) -> dict[str, list[tuple[Labels, float]]]:
        families = self._collector.collect()
        return {family.name: [(s.labels, s.value) for s in family.samples] for family in families}

    def _read(self, elapsed: float) -> None:
        tick = Tick(self._clock(), elapsed)
        for gpu, device, readers in zip(self.gpus, self.devices, self._readers, strict=True):
            for collector, read in readers.items():
                try:
                    reading = None if gpu.index in self.lost else read(device, tick)
                except DriverError:
                    reading = None
                self._readings.setdefault(collector, {})[gpu] = reading


@pytest.fixture
def sampled(machine: Callable[..., Any]) -> Callable[..., Sampled]:
    """Return a function that creates a machine from a scenario's YAML, read by these collectors."""

    def make(scenario: str, gpus: int = 1, collectors: Iterable[GpuCollector[Any]] = GPU_COLLECTORS) -> Sampled:
        # Costly collectors are disabled, as in the daemon.
        return Sampled(machine(scenario), gpus, [collector for collector in collectors if collector.is_on])

    return make
