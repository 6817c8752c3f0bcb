"""The state of this node, read by the same threads as in an exporter, but without its pages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rankscope_exporter.gpu.allocation.claims import ClaimsWatcher
from rankscope_exporter.gpu.allocation.occupants import Occupants
from rankscope_exporter.gpu.allocation.processes import ProcessTable, UserNames
from rankscope_exporter.gpu.collector import GpuCollector, SampledCollector
from rankscope_exporter.gpu.collectors import (
    allocation,
    clocks,
    gpu,
    load,
    memory,
    nvlink,
    pcie,
    power,
    processes,
    temperature,
)
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.rank_gpus import RankGpus
from rankscope_exporter.gpu.sampler import Sampler
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.collectors.findings import Findings
from rankscope_exporter.ranks.collectors.network import Network
from rankscope_exporter.ranks.collectors.rank_processes import RankProcesses
from rankscope_exporter.ranks.run_directory import RankPolicy, RunDirectory
from rankscope_exporter.ranks.watcher import RankWatcher
from rankscope_exporter.report.gpus import GpuReport, report_gpus
from rankscope_exporter.report.runs import NodeReport, Reporter, reporter
from rankscope_exporter.report.values import Values
from rankscope_exporter.worker import Worker

COLLECTORS: tuple[GpuCollector[Any], ...] = (
    gpu.COLLECTOR,
    load.COLLECTOR,
    memory.COLLECTOR,
    power.COLLECTOR,
    temperature.COLLECTOR,
    clocks.COLLECTOR,
    pcie.COLLECTOR,
    nvlink.COLLECTOR,
    processes.COLLECTOR,
)
REFERENCE_INTERVAL = 30.0
"""Seconds; without effect on one node."""
INTERVAL = 1.0


class Node(NamedTuple):
    """The current state of the node."""

    reporter: Reporter
    sampler: Sampler
    collectors: Sequence[GpuCollector[Any]]

    def runs(self) -> NodeReport:
        """Return the report of the runs. Raise OutdatedError."""
        return self.reporter.report()

    def gpus(self) -> Sequence[GpuReport]:
        """Return the reports of the GPUs."""
        self.sampler.take_snapshot()
        families = [family for one in self.collectors for family in SampledCollector(one, self.sampler).collect()]
        return report_gpus(Values(families), self.reporter.look(), time.time())


@contextmanager
def watch_node(run_dirs: Sequence[Path]) -> Iterator[Node]:
    """Read the ranks in these directories and the GPUs once a second, until the context ends."""
    users, occupants = UserNames(), Occupants(ProcessTable())
    gpus = RankGpus([collector.name for collector in COLLECTORS])
    aligned, usage, network = AlignedSteps(REFERENCE_INTERVAL), RankProcesses(), Network()
    directory = RunDirectory(run_dirs, policy=RankPolicy(users.name, occupants.is_elsewhere))
    ranks = RankWatcher(directory, (aligned, usage, network, Findings(aligned, usage, network, gpus)))
    claims = ClaimsWatcher((), ranks.scan)
    holders = allocation.watching(claims.claims, ProcessTable(), users, occupants)
    sampler = Sampler(Driver(), (*COLLECTORS, holders), watches_xids=False)
    occupants.lacks, gpus.sampler = sampler.lacks, sampler
    sampler.start()
    try:
        with Worker("users", INTERVAL, users.resolve, "cannot look up user names"), ranks, claims:
            yield Node(reporter(ranks), sampler, (*COLLECTORS, holders))
    finally:
        sampler.stop()
        directory.close()
