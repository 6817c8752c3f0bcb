"""A driver may be absent, appear, go away and report XID errors; none of that is an exception to anybody above."""

from __future__ import annotations

import pynvml
import pytest

from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.nvml.events import XidEvent
from rankscope_exporter.simulation import simulated_uuid


def test_a_machine_without_the_library_has_no_driver(caplog):
    driver = Driver()
    assert not driver.connect()
    assert not driver.connect()
    assert len(caplog.records) == 1, "the reason is told once"


def test_a_driver_that_is_loaded_later_is_found(machine):
    m = machine("{gpus: 3, driver: [{at: 0, loaded: false}, {at: 5, loaded: true}]}")
    assert not m.driver.connect()
    m.clock.advance(5)
    assert m.driver.connect()
    assert m.driver.device_count() == 3


def test_a_driver_that_was_loaded_anew_wants_a_new_connection(machine):
    m = machine("{gpus: 1, driver: [{at: 5, loaded: false}, {at: 6, loaded: true}]}")
    assert m.driver.connect()
    m.clock.advance(5)
    with pytest.raises(DriverError, match="Driver Not Loaded"):
        m.driver.device_count()
    m.clock.advance(1)
    with pytest.raises(DriverError, match="Uninitialized"):
        m.driver.device_count()
    m.driver.close()
    assert m.driver.connect()
    assert m.driver.device_count() == 1


def test_closing_gives_every_handle_back(machine):
    m = machine("gpus: 1")
    m.device()
    m.driver.close()
    assert pynvml._nvmlLib_refcount == 0
    with pytest.raises(DriverError, match="Uninitialized"):
        m.driver.device(0)


def test_device_files_that_are_open_after_closing_are_named(machine, tmp_path):
    machine("gpus: 1")
    driver = Driver(descriptors=tmp_path)
    (tmp_path / "0").symlink_to("/dev/null")
    assert driver.connect()
    assert driver.close() is None
    for number, name in enumerate(("nvidiactl", "nvidia0", "nvidia0")):
        (tmp_path / f"1{number}").symlink_to(f"/dev/{name}")
    assert driver.connect()
    assert driver.close() == "still open: /dev/nvidia0, /dev/nvidiactl"


def test_where_nobody_can_say_which_files_are_open_none_is(machine, tmp_path):
    machine("gpus: 1")
    driver = Driver(descriptors=tmp_path / "none")
    assert driver.connect()
    assert driver.close() is None


def test_a_gpu_that_does_not_exist_cannot_be_opened(machine):
    m = machine("gpus: 2")
    with pytest.raises(DriverError, match="Invalid Argument"):
        m.device(2)


def test_each_xid_comes_once_with_its_gpu(machine):
    m = machine("{gpus: 2, timeline: {0: [{at: 2, xid: 31}], 1: [{at: 1, xid: 79}, {at: 1, xid: 79}]}}")
    first, second = m.device(0), m.device(1)
    events = m.driver.xid_events()
    assert events.register(first)
    assert events.register(second)
    assert events.wait(0.5) is None
    m.clock.advance(2)
    heard = [events.wait(0.5) for _ in range(3)]
    assert heard == [
        XidEvent(simulated_uuid(0), 31),
        XidEvent(simulated_uuid(1), 79),
        XidEvent(simulated_uuid(1), 79),
    ]
    assert events.wait(0.5) is None
    events.close()


def test_a_gpu_that_fell_off_the_bus_is_still_named_by_its_last_xid(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 1, xid: 79, lost: true}]}}")
    events = m.driver.connect() and m.driver.xid_events()
    assert events.register(m.device())
    m.clock.advance(1)
    assert events.wait(0.5) == XidEvent(simulated_uuid(0), 79)


@pytest.mark.parametrize("symbol", ["nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"])
def test_a_gpu_without_xid_events_says_so(machine, symbol):
    m = machine(f"{{gpus: 1, timeline: {{0: [{{at: 0, fails: {{{symbol}: NOT_SUPPORTED}}}}]}}}}")
    device = m.device()
    assert not m.driver.xid_events().register(device)
