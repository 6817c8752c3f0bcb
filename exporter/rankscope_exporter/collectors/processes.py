"""How many processes use each GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from rankscope_exporter.nvml.device import Device
from rankscope_exporter.source import Gpu, GpuSource, Tick, gauge


def read(device: Device, _tick: Tick) -> int | None:
    """The number of processes; one with both kinds of context counts once."""
    pids = device.pids()
    return None if pids is None else len(pids)


def families(readings: Mapping[Gpu, int | None]) -> Iterable[Metric]:
    """The number of processes."""
    yield gauge("processes", "Processes with a context on the GPU.", readings, lambda count: count)


SOURCE = GpuSource("processes", "number of processes on each GPU", lambda: read, families)
