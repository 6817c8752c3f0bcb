"""Identity of each GPU, and whether it answers."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from rankscope_exporter.gpu.collector import Cached, GpuCollector, GpuMetrics, Reader
from rankscope_exporter.gpu.nvml.device import Device
from rankscope_exporter.gpu.nvml.errors import DeviceLostError, DriverError


class Identity(NamedTuple):
    """The labels of rankscope_gpu_info; empty if the driver does not report one."""

    name: str
    pci_bus_id: str
    node: str
    """The node's name, as in rank records."""
    driver_version: str
    cuda_version: str
    busy_source: str


def reader(node: str) -> Reader[Identity]:
    """Return a reader. It reads the identity once, except the source of busy time, which may answer later."""
    once = Cached(lambda device, _: identify(device, node))
    return lambda device, tick: once(device, tick)._replace(busy_source=_text_or_empty(lambda: _busy_source(device)))


def identify(device: Device, node: str) -> Identity:
    """Read the identity. A GPU that answers any call is up; a value that it fails to report is empty."""
    return Identity(
        name=_text_or_empty(device.name),
        pci_bus_id=_text_or_empty(device.pci_bus_id),
        node=node,
        driver_version=_text_or_empty(device.driver_version),
        cuda_version=_text_or_empty(device.cuda_version),
        busy_source="",
    )


def _busy_source(device: Device) -> str | None:
    if (whole := device.gpm_samplers.get(None)) and "graphics" in whole.latest:
        return "gpm"
    if device.samples_utilization():
        return "samples"
    return None if device.utilization() is None else "instantaneous"


def _text_or_empty(query: Callable[[], str | None]) -> str:
    try:
        return query() or ""
    except DeviceLostError:
        raise
    except DriverError:
        return ""


GPU = GpuMetrics[Identity]()
METRICS = (
    GPU.gauge(
        "info",
        "Identity and node of the GPU. `busy_source` is the source of busy time: GPM (`gpm`), the driver's samples "
        "(`samples`) or its current utilization (`instantaneous`); empty if there is none (MIG).",
        lambda identity: {identity: 1},
        *Identity._fields,
        source="nvmlDeviceGetName, nvmlDeviceGetPciInfo, nvmlSystemGetDriverVersion, nvmlSystemGetCudaDriverVersion",
    ),
    GPU.gauge(
        "up",
        "1 while the GPU answers within its deadline, 0 while it is lost or stuck. Its other metrics except XID errors "
        "are then absent.",
        lambda _: 1,
        source="nvmlDeviceGetHandleByIndex, nvmlDeviceGetPerformanceState",
        without=0,
    ),
)

COLLECTOR = GpuCollector(
    "gpu", "identity of each GPU, and whether it answers", lambda: reader(socket.gethostname()), METRICS
)


def identity_collector(node: str) -> GpuCollector[Identity]:
    """Return the collector for the GPUs of the node with this name."""
    return replace(COLLECTOR, reader=lambda: reader(node))
