"""An average is over what was seen, as far back as 15 s: bursts count, gaps and failures do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rankscope_exporter.dcgm.recent import WINDOW, Recent
from rankscope_exporter.gpu.collector import Gpu, GpuCollector, Tick
from rankscope_exporter.gpu.collectors import load
from rankscope_exporter.gpu.nvml.errors import DriverError

Counts = dict[str, float] | None
GPU = Gpu(0, "GPU-0")


class FakeDevice:
    """All that an average needs of a device."""

    uuid = GPU.uuid


class Watched:
    """A collector that reads what a test gives it."""

    def __init__(self) -> None:
        self._next: Counts = None
        self.during: dict[str, float] = {}  # the rates that a scrape finds while the device is being read
        collector: GpuCollector[dict[str, float]] = GpuCollector("s", "", lambda: self._answer, ())
        self._recent = Recent(collector, lambda counts: {("", name): count for name, count in counts.items()})
        self._read: Callable[[Any, Tick], Counts] = self._recent.collector.reader()

    def after(self, elapsed: float, counts: Counts) -> dict[str, float]:
        """The rates after a reading."""
        self._next = counts
        assert self._read(FakeDevice(), Tick(0.0, elapsed)) is counts
        return self._rates()

    def _answer(self, _device: object, _tick: Tick) -> Counts:
        self.during = self._rates()
        return self._next

    def _rates(self) -> dict[str, float]:
        return {name: rate for (_, name), rate in self._recent.rates(GPU).items()}


def test_one_reading_is_no_average() -> None:
    assert Watched().after(0.0, {"busy": 5.0}) == {}


def test_an_average_covers_all_between_the_readings() -> None:
    watched = Watched()
    watched.after(0.0, {"busy": 5.0})
    watched.after(1.0, {"busy": 6.0})
    assert watched.after(3.0, {"busy": 6.0}) == {"busy": 0.25}


def test_while_a_device_is_being_read_its_averages_are_those_of_before() -> None:
    watched = Watched()
    watched.after(0.0, {"busy": 0.0})
    before = watched.after(1.0, {"busy": 0.5})
    watched.after(1.0, {"busy": 0.5})
    assert watched.during == before == {"busy": 0.5}


def test_what_is_longer_ago_than_the_window_is_forgotten() -> None:
    watched = Watched()
    watched.after(0.0, {"busy": 0.0})
    watched.after(1.0, {"busy": 1.0})
    idle = [watched.after(1.0, {"busy": 1.0})["busy"] for _ in range(int(WINDOW))]
    assert idle[0] == 0.5
    assert idle == sorted(idle, reverse=True)
    assert idle[-1] == 0


def test_a_quantity_that_begins_later_is_averaged_from_then_on() -> None:
    watched = Watched()
    watched.after(0.0, {})
    assert watched.after(1.0, {"tensor": 3.0}) == {}
    assert watched.after(1.0, {"tensor": 3.5}) == {"tensor": 0.5}


@pytest.mark.parametrize("anew", [{"busy": 1.0}, {}, None])
def test_a_counter_that_begins_anew_or_is_away_begins_a_new_average(anew: Counts) -> None:
    watched = Watched()
    watched.after(0.0, {"busy": 5.0})
    watched.after(1.0, {"busy": 6.0})
    assert watched.after(1.0, anew) == {}
    assert watched.after(1.0, {"busy": 7.0}) == ({"busy": 6.0} if anew else {})


def test_nothing_is_averaged_across_a_gap() -> None:
    watched = Watched()
    watched.after(0.0, {"busy": 5.0})
    watched.after(1.0, {"busy": 6.0})
    assert watched.after(0.0, {"busy": 9.0}) == {}
    assert watched.after(2.0, {"busy": 10.0}) == {"busy": 0.5}


def test_nothing_is_averaged_across_a_reading_that_failed(machine: Callable[..., Any]) -> None:
    simulated = machine("""
gpus: 1
timeline:
  0:
    - {at: 0, busy: 1}
    - {at: 5, fails: {nvmlDeviceGetSamples: UNKNOWN}}
    - {at: 6, fails: {}}
""")
    recent = Recent(load.COLLECTOR, lambda loads: {("", "gpu"): loads["gpu"].busy_seconds})
    device, read, clock = simulated.device(), recent.collector.reader(), simulated.clock
    gpu = Gpu(0, device.uuid)
    seen = []
    for _ in range(9):
        clock.advance(1)
        try:
            read(device, Tick(clock(), 1.0))
        except DriverError:
            seen.append("failed")
        else:
            seen.append(recent.rates(gpu).get(("", "gpu")))
        if seen[-1] == "failed":
            assert recent.rates(gpu) == {}
    failed = seen.index("failed")
    assert seen[failed - 1] == pytest.approx(1)
    assert seen[failed + 1] is None
    assert seen[-1] == pytest.approx(1)
