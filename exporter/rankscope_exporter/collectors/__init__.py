"""The collectors, one file each: file = collector = `--collector.<name>` = value of the label `collector`.

A line in one of these lists is the whole registration.
"""

from __future__ import annotations

from typing import Any, Protocol

from rankscope_exporter.collectors import allocation, clocks, gpu, load, memory, power, processes, temperature
from rankscope_exporter.collectors.exporter import ExporterCollector
from rankscope_exporter.collectors.ranks import RanksCollector
from rankscope_exporter.collectors.xid import XidCollector
from rankscope_exporter.source import GpuSource

# Read from each device by the sampler's threads; one that is off is not asked of the driver either.
GPU_SOURCES: tuple[GpuSource[Any], ...] = (
    gpu.SOURCE,
    load.SOURCE,
    memory.SOURCE,
    power.SOURCE,
    temperature.SOURCE,
    clocks.SOURCE,
    processes.SOURCE,
    allocation.SOURCE,
)


class Described(Protocol):
    """What --help says of a collector."""

    @property
    def name(self) -> str:
        """Of the file, the flag and the label's value."""

    @property
    def help(self) -> str:
        """One line."""


COLLECTORS: tuple[Described, ...] = (
    *GPU_SOURCES,
    XidCollector,
    RanksCollector,
    ExporterCollector,
)
