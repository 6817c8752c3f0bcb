"""The NVIDIA driver: its connection, devices and XID events. A machine without a driver is not an error."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import pynvml

from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import DriverError, ask, perform
from rankscope_exporter.gpu.nvml.events import XidEvents

DEVICE_FILES = "/dev/nvidia"  # /dev/nvidia0, /dev/nvidiactl, /dev/nvidia-caps/…

logger = logging.getLogger(__name__)


class Driver:
    """A connection to NVML, one per process. Connect and close it from the same thread."""

    def __init__(self, descriptors: Path = Path("/proc/self/fd"), *, uses_gpm: bool = True) -> None:
        """Initialize without connecting. `descriptors` is a directory of links to this process's open files."""
        self._descriptors, self._uses_gpm = descriptors, uses_gpm
        self._connected = False
        self._logged_error = ""
        self.error: DriverError | None = None
        """Why the last connection failed."""

    def connect(self) -> bool:
        """Connect and return whether the driver answers. May be called repeatedly until it does."""
        if not self._connected:
            try:
                self._connected = perform(pynvml.nvmlInit)
                self._log_error("" if self._connected else "driver does not support NVML")
            except DriverError as error:
                self.error = error
                self._log_error(str(error))
        return self._connected

    def close(self) -> str | None:
        """Close every handle: an open one blocks driver unloading and GPU resets.

        Returns the reason if one stays open (the driver's error or the open device files), None otherwise.
        """
        if self._connected:
            self._connected = False
            try:
                perform(pynvml.nvmlShutdown)
            except DriverError as error:
                logger.warning("NVML shutdown failed: %s", error)
                return str(error)
        still_open = self._open_devices()
        return f"still open: {', '.join(still_open)}" if still_open else None

    def _open_devices(self) -> list[str]:
        """Return NVIDIA's device files that this process has open; empty without a procfs."""
        found = set()
        for descriptor in self._descriptors.iterdir() if self._descriptors.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # closed after the listing, like the listing's own descriptor
                found.add(str(descriptor.readlink()))
        return sorted(path for path in found if path.startswith(DEVICE_FILES))

    def device_count(self) -> int:
        """Return the number of GPUs that the driver reports, including lost ones. Raises DriverError."""
        return int(ask(pynvml.nvmlDeviceGetCount) or 0)

    def device(self, index: int) -> Device:
        """Open a GPU. Raises DeviceLostError, DriverError."""
        return Device(index, uses_gpm=self._uses_gpm)

    def versions(self) -> tuple[str, str]:
        """Return the versions of the driver and of its library, such as 580.159.04 and 13.580.159.04; empty if unknown.

        Raises DriverError.
        """
        return ask(pynvml.nvmlSystemGetDriverVersion) or "", ask(pynvml.nvmlSystemGetNVMLVersion) or ""

    def xid_events(self) -> XidEvents:
        """Create an event set. Raises DriverError."""
        return XidEvents()

    def _log_error(self, error: str) -> None:
        """Log why there is no driver, once for each reason."""
        if error and error != self._logged_error:
            logger.warning("NVIDIA driver is not available: %s", error)
        self._logged_error = error
