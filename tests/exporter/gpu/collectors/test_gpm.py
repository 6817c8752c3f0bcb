"""GPM becomes counters of observed time that are exact over any window."""

from __future__ import annotations

import ctypes
import time

import pynvml
import pytest
from testing.waiting import eventually, in_a_thread

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
    gpu = watch("{gpus: 1, timeline: {0: [{at: 0, busy: 0.5, waiting: 0.5}]}}", gpm.COLLECTOR)
    assert gpu.after(1) == {}
    gpu.after(1)
    found = gpu.after(9)
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
def test_short_bursts_count_in_full_for_any_interval(watch, interval):
    bursts = ", ".join(f"{{at: {at}, busy: 1}}, {{at: {at + 0.05}, busy: 0}}" for at in range(1, 90))
    gpu = watch(f"{{gpus: 1, timeline: {{0: [{bursts}]}}}}", gpm.COLLECTOR)
    gpu.after(0)
    for _ in range(round(63 / interval)):
        found = gpu.after(interval)
    assert found[SM][""] == pytest.approx(0.95 * 0.05 * 62.5, rel=0.02)


def test_readings_that_are_too_close_are_merged_without_loss(watch):
    gpu = watch(BUSY, gpm.COLLECTOR)
    gpu.after(1)
    assert SM not in gpu.after(0.04)
    assert SM not in gpu.after(0.04)
    assert gpu.after(0.04)[SM][""] == pytest.approx(0.95 * 0.12)


def test_a_gap_is_not_counted_and_counting_continues_after_it(watch):
    gpu = watch(BUSY, gpm.COLLECTOR)
    gpu.after(1)
    assert gpu.after(2)[SM][""] == pytest.approx(0.95 * 2)
    assert gpu.after(100, gap=True)[SM][""] == pytest.approx(0.95 * 2)
    assert gpu.after(1)[SM][""] == pytest.approx(0.95 * 3)


def test_a_reopened_gpu_starts_with_new_samples_and_keeps_its_counts(watch):
    gpu = watch(BUSY, gpm.COLLECTOR)
    gpu.after(1)
    gpu.after(2)
    gpu.reopen()
    assert gpu.after(1)[SM][""] == pytest.approx(0.95 * 2)
    assert gpu.after(1)[SM][""] == pytest.approx(0.95 * 3)


@pytest.fixture
def allocated_samples(monkeypatch) -> list[int]:
    """Return the addresses of allocated samples, updated on each allocation and release."""
    allocated: list[int] = []
    allocate, free = pynvml.nvmlGpmSampleAlloc, pynvml.nvmlGpmSampleFree

    def allocating():
        sample = allocate()
        allocated.append(ctypes.cast(sample, ctypes.c_void_p).value)
        return sample

    def freeing(sample):
        free(sample)
        allocated.remove(ctypes.cast(sample, ctypes.c_void_p).value)

    monkeypatch.setattr(pynvml, "nvmlGpmSampleAlloc", allocating)
    monkeypatch.setattr(pynvml, "nvmlGpmSampleFree", freeing)
    return allocated


def test_a_gpu_that_is_reopened_repeatedly_has_at_most_two_samples(watch, allocated_samples):
    gpu = watch(BUSY, gpm.COLLECTOR)
    for _ in range(5):
        gpu.after(1)
        assert len(allocated_samples) == 2
        gpu.reopen()
        assert allocated_samples == []


def test_lost_and_released_gpus_free_their_samples(machine, allocated_samples):
    m = machine("{gpus: 2, timeline: {0: [{at: 5, lost: true}]}}", sleep=time.sleep)
    sampler = Sampler(m.driver, [gpm.COLLECTOR], timing=Timing(interval=0.02, reopen_after=0.02))
    sampler.start()
    try:
        eventually(lambda: len(allocated_samples) == 4)
        m.advance(5, lambda: len(allocated_samples) == 2)
        sampler.release(3600)
        assert allocated_samples == []
    finally:
        sampler.stop()


def test_instances_of_a_split_gpu_are_counted_separately_without_the_whole_gpu(watch):
    scenario = "{gpus: 1, model: {like: H100, mig: [3g.40gb, 1g.10gb]}, timeline: {0: [{at: 0, busy: 1}]}}"
    gpu = watch(scenario, gpm.COLLECTOR)
    gpu.after(1)
    found = gpu.after(2)
    assert found[SM] == {"1": pytest.approx(1.9), "2": pytest.approx(1.9)}
    assert not [name for name in found if name.endswith("_bytes_total")], "the links belong to the whole GPU"


def test_without_permission_instances_export_nothing(watch):
    gpu = watch(
        """{gpus: 1, model: {mig: [1g.10gb]},
            timeline: {0: [{at: 0, fails: {nvmlGpmMigSampleGet: NO_PERMISSION}}]}}""",
        gpm.COLLECTOR,
    )
    gpu.after(1)
    assert gpu.after(1) == {}


@pytest.mark.parametrize("model", ["A100", "T4"])
def test_a_gpu_before_hopper_has_no_gpm_metrics(watch, model):
    gpu = watch(f"{{gpus: 1, model: {model}}}", gpm.COLLECTOR)
    gpu.after(1)
    assert gpu.after(1) == {}


def test_failed_samples_are_not_compared(watch):
    scenario = (
        "{gpus: 1, timeline: {0: [{at: 0, busy: 1}, {at: 2, fails: {nvmlGpmSampleGet: UNKNOWN}}, {at: 3, fails: {}}]}}"
    )
    gpu = watch(scenario, gpm.COLLECTOR)
    gpu.after(1)
    with pytest.raises(DriverError, match="nvmlGpmSampleGet"):
        gpu.after(1.5)
    assert gpu.after(2)[SM][""] == pytest.approx(0.95 * 3.5), "the earlier sample is still valid"


def test_the_request_and_two_samples_are_allocated_once(watch, monkeypatch):
    made, buffers = [], []
    allocate, compare = pynvml.nvmlGpmSampleAlloc, pynvml.nvmlGpmMetricsGet
    monkeypatch.setattr(pynvml, "nvmlGpmSampleAlloc", lambda: made.append(1) or allocate())
    monkeypatch.setattr(pynvml, "nvmlGpmMetricsGet", lambda request: buffers.append(id(request)) or compare(request))
    gpu = watch(BUSY, gpm.COLLECTOR)
    for _ in range(10):
        gpu.after(1)
    assert len(made) == 2
    assert len(buffers) == 9
    assert len(set(buffers)) == 1


def test_the_simulated_driver_rejects_a_sample_of_another_thread(machine):
    sampler = GpmSampler(machine(BUSY).device())
    errors = []

    def share() -> None:
        try:
            sampler.measure(0, 0.0)
        except DriverError as error:
            errors.append(str(error))

    in_a_thread(share)
    assert errors == ["nvmlGpmSampleGet: Invalid Argument"]
