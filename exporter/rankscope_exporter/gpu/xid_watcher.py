"""The thread that waits for XID events of all devices, because waiting blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.nvml.events import XidEvents
from rankscope_exporter.worker import Worker

WAIT = 0.5  # seconds; how long it may take to notice a new device, or the end

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Xids:
    """Of one GPU: events by code, None unless its driver reports them; and the unix time of the last of each."""

    counts: Mapping[int, int] | None
    last: Mapping[int, float]

    def listening(self) -> Xids:
        """As it is once the driver has agreed to report them."""
        return Xids(self.counts or {}, self.last)

    def with_event(self, code: int, unix: float) -> Xids:
        """As it is after one more event."""
        counts = self.counts or {}
        return Xids({**counts, code: counts.get(code, 0) + 1}, {**self.last, code: unix})


class XidWatcher:
    """Registers every device that is open and reports `(uuid, code)` for each event, `(uuid, None)` when it begins."""

    def __init__(
        self, driver: Driver, devices: Callable[[], Iterable[Device]], report: Callable[[str, int | None], None]
    ) -> None:
        self._driver = driver
        self._devices = devices
        self._report = report
        self._asked: dict[str, Device] = {}
        self._registered: set[str] = set()
        self._events: XidEvents | None = None
        self.worker = Worker("xid", WAIT, self._turn, "XID errors cannot be waited for", at_end=self._close)

    def listen(self, events: XidEvents) -> float:
        """Wait for an event, of new devices too. Returns the seconds to pause until the next time."""
        for device in self._devices():
            self._register(events, device)
        if not self._registered:
            return WAIT
        try:
            event = events.wait(WAIT)
        except DriverError as error:  # also while any GPU of the set is lost, and then at once: do not spin
            logger.debug("no XID events for now: %s", error)
            return WAIT
        if event:
            logger.warning("XID %d on GPU %s", event.code, event.uuid)
            self._report(event.uuid, event.code)
        return 0.0

    def _turn(self) -> float:
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
        """The driver is gone, or cannot do this; another connection brings another watcher."""
        logger.warning("XID errors are not reported any more: %s", error)
        self.worker.request_stop()

    def _register(self, events: XidEvents, device: Device) -> None:
        """Once for each GPU of this connection; again only for one that failed and was opened anew since."""
        if device.uuid in self._registered or self._asked.get(device.uuid) is device:
            return
        self._asked[device.uuid] = device
        try:
            is_registered = events.register(device)
        except DriverError as error:
            logger.warning("GPU %s reports no XID errors: %s", device.uuid, error)
            return
        if is_registered:
            self._registered.add(device.uuid)
            self._report(device.uuid, None)
