"""The simulated library replaces the real one, and is removed without a trace."""

from __future__ import annotations

import pynvml
import pytest

from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.simulation import simulated_uuid
from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.library import installed
from rankscope_exporter.simulation.ranks import RankActivity
from rankscope_exporter.simulation.scenario import load_scenario


def bindings() -> tuple[object, dict[str, object], int]:
    return pynvml.nvmlLib, dict(pynvml._nvmlGetFunctionPointer_cache), pynvml._nvmlLib_refcount


def test_installations_nest_and_restore_the_bindings_exactly():
    original = bindings()
    with installed(SimulatedDriver(load_scenario("2"))):
        driver = Driver()
        driver.connect()
        assert driver.device_count() == 2
        before = bindings()
        with installed(SimulatedDriver(load_scenario("5"))):
            inner = Driver()
            inner.connect()
            assert inner.device_count() == 5
        assert bindings() == before != original
        assert driver.device_count() == 2
    assert bindings() == original


def test_a_missing_symbol_is_an_unsupported_function(machine):
    machine("gpus: 1").driver.connect()
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        pynvml.nvmlUnitGetCount()


def test_the_driver_describes_error_codes(machine):
    machine("gpus: 1").driver.connect()
    assert pynvml.nvmlErrorString(4242) == "NVML code 4242"


def test_a_blocking_call_blocks_for_its_time(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, blocks: {nvmlDeviceGetPowerUsage: 30}}]}}")
    device = m.device()
    device.temperature()
    before = m.clock()
    device.power()
    assert m.clock() - before == 30


def test_a_lost_gpu_can_be_reopened_when_it_returns(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 0, lost: true}, {at: 5, lost: false}]}}")
    m.driver.connect()
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetHandleByIndex(0)
    m.clock.advance(5)
    assert m.device().uuid == simulated_uuid(0)


def test_a_gpu_is_busy_while_its_rank_is():
    spent = iter(range(1, 1000))
    uuid = simulated_uuid(1)

    def always_busy():
        yield RankActivity(uuid, 4242, busy_seconds=next(spent) / 6, waiting_seconds=0)

    with installed(SimulatedDriver(load_scenario("2"), activities=always_busy)) as simulated:
        driver = Driver()
        driver.connect()
        idle, device = driver.device(0), driver.device(1)
        while simulated.gpus[1].seconds(simulated.now()).computing < 0.5:
            simulated.sleep(0.02)
        assert device.pids() == {4242}
        assert idle.pids() == frozenset()
        assert device.memory().used > 0
        assert any(sample.percent > 50 for sample in device.utilization_samples())
        assert not any(sample.percent for sample in idle.utilization_samples())
