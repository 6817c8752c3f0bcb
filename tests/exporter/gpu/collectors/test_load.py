"""GPU time is integrated exactly: every burst counts once, and unobserved time does not count."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from rankscope_exporter.gpu.busy_meter import BusyMeter
from rankscope_exporter.gpu.collector import Tick
from rankscope_exporter.gpu.collectors.load import reader
from rankscope_exporter.gpu.nvml.device import UtilizationSample
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.nvml.gpm import GpmSampler

BUSY = "{gpus: 1, timeline: {0: [{at: 0, busy: 1}]}}"
BURSTS = """
gpus: 1
timeline:
  0:
"""


def burst_every(period: float, seconds: float, until: float) -> str:
    """Return a scenario in which the GPU is busy for `seconds` at the start of every period."""
    entries = []
    at = 0.0
    while at < until:
        entries += [f"    - {{at: {at}, busy: 1}}", f"    - {{at: {at + seconds}, busy: 0}}"]
        at += period
    return BURSTS + "\n".join(entries)


class Ring:
    """A device with samples set by a test."""

    def __init__(self, *samples: tuple[float, float]) -> None:
        self.samples = list(samples)

    def supports_gpm(self) -> bool:
        return False

    def samples_utilization(self, _engine: str) -> bool:
        return bool(self.samples)

    def utilization_samples(self, _engine: str) -> Iterator[UtilizationSample]:
        return (UtilizationSample(round(t * 1e6), percent) for t, percent in reversed(self.samples))

    def utilization(self, _engine: str) -> float:
        return 1.0


@pytest.mark.parametrize("interval", [0.3, 1.0, 7.0, 15.0])
def test_bursts_between_readings_count_in_full(metered, interval):
    gpu = metered(burst_every(20, 1, until=300), BusyMeter())
    before = gpu.after(10, elapsed=0).busy_seconds
    for _ in range(math.ceil(240 / interval)):
        load = gpu.after(interval)
    simulated = gpu.machine.simulated
    truth = simulated.gpus[0].seconds(simulated.now()).computing - 1
    assert load.busy_seconds - before == pytest.approx(truth, abs=0.2)
    assert truth >= 12


class Averaged:
    """The samples of drivers that average over the last seconds, as on an H200: they lag and end late."""

    def __init__(self, monkeypatch, device) -> None:
        monkeypatch.setattr(device, "utilization_samples", self)

    def __call__(self, _engine="gpu"):
        return (UtilizationSample(round(t * 1e6), 50) for t in range(14, 0, -1))


def test_kernels_are_measured_between_two_readings_where_the_samples_are_averages(metered, monkeypatch):
    gpu = metered("{gpus: 1, timeline: {0: [{at: 3, busy: 1}, {at: 7, busy: 0}]}}", BusyMeter())
    Averaged(monkeypatch, gpu.device)
    loads = [gpu.after(1, elapsed=1 if second else 0) for second in range(14)]
    assert loads[-1].busy_seconds == pytest.approx(4, abs=0.01)
    assert loads[-1].idle_for == pytest.approx(7)  # and not that of an average, which is above zero for longer


def test_without_gpms_answer_the_samples_count(metered):
    scenario = "{gpus: 1, timeline: {0: [{at: 0, busy: 1, fails: {nvmlGpmSampleGet: NO_PERMISSION}}]}}"
    gpu = metered(scenario, BusyMeter())
    gpu.after(2, elapsed=0)
    assert [gpu.after(1).busy_seconds for _ in range(3)] == pytest.approx([1, 2, 3], abs=0.2)


@pytest.mark.parametrize(("rate", "idle_for"), [(4e6, 3.0), (26e9, 0.0)])
def test_a_gpu_that_copies_from_the_host_is_not_idle(metered, monkeypatch, rate, idle_for):
    """An idle H200 with a process moves 4 MB/s over PCIe, one that loads data 26 GB/s."""
    gpu = metered(BUSY, BusyMeter())
    gpu.after(1, elapsed=0)
    gpu.after(1)
    copying = {"graphics": 0.0, "pcie_receive": rate, "pcie_transmit": 0.0}
    monkeypatch.setattr(GpmSampler, "measure", lambda _self, elapsed, _at: {k: v * elapsed for k, v in copying.items()})
    loads = [gpu.after(1) for _ in range(3)]
    assert [load.busy_seconds for load in loads] == pytest.approx([1, 1, 1])
    assert loads[-1].idle_for == idle_for


def test_a_gpm_that_never_answers_leaves_nothing_behind(metered, monkeypatch):
    def refuse(*_arguments):
        raise DriverError("nvmlGpmSampleAlloc", 20, "no memory")

    monkeypatch.setattr(GpmSampler, "__init__", refuse)
    gpu = metered(BUSY, BusyMeter())
    gpu.after(1, elapsed=0)
    assert [gpu.after(1).busy_seconds for _ in range(3)] == pytest.approx([1, 2, 3], abs=0.2)
    assert not gpu.device._at_close


def test_gpm_is_not_asked_without_its_collector(machine):
    simulated = machine(BUSY)
    simulated.driver = Driver(uses_gpm=False)
    device, meter = simulated.device(), BusyMeter()
    for second in range(4):
        simulated.clock.advance(1)
        load = meter(device, Tick(simulated.clock(), 1 if second else 0))
    assert load.busy_seconds == pytest.approx(3, abs=0.2)
    assert not device.gpm_samplers


def test_an_idle_context_is_not_busy(metered):
    """An idle H200 with a process reports 6e-5 of the time."""
    gpu = metered("{gpus: 1, timeline: {0: [{at: 2, busy: 1}, {at: 3, busy: 0.00006}]}}", BusyMeter())
    loads = [gpu.after(1, elapsed=1 if second else 0) for second in range(9)]
    assert loads[-1].idle_for == pytest.approx(6)


def test_reading_twice_counts_once(metered):
    gpu = metered(BUSY, BusyMeter())
    gpu.after(2, elapsed=0)
    readings = [gpu.after(seconds, elapsed=0).busy_seconds for seconds in (2, 0, 0, 0, 0)]
    assert readings == pytest.approx([2] * 5)


def test_activity_before_the_first_reading_is_not_counted(metered):
    assert metered(BUSY, BusyMeter()).after(15, elapsed=0).busy_seconds == 0


def test_a_gap_longer_than_the_ring_counts_only_the_ring(metered):
    gpu = metered(BUSY.replace("gpus: 1", "gpus: 1, model: A100"), BusyMeter())
    gpu.after(1, elapsed=0)
    seen = gpu.after(500).busy_seconds
    assert 19 < seen <= 20
    assert gpu.after(1).busy_seconds == pytest.approx(seen + 1)


def test_a_percent_above_100_counts_as_100():
    ring, meter = Ring((9.0, 0), (10.0, 0)), BusyMeter()
    meter(ring, Tick(10, 0))
    ring.samples.append((11.0, 250))
    assert meter(ring, Tick(11, 1)).busy_seconds == pytest.approx(1)


def test_the_last_busy_time_is_that_of_the_last_busy_sample(metered):
    gpu = metered("{gpus: 1, model: A100, timeline: {0: [{at: 2, busy: 1}, {at: 3, busy: 0}]}}", BusyMeter())
    assert gpu.after(1, elapsed=0).last_busy == gpu.clock(), "never busy: time when first seen"
    assert gpu.after(5).last_busy == pytest.approx(gpu.machine.simulated.start_unix + 3, abs=0.2)


def test_the_ring_has_activity_from_before_the_exporter_started(metered):
    gpu = metered("{gpus: 1, timeline: {0: [{at: 0, busy: 1}, {at: 1, busy: 0}]}}", BusyMeter())
    assert gpu.after(10, elapsed=0).last_busy == pytest.approx(gpu.machine.simulated.start_unix + 1, abs=0.2)


def test_without_a_ring_the_instantaneous_utilization_is_integrated(metered):
    scenario = "{gpus: 1, timeline: {0: [{at: 0, busy: 0.5, fails: {nvmlDeviceGetSamples: NOT_SUPPORTED}}]}}"
    gpu = metered(scenario, BusyMeter())
    gpu.after(5, elapsed=0)
    load = gpu.after(2)
    assert load.busy_seconds == pytest.approx(1)
    assert load.last_busy == gpu.clock()


def test_a_ring_that_is_always_empty_does_not_count():
    load = BusyMeter()(Ring(), Tick(100, 2))
    assert load.busy_seconds == 2


def test_a_gpu_without_utilization_has_no_load(metered):
    scenario = """
        gpus: 1
        timeline: {0: [{at: 0, fails: {nvmlDeviceGetSamples: NOT_SUPPORTED,
                                       nvmlDeviceGetUtilizationRates: NOT_SUPPORTED}}]}"""
    assert metered(scenario, BusyMeter()).after(0, elapsed=1) is None


def test_each_engine_is_integrated_from_its_own_ring(metered):
    gpu = metered("{gpus: 1, model: T4, timeline: {0: [{at: 0, busy: 1}]}}", reader())
    gpu.after(2, elapsed=0)
    seconds = {engine: load.busy_seconds for engine, load in gpu.after(4).items()}
    assert seconds == pytest.approx({"gpu": 4, "memory": 2, "encoder": 0, "decoder": 0})


def test_a_missing_engine_is_none(metered):
    loads = metered("gpus: 1", reader()).after(1)
    assert loads["encoder"] is None
    assert loads["decoder"] is not None
