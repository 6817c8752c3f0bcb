"""The watcher registers every GPU that supports XID events, and stays cheap while one fails."""

from __future__ import annotations

import pytest

from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.nvml.events import XidEvent
from rankscope_exporter.gpu.xid_watcher import WAIT, XidWatcher


class Device:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


class Events:
    """An event set with answers from the test."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[Device] = []
        self.is_failing = False

    def register(self, device: Device) -> bool:
        self.asked.append(device)
        if self.is_failing:
            raise DriverError("nvmlDeviceRegisterEvents", 15, "GPU is lost")
        return True

    def wait(self, _seconds: float) -> object:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def make_watcher():
    """Return a function that creates a watcher, run by the test, and a list of its reports."""

    def make(*devices: Device):
        reports = []
        watcher = XidWatcher(None, lambda: devices, lambda uuid, code: reports.append((uuid, code)))
        return watcher, reports

    return make


def test_a_gpu_is_registered_once_and_its_events_reported(make_watcher):
    watcher, reports = make_watcher(Device("A"))
    events = Events(None, XidEvent("A", 79))
    assert watcher.listen(events) == 0
    assert watcher.listen(events) == 0
    assert len(events.asked) == 1
    assert reports == [("A", None), ("A", 79)]


def test_waiting_that_fails_at_once_does_not_spin(make_watcher):
    watcher, _ = make_watcher(Device("A"))
    assert watcher.listen(Events(DriverError("nvmlEventSetWait", 15, "GPU is lost"))) == WAIT


def test_without_gpus_the_watcher_pauses(make_watcher):
    watcher, reports = make_watcher()
    assert watcher.listen(Events()) == WAIT
    assert reports == []


def test_a_gpu_that_failed_to_register_is_retried_only_after_a_reopen(make_watcher):
    events = Events()
    events.is_failing = True
    devices = [Device("A")]
    watcher, reports = make_watcher()
    watcher._devices = lambda: devices
    watcher.listen(events)
    watcher.listen(events)
    assert len(events.asked) == 1
    events.is_failing = False
    devices[0] = Device("A")
    watcher.listen(events)
    assert len(events.asked) == 2
    assert reports == [("A", None)]
