"""An average covers up to 15 s of observed time: bursts count, gaps and failures do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from rankscope_exporter.dcgm.recent import Amounts, averaging
from rankscope_exporter.gpu.collector import GpuCollector, Tick
from rankscope_exporter.gpu.nvml.errors import DriverError

Counts = dict[str, float] | None
UUID = "GPU-0"
FAILS: Counts = {"fails": 0.0}
"""The counts of a reading that fails."""


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
        with suppress(DriverError):
            assert self._read(FakeDevice(), Tick(0.0, elapsed)) is counts
        return self._rates()

    def _answer(self, _device: object, _tick: Tick) -> Counts:
        self.during = self._rates()
        if self._next == FAILS:
            raise DriverError("nvmlDeviceGetSamples", 1, "")
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


def test_a_quantity_that_starts_later_is_averaged_from_then_on() -> None:
    collector = AveragedCollector()
    collector.after(0.0, {})
    assert collector.after(1.0, {"tensor": 3.0}) == {}
    assert collector.after(1.0, {"tensor": 3.5}) == {"tensor": 0.5}


@pytest.mark.parametrize("next_counts", [{"busy": 1.0}, {}, None, FAILS])
def test_a_counter_that_restarts_is_missing_or_fails_starts_a_new_average(next_counts: Counts) -> None:
    collector = AveragedCollector()
    collector.after(0.0, {"busy": 5.0})
    collector.after(1.0, {"busy": 6.0})
    assert collector.after(1.0, next_counts) == {}
    assert collector.after(1.0, {"busy": 7.0}) == ({"busy": 6.0} if next_counts == {"busy": 1.0} else {})


def test_averages_do_not_span_a_gap() -> None:
    collector = AveragedCollector()
    collector.after(0.0, {"busy": 5.0})
    collector.after(1.0, {"busy": 6.0})
    assert collector.after(0.0, {"busy": 9.0}) == {}
    assert collector.after(2.0, {"busy": 10.0}) == {"busy": 0.5}
