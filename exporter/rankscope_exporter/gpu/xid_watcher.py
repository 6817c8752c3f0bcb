"""The thread that waits for XID events of all devices. It is separate because waiting blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.nvml.events import XidEvents
from rankscope_exporter.worker import Worker

WAIT = 0.5  # seconds; the longest delay until a new device or a stop request is noticed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Xids:
    """XID events of one GPU: counts by code, None if the driver reports none; and the last unix time by code."""

    counts: Mapping[int, int] | None
    last: Mapping[int, float]

    def with_reporting(self) -> Xids:
        """Return the state after the driver has agreed to report events."""
        return Xids(self.counts or {}, self.last)

    def with_event(self, code: int, unix: float) -> Xids:
        """Return the state after one more event."""
        counts = self.counts or {}
        return Xids({**counts, code: counts.get(code, 0) + 1}, {**self.last, code: unix})


class XidWatcher:
    """A thread that registers open devices. It reports `(uuid, None)` on registration, `(uuid, code)` per event."""

    def __init__(
        self, driver: Driver, devices: Callable[[], Iterable[Device]], report: Callable[[str, int | None], None]
    ) -> None:
        self._driver = driver
        self._devices = devices
        self._report = report
        self._asked: dict[str, Device] = {}
        self._registered: set[str] = set()
        self._events: XidEvents | None = None
        self.worker = Worker("xid", WAIT, self._run_once, "waiting for XID events failed", at_end=self._close)

    def listen(self, events: XidEvents) -> float:
        """Register new devices and wait for an event. Returns the seconds to pause until the next call."""
        for device in self._devices():
            self._register(events, device)
        if not self._registered:
            return WAIT
        try:
            event = events.wait(WAIT)
        except DriverError as error:  # returned at once while any GPU of the set is lost: pause instead of spinning
            logger.debug("waiting for XID events failed: %s", error)
            return WAIT
        if event:
            logger.warning("XID %d on GPU %s", event.code, event.uuid)
            self._report(event.uuid, event.code)
        return 0.0

    def _run_once(self) -> float:
        try:
            self._events = self._events or self._driver.xid_events()
        except DriverError as error:
            self._end(error)
            return 0.0
        return self.listen(self._events)

    def _close(self) -> None:
        try:
            if self._events:
                self._events.close()
        except DriverError as error:
            self._end(error)

    def _end(self, error: DriverError) -> None:
        """Stop this watcher: the driver is gone or lacks events. Another connection starts another watcher."""
        logger.warning("XID reporting stopped: %s", error)
        self.worker.request_stop()

    def _register(self, events: XidEvents, device: Device) -> None:
        """Register a GPU once per connection, and again only if it failed and was reopened since."""
        if device.uuid in self._registered or self._asked.get(device.uuid) is device:
            return
        self._asked[device.uuid] = device
        try:
            is_registered = events.register(device)
        except DriverError as error:
            logger.warning("GPU %s: XID registration failed: %s", device.uuid, error)
            return
        if is_registered:
            self._registered.add(device.uuid)
            self._report(device.uuid, None)
