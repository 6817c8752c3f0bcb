"""What each GPU is, and whether it answers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from rankscope_exporter.families import GaugeMetricFamily
from rankscope_exporter.nvml.device import Device
from rankscope_exporter.nvml.errors import DeviceLostError, DriverError
from rankscope_exporter.source import GPU_LABELS, Gpu, GpuSource, Tick


@dataclass(frozen=True)
class Identity:
    """The labels of rankscope_gpu_info; empty where the driver does not say."""

    name: str
    pci_bus_id: str
    driver_version: str
    cuda_version: str
    busy_source: str


class IdentityReader:
    """Asks once for each time that the device is opened, but for the ring, which may fill later."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._identity: Identity | None = None

    def __call__(self, device: Device, _tick: Tick) -> Identity:
        """What the device is."""
        if device is not self._device or self._identity is None or self._identity.busy_source != "samples":
            self._identity = identify(device)
            self._device = device
        return self._identity


def identify(device: Device) -> Identity:
    """Ask for everything. A GPU that answers at all is up: what it fails to say is empty."""
    return Identity(
        name=_said(device.name),
        pci_bus_id=_said(device.pci_bus_id),
        driver_version=_said(device.driver_version),
        cuda_version=_said(device.cuda_version),
        busy_source=_said(lambda: _busy_source(device)),
    )


def families(readings: Mapping[Gpu, Identity | None], node: str | None = None) -> Iterable[Metric]:
    """rankscope_gpu_info and rankscope_gpu_up. The node is named as the ranks name it: the host's name."""
    up = GaugeMetricFamily(
        "rankscope_gpu_up", "1 while the GPU answers; 0 when it is lost or stuck.", labels=GPU_LABELS
    )
    more = ("name", "pci_bus_id", "node", "driver_version", "cuda_version", "busy_source")
    info = GaugeMetricFamily("rankscope_gpu_info", "What the GPU is and where it is.", labels=(*GPU_LABELS, *more))
    node = node or socket.gethostname()
    for gpu, identity in readings.items():
        up.add_metric(gpu.values(), identity is not None)
        if identity:
            labels = {"node": node, **vars(identity)}
            info.add_metric(gpu.values(*(labels[name] for name in more)), 1)
    return info, up


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


SOURCE = GpuSource("gpu", "what each GPU is, and whether it answers", IdentityReader, families)
