"""XID errors reported by the driver, from one event set for all devices."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import pynvml

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import DriverError, ask, perform

HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})
"""XIDs of a fault of hardware or firmware; docs/runbooks/RankscopeGpuXid.md explains them."""


@dataclass(frozen=True)
class XidEvent:
    """One XID error of the GPU with this UUID."""

    uuid: str
    code: int


class XidEvents:
    """An NVML event set. Use it from one thread: NVML does not document thread safety."""

    def __init__(self) -> None:
        self._set = ask(pynvml.nvmlEventSetCreate)
        self._devices: dict[int, Device] = {}

    def register(self, device: Device) -> bool:
        """Register the device for XID events. Return False if it does not support them. Raises DriverError."""
        if self._set is None:
            return False
        supported = ask(pynvml.nvmlDeviceGetSupportedEventTypes, device.handle)
        if not (supported or 0) & pynvml.nvmlEventTypeXidCriticalError:
            return False
        if not perform(pynvml.nvmlDeviceRegisterEvents, device.handle, pynvml.nvmlEventTypeXidCriticalError, self._set):
            return False
        # Keyed by address, because a GPU that has fallen off the bus (XID 79) cannot be asked for its UUID.
        self._devices[_address(device.handle)] = device
        return True

    def wait(self, seconds: float) -> XidEvent | None:
        """Return the next XID event, or None after this many seconds without one. Raises DriverError."""
        try:
            data = ask(pynvml.nvmlEventSetWait, self._set, int(seconds * 1000))
        except DriverError as error:
            if error.code == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        device = self._devices.get(_address(data.device)) if data else None
        return XidEvent(device.uuid, int(data.eventData)) if device else None

    def close(self) -> None:
        """Free the event set. Raises DriverError."""
        if self._set is not None:
            perform(pynvml.nvmlEventSetFree, self._set)
            self._set = None


def _address(handle: Any) -> int:
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)
