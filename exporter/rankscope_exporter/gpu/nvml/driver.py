"""The NVIDIA driver: whether there is one, its devices, its XID events. A machine without one is no error."""

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
    """A connection to NVML, which is one per process; connect and close it from one thread."""

    def __init__(self, descriptors: Path = Path("/proc/self/fd")) -> None:
        """`descriptors` is where the files that this process has open are listed as links."""
        self._descriptors = descriptors
        self._connected = False
        self._complaint = ""

    def connect(self) -> bool:
        """Whether the driver is there and answers. May be called again and again until it is."""
        if not self._connected:
            try:
                self._connected = perform(pynvml.nvmlInit)
                self._complain("" if self._connected else "the driver does not support NVML")
            except DriverError as error:
                self._complain(str(error))
        return self._connected

    def close(self) -> str | None:
        """Give every handle back: an open one blocks a driver's unloading and a GPU's reset.

        Returns why one is open all the same: the driver's word, or a device file that it has not closed.
        """
        if self._connected:
            self._connected = False
            try:
                perform(pynvml.nvmlShutdown)
            except DriverError as error:
                logger.warning("the driver did not let go: %s", error)
                return str(error)
        still_open = self._open_devices()
        return f"still open: {', '.join(still_open)}" if still_open else None

    def _open_devices(self) -> list[str]:
        """NVIDIA's device files that this process has open; without a procfs nobody knows of any."""
        found = set()
        for descriptor in self._descriptors.iterdir() if self._descriptors.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed, as the listing's own is
                found.add(str(descriptor.readlink()))
        return sorted(path for path in found if path.startswith(DEVICE_FILES))

    def device_count(self) -> int:
        """GPUs that the driver reports, lost ones that it still remembers included. Raises DriverError."""
        return int(ask(pynvml.nvmlDeviceGetCount) or 0)

    def device(self, index: int) -> Device:
        """Open a GPU. Raises DeviceLostError, DriverError."""
        return Device(index)

    def xid_events(self) -> XidEvents:
        """A new event set. Raises DriverError."""
        return XidEvents()

    def _complain(self, complaint: str) -> None:
        """Say why there is no driver, once for each reason."""
        if complaint and complaint != self._complaint:
            logger.warning("no NVIDIA driver yet: %s", complaint)
        self._complaint = complaint
