"""Handles are released on request, all or none. Counters continue after they are reacquired."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pynvml
import pytest
from testing.waiting import eventually
from tests.exporter.gpu.conftest import PATIENT

from rankscope_exporter.gpu.collector import Gpu, SampledCollector
from rankscope_exporter.gpu.collectors import gpu, load
from rankscope_exporter.gpu.collectors.exporter import ExporterCollector
from rankscope_exporter.gpu.device_sampler import Timing
from rankscope_exporter.gpu.sampler import ReleaseError, Sampler
from rankscope_exporter.registry import GPU_COLLECTORS
from rankscope_exporter.simulation import simulated_uuid

FIRST, SECOND = Gpu(0, simulated_uuid(0)), Gpu(1, simulated_uuid(1))
LONG = 3600.0


def threads() -> set[str]:
    """Return the names of the sampler's threads that call the driver."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(("gpu-", "xid"))}


def published(sampler: Sampler) -> set[str]:
    """Return the names of the GPUs' series."""
    sampler.take_snapshot()
    collected = (SampledCollector(collector, sampler.texts).collect() for collector in GPU_COLLECTORS)
    return {sample.name for families in collected for family in families for sample in family.samples}


def exporter_values(sampler: Sampler) -> dict[str, float]:
    families = ExporterCollector(sampler).collect()
    return {sample.name.removeprefix("rankscope_exporter_"): sample.value for f in families for sample in f.samples}


def test_released_gpus_have_no_handle_no_thread_and_no_series(sampling):
    _, sampler = sampling("gpus: 2")
    eventually(lambda: threads() == {"gpu-0", "gpu-1", "xid"})
    sampler.release(LONG)
    assert pynvml._nvmlLib_refcount == 0
    assert threads() == set()
    assert published(sampler) == set()
    values = exporter_values(sampler)
    assert (values["gpus_released"], values["nvml_up"], values["gpus_seen"], values["gpus_expected"]) == (1, 0, 0, 2)
    assert not sampler.is_ready
    time.sleep(5 * PATIENT.interval)
    assert pynvml._nvmlLib_refcount == 0, "no reconnect"


def test_xid_counts_remain_while_the_gpus_are_released(sampling):
    m, sampler = sampling("{gpus: 2, timeline: {1: [{at: 5, xid: 31}]}}")
    eventually(lambda: [xids.counts for xids in sampler.xids().values()] == [{}, {}])
    m.advance(5, lambda: sampler.xids()[SECOND].counts == {31: 1})
    sampler.release(LONG)
    assert [xids.counts for xids in sampler.xids().values()] == [{}, {31: 1}]


def test_all_series_return_and_busy_time_continues_without_the_unobserved_time(sampling):
    m, sampler = sampling("{gpus: 2, timeline: {0: [{at: 0, busy: 1}]}}", in_simulated_time=True)

    def busy_seconds() -> float:
        reading = sampler.readings(load.COLLECTOR).get(FIRST)
        return reading["gpu"].busy_seconds if reading else 0

    for second in range(1, 6):
        m.advance(1, lambda second=second: busy_seconds() >= second - 1)
    names, before = published(sampler), sampler.readings(load.COLLECTOR)[FIRST]["gpu"].busy_seconds
    sampler.release(LONG)
    m.clock.advance(1000)
    sampler.resume()
    eventually(lambda: sampler.is_ready)
    assert published(sampler) == names
    assert exporter_values(sampler)["gpus_released"] == 0
    assert before <= sampler.readings(load.COLLECTOR)[FIRST]["gpu"].busy_seconds <= before + 20, "the ring holds 20 s"
    eventually(lambda: threads() == {"gpu-0", "gpu-1", "xid"})


def test_gpus_that_disappear_during_a_release_are_reported_missing(sampling):
    m, sampler = sampling("{gpus: 2, timeline: {1: [{at: 5, lost: true}]}}")
    sampler.release(LONG)
    m.clock.advance(5)
    sampler.resume()
    eventually(lambda: sampler.is_ready)
    assert sampler.readings(gpu.COLLECTOR)[FIRST] is not None
    assert sampler.readings(gpu.COLLECTOR)[SECOND] is None
    assert (sampler.gpus_seen, sampler.gpus_expected) == (1, 2)


def test_a_driver_that_is_reloaded_during_a_release_is_connected(sampling):
    m, sampler = sampling("{gpus: 2, driver: [{at: 5, loaded: false}, {at: 9, loaded: true}]}")
    sampler.release(LONG)
    m.clock.advance(9)
    sampler.resume()
    eventually(lambda: sampler.is_ready)
    assert sampler.nvml_up
    assert sampler.gpus_seen == 2


def test_a_release_ends_by_itself_after_its_time(sampling):
    _, sampler = sampling("gpus: 2")
    sampler.release(0.2)
    assert sampler.is_released
    eventually(lambda: sampler.is_ready)
    assert sampler.gpus_seen == 2


def test_a_release_can_be_extended_and_resumed_twice(sampling):
    _, sampler = sampling("gpus: 2")
    sampler.release(0.2)
    sampler.release(LONG)
    time.sleep(0.5)
    assert sampler.is_released
    sampler.resume()
    sampler.resume()
    eventually(lambda: sampler.is_ready)


def test_nothing_is_released_while_one_gpu_is_stuck_and_the_others_continue(sampling):
    timing = Timing(interval=0.02, deadline=2, reopen_after=0.02)
    m, sampler = sampling("{gpus: 3, timeline: {1: [{at: 5, blocks: {nvmlDeviceGetTemperature: 60}}]}}", timing=timing)
    m.advance(5, lambda: sampler.readings(gpu.COLLECTOR)[SECOND] is None)
    with pytest.raises(ReleaseError, match="gpu-1: a driver call does not return"):
        sampler.release(LONG)
    assert not sampler.is_released
    eventually(lambda: sampler.gpus_seen == 2)
    assert sampler.readings(gpu.COLLECTOR)[FIRST] is not None
    eventually(lambda: "xid" in threads())

    m.unblock.set()
    eventually(lambda: sampler.gpus_seen == 3)
    m.clock.advance(1)
    sampler.release(LONG)
    assert pynvml._nvmlLib_refcount == 0


def test_a_failed_driver_shutdown_is_no_release(sampling, monkeypatch):
    _, sampler = sampling("gpus: 1")
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlShutdown", lambda: pynvml._nvmlCheckReturn(pynvml.NVML_ERROR_UNKNOWN))
        with pytest.raises(ReleaseError, match="Unknown Error"):
            sampler.release(LONG)
    assert not sampler.is_released
    eventually(lambda: sampler.gpus_seen == 1)


def test_a_driver_that_does_not_respond_fails_the_release_and_leaves_none_pending(sampling, monkeypatch):
    _, sampler = sampling("gpus: 1", timing=replace(PATIENT, release_timeout=0.2))
    blocked, unblock = threading.Event(), threading.Event()
    shut_down = pynvml.nvmlShutdown
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: blocked.set() or (unblock.wait(60) and shut_down()))
    with pytest.raises(ReleaseError, match=r"driver did not respond within 0\.2 s"):
        sampler.release(LONG)
    eventually(blocked.is_set)
    unblock.set()
    eventually(lambda: sampler.is_ready)
    assert sampler.gpus_seen == 1
