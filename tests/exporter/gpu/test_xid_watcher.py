"""The watcher listens to every GPU that can be listened to, and is no burden while one cannot."""

from __future__ import annotations

import pytest

from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.nvml.events import XidEvent
from rankscope_exporter.gpu.xid_watcher import WAIT, XidWatcher


class Device:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


class Events:
    """An event set that answers what a test says."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked: list[Device] = []
        self.refusing = False

    def register(self, device: Device) -> bool:
        self.asked.append(device)
        if self.refusing:
            raise DriverError("nvmlDeviceRegisterEvents", 15, "GPU is lost")
        return True

    def wait(self, _seconds: float) -> object:
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def watching():
    """Makes a watcher whose turns a test takes, and what it reports."""

    def make(*devices: Device):
        reports = []
        watcher = XidWatcher(None, lambda: devices, lambda uuid, code: reports.append((uuid, code)))
        return watcher, reports

    return make


def test_a_gpu_is_registered_once_and_its_events_reported(watching):
    watcher, reports = watching(Device("A"))
    events = Events(None, XidEvent("A", 79))
    assert watcher.listen(events) == 0
    assert watcher.listen(events) == 0
    assert len(events.asked) == 1
    assert reports == [("A", None), ("A", 79)]


def test_waiting_that_fails_at_once_does_not_spin(watching):
    watcher, _ = watching(Device("A"))
    assert watcher.listen(Events(DriverError("nvmlEventSetWait", 15, "GPU is lost"))) == WAIT


def test_with_no_gpu_to_listen_to_it_waits_for_one(watching):
    watcher, reports = watching()
    assert watcher.listen(Events()) == WAIT
    assert reports == []


def test_a_gpu_that_cannot_be_registered_is_asked_again_only_when_it_was_opened_anew(watching):
    events = Events()
    events.refusing = True
    devices = [Device("A")]
    watcher, reports = watching()
    watcher._devices = lambda: devices
    watcher.listen(events)
    watcher.listen(events)
    assert len(events.asked) == 1
    events.refusing = False
    devices[0] = Device("A")
    watcher.listen(events)
    assert len(events.asked) == 2
    assert reports == [("A", None)]
