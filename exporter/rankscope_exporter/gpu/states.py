"""The last reading and lines of each GPU, kept by UUID for the exporter's lifetime.

GPU threads write them and scrapes read them. Stale readings are not returned.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rankscope_exporter.exposition.sample_cache import Texts
from rankscope_exporter.gpu.collector import Gpu, GpuCollector, Reader
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.xid_watcher import Xids

R = TypeVar("R")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """One round by collector: values (a value, None, or an unexpected exception) and lines."""

    taken: float
    values: Mapping[GpuCollector[Any], object]
    texts: Mapping[GpuCollector[Any], Texts]

    def value(self, collector: GpuCollector[Any]) -> object:
        """Return the collector's value. Raises its exception."""
        value = self.values[collector]
        if isinstance(value, Exception):
            raise value
        return value

    def lines(self, collector: GpuCollector[Any]) -> Texts:
        """Return the collector's lines. Raises its exception."""
        self.value(collector)
        return self.texts[collector]


@dataclass(frozen=True)
class Snapshot:
    """The readings of all GPUs at one time; None for a GPU that is down."""

    gpus: Sequence[tuple[Gpu, Reading | None]] = ()

    def values(self, collector: GpuCollector[R]) -> dict[Gpu, R | None]:
        """Return the collector's value of each GPU; None if the GPU is down or lacks the value.

        Raises the reader's unexpected exception.
        """
        return {gpu: cast("R | None", reading and reading.value(collector)) for gpu, reading in self.gpus}

    def texts(self, collector: GpuCollector[Any]) -> list[Texts]:
        """Return the collector's lines of each GPU. Raises the reader's unexpected exception."""
        return [reading.lines(collector) if reading else collector.cache(gpu).write(None) for gpu, reading in self.gpus]


class GpuState:
    """State of one GPU. Its counters survive the loss of the device."""

    def __init__(self, gpu: Gpu, collectors: Iterable[GpuCollector[Any]]) -> None:
        self.readers: dict[GpuCollector[Any], Reader[Any]] = {collector: collector.reader() for collector in collectors}
        self.set_labels(gpu)
        self.latest: Reading | None = None
        self.xids = Xids(None, {})

    def set_labels(self, gpu: Gpu) -> None:
        """Set the GPU's index and UUID, and start new sample caches with them."""
        self.gpu = gpu
        self.caches = {collector: collector.cache(gpu) for collector in self.readers}

    def latest_since(self, oldest: float) -> Reading | None:
        """Return the last reading, or None if it is older."""
        latest = self.latest
        return latest if latest is not None and latest.taken >= oldest else None


class GpuStates:
    """All GPUs ever seen. `oldest` returns the monotonic time from which readings are valid."""

    def __init__(self, collectors: Sequence[GpuCollector[Any]], oldest: Callable[[], float]) -> None:
        self._collectors = collectors
        self._oldest = oldest
        self._states: dict[str, GpuState] = {}
        self._by_index: tuple[GpuState, ...] = ()
        self._open: list[Device] = []
        self._ambiguous: set[str] = set()  # UUIDs that several GPUs report, or that are empty or zero
        self._lock = threading.Lock()

    def state_of(self, device: Device) -> GpuState:
        """Return the state of the GPU with this UUID, at its current index. Sets the device's `uuid`."""
        with self._lock:
            self._open = [*(one for one in self._open if one.is_open and one is not device), device]
            self._disambiguate(device.reported_uuid)
            gpu = Gpu(device.index, device.uuid)
            state = self._states.setdefault(device.uuid, GpuState(gpu, self._collectors))
            if state.gpu != gpu:
                state.set_labels(gpu)
            self._by_index = tuple(sorted(self._states.values(), key=lambda state: state.gpu.index))
            return state

    def _disambiguate(self, uuid: str) -> None:
        """Append the index to a UUID that does not identify one GPU, so that joins on it do not mix GPUs."""
        alike = [device for device in self._open if device.reported_uuid == uuid]
        if len({device.index for device in alike}) > 1 or not uuid.removeprefix("GPU-").strip("0-"):
            self._ambiguous.add(uuid)
        for device in alike if uuid in self._ambiguous else ():
            self._label(device, f"{uuid or 'GPU'}#{device.index}")

    def _label(self, device: Device, uuid: str) -> None:
        if device.uuid == uuid:
            return
        if uuid not in self._states:
            logger.warning("GPU %d reports an ambiguous UUID (%r); using uuid=%s", device.index, device.uuid, uuid)
        state = self._states.get(device.uuid)
        if state and state.gpu.index == device.index:
            self._states[uuid] = self._states.pop(device.uuid)
            state.set_labels(Gpu(device.index, uuid))
        device.uuid = uuid

    def has_seen(self, uuid: str) -> bool:
        """Return whether a GPU with this UUID was ever seen."""
        return uuid in self._states

    @property
    def seen(self) -> int:
        """Number of GPUs that answer now."""
        return sum(reading is not None for _, reading in self.latest().gpus)

    def latest(self) -> Snapshot:
        """Return the last reading of every GPU."""
        oldest = self._oldest()
        return Snapshot([(state.gpu, state.latest_since(oldest)) for state in self._by_index])

    def xids(self) -> dict[Gpu, Xids]:
        """Return the XID events of every GPU, including lost GPUs."""
        return {state.gpu: state.xids for state in self._by_index}

    def record_xid(self, uuid: str, code: int | None, unix: float) -> None:
        """Record an XID event. `code` is None when the driver starts to report events."""
        state = self._states[uuid]
        state.xids = state.xids.with_reporting() if code is None else state.xids.with_event(code, unix)

    def forget(self) -> None:
        """Drop the readings: their driver is closed, and the next one may be different."""
        for state in self._by_index:
            state.latest = None
