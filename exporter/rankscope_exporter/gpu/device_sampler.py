"""One GPU's thread, which reads every collector periodically. A blocked device delays only its own thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rankscope_exporter.exposition.sample_cache import Texts
from rankscope_exporter.gpu.collector import GpuCollector, Reader, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import DeviceLostError, DriverError
from rankscope_exporter.gpu.states import GpuState, Reading
from rankscope_exporter.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timing:
    """Intervals and timeouts in seconds, and clocks."""

    interval: float = 1.0
    deadline: float = 5.0
    """Age limit of a reading, but at least three intervals."""
    reopen_after: float = 5.0
    """Delay before reopening a device: each attempt makes the kernel initialize it and write to its log."""
    reconnect_after: float = 60.0
    """Delay before reconnecting the driver if GPUs are missing: NVML finds a reset GPU only after a reconnect."""
    release_timeout: float = 5.0
    """Limit for releasing the handles: the threads take up to 2 s to end, and then the driver cleans up."""
    unix: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    @property
    def stale_after(self) -> float:
        """Age from which a reading is stale."""
        return max(self.deadline, 3 * self.interval)


class DeviceSampler:
    """Reader of the device at one index. Only the driver is shared with other devices."""

    def __init__(
        self,
        index: int,
        open_device: Callable[[int], Device],
        state_of: Callable[[Device], GpuState],
        timing: Timing,
    ) -> None:
        self._index = index
        self._open_device = open_device
        self._state_of = state_of
        self._timing = timing
        self._state: GpuState | None = None
        self._logged_errors: dict[str, str] = {}
        self._began = timing.monotonic()
        self.device: Device | None = None
        self.has_completed_round = False
        complaint = f"GPU {index}: reading failed"
        self.worker = Worker(f"gpu-{index}", timing.interval, self._run_once, complaint, at_end=self._close)

    @property
    def is_stuck(self) -> bool:
        """True if the current round is overdue."""
        return self.worker.is_running and self._timing.monotonic() - self._began > self._timing.stale_after

    def round(self) -> float:
        """Take one reading. Returns the seconds until the next."""
        self._began = self._timing.monotonic()
        try:
            self._take_reading()
        except DriverError as error:
            self._fail(error)
            return max(self._timing.interval, self._timing.reopen_after)
        self._log_recovery("device")
        return max(0.0, self._began + self._timing.interval - self._timing.monotonic())

    def _run_once(self) -> float:
        pause = self.round()
        self.has_completed_round = True
        self._began = self._timing.monotonic() + pause
        return pause

    def _close(self) -> None:
        if self.device:
            self.device.close()

    def _take_reading(self) -> None:
        if self.device is None:
            device = self._open_device(self._index)
            self._state = self._state_of(device)
            self.device = device  # assigned last: the XID watcher needs the state of every device it sees
        assert self._state is not None
        self.device.check()
        tick = Tick(self._timing.unix(), self._elapsed(self._state), self._began)
        values: dict[GpuCollector[Any], object] = {}
        texts: dict[GpuCollector[Any], Texts] = {}
        for collector, reader in self._state.readers.items():
            values[collector], texts[collector] = self._read(collector, reader, self.device, tick)
        self._state.latest = Reading(self._began, values, texts)

    def _elapsed(self, state: GpuState) -> float:
        """Return the seconds since the previous reading; 0 if that reading is stale."""
        elapsed = self._began - state.latest.taken if state.latest else 0.0
        return elapsed if elapsed <= self._timing.stale_after else 0.0

    def _read(
        self, collector: GpuCollector[Any], reader: Reader[Any], device: Device, tick: Tick
    ) -> tuple[object, Texts]:
        """Read one collector. A failure affects only this collector, unless the device is lost."""
        assert self._state is not None
        cache = self._state.caches[collector]
        try:
            value = reader(device, tick)
            texts = cache.write(value)
        except DeviceLostError:
            raise
        except DriverError as error:
            self._log_failure(collector.name, error)
            return None, cache.write(None)
        except Exception as error:  # a bug: a scrape raises it, and the collector counts as failed
            self._log_failure(collector.name, error)
            return error, ()
        self._log_recovery(collector.name)
        return value, texts

    def _fail(self, error: DriverError) -> None:
        """Close the device and reopen it later. Drop the reading of a lost device; others are valid until stale."""
        self._log_failure("device", error)
        if self.device:
            self.device.close()
        self.device = None
        if self._state and isinstance(error, DeviceLostError):
            self._state.latest = None

    def _log_failure(self, source: str, error: Exception) -> None:
        """Log an error when it begins or changes, not at every reading."""
        if self._logged_errors.get(source) != str(error):
            logger.warning("GPU %d: %s read failed: %s", self._index, source, error)
            self._logged_errors[source] = str(error)

    def _log_recovery(self, source: str) -> None:
        """Log the first successful reading after an error."""
        if self._logged_errors.pop(source, None):
            logger.info("GPU %d: %s read recovered", self._index, source)
