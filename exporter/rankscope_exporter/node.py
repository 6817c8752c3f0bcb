"""The data sources of this node: the threads that read its ranks and GPUs, for the exporter and `rankscope top`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from rankscope_exporter import registry
from rankscope_exporter.config import Config
from rankscope_exporter.dcgm.collector import Averages
from rankscope_exporter.documents import DocumentError
from rankscope_exporter.flags import flag_name
from rankscope_exporter.gpu.allocation.claims import ClaimsWatcher, Scheduler, SchedulerError
from rankscope_exporter.gpu.allocation.occupants import Occupants
from rankscope_exporter.gpu.allocation.processes import ProcessTable, UserNames
from rankscope_exporter.gpu.collector import GpuCollector
from rankscope_exporter.gpu.collectors import allocation, gpm
from rankscope_exporter.gpu.collectors.xid import XidCollector
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.rank_gpus import RankGpus
from rankscope_exporter.gpu.sampler import Sampler
from rankscope_exporter.ranks.diagnosis_service import DiagnosisService
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.principals import SUBORDINATE_IDS
from rankscope_exporter.ranks.run_directory import RankPolicy, RunDirectory
from rankscope_exporter.ranks.watcher import RankWatcher
from rankscope_exporter.report.runs import Reporter
from rankscope_exporter.worker import Worker

USER_LOOKUP_INTERVAL = 1.0  # seconds: as often as the ranks are read


class StartError(Exception):
    """The node cannot be read as configured. The text names the flag."""


class Node(NamedTuple):
    """The data sources."""

    ranks: RankWatcher
    reporter: Reporter
    gpus: Sequence[GpuCollector[Any]]
    sampler: Sampler
    averages: Averages | None
    """With dcgm-exporter's metrics only."""
    diagnosis: DiagnosisService


@contextmanager
def build_node(settings: Config, listeners: Sequence[Callable[[Look], None]] = ()) -> Iterator[Node]:
    """Read the ranks and the GPUs until the context ends. Raise StartError.

    The listeners are called with each diagnosis, on the thread that makes it.
    """
    users, occupants = UserNames(), Occupants(ProcessTable(settings.procfs))
    rank_gpus = RankGpus(settings.collectors)
    policy = RankPolicy(users.name, occupants.is_elsewhere, settings.has_owner, settings.users)
    directory = RunDirectory(settings.run_dirs, policy=policy)  # stays open until the process exits
    with ExitStack() as stack:
        # On its own thread: a directory service that hangs delays no rank.
        stack.enter_context(
            Worker("users", USER_LOOKUP_INTERVAL, partial(_resolve, users), "cannot look up user names")
        )
        _simulate(settings, directory, stack)
        collectors, diagnosis = registry.rank_collectors(settings, rank_gpus, rank_gpus.faults)
        diagnosis.listeners = listeners
        ranks = RankWatcher(directory, collectors)
        stack.callback(diagnosis.close)
        stack.enter_context(ranks)
        gpus: Sequence[GpuCollector[Any]] = _gpu_collectors(settings, ranks, users, occupants, stack)
        averages = Averages(gpus) if settings.dcgm else None
        gpus = averages.collectors if averages else gpus
        driver = Driver(uses_gpm=gpm.COLLECTOR.name in settings.collectors)
        sampler = Sampler(driver, gpus, watches_xids=XidCollector.name in settings.collectors)
        occupants.lacks, rank_gpus.sampler = sampler.lacks, sampler
        rank_gpus.allocation = next((one for one in gpus if one.name == allocation.COLLECTOR.name), None)
        sampler.start()
        stack.callback(sampler.stop)
        reporter = Reporter(ranks.scan, lambda: diagnosis.look)
        if settings.analyzer_url:
            stack.enter_context(_ask_analyzer(settings.analyzer_url, reporter))
        yield Node(ranks, reporter, gpus, sampler, averages, diagnosis)


def _ask_analyzer(url: str, reporter: Reporter) -> Worker:
    """Return the thread that asks the analyzer what it finds in this node's runs, for the reporter."""
    from rankscope.cli.explaining.fetching import fetch
    from rankscope.cli.explaining.prometheus import Prometheus
    from rankscope_exporter.report.remote import ASK_INTERVAL, AnalyzedRuns, one_at_a_time

    analyzed = AnalyzedRuns(Prometheus(url, fetch=one_at_a_time(fetch)))
    reporter.complete = analyzed.add_to
    return Worker("analyzed", ASK_INTERVAL, analyzed.poll, "cannot ask the analyzer for its findings")


def _resolve(users: UserNames) -> None:
    SUBORDINATE_IDS.refresh()
    users.resolve()


def _simulate(settings: Config, directory: RunDirectory, stack: ExitStack) -> None:
    """Install the simulated driver instead of NVIDIA's, if enabled."""
    if settings.simulate is None:
        return
    from rankscope_exporter.simulation.machine import simulated

    try:
        machine = simulated(settings.simulate, directory)
    except DocumentError as error:
        raise StartError(f"--simulate: {error}") from error
    stack.enter_context(machine)


def _gpu_collectors(
    settings: Config, ranks: RankWatcher, users: UserNames, occupants: Occupants, stack: ExitStack
) -> list[GpuCollector[Any]]:
    """Return the enabled GPU collectors; with `allocation`, run the thread that watches who has allocated the GPUs."""
    enabled = registry.gpu_collectors(settings)
    if allocation.COLLECTOR in enabled:
        if not settings.procfs.is_dir():
            raise StartError(f"--path.procfs: {settings.procfs} is not a directory")
        # The processes of simulated GPUs are in the exporter's own PID namespace.
        processes = ProcessTable(settings.procfs, sees_all=True if settings.simulate else None)
        watcher = ClaimsWatcher(_schedulers(settings), ranks.scan)
        enabled[enabled.index(allocation.COLLECTOR)] = allocation.watching(watcher.claims, processes, users, occupants)
        stack.enter_context(watcher)
    return enabled


def _schedulers(settings: Config) -> list[Scheduler]:
    schedulers = []
    for setting, build in allocation.SCHEDULERS.items():
        path = getattr(settings, setting)
        if path is None:
            continue
        try:
            schedulers.append(build(path))
        except SchedulerError as error:
            raise StartError(f"{flag_name(Config, setting)}: {error}") from error
    return schedulers
