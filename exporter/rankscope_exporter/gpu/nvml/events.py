"""XID errors as the driver reports them: one event set for all devices."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import pynvml

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import DriverError, ask, perform


@dataclass(frozen=True)
class XidEvent:
    """One XID error of the GPU with this UUID."""

    uuid: str
    code: int


class XidEvents:
    """An NVML event set. Used by one thread alone: nothing documents what happens otherwise."""

    def __init__(self) -> None:
        self._set = ask(pynvml.nvmlEventSetCreate)
        self._devices: dict[int, Device] = {}

    def register(self, device: Device) -> bool:
        """Have the device's XIDs reported; False if it cannot. Raises DriverError."""
        if self._set is None:
            return False
        supported = ask(pynvml.nvmlDeviceGetSupportedEventTypes, device.handle)
        if not (supported or 0) & pynvml.nvmlEventTypeXidCriticalError:
            return False
        if not perform(pynvml.nvmlDeviceRegisterEvents, device.handle, pynvml.nvmlEventTypeXidCriticalError, self._set):
            return False
        # By address, because a GPU that has just fallen off the bus (XID 79) can no longer be asked for its UUID.
        self._devices[_address(device.handle)] = device
        return True

    def wait(self, seconds: float) -> XidEvent | None:
        """The next XID, or None if there is none for so long. Raises DriverError."""
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
