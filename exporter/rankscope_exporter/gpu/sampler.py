"""The supervisor: connects the driver, runs a thread per GPU, and holds the last readings.

Scrapes use these readings and never wait for the driver. A failing driver or device does not stop the supervisor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

from rankscope_exporter.exposition.sample_cache import Texts
from rankscope_exporter.gpu.collector import Gpu, GpuCollector
from rankscope_exporter.gpu.command_queue import CommandQueue
from rankscope_exporter.gpu.device_sampler import DeviceSampler, Timing
from rankscope_exporter.gpu.lifecycle import Phase, PhaseEntry
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.nvml.errors import DriverError
from rankscope_exporter.gpu.states import GpuStates, Snapshot
from rankscope_exporter.gpu.xid_watcher import Xids, XidWatcher
from rankscope_exporter.worker import Worker

R = TypeVar("R")
JOIN_TIMEOUT = 2.0  # seconds; a thread that does not end within it is stuck in the driver

logger = logging.getLogger(__name__)


class ReleaseError(Exception):
    """The handles cannot be released and stay open; the message has the reason."""


class Sampler:
    """Supervisor of the GPUs of this machine."""

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
        self._snapshot = Snapshot()
        self._watches_xids = watches_xids
        self._timing = timing or Timing()
        self._devices: dict[int, DeviceSampler] = {}
        self._watcher: XidWatcher | None = None
        self._entry = PhaseEntry(Phase.STARTING, self._timing.monotonic())
        self._is_connected = False
        self._has_answered = False  # since the last failure; true also while reconnecting, until the answer is stale
        self._connected_at = self._answered_at = 0.0  # monotonic
        self._commands = CommandQueue()
        # The interval is 0 because `_run_once` waits for commands itself.
        self._worker = Worker("sampler", 0.0, self._run_once, "supervising the driver failed")
        self.gpus_expected = 0
        """Highest number of GPUs that the driver has reported since the start."""

    def start(self) -> None:
        """Start the supervisor's thread."""
        self._entry = PhaseEntry(Phase.STARTING, self._timing.monotonic())
        self._worker.start()

    def stop(self) -> None:
        """End all threads that are not stuck, and close the driver."""
        self._worker.request_stop()
        self._commands.post(lambda: None)
        self._worker.join(JOIN_TIMEOUT)
        self.disconnect()

    def release(self, seconds: float) -> None:
        """Close every handle until `resume`, or for `seconds`. Raises ReleaseError if sampling continues instead."""
        try:
            self._commands.call(lambda: self._release(seconds), self._timing.release_timeout)
        except TimeoutError:
            self._commands.post(self._reacquire)  # undo a late release: the caller gets an error
            raise ReleaseError(f"driver did not respond within {self._timing.release_timeout:g} s") from None

    def resume(self) -> None:
        """Reacquire the handles soon, without waiting for it."""
        self._commands.post(self._reacquire)

    @property
    def phase(self) -> Phase:
        """The phase that was entered last, or SAMPLING if every GPU has been read since."""
        entry = self._entry
        is_acquired = entry.phase is not Phase.RELEASED
        return Phase.SAMPLING if is_acquired and self._has_read_all(entry) else entry.phase

    @property
    def is_released(self) -> bool:
        """True while the handles are released, and after that until every GPU has been read again."""
        return self.phase in (Phase.RELEASED, Phase.RESUMING)

    @property
    def nvml_up(self) -> bool:
        """True while the driver answers."""
        return self._has_answered and self._answered_at >= self._oldest()

    @property
    def gpus_seen(self) -> int:
        """Number of GPUs that answer now."""
        return self._gpus.seen

    @property
    def is_ready(self) -> bool:
        """True if a scrape is complete: every GPU has been read since the start or the last release."""
        return self.phase is Phase.SAMPLING

    def _has_read_all(self, entry: PhaseEntry) -> bool:
        """Return whether every device has been read once since the phase began, or is overdue."""
        if entry.since < self._oldest():
            return True
        return entry.has_supervised and all(device.has_completed_round for device in [*self._devices.values()])

    def latest(self) -> Snapshot:
        """Return the last reading of every GPU ever seen; empty while the handles are released."""
        return Snapshot() if self.is_released else self._gpus.latest()

    def readings(self, collector: GpuCollector[R]) -> dict[Gpu, R | None]:
        """Return the collector's last reading of every GPU. Raises the reader's unexpected exception."""
        return self.latest().values(collector)

    def take_snapshot(self) -> None:
        """Keep the last readings, so that `texts` and `values` return the same ones for all metrics of a page."""
        self._snapshot = self.latest()

    def texts(self, collector: GpuCollector[Any]) -> list[Texts]:
        """Return the collector's lines of every GPU in the snapshot. Raises the reader's unexpected exception."""
        return self._snapshot.texts(collector)

    def values(self, collector: GpuCollector[R]) -> dict[Gpu, R | None]:
        """Return the collector's reading of every GPU in the snapshot. Raises the reader's unexpected exception."""
        return self._snapshot.values(collector)

    def xids(self) -> dict[Gpu, Xids]:
        """Return the XID events of every GPU, including lost GPUs."""
        return self._gpus.xids()

    def lacks(self, uuid: str) -> bool:
        """Return whether every GPU has been read and none has this UUID."""
        return self.is_ready and not self._gpus.has_seen(uuid)

    def supervise(self) -> None:
        """Check the driver once: connect it if needed, and run a thread for each of its GPUs."""
        if not self._is_connected and not self._connect():
            return
        try:
            count = self._driver.device_count()
        except DriverError as error:
            if self._has_answered:
                logger.warning("driver stopped responding: %s", error)
            self.disconnect()
            self._forget_readings()
            return
        if not self._has_answered or count > self.gpus_expected:
            logger.info("driver ready: %d GPUs", count)
        self._has_answered, self._answered_at = True, self._timing.monotonic()
        self.gpus_expected = max(self.gpus_expected, count)
        self._start_threads(count)
        if self._should_reconnect():
            logger.info("%d of %d GPUs are missing; reconnecting the driver", self._missing_gpus(), self.gpus_expected)
            self.disconnect()

    def disconnect(self) -> str | None:
        """End the threads and close the driver, unless a thread is stuck in a driver call.

        Returns the reason if handles stay open, None otherwise.
        """
        workers = [thread.worker for thread in (*self._devices.values(), self._watcher) if thread]
        for worker in workers:
            worker.request_stop()
        until = self._timing.monotonic() + JOIN_TIMEOUT
        stuck = [worker for worker in workers if not worker.join(until - self._timing.monotonic())]
        if self._watcher and self._watcher.worker not in stuck:
            self._watcher = None
        if stuck:
            return f"{', '.join(worker.name for worker in stuck)}: a driver call does not return"
        self._is_connected, self._devices = False, {}
        return self._driver.close()

    def _release(self, seconds: float) -> None:
        if reason := self.disconnect():  # the next supervision restarts the threads
            raise ReleaseError(reason)
        now = self._timing.monotonic()
        self._entry = PhaseEntry(Phase.RELEASED, now, until=now + seconds)
        self._forget_readings()
        logger.warning("released all GPU handles for up to %g s", seconds)

    def _forget_readings(self) -> None:
        self._has_answered = False
        self._gpus.forget()

    def _reacquire(self) -> None:
        if self._entry.phase is Phase.RELEASED:
            self._entry = PhaseEntry(Phase.RESUMING, self._timing.monotonic())
            logger.info("reacquiring the GPUs")

    def _run_once(self) -> None:
        try:
            self._supervise_unless_released()
        finally:
            self._commands.run_next(within=self._timing.interval)

    def _supervise_unless_released(self) -> None:
        if self._entry.phase is Phase.RELEASED:
            if self._timing.monotonic() < self._entry.until:
                return
            logger.warning("GPU release timed out")
            self._reacquire()
        self.supervise()
        self._entry.has_supervised = True

    def _connect(self) -> bool:
        self._is_connected = self._driver.connect()
        self._has_answered = self._has_answered and self._is_connected
        self._connected_at = self._timing.monotonic()
        return self._is_connected

    def _start_threads(self, count: int) -> None:
        for index in range(count):
            device = self._devices.get(index)
            if device is None or not device.worker.is_running:
                self._devices[index] = DeviceSampler(index, self._driver.device, self._gpus.state_of, self._timing)
                self._devices[index].worker.start()
        if self._watches_xids and self._watcher is None:
            self._watcher = XidWatcher(self._driver, self._open_devices, self._record_xid)
            self._watcher.worker.start()

    def _should_reconnect(self) -> bool:
        is_due = self._timing.monotonic() - self._connected_at > self._timing.reconnect_after
        return is_due and self._missing_gpus() > 0 and not any(device.is_stuck for device in self._devices.values())

    def _missing_gpus(self) -> int:
        return self.gpus_expected - self.gpus_seen

    def _open_devices(self) -> list[Device]:
        return [sampler.device for sampler in [*self._devices.values()] if sampler.device]

    def _record_xid(self, uuid: str, code: int | None) -> None:
        self._gpus.record_xid(uuid, code, self._timing.unix())

    def _oldest(self) -> float:
        return self._timing.monotonic() - self._timing.stale_after
