"""What each GPU is, and whether it answers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace

from rankscope_exporter.gpu.collector import GpuCollector, GpuMetrics, Tick
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import DeviceLostError, DriverError


@dataclass(frozen=True)
class Identity:
    """The labels of rankscope_gpu_info; empty where the driver does not say."""

    name: str
    pci_bus_id: str
    node: str
    """The name of the node, by which ranks name it too."""
    driver_version: str
    cuda_version: str
    busy_source: str


class IdentityReader:
    """Asks once for each time that the device is opened, but for the ring, which may fill later."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._device: Device | None = None
        self._identity: Identity | None = None

    def __call__(self, device: Device, _tick: Tick) -> Identity:
        """What the device is."""
        if device is not self._device or self._identity is None or self._identity.busy_source != "samples":
            self._identity = identify(device, self._node)
            self._device = device
        return self._identity


def identify(device: Device, node: str) -> Identity:
    """Ask for everything. A GPU that answers at all is up: what it fails to say is empty."""
    return Identity(
        name=_said(device.name),
        pci_bus_id=_said(device.pci_bus_id),
        node=node,
        driver_version=_said(device.driver_version),
        cuda_version=_said(device.cuda_version),
        busy_source=_said(lambda: _busy_source(device)),
    )


def _busy_source(device: Device) -> str | None:
    if device.samples_utilization():
        return "samples"
    return None if device.utilization() is None else "instantaneous"


def _said(question: Callable[[], str | None]) -> str:
    try:
        return question() or ""
    except DeviceLostError:
        raise
    except DriverError:
        return ""


GPU = GpuMetrics[Identity]()
METRICS = (
    GPU.gauge(
        "info",
        "What the GPU is and where it is; `busy_source` says whether busy time is integrated from the driver's ring "
        "(`samples`) or from its utilization now (`instantaneous`), empty where it tells neither (MIG).",
        lambda identity: {astuple(identity): 1},
        *(field.name for field in fields(Identity)),
        source="nvmlDeviceGetName, nvmlDeviceGetPciInfo, nvmlSystemGetDriverVersion, nvmlSystemGetCudaDriverVersion",
    ),
    GPU.gauge(
        "up",
        "1 while the GPU answers within its deadline; 0 when it is lost or stuck: then all else of it is absent, but "
        "for what the driver said of its XID errors.",
        lambda _: 1,
        source="nvmlDeviceGetHandleByIndex, nvmlDeviceGetPerformanceState",
        without=0,
    ),
)

COLLECTOR = GpuCollector(
    "gpu", "what each GPU is, and whether it answers", lambda: IdentityReader(socket.gethostname()), METRICS
)


def on_node(node: str) -> GpuCollector[Identity]:
    """Return the collector for the GPUs of the node with this name."""
    return replace(COLLECTOR, reader=lambda: IdentityReader(node))
