"""Everything that runs in the exporter, built from the configuration and taken down in the opposite order."""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from rankscope import __version__
from rankscope.record.group_name import compact
from rankscope_exporter import registry
from rankscope_exporter.config import Config
from rankscope_exporter.dcgm.collector import Averages, DcgmCollector
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.flags import flag_name
from rankscope_exporter.gpu.allocation.claims import ClaimsWatcher, Scheduler, SchedulerError
from rankscope_exporter.gpu.allocation.occupants import Occupants
from rankscope_exporter.gpu.allocation.processes import ProcessTable, UserNames, name_of_user
from rankscope_exporter.gpu.collector import GpuCollector
from rankscope_exporter.gpu.collectors import allocation
from rankscope_exporter.gpu.collectors.xid import XidCollector
from rankscope_exporter.gpu.nvml.driver import Driver
from rankscope_exporter.gpu.rank_gpus import RankGpus
from rankscope_exporter.gpu.sampler import Sampler
from rankscope_exporter.ranks.collectors.findings import Findings
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.ranks.run_directory import RankPolicy, RunDirectory
from rankscope_exporter.ranks.watcher import RankWatcher
from rankscope_exporter.report.runs import reporter
from rankscope_exporter.web import limits
from rankscope_exporter.web.app import create_app
from rankscope_exporter.web.connections import Connections
from rankscope_exporter.web.listeners import listening
from rankscope_exporter.web.protocol import protocol
from rankscope_exporter.worker import Worker

# What only some ask for is imported where it is used: with YAML and bcrypt it takes 2 MiB.
if TYPE_CHECKING:
    import ssl

    from rankscope_exporter.web.config_file import WebConfigFile
    from rankscope_exporter.web.gate import Gate

RUNS_NAMED = 10  # in a line of the log
USERS_NAMED_EVERY = 1.0  # seconds: as often as the ranks are read
SWITCH_INTERVAL = 0.00005
"""Seconds after which a thread gives the interpreter's lock to one that waits for it. The event loop asks for it at
each step of each connection; with Python's 5 ms each may take as long while ranks are read or a status page is made.
Half of the scrapes under siege took more than 24 ms with 0.5 ms, and more than 16 with this."""
M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 128 * 1024
"""glibc's mallopt, and its own threshold in bytes at the start of a process."""
SHUTDOWN_GRACE = 2  # seconds for requests in flight when the daemon is told to stop

logger = logging.getLogger("rankscope_exporter")


class StartError(Exception):
    """The daemon cannot start; the text names the flag."""


def run(settings: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError."""
    web_config = _web_config(settings)
    users, occupants = UserNames(name_of_user), Occupants(ProcessTable(settings.procfs))
    beliefs = RankPolicy(users.name, occupants.is_elsewhere, settings.has_owner, settings.users)
    rank_gpus = RankGpus(settings.collectors)
    run_directory = RunDirectory(settings.run_dirs, beliefs=beliefs)  # its end is that of the process
    with (
        _listening(settings) as listeners,
        # A thread of its own: a directory service that hangs delays no rank.
        Worker("users", USERS_NAMED_EVERY, users.resolve, "the ranks' owners cannot be named"),
        _simulation(settings, run_directory),
        _watched_ranks(settings, run_directory, rank_gpus) as ranks,
        _gpu_collectors(settings, ranks, occupants) as enabled,
    ):
        averages = Averages(enabled) if settings.dcgm else None
        gpus = averages.collectors if averages else enabled
        sampler = Sampler(Driver(), gpus, watches_xids=XidCollector.name in settings.collectors)
        occupants.lacks, rank_gpus.sampler = sampler.lacks, sampler
        collectors = registry.collectors(settings.collectors, gpus, sampler, ranks.collectors)
        scrape = Scrape([*collectors, DcgmCollector(averages, sampler)] if averages else collectors)
        app = create_app(scrape, sampler, reporter(ranks), has_lifecycle=settings.enable_lifecycle)
        sampler.start()
        sys.setswitchinterval(SWITCH_INTERVAL)
        _give_back_large_blocks()
        gc.freeze()  # what was imported stays: a full collection takes 0.1 ms instead of 38
        try:
            scheme = "https" if web_config and web_config.current().context else "http"
            _serve(server_configuration(app, web_config), listeners, scheme)
        finally:
            sampler.stop()


def _web_config(settings: Config) -> WebConfigFile | None:
    if settings.web_config_file is None:
        return None
    from rankscope_exporter.web.config_file import WebConfigError, WebConfigFile

    try:
        return WebConfigFile(settings.web_config_file)
    except WebConfigError as error:
        raise StartError(f"--web.config.file: {error}") from error


def server_configuration(app: ASGIApp, web_config: WebConfigFile | None) -> uvicorn.Config:
    """How `app` is served: behind the gate and with TLS where the web configuration says so."""
    tls = _tls(web_config)
    connections = Connections(limits.connections(limits.TLS_CONNECTIONS if tls else limits.CONNECTIONS))
    configuration = uvicorn.Config(
        _gated(app, web_config) if web_config else app,
        loop="uvloop",
        http=protocol(connections, tls),
        log_config=None,
        log_level="error",  # its warnings are one for each bad request; protocol.py counts those
        access_log=False,
        ws="none",
        proxy_headers=False,  # it would believe a local client whatever address that says it has
        timeout_keep_alive=limits.KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_GRACE,
        backlog=limits.WAITING,
    )
    configuration.load()
    return configuration


def _tls(web_config: WebConfigFile | None) -> Callable[[], ssl.SSLContext] | None:
    """A new connection's context, if there is TLS: uvicorn's own settings can neither set versions nor renew it."""
    if web_config is None or (context := web_config.current().context) is None:
        return None
    return lambda: web_config.current().context or context


def _gated(app: ASGIApp, web_config: WebConfigFile) -> Gate:
    from rankscope_exporter.web.gate import Gate

    return Gate(app, web_config.current)


def _give_back_large_blocks() -> None:
    """Keep glibc from raising its threshold, above which a freed block goes back to the kernel.

    Each TLS connection has a buffer of 256 KiB, of which few bytes are used: from the heap all of it is resident.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def _serve(configuration: uvicorn.Config, listeners: list[socket.socket], scheme: str) -> None:
    host, port = listeners[0].getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    logger.info("rankscope-exporter %s listens on %s://%s:%s", __version__, scheme, address, port)
    # Once it has ended uvicorn raises the signal again, which would end the process before anything is saved.
    signal.signal(signal.SIGTERM, lambda *_: None)
    uvicorn.Server(configuration).run(sockets=listeners)


@contextmanager
def _listening(settings: Config) -> Iterator[list[socket.socket]]:
    with ExitStack() as opened:
        try:
            listeners = opened.enter_context(listening(settings.host, settings.port))
        except OSError as error:
            address = f"{settings.host}:{settings.port}"
            raise StartError(f"--web.listen-address: cannot listen on {address}: {error.strerror or error}") from error
        yield listeners


@contextmanager
def _gpu_collectors(settings: Config, ranks: RankWatcher, occupants: Occupants) -> Iterator[list[GpuCollector[Any]]]:
    """The GPU collectors that are on; with `allocation`, whoever watches the claims to the GPUs for it."""
    enabled = registry.gpu_collectors(settings)
    if allocation.COLLECTOR not in enabled:
        yield enabled
        return
    if not settings.procfs.is_dir():
        raise StartError(f"--path.procfs: {settings.procfs} is no directory")
    users = UserNames()
    # Simulated GPUs have processes of wherever the exporter runs.
    processes = ProcessTable(settings.procfs, sees_all=True if settings.simulate else None)
    watcher = ClaimsWatcher(_schedulers(settings), ranks.scan, users)
    enabled[enabled.index(allocation.COLLECTOR)] = allocation.watching(watcher.claims, processes, users, occupants)
    with watcher:
        yield enabled


@contextmanager
def _watched_ranks(settings: Config, run_directory: RunDirectory, gpus: RankGpus) -> Iterator[RankWatcher]:
    """The thread that reads the ranks, for each collector of ranks that is on."""
    paths = ", ".join(f"{one}{'' if one.is_dir() else ' (not there yet)'}" for one in settings.run_dirs)
    is_any_there = any(one.is_dir() for one in settings.run_dirs)
    logger.log(logging.INFO if is_any_there else logging.WARNING, "the records of ranks are looked for in %s", paths)
    collectors = registry.rank_collectors(settings, gpus)
    watcher = RankWatcher(run_directory, collectors)
    with ExitStack() as saved, watcher:
        for findings in (one for one in collectors if isinstance(one, Findings)):
            saved.callback(findings.close)
        if scan := watcher.scan():
            logger.info("ranks there now: %s", _names(scan.ranks) or "none")
        yield watcher


def _names(ranks: Sequence[Rank]) -> str:
    """The living ranks of some runs; how many others there are."""
    runs: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank.snapshot.alive:
            run, number, owner = rank.key
            runs.setdefault((run, owner), []).append(int(number))
    names = [f"{compact(sorted(numbers))} of run {run}" for (run, _), numbers in [*runs.items()][:RUNS_NAMED]]
    more, ended = len(runs) - len(names), len(ranks) - sum(map(len, runs.values()))
    counts = [f"{more} more runs"] * bool(more) + [f"{ended} that have ended"] * bool(ended)
    return ", ".join(names + counts)


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


@contextmanager
def _simulation(settings: Config, run_directory: RunDirectory) -> Iterator[None]:
    """The simulated driver instead of NVIDIA's, if the settings ask for it."""
    if settings.simulate is None:
        yield
        return
    from rankscope_exporter.simulation.machine import simulated
    from rankscope_exporter.simulation.values import ScenarioError

    try:
        machine = simulated(settings.simulate, run_directory)
    except ScenarioError as error:
        raise StartError(f"--simulate: {error}") from error
    with machine:
        yield
