"""GPU time is integrated truly: every burst counts once, and nothing that was not seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope_exporter.gpu.busy_meter import BusyMeter
from rankscope_exporter.gpu.collector import Tick
from rankscope_exporter.gpu.collectors.load import LoadReader
from rankscope_exporter.gpu.nvml.device import UtilizationSample

BURSTS = """
gpus: 1
timeline:
  0:
"""


def burst_every(period: float, seconds: float, until: float) -> str:
    """A scenario in which the GPU works for so many seconds at the beginning of every period."""
    entries = []
    at = 0.0
    while at < until:
        entries += [f"    - {{at: {at}, busy: 1}}", f"    - {{at: {at + seconds}, busy: 0}}"]
        at += period
    return BURSTS + "\n".join(entries)


class Ring:
    """A device whose samples a test sets."""

    def __init__(self, *samples: tuple[float, float]) -> None:
        self.samples = list(samples)

    def samples_utilization(self, _engine: str) -> bool:
        return bool(self.samples)

    def utilization_samples(self, _engine: str) -> Iterator[UtilizationSample]:
        return (UtilizationSample(round(t * 1e6), percent) for t, percent in reversed(self.samples))

    def utilization(self, _engine: str) -> float:
        return 1.0


@pytest.mark.parametrize("interval", [0.3, 1.0, 7.0, 15.0])
def test_bursts_between_readings_count_in_full(machine, interval):
    m = machine(burst_every(20, 1, until=300))
    device, meter = m.device(), BusyMeter()
    m.clock.advance(10)
    before = meter(device, Tick(m.clock(), 0)).busy_seconds
    seconds = 0.0
    while seconds < 240:
        m.clock.advance(interval)
        seconds += interval
        load = meter(device, Tick(m.clock(), interval))
    truth = m.simulated.gpus[0].seconds(m.simulated.now()).computing - 1
    assert load.busy_seconds - before == pytest.approx(truth, abs=0.2)
    assert truth >= 12


def test_reading_twice_counts_once(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, busy: 1}]}}")
    device, meter = m.device(), BusyMeter()
    m.clock.advance(2)
    meter(device, Tick(m.clock(), 0))
    m.clock.advance(2)
    readings = [meter(device, Tick(m.clock(), 2)).busy_seconds for _ in range(5)]
    assert readings == pytest.approx([2] * 5)


def test_what_happened_before_the_first_reading_is_not_counted(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, busy: 1}]}}")
    device, meter = m.device(), BusyMeter()
    m.clock.advance(15)
    assert meter(device, Tick(m.clock(), 0)).busy_seconds == 0


def test_a_gap_longer_than_the_ring_is_not_invented(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, busy: 1}]}}")
    device, meter = m.device(), BusyMeter()
    m.clock.advance(1)
    meter(device, Tick(m.clock(), 0))
    m.clock.advance(500)
    seen = meter(device, Tick(m.clock(), 500)).busy_seconds
    assert 19 < seen <= 20
    m.clock.advance(1)
    assert meter(device, Tick(m.clock(), 1)).busy_seconds == pytest.approx(seen + 1)


def test_a_percent_above_a_hundred_is_all_the_time():
    ring, meter = Ring((9.0, 0), (10.0, 0)), BusyMeter()
    meter(ring, Tick(10, 0))
    ring.samples.append((11.0, 250))
    assert meter(ring, Tick(11, 1)).busy_seconds == pytest.approx(1)


def test_the_last_busy_time_is_that_of_the_last_busy_sample(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 2, busy: 1}, {at: 3, busy: 0}]}}")
    device, meter = m.device(), BusyMeter()
    m.clock.advance(1)
    assert meter(device, Tick(m.clock(), 0)).last_busy == m.clock(), "never seen busy: when it was first seen"
    m.clock.advance(5)
    assert meter(device, Tick(m.clock(), 5)).last_busy == pytest.approx(m.simulated.start_unix + 3, abs=0.2)


def test_the_ring_tells_of_work_before_the_exporter_began(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, busy: 1}, {at: 1, busy: 0}]}}")
    device = m.device()
    m.clock.advance(10)
    assert BusyMeter()(device, Tick(m.clock(), 0)).last_busy == pytest.approx(m.simulated.start_unix + 1, abs=0.2)


def test_without_a_ring_the_instantaneous_utilization_is_integrated(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, busy: 0.5, fails: {nvmlDeviceGetSamples: NOT_SUPPORTED}}]}}")
    device, meter = m.device(), BusyMeter()
    m.clock.advance(5)
    meter(device, Tick(m.clock(), 0))
    m.clock.advance(2)
    load = meter(device, Tick(m.clock(), 2))
    assert load.busy_seconds == pytest.approx(1)
    assert load.last_busy == m.clock()


def test_a_ring_that_never_holds_anything_is_none():
    load = BusyMeter()(Ring(), Tick(100, 2))
    assert load.busy_seconds == 2


def test_a_gpu_that_tells_nothing_of_its_utilization_has_no_load(machine):
    m = machine("""
        gpus: 1
        timeline: {0: [{at: 0, fails: {nvmlDeviceGetSamples: NOT_SUPPORTED,
                                       nvmlDeviceGetUtilizationRates: NOT_SUPPORTED}}]}""")
    assert BusyMeter()(m.device(), Tick(m.clock(), 1)) is None


def test_each_engine_is_integrated_from_its_own_ring(machine):
    m = machine("{gpus: 1, model: T4, timeline: {0: [{at: 0, busy: 1}]}}")
    device, reader = m.device(), LoadReader()
    m.clock.advance(2)
    reader(device, Tick(m.clock(), 0))
    m.clock.advance(4)
    seconds = {engine: load.busy_seconds for engine, load in reader(device, Tick(m.clock(), 4)).items()}
    assert seconds == pytest.approx({"gpu": 4, "memory": 2, "encoder": 0, "decoder": 0})


def test_an_engine_that_a_gpu_does_not_have_is_none(machine):
    m = machine("gpus: 1")
    m.clock.advance(1)
    loads = LoadReader()(m.device(), Tick(m.clock(), 1))
    assert loads["encoder"] is None
    assert loads["decoder"] is not None
