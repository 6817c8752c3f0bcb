"""What is known of the GPUs: the last reading of each and its lines, kept by UUID for as long as the exporter lives.

The threads that read write here, and scrapes take from here. A reading that is too old is none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """What a round brought, by collector: a value, None, or the exception that was raised by mistake; and its lines."""

    taken: float
    values: Mapping[GpuCollector[Any], object]
    texts: Mapping[GpuCollector[Any], Texts]


class GpuState:
    """What is known of one GPU: counters outlast a lost device."""

    def __init__(self, gpu: Gpu, collectors: Iterable[GpuCollector[Any]]) -> None:
        self.readers: dict[GpuCollector[Any], Reader[Any]] = {collector: collector.reader() for collector in collectors}
        self.at(gpu)
        self.latest: Reading | None = None
        self.xids = Xids(None, {})

    def at(self, gpu: Gpu) -> None:
        """From now on the GPU has this index."""
        self.gpu = gpu
        self.caches = {collector: collector.cache(gpu) for collector in self.readers}

    def since(self, oldest: float) -> Reading | None:
        """The last reading, unless it is older."""
        latest = self.latest
        return latest if latest is not None and latest.taken >= oldest else None


class GpuStates:
    """All GPUs ever seen. `oldest` is the monotonic time from which on readings count now."""

    def __init__(self, collectors: Sequence[GpuCollector[Any]], oldest: Callable[[], float]) -> None:
        self._collectors = collectors
        self._oldest = oldest
        self._states: dict[str, GpuState] = {}
        self._by_index: tuple[GpuState, ...] = ()
        self._open: list[Device] = []
        self._ambiguous: set[str] = set()  # UUIDs that several GPUs report, or that are none
        self._lock = threading.Lock()

    def of(self, device: Device) -> GpuState:
        """Return the state of the GPU with this UUID, at whatever index it is now; sets the device's `uuid`."""
        with self._lock:
            self._open = [*(one for one in self._open if one.is_open and one is not device), device]
            self._tell_apart(device.reported_uuid)
            gpu = Gpu(device.index, device.uuid)
            state = self._states.setdefault(device.uuid, GpuState(gpu, self._collectors))
            if state.gpu != gpu:
                state.at(gpu)
            self._by_index = tuple(sorted(self._states.values(), key=lambda state: state.gpu.index))
            return state

    def _tell_apart(self, uuid: str) -> None:
        """Add the index to a UUID that does not identify a GPU: whoever joins by it must not mix several GPUs."""
        alike = [device for device in self._open if device.reported_uuid == uuid]
        if len({device.index for device in alike}) > 1 or not uuid.removeprefix("GPU-").strip("0-"):
            self._ambiguous.add(uuid)
        for device in alike if uuid in self._ambiguous else ():
            self._label(device, f"{uuid or 'GPU'}#{device.index}")

    def _label(self, device: Device, uuid: str) -> None:
        if device.uuid == uuid:
            return
        if uuid not in self._states:
            logger.warning("GPU %d has no UUID of its own (%r); its label is uuid=%s", device.index, device.uuid, uuid)
        state = self._states.get(device.uuid)
        if state and state.gpu.index == device.index:
            self._states[uuid] = self._states.pop(device.uuid)
            state.at(Gpu(device.index, uuid))
        device.uuid = uuid

    def has(self, uuid: str) -> bool:
        """Return whether a GPU with this UUID was ever seen."""
        return uuid in self._states

    @property
    def seen(self) -> int:
        """GPUs that answer now."""
        oldest = self._oldest()
        return sum(state.since(oldest) is not None for state in self._by_index)

    def readings(self, collector: GpuCollector[R]) -> dict[Gpu, R | None]:
        """The collector's last reading of every GPU; None where it is down or does not have this.

        Raises what the collector's reader raised by mistake.
        """
        return {gpu: cast("R | None", value) for gpu, value, _ in self._latest(collector)}

    def texts(self, collector: GpuCollector[Any]) -> list[Texts]:
        """The lines of these readings."""
        return [texts for _, _, texts in self._latest(collector)]

    def xids(self) -> dict[Gpu, Xids]:
        """XID events of every GPU, lost ones included."""
        return {state.gpu: state.xids for state in self._by_index}

    def record_xid(self, uuid: str, code: int | None, unix: float) -> None:
        """An XID event; None: from now on the driver reports them."""
        state = self._states[uuid]
        state.xids = state.xids.listening() if code is None else state.xids.with_event(code, unix)

    def forget(self) -> None:
        """What was read belongs to a driver that is gone, or that may be another one when the GPUs are read again."""
        for state in self._by_index:
            state.latest = None

    def _latest(self, collector: GpuCollector[Any]) -> Iterator[tuple[Gpu, object, Texts]]:
        oldest = self._oldest()
        for state in self._by_index:
            latest = state.since(oldest)
            if latest is None:
                yield state.gpu, None, collector.cache(state.gpu).write(None)
                continue
            value = latest.values[collector]
            if isinstance(value, Exception):
                raise value
            yield state.gpu, value, latest.texts[collector]
