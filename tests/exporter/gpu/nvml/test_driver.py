"""A driver may be absent, appear, disappear and report XID errors without an exception in its callers."""

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
    assert len(caplog.records) == 1, "the reason is logged once"


def test_a_driver_that_is_loaded_later_is_found(machine):
    m = machine("{gpus: 3, driver: [{at: 0, loaded: false}, {at: 5, loaded: true}]}")
    assert not m.driver.connect()
    m.clock.advance(5)
    assert m.driver.connect()
    assert m.driver.device_count() == 3


def test_a_reloaded_driver_requires_a_new_connection(machine):
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


def test_closing_releases_every_handle(machine):
    m = machine("gpus: 1")
    m.device()
    m.driver.close()
    assert pynvml._nvmlLib_refcount == 0
    with pytest.raises(DriverError, match="Uninitialized"):
        m.driver.device(0)


def test_device_files_that_stay_open_are_named(machine, tmp_path):
    machine("gpus: 1")
    driver = Driver(descriptors=tmp_path)
    (tmp_path / "0").symlink_to("/dev/null")
    assert driver.connect()
    assert driver.close() is None
    for number, name in enumerate(("nvidiactl", "nvidia0", "nvidia0")):
        (tmp_path / f"1{number}").symlink_to(f"/dev/{name}")
    assert driver.connect()
    assert driver.close() == "still open: /dev/nvidia0, /dev/nvidiactl"


def test_without_a_procfs_no_file_counts_as_open(machine, tmp_path):
    machine("gpus: 1")
    driver = Driver(descriptors=tmp_path / "none")
    assert driver.connect()
    assert driver.close() is None


def test_a_missing_gpu_cannot_be_opened(machine):
    m = machine("gpus: 2")
    with pytest.raises(DriverError, match="Invalid Argument"):
        m.device(2)


def test_each_xid_is_reported_once_with_its_gpu(machine):
    m = machine("{gpus: 2, timeline: {0: [{at: 2, xid: 31}], 1: [{at: 1, xid: 79}, {at: 1, xid: 79}]}}")
    first, second = m.device(0), m.device(1)
    events = m.driver.xid_events()
    assert events.register(first)
    assert events.register(second)
    assert events.wait(0.5) is None
    m.clock.advance(2)
    received = [events.wait(0.5) for _ in range(3)]
    assert received == [
        XidEvent(simulated_uuid(0), 31),
        XidEvent(simulated_uuid(1), 79),
        XidEvent(simulated_uuid(1), 79),
    ]
    assert events.wait(0.5) is None
    events.close()


def test_the_last_xid_of_a_gpu_that_fell_off_the_bus_has_its_uuid(machine):
    m = machine("{gpus: 1, timeline: {0: [{at: 1, xid: 79, lost: true}]}}")
    events = m.driver.connect() and m.driver.xid_events()
    assert events.register(m.device())
    m.clock.advance(1)
    assert events.wait(0.5) == XidEvent(simulated_uuid(0), 79)


@pytest.mark.parametrize("symbol", ["nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"])
def test_a_gpu_without_xid_events_cannot_be_registered(machine, symbol):
    m = machine(f"{{gpus: 1, timeline: {{0: [{{at: 0, fails: {{{symbol}: NOT_SUPPORTED}}}}]}}}}")
    device = m.device()
    assert not m.driver.xid_events().register(device)
