"""All collectors and all metrics. The daemon, --help and docs/metrics.md are built from these lists.

To add a collector, add its file and one line here. A collector that reads neither a device nor the ranks needs a second
line, in `collectors`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from rankscope_exporter.capture.metrics import METRICS as CAPTURE_METRICS
from rankscope_exporter.config import Config
from rankscope_exporter.exposition import scrape
from rankscope_exporter.exposition.collector import Collector, Described
from rankscope_exporter.exposition.metric import Declaration
from rankscope_exporter.gpu.collector import GpuCollector, SampledCollector
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
)
from rankscope_exporter.gpu.collectors.exporter import ExporterCollector
from rankscope_exporter.gpu.collectors.xid import XidCollector
from rankscope_exporter.gpu.rank_gpus import GpuFaults, RankGpu
from rankscope_exporter.gpu.sampler import Sampler
from rankscope_exporter.ranks.collectors import ranks
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.collectors.findings import CULPRIT_RUNS, LIMIT_METRICS, Findings
from rankscope_exporter.ranks.collectors.network import Network
from rankscope_exporter.ranks.collectors.rank_processes import RankProcesses
from rankscope_exporter.ranks.collectors.ranks import Ranks
from rankscope_exporter.ranks.diagnosis_service import DiagnosisService
from rankscope_exporter.ranks.watcher import RankCollector

# The sampler's threads read these from each device. A disabled collector makes no calls to the driver.
GPU_COLLECTORS: tuple[GpuCollector[Any], ...] = (
    gpu.COLLECTOR,
    load.COLLECTOR,
    gpm.COLLECTOR,
    memory.COLLECTOR,
    power.COLLECTOR,
    temperature.COLLECTOR,
    clocks.COLLECTOR,
    ecc.COLLECTOR,
    pcie.COLLECTOR,
    pcie_throughput.COLLECTOR,
    nvlink.COLLECTOR,
    modes.COLLECTOR,
    mig.COLLECTOR,
    processes.COLLECTOR,
    process.COLLECTOR,
    allocation.COLLECTOR,
)

# The thread that reads the ranks polls these, in this order.
RANK_COLLECTORS: tuple[Described, ...] = (Ranks, AlignedSteps, RankProcesses, Network, Findings)

# In the order of /metrics and --help.
COLLECTORS: tuple[Described, ...] = (*GPU_COLLECTORS, XidCollector, *RANK_COLLECTORS, ExporterCollector)
HELP = {collector.name: collector.help for collector in COLLECTORS}
OFF_BY_DEFAULT = frozenset(collector.name for collector in GPU_COLLECTORS if not collector.is_on)

# All metrics by subject, for docs/metrics.md.
GPU_METRICS: tuple[Declaration, ...] = (
    *(metric for collector in GPU_COLLECTORS for metric in collector.metrics),
    *XidCollector.metrics,
    CULPRIT_RUNS,
)
RANK_METRICS: tuple[Declaration, ...] = tuple(m for collector in RANK_COLLECTORS for m in collector.metrics)
EXPORTER_METRICS: tuple[Declaration, ...] = (
    *ExporterCollector.metrics,
    *scrape.METRICS,
    *ranks.SCAN_METRICS,
    ranks.ALIVE,
    *LIMIT_METRICS,
    *CAPTURE_METRICS,
)


def gpu_collectors(settings: Config) -> list[GpuCollector[Any]]:
    """Return the enabled GPU collectors, which the sampler reads."""
    enabled = [collector for collector in GPU_COLLECTORS if collector.name in settings.collectors]
    return [gpu.identity_collector(settings.node) if collector is gpu.COLLECTOR else collector for collector in enabled]


def rank_collectors(
    settings: Config,
    gpus: Callable[[float], Mapping[str, RankGpu]],
    faults: Callable[[], Mapping[str, GpuFaults]] = dict,
) -> tuple[list[RankCollector], DiagnosisService]:
    """Build and return the enabled rank collectors, and the diagnosis that one of them shows."""
    aligned, processes = AlignedSteps(), RankProcesses(settings.procfs)
    network = Network(settings.sysfs)
    diagnosis = DiagnosisService(aligned, processes, network, gpus, settings, faults=faults, node=settings.node)
    available: tuple[RankCollector, ...] = (Ranks(settings.node), aligned, processes, network, Findings(diagnosis))
    return [collector for collector in available if collector.name in settings.collectors], diagnosis


def collectors(
    names: Collection[str], gpus: Iterable[GpuCollector[Any]], sampler: Sampler, ranks: Iterable[Collector]
) -> list[Collector]:
    """Return the collectors with these names, in the order of COLLECTORS, as a scrape calls them."""
    available: list[Collector] = [
        *(SampledCollector(collector, sampler.texts) for collector in gpus),
        XidCollector(sampler.xids),
        *ranks,
        ExporterCollector(sampler),
    ]
    return [collector for collector in available if collector.name in names]
