"""GPM becomes counters: true over any window, of what was watched and nothing else."""

from __future__ import annotations

import ctypes
import threading
import time

import pynvml
import pytest
from testing.waiting import eventually

from rankscope_exporter.gpu.collectors import gpm
from rankscope_exporter.gpu.device_sampler import Timing
from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.nvml.gpm import GpmSampler
from rankscope_exporter.gpu.sampler import Sampler
from rankscope_exporter.simulation.gpu import NVLINK_RATE, PCIE_RATE

PREFIX = "rankscope_gpu_"
SM = f"{PREFIX}sm_active_seconds_total"
BUSY = "{gpus: 1, timeline: {0: [{at: 0, busy: 1}]}}"


def test_shares_become_seconds_and_rates_become_bytes(watch):
    watched = watch("{gpus: 1, timeline: {0: [{at: 0, busy: 0.5, waiting: 0.5}]}}", gpm.COLLECTOR)
    assert watched.after(1) == {}
    watched.after(1)
    found = watched.after(9)
    assert found[f"{PREFIX}graphics_active_seconds_total"][""] == pytest.approx(10)
    assert found[SM][""] == pytest.approx(10 * (0.5 * 0.95 + 0.5 * 0.15))
    assert found[f"{PREFIX}tensor_active_seconds_total"][""] == pytest.approx(3)
    pipes = {pipe: seconds for (_, pipe), seconds in found[f"{PREFIX}pipe_active_seconds_total"].items()}
    assert pipes == pytest.approx(
        {"tensor_hmma": 2.5, "tensor_imma": 0.5, "tensor_dfma": 0, "fp64": 0, "fp32": 1, "fp16": 0.5}
    )
    assert found[f"{PREFIX}gpm_pcie_bytes_total"]["", "transmit"] == pytest.approx(5 * PCIE_RATE)
    assert found[f"{PREFIX}gpm_nvlink_bytes_total"]["", "receive"] == pytest.approx(5 * NVLINK_RATE)


@pytest.mark.parametrize("interval", [0.15, 1.0, 7.0])
def test_short_bursts_count_in_full_whatever_the_interval(watch, interval):
    bursts = ", ".join(f"{{at: {at}, busy: 1}}, {{at: {at + 0.05}, busy: 0}}" for at in range(1, 90))
    watched = watch(f"{{gpus: 1, timeline: {{0: [{bursts}]}}}}", gpm.COLLECTOR)
    watched.after(0)
    for _ in range(round(63 / interval)):
        found = watched.after(interval)
    assert found[SM][""] == pytest.approx(0.95 * 0.05 * 62.5, rel=0.02)


def test_readings_that_are_too_close_wait_for_each_other_and_lose_nothing(watch):
    watched = watch(BUSY, gpm.COLLECTOR)
    watched.after(1)
    assert SM not in watched.after(0.04)
    assert SM not in watched.after(0.04)
    assert watched.after(0.04)[SM][""] == pytest.approx(0.95 * 0.12)


def test_a_gap_is_not_counted_and_counting_goes_on_after_it(watch):
    watched = watch(BUSY, gpm.COLLECTOR)
    watched.after(1)
    assert watched.after(2)[SM][""] == pytest.approx(0.95 * 2)
    assert watched.after(100, gap=True)[SM][""] == pytest.approx(0.95 * 2)
    assert watched.after(1)[SM][""] == pytest.approx(0.95 * 3)


def test_a_gpu_that_was_opened_anew_begins_with_new_samples_and_keeps_its_counts(watch):
    watched = watch(BUSY, gpm.COLLECTOR)
    watched.after(1)
    watched.after(2)
    watched.reopen()
    assert watched.after(1)[SM][""] == pytest.approx(0.95 * 2)
    assert watched.after(1)[SM][""] == pytest.approx(0.95 * 3)


@pytest.fixture
def samples_held(monkeypatch) -> list[int]:
    """The addresses of the samples that were made and not given back."""
    held: list[int] = []
    allocate, free = pynvml.nvmlGpmSampleAlloc, pynvml.nvmlGpmSampleFree

    def allocating():
        sample = allocate()
        held.append(ctypes.cast(sample, ctypes.c_void_p).value)
        return sample

    def freeing(sample):
        free(sample)
        held.remove(ctypes.cast(sample, ctypes.c_void_p).value)

    monkeypatch.setattr(pynvml, "nvmlGpmSampleAlloc", allocating)
    monkeypatch.setattr(pynvml, "nvmlGpmSampleFree", freeing)
    return held


def test_a_gpu_that_is_opened_again_and_again_holds_two_samples_and_no_more(watch, samples_held):
    watched = watch(BUSY, gpm.COLLECTOR)
    for _ in range(5):
        watched.after(1)
        assert len(samples_held) == 2
        watched.reopen()
        assert samples_held == []


def test_a_gpu_that_is_lost_gives_its_samples_back_and_so_does_one_that_is_let_go_of(machine, samples_held):
    m = machine("{gpus: 2, timeline: {0: [{at: 5, lost: true}]}}", sleep=time.sleep)
    sampler = Sampler(m.driver, [gpm.COLLECTOR], timing=Timing(interval=0.02, reopen_after=0.02))
    sampler.start()
    try:
        eventually(lambda: len(samples_held) == 4)
        m.clock.advance(5)
        eventually(lambda: len(samples_held) == 2)
        sampler.release(3600)
        assert samples_held == []
    finally:
        sampler.stop()


def test_each_instance_of_a_split_gpu_is_counted_by_itself_and_the_whole_is_not(watch):
    scenario = "{gpus: 1, model: {like: H100, mig: [3g.40gb, 1g.10gb]}, timeline: {0: [{at: 0, busy: 1}]}}"
    watched = watch(scenario, gpm.COLLECTOR)
    watched.after(1)
    found = watched.after(2)
    assert found[SM] == {"1": pytest.approx(1.9), "2": pytest.approx(1.9)}
    assert not [name for name in found if name.endswith("_bytes_total")], "the links belong to the whole GPU"


def test_an_exporter_that_may_not_sample_instances_tells_nothing_of_them(watch):
    watched = watch(
        """{gpus: 1, model: {mig: [1g.10gb]},
            timeline: {0: [{at: 0, fails: {nvmlGpmMigSampleGet: NO_PERMISSION}}]}}""",
        gpm.COLLECTOR,
    )
    watched.after(1)
    assert watched.after(1) == {}


@pytest.mark.parametrize("model", ["A100", "T4"])
def test_a_gpu_before_hopper_has_none_of_it(watch, model):
    watched = watch(f"{{gpus: 1, model: {model}}}", gpm.COLLECTOR)
    watched.after(1)
    assert watched.after(1) == {}


def test_samples_that_fail_are_not_compared_with(watch):
    scenario = (
        "{gpus: 1, timeline: {0: [{at: 0, busy: 1}, {at: 2, fails: {nvmlGpmSampleGet: UNKNOWN}}, {at: 3, fails: {}}]}}"
    )
    watched = watch(scenario, gpm.COLLECTOR)
    watched.after(1)
    with pytest.raises(DriverError, match="nvmlGpmSampleGet"):
        watched.after(1.5)
    assert watched.after(2)[SM][""] == pytest.approx(0.95 * 3.5), "the sample from before still holds"


def test_the_buffer_of_metrics_is_made_once_and_two_samples_serve_for_good(watch, monkeypatch):
    made, buffers = [], []
    allocate, compare = pynvml.nvmlGpmSampleAlloc, pynvml.nvmlGpmMetricsGet
    monkeypatch.setattr(pynvml, "nvmlGpmSampleAlloc", lambda: made.append(1) or allocate())
    monkeypatch.setattr(pynvml, "nvmlGpmMetricsGet", lambda request: buffers.append(id(request)) or compare(request))
    watched = watch(BUSY, gpm.COLLECTOR)
    for _ in range(10):
        watched.after(1)
    assert len(made) == 2
    assert len(buffers) == 9
    assert len(set(buffers)) == 1


def test_the_simulated_driver_refuses_a_sample_of_another_thread(machine):
    sampler = GpmSampler(machine(BUSY).device())
    refused = []

    def share() -> None:
        try:
            sampler.measure(0)
        except DriverError as error:
            refused.append(str(error))

    thread = threading.Thread(target=share)
    thread.start()
    thread.join()
    assert refused == ["nvmlGpmSampleGet: Invalid Argument"]
