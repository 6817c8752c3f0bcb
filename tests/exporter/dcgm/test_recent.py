"""An average covers up to 15 s of observed time: bursts count, gaps and failures do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rankscope_exporter.dcgm.recent import WINDOW, Amounts, averaging
from rankscope_exporter.gpu.collector import GpuCollector, Tick
from rankscope_exporter.gpu.collectors import load
from rankscope_exporter.gpu.nvml.errors import DriverError

Counts = dict[str, float] | None
UUID = "GPU-0"


class FakeDevice:
    """The part of a device that an average uses."""

    uuid = UUID


class AveragedCollector:
    """A collector that reads values set by a test."""

    def __init__(self) -> None:
        self._next: Counts = None
        self.during: dict[str, float] = {}  # rates during the reading, as a concurrent scrape gets them
        collector: GpuCollector[dict[str, float]] = GpuCollector("s", "", lambda: self._answer, ())
        self._averages: dict[str, Amounts] = {}
        averaged = averaging(
            collector, lambda counts: {("", name): count for name, count in counts.items()}, self._averages
        )
        self._read: Callable[[Any, Tick], Counts] = averaged.reader()

    def after(self, elapsed: float, counts: Counts) -> dict[str, float]:
        """Return the rates after a reading."""
        self._next = counts
        assert self._read(FakeDevice(), Tick(0.0, elapsed)) is counts
        return self._rates()

    def _answer(self, _device: object, _tick: Tick) -> Counts:
        self.during = self._rates()
        return self._next

    def _rates(self) -> dict[str, float]:
        return {name: rate for (_, name), rate in self._averages.get(UUID, {}).items()}


def test_one_reading_has_no_average() -> None:
    assert AveragedCollector().after(0.0, {"busy": 5.0}) == {}


def test_an_average_covers_the_time_between_readings() -> None:
    collector = AveragedCollector()
    collector.after(0.0, {"busy": 5.0})
    collector.after(1.0, {"busy": 6.0})
    assert collector.after(3.0, {"busy": 6.0}) == {"busy": 0.25}


def test_during_a_reading_the_previous_averages_are_returned() -> None:
    collector = AveragedCollector()
    collector.after(0.0, {"busy": 0.0})
    before = collector.after(1.0, {"busy": 0.5})
    collector.after(1.0, {"busy": 0.5})
    assert collector.during == before == {"busy": 0.5}


def test_readings_older_than_the_window_are_dropped() -> None:
    collector = AveragedCollector()
    collector.after(0.0, {"busy": 0.0})
    collector.after(1.0, {"busy": 1.0})
    idle = [collector.after(1.0, {"busy": 1.0})["busy"] for _ in range(int(WINDOW))]
    assert idle[0] == 0.5
    assert idle == sorted(idle, reverse=True)
    assert idle[-1] == 0


def test_a_quantity_that_starts_later_is_averaged_from_then_on() -> None:
    collector = AveragedCollector()
    collector.after(0.0, {})
    assert collector.after(1.0, {"tensor": 3.0}) == {}
    assert collector.after(1.0, {"tensor": 3.5}) == {"tensor": 0.5}


@pytest.mark.parametrize("next_counts", [{"busy": 1.0}, {}, None])
def test_a_counter_that_restarts_or_is_missing_starts_a_new_average(next_counts: Counts) -> None:
    collector = AveragedCollector()
    collector.after(0.0, {"busy": 5.0})
    collector.after(1.0, {"busy": 6.0})
    assert collector.after(1.0, next_counts) == {}
    assert collector.after(1.0, {"busy": 7.0}) == ({"busy": 6.0} if next_counts else {})


def test_averages_do_not_span_a_gap() -> None:
    collector = AveragedCollector()
    collector.after(0.0, {"busy": 5.0})
    collector.after(1.0, {"busy": 6.0})
    assert collector.after(0.0, {"busy": 9.0}) == {}
    assert collector.after(2.0, {"busy": 10.0}) == {"busy": 0.5}


def test_averages_do_not_span_a_failed_reading(machine: Callable[..., Any]) -> None:
    simulated = machine("""
gpus: 1
timeline:
  0:
    - {at: 0, busy: 1}
    - {at: 5, fails: {nvmlDeviceGetSamples: UNKNOWN}}
    - {at: 6, fails: {}}
""")
    rates: dict[str, Amounts] = {}
    collector = averaging(load.COLLECTOR, lambda loads: {("", "gpu"): loads["gpu"].busy_seconds}, rates)
    device, read, clock = simulated.device(), collector.reader(), simulated.clock
    seen = []
    for _ in range(9):
        clock.advance(1)
        try:
            read(device, Tick(clock(), 1.0))
        except DriverError:
            seen.append("failed")
        else:
            seen.append(rates[device.uuid].get(("", "gpu")))
        if seen[-1] == "failed":
            assert rates[device.uuid] == {}
    failed = seen.index("failed")
    assert seen[failed - 1] == pytest.approx(1)
    assert seen[failed + 1] is None
    assert seen[-1] == pytest.approx(1)
