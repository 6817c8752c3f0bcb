"""The supervisor: connects the driver, keeps a thread for each of its GPUs, and holds their last readings.

A scrape takes those readings and never waits for the driver. Nothing here ends because a driver or a device does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from rankscope_exporter.exposition.sample_cache import Texts
from rankscope_exporter.gpu.collector import Gpu, GpuCollector
from rankscope_exporter.gpu.command_queue import CommandQueue
from rankscope_exporter.gpu.device_sampler import DeviceSampler, Timing
from rankscope_exporter.gpu.lifecycle import Connection, Entered, Phase
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.states import GpuStates
from rankscope_exporter.gpu.xid_watcher import Xids, XidWatcher
from rankscope_exporter.worker import Worker

R = TypeVar("R")
JOIN_WITHIN = 2.0  # seconds; a thread that does not end by then is stuck in the driver

logger = logging.getLogger(__name__)


class ReleaseError(Exception):
    """The handles cannot be given back now, and are kept; the text says why."""


class Sampler:
    """Everything that is known of the GPUs of this machine."""

    def __init__(
        self,
        driver: Driver,
        collectors: Sequence[GpuCollector[Any]],
        *,
        watches_xids: bool = True,
        timing: Timing | None = None,
    ) -> None:
        self._driver = driver
        self._gpus = GpuStates(collectors, self._oldest)
        self._watches_xids = watches_xids
        self._timing = timing or Timing()
        self._devices: dict[int, DeviceSampler] = {}
        self._watcher: XidWatcher | None = None
        self._entered = Entered(Phase.STARTING, self._timing.monotonic())
        self._connection = Connection.ABSENT
        self._connected_at = self._answered_at = 0.0  # monotonic, the last time of each
        self._commands = CommandQueue()
        # It waits for commands itself, between two looks.
        self._worker = Worker("sampler", 0.0, self._turn, "the sampler's supervision failed")
        self.gpus_expected = 0
        """The most GPUs that the driver has reported since the start."""

    def start(self) -> None:
        """Begin to look for the driver, in a thread."""
        self._entered = Entered(Phase.STARTING, self._timing.monotonic())
        self._worker.start()

    def stop(self) -> None:
        """End all threads that can be ended, and give the driver's handles back."""
        self._worker.request_stop()
        self._commands.post(lambda: None)
        self._worker.join(JOIN_WITHIN)
        self.disconnect()

    def release(self, seconds: float) -> None:
        """Give every handle back until `resume`, or for so many seconds. Raises ReleaseError: then all is as it was."""
        try:
            self._commands.call(lambda: self._let_go(seconds), self._timing.answer_within)
        except TimeoutError:
            self._commands.post(self._take_again)  # should it be done after all: whoever asked for it has been refused
            raise ReleaseError(f"the driver has not answered for {self._timing.answer_within:g} s") from None

    def resume(self) -> None:
        """Take the handles again, soon after."""
        self._commands.post(self._take_again)

    @property
    def phase(self) -> Phase:
        """The one that was entered last, or SAMPLING if every GPU has been asked since."""
        entered = self._entered
        is_taken = entered.phase is not Phase.RELEASED
        return Phase.SAMPLING if is_taken and self._has_asked_all(entered) else entered.phase

    @property
    def is_released(self) -> bool:
        """Whether the handles are given back on request, or taken again and not every GPU has been asked since."""
        return self.phase in (Phase.RELEASED, Phase.RESUMING)

    @property
    def nvml_up(self) -> bool:
        """Whether the driver answers."""
        return self._connection.has_answered and self._answered_at >= self._oldest()

    @property
    def gpus_seen(self) -> int:
        """GPUs that answer now."""
        return self._gpus.seen

    @property
    def is_ready(self) -> bool:
        """Whether a scrape misses nothing that is there: not given back on request, nor only a moment late."""
        return self.phase is Phase.SAMPLING

    def _has_asked_all(self, since: Entered) -> bool:
        """Whether every device has been asked once since then, or has had its time for it."""
        if since.since < self._oldest():
            return True
        return since.has_looked and all(device.has_finished_a_round for device in [*self._devices.values()])

    def readings(self, collector: GpuCollector[R]) -> dict[Gpu, R | None]:
        """Its last reading of every GPU ever seen; none while the handles are given back: nobody knows then.

        Raises what the collector's reader raised by mistake.
        """
        return {} if self.is_released else self._gpus.readings(collector)

    def texts(self, collector: GpuCollector[Any]) -> list[Texts]:
        """The lines of these readings."""
        return [] if self.is_released else self._gpus.texts(collector)

    def xids(self) -> dict[Gpu, Xids]:
        """XID events of every GPU, lost ones included."""
        return self._gpus.xids()

    def lacks(self, uuid: str) -> bool:
        """Return whether every GPU has been asked and none has this UUID."""
        return self.is_ready and not self._gpus.has(uuid)

    def supervise(self) -> None:
        """One look at the driver: connect it, and keep a thread for each of its GPUs."""
        if not self._connection.is_open and not self._connect():
            return
        try:
            count = self._driver.device_count()
        except DriverError as error:
            if self._connection.has_answered:
                logger.warning("the driver does not answer any more: %s", error)
            self.disconnect()
            self._forget_readings()
            return
        if not self._connection.has_answered or count > self.gpus_expected:
            logger.info("the driver answers and has %d GPUs", count)
        self._connection, self._answered_at = Connection.ANSWERING, self._timing.monotonic()
        self.gpus_expected = max(self.gpus_expected, count)
        self._start_threads(count)
        if self._should_reconnect():
            logger.info("%d of %d GPUs are missing: connecting anew", self._missing(), self.gpus_expected)
            self.disconnect()

    def disconnect(self) -> str | None:
        """End the threads and close the driver, unless one is stuck in it: it must not lose the ground under it.

        Returns why handles are open all the same.
        """
        workers = [thread.worker for thread in (*self._devices.values(), self._watcher) if thread]
        for worker in workers:
            worker.request_stop()
        until = self._timing.monotonic() + JOIN_WITHIN
        stuck = [worker for worker in workers if not worker.join(until - self._timing.monotonic())]
        if self._watcher and self._watcher.worker not in stuck:
            self._watcher = None
        if stuck:
            return f"{', '.join(worker.name for worker in stuck)}: a call to the driver does not return"
        self._connection, self._devices = self._connection.closed(), {}
        return self._driver.close()

    def _let_go(self, seconds: float) -> None:
        if reason := self.disconnect():  # the next look at the driver starts the threads again
            raise ReleaseError(reason)
        now = self._timing.monotonic()
        self._entered = Entered(Phase.RELEASED, now, until=now + seconds)
        self._forget_readings()
        logger.warning("the GPUs are released for up to %g s: no handle is open", seconds)

    def _forget_readings(self) -> None:
        self._connection = self._connection.silenced()
        self._gpus.forget()

    def _take_again(self) -> None:
        if self._entered.phase is Phase.RELEASED:
            self._entered = Entered(Phase.RESUMING, self._timing.monotonic())
            logger.info("the GPUs are taken again")

    def _turn(self) -> None:
        try:
            self._look()
        finally:
            self._commands.run_next(within=self._timing.interval)

    def _look(self) -> None:
        if self._entered.phase is Phase.RELEASED:
            if self._timing.monotonic() < self._entered.until:
                return
            logger.warning("nobody has asked for the GPUs to be taken again, and their time is over")
            self._take_again()
        self.supervise()
        self._entered.has_looked = True

    def _connect(self) -> bool:
        is_connected = self._driver.connect()
        self._connection = self._connection.opened() if is_connected else Connection.ABSENT
        self._connected_at = self._timing.monotonic()
        return is_connected

    def _start_threads(self, count: int) -> None:
        for index in range(count):
            device = self._devices.get(index)
            if device is None or not device.worker.is_running:
                self._devices[index] = DeviceSampler(index, self._driver.device, self._gpus.of, self._timing)
                self._devices[index].worker.start()
        if self._watches_xids and self._watcher is None:
            self._watcher = XidWatcher(self._driver, self._open_devices, self._hear_xid)
            self._watcher.worker.start()

    def _should_reconnect(self) -> bool:
        is_time = self._timing.monotonic() - self._connected_at > self._timing.reconnect_after
        return is_time and self._missing() > 0 and not any(device.is_stuck for device in self._devices.values())

    def _missing(self) -> int:
        return self.gpus_expected - self.gpus_seen

    def _open_devices(self) -> list[Device]:
        return [sampler.device for sampler in [*self._devices.values()] if sampler.device]

    def _hear_xid(self, uuid: str, code: int | None) -> None:
        self._gpus.record_xid(uuid, code, self._timing.unix())

    def _oldest(self) -> float:
        return self._timing.monotonic() - self._timing.stale_after
