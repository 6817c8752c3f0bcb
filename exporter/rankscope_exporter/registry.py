"""Every collector and every metric that there is: what the daemon is built from, --help says and docs/metrics.md lists.

A line in one of these lists is the whole registration.
"""

from __future__ import annotations

from typing import Any, Protocol

from rankscope_exporter.exposition import exporter, scrape
from rankscope_exporter.exposition.exporter import ExporterCollector
from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.gpu.collectors import (
    allocation,
    clocks,
    ecc,
    gpm,
    gpu,
    load,
    memory,
    mig,
    modes,
    nvlink,
    pcie,
    pcie_throughput,
    power,
    process,
    processes,
    temperature,
    xid,
)
from rankscope_exporter.gpu.collectors.xid import XidCollector
from rankscope_exporter.gpu.source import GpuSource
from rankscope_exporter.ranks.collectors import alignment, rank_processes, ranks
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.collectors.rank_processes import RankProcesses
from rankscope_exporter.ranks.collectors.ranks import Ranks

# Read from each device by the sampler's threads; one that is off is not asked of the driver either.
GPU_SOURCES: tuple[GpuSource[Any], ...] = (
    gpu.SOURCE,
    load.SOURCE,
    gpm.SOURCE,
    memory.SOURCE,
    power.SOURCE,
    temperature.SOURCE,
    clocks.SOURCE,
    ecc.SOURCE,
    pcie.SOURCE,
    pcie_throughput.SOURCE,
    nvlink.SOURCE,
    modes.SOURCE,
    mig.SOURCE,
    processes.SOURCE,
    process.SOURCE,
    allocation.SOURCE,
)

# Every metric there is, by what it is about: what docs/metrics.md says.
GPU_METRICS: tuple[Declaration, ...] = (
    *(metric for source in GPU_SOURCES for metric in source.metrics),
    *xid.METRICS,
)
RANK_METRICS: tuple[Declaration, ...] = (*ranks.METRICS, *alignment.METRICS, *rank_processes.METRICS)
EXPORTER_METRICS: tuple[Declaration, ...] = (*exporter.METRICS, *scrape.METRICS, ranks.SKIPPED, ranks.CONTRADICTED)


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
    Ranks,
    AlignedSteps,
    RankProcesses,
    ExporterCollector,
)

OFF_UNLESS_ASKED_FOR = frozenset(source.name for source in GPU_SOURCES if not source.is_on)
