"""One GPU's thread: reads every collector from its device, again and again. A device that blocks holds up only this."""

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
    """How often devices are read, and the clocks by which. Seconds."""

    interval: float = 1.0
    deadline: float = 5.0
    """A reading older than this, and than three intervals, is none."""
    reopen_after: float = 5.0
    """Until a device that could not be opened is tried again: each try makes the kernel initialize it, and log."""
    reconnect_after: float = 60.0
    """Until the driver is connected anew because GPUs are missing: NVML finds a GPU that was reset only then."""
    answer_within: float = 5.0
    """For whoever asks for the handles back: the threads' end takes up to 2 s, and then the driver cleans up."""
    unix: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    @property
    def stale_after(self) -> float:
        """The age up to which a reading counts."""
        return max(self.deadline, 3 * self.interval)


class DeviceSampler:
    """Reads the device at one index. Nothing here is shared with other devices but the driver below."""

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
        self._complaints: dict[str, str] = {}
        self._began = timing.monotonic()
        self.device: Device | None = None
        self.has_finished_a_round = False
        complaint = f"GPU {index}: a reading failed"
        self.worker = Worker(f"gpu-{index}", timing.interval, self._turn, complaint, at_end=self._close)

    @property
    def is_stuck(self) -> bool:
        """Whether a round has not ended in time."""
        return self.worker.is_running and self._timing.monotonic() - self._began > self._timing.stale_after

    def round(self) -> float:
        """Take one reading. Returns the seconds to pause until the next."""
        self._began = self._timing.monotonic()
        try:
            self._take_reading()
        except DriverError as error:
            self._fail(error)
            return max(self._timing.interval, self._timing.reopen_after)
        self._log_recovery("the device")
        return max(0.0, self._began + self._timing.interval - self._timing.monotonic())

    def _turn(self) -> float:
        pause = self.round()
        self.has_finished_a_round = True
        self._began = self._timing.monotonic() + pause
        return pause

    def _close(self) -> None:
        if self.device:
            self.device.close()

    def _take_reading(self) -> None:
        if self.device is None:
            device = self._open_device(self._index)
            self._state = self._state_of(device)
            self.device = device  # last: whoever sees the device, as the XID watcher does, finds its state
        assert self._state is not None
        self.device.check()
        tick = Tick(self._timing.unix(), self._elapsed(self._state), self._began)
        values: dict[GpuCollector[Any], object] = {}
        texts: dict[GpuCollector[Any], Texts] = {}
        for collector, reader in self._state.readers.items():
            values[collector], texts[collector] = self._read(collector, reader, self.device, tick)
        self._state.latest = Reading(self._began, values, texts)

    def _elapsed(self, state: GpuState) -> float:
        """Since the reading before; 0 if that is so long ago that nobody can say what was in between."""
        elapsed = self._began - state.latest.taken if state.latest else 0.0
        return elapsed if elapsed <= self._timing.stale_after else 0.0

    def _read(
        self, collector: GpuCollector[Any], reader: Reader[Any], device: Device, tick: Tick
    ) -> tuple[object, Texts]:
        """One collector must not cost the others theirs, unless the device itself is gone."""
        assert self._state is not None
        cache = self._state.caches[collector]
        try:
            value = reader(device, tick)
            texts = cache.write(value)
        except DeviceLostError:
            raise
        except DriverError as error:
            self._complain(collector.name, error)
            return None, cache.write(None)
        except Exception as error:  # a mistake of ours: the scrape raises it, and the collector counts as failed
            self._complain(collector.name, error)
            return error, ()
        self._log_recovery(collector.name)
        return value, texts

    def _fail(self, error: DriverError) -> None:
        """Open the device anew next time. One that is lost is down at once, others when their reading is too old."""
        self._complain("the device", error)
        if self.device:
            self.device.close()
        self.device = None
        if self._state and isinstance(error, DeviceLostError):
            self._state.latest = None

    def _complain(self, about: str, error: Exception) -> None:
        """Log when something begins to fail, and when it fails otherwise; not at every reading."""
        if self._complaints.get(about) != str(error):
            logger.warning("GPU %d: %s cannot be read: %s", self._index, about, error)
            self._complaints[about] = str(error)

    def _log_recovery(self, about: str) -> None:
        """Log that what had failed works again."""
        if self._complaints.pop(about, None):
            logger.info("GPU %d: %s can be read again", self._index, about)
