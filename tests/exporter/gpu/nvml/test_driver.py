"""A driver may be absent, appear and disappear without an exception in its callers."""

from __future__ import annotations

import pynvml
import pytest

from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.nvml.errors import DriverError


def test_a_machine_without_the_library_has_no_driver(caplog):
    driver = Driver()
    assert not driver.connect()
    assert not driver.connect()
    assert len(caplog.records) == 1, "the reason is logged once"


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


@pytest.mark.parametrize("symbol", ["nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents"])
def test_a_gpu_without_xid_events_cannot_be_registered(machine, symbol):
    m = machine(f"{{gpus: 1, timeline: {{0: [{{at: 0, fails: {{{symbol}: NOT_SUPPORTED}}}}]}}}}")
    device = m.device()
    assert not m.driver.xid_events().register(device)
