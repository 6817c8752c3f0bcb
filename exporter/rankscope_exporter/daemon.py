"""The exporter's main program: builds all parts from the configuration, and stops them in reverse order."""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from rankscope import __version__
from rankscope.record.group_name import compact
from rankscope_exporter import registry
from rankscope_exporter.config import Config
from rankscope_exporter.dcgm.collector import Averages, DcgmCollector
from rankscope_exporter.documents import DocumentError
from rankscope_exporter.exposition.scrape import Scrape
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
from rankscope_exporter.ranks.collectors.findings import Findings
from rankscope_exporter.ranks.principals import SUBORDINATE_IDS
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.ranks.run_directory import RankPolicy, RunDirectory
from rankscope_exporter.ranks.watcher import RankWatcher
from rankscope_exporter.report.runs import reporter
from rankscope_exporter.web import limits
from rankscope_exporter.web.app import create_app
from rankscope_exporter.web.connections import Connections
from rankscope_exporter.web.listeners import address_name, listening
from rankscope_exporter.web.pages import PacedPages
from rankscope_exporter.web.protocol import protocol
from rankscope_exporter.worker import Worker

# Optional modules are imported where they are used: with YAML and bcrypt they take 2 MiB.
if TYPE_CHECKING:
    import ssl

    from rankscope_exporter.web.config_file import WebConfigFile
    from rankscope_exporter.web.gate import Gate

MAX_RUNS_LOGGED = 10  # in one log line
USER_LOOKUP_INTERVAL = 1.0  # seconds: as often as the ranks are read
SWITCH_INTERVAL = 0.00005
"""Seconds after which a thread must release the GIL if another thread waits for it. The event loop acquires the GIL at
each step of each connection. With Python's default of 5 ms, each step may take that long while ranks are read or a
status page is rendered. The median scrape under attack took 24 ms with 0.5 ms, and 16 ms with this value."""
M_MMAP_THRESHOLD, DEFAULT_THRESHOLD = -3, 128 * 1024
"""An option of glibc's mallopt, and the initial value in bytes of what it sets."""
TRIM_INTERVAL = 2.0  # seconds between two returns of freed memory
SHUTDOWN_GRACE = 2  # seconds for requests in flight when the daemon stops

logger = logging.getLogger("rankscope_exporter")


class StartError(Exception):
    """The daemon cannot start. The text names the flag."""


def run(settings: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError."""
    web_config = _web_config(settings)
    users, occupants = UserNames(), Occupants(ProcessTable(settings.procfs))
    rank_policy = RankPolicy(users.name, occupants.is_elsewhere, settings.has_owner, settings.users)
    rank_gpus = RankGpus(settings.collectors)
    run_directory = RunDirectory(settings.run_dirs, policy=rank_policy)  # stays open until the process exits
    with (
        _listening(settings) as listeners,
        # On its own thread: a directory service that hangs delays no rank.
        Worker("memory", TRIM_INTERVAL, _return_small_blocks, "cannot return memory"),
        Worker("users", USER_LOOKUP_INTERVAL, partial(_resolve, users), "cannot look up user names"),
        _simulation(settings, run_directory),
        _watched_ranks(settings, run_directory, rank_gpus) as ranks,
        _gpu_collectors(settings, ranks, users, occupants) as enabled,
    ):
        averages = Averages(enabled) if settings.dcgm else None
        gpus = averages.collectors if averages else enabled
        driver = Driver(uses_gpm=gpm.COLLECTOR.name in settings.collectors)
        sampler = Sampler(driver, gpus, watches_xids=XidCollector.name in settings.collectors)
        occupants.lacks, rank_gpus.sampler = sampler.lacks, sampler
        collectors = registry.collectors(settings.collectors, gpus, sampler, ranks.collectors)
        collectors += [DcgmCollector(averages, sampler)] if averages else []
        scrape = Scrape(collectors, sampler.take_snapshot)
        app = create_app(scrape, sampler, reporter(ranks), has_lifecycle=settings.enable_lifecycle)
        sampler.start()
        sys.setswitchinterval(SWITCH_INTERVAL)
        _return_large_blocks()
        gc.freeze()  # imported objects stay: a full collection takes 0.1 ms instead of 38
        try:
            scheme = "https" if web_config and web_config.current().context else "http"
            _serve(server_configuration(app, web_config), listeners, scheme)
        finally:
            sampler.stop()


def _resolve(users: UserNames) -> None:
    SUBORDINATE_IDS.refresh()
    users.resolve()


def _web_config(settings: Config) -> WebConfigFile | None:
    if settings.web_config_file is None:
        return None
    from rankscope_exporter.web.config_file import WebConfigFile

    try:
        return WebConfigFile(settings.web_config_file)
    except DocumentError as error:
        raise StartError(f"--web.config.file: {error}") from error


def server_configuration(app: ASGIApp, web_config: WebConfigFile | None) -> uvicorn.Config:
    """Return uvicorn's configuration for `app`, with authentication and TLS as the web configuration requires."""
    tls = _tls(web_config)
    connections = Connections()
    configuration = uvicorn.Config(
        PacedPages(_gated(app, web_config) if web_config else app),
        loop="uvloop",
        http=protocol(connections, tls),
        log_config=None,
        log_level="error",  # uvicorn warns of each bad request; protocol.py counts them instead
        access_log=False,
        ws="none",
        proxy_headers=False,  # uvicorn would trust any address that a local client claims
        timeout_keep_alive=limits.KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_GRACE,
        backlog=limits.BACKLOG,
    )
    configuration.load()
    return configuration


def _tls(web_config: WebConfigFile | None) -> Callable[[], ssl.SSLContext] | None:
    """Return a function for a connection's TLS context, or None: uvicorn cannot set versions or renew certificates."""
    if web_config is None or (context := web_config.current().context) is None:
        return None
    return lambda: web_config.current().context or context


def _gated(app: ASGIApp, web_config: WebConfigFile) -> Gate:
    from rankscope_exporter.web.gate import Gate

    return Gate(app, web_config.current)


def _return_large_blocks() -> None:
    """Stop glibc from raising the size from which it returns freed blocks to the kernel.

    Pages and received data are such blocks. On the heap, freed ones would stay resident.
    """
    _glibc("mallopt", M_MMAP_THRESHOLD, DEFAULT_THRESHOLD)


def _return_small_blocks() -> None:
    """Return freed memory between blocks in use to the kernel: each poll has new blocks for all ranks."""
    _glibc("malloc_trim", 0)


def _glibc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)  # musl has none
    if function is not None:
        function(*arguments)


def _serve(configuration: uvicorn.Config, listeners: list[socket.socket], scheme: str) -> None:
    addresses = dict.fromkeys(f"{scheme}://{address_name(one.getsockname())}" for one in listeners)
    logger.info("rankscope-exporter %s listening on %s", __version__, ", ".join(addresses))
    # uvicorn raises the signal again when it has stopped. That would kill the process before it saves its state.
    signal.signal(signal.SIGTERM, lambda *_: None)
    uvicorn.Server(configuration).run(sockets=listeners)


@contextmanager
def _listening(settings: Config) -> Iterator[list[socket.socket]]:
    with ExitStack() as opened:
        try:
            listeners = opened.enter_context(listening(settings.host, settings.port))
        except OSError as error:
            address = error.filename or settings.listen_address
            raise StartError(f"--web.listen-address: cannot listen on {address}: {error.strerror or error}") from error
        yield listeners


@contextmanager
def _gpu_collectors(
    settings: Config, ranks: RankWatcher, users: UserNames, occupants: Occupants
) -> Iterator[list[GpuCollector[Any]]]:
    """Yield the enabled GPU collectors; with `allocation`, run the thread that watches who has allocated the GPUs."""
    enabled = registry.gpu_collectors(settings)
    if allocation.COLLECTOR not in enabled:
        yield enabled
        return
    if not settings.procfs.is_dir():
        raise StartError(f"--path.procfs: {settings.procfs} is not a directory")
    # The processes of simulated GPUs are in the exporter's own PID namespace.
    processes = ProcessTable(settings.procfs, sees_all=True if settings.simulate else None)
    watcher = ClaimsWatcher(_schedulers(settings), ranks.scan)
    enabled[enabled.index(allocation.COLLECTOR)] = allocation.watching(watcher.claims, processes, users, occupants)
    with watcher:
        yield enabled


@contextmanager
def _watched_ranks(settings: Config, run_directory: RunDirectory, gpus: RankGpus) -> Iterator[RankWatcher]:
    """Run the thread that reads the ranks for the enabled rank collectors."""
    paths = ", ".join(f"{path}{'' if path.is_dir() else ' (does not exist yet)'}" for path in settings.run_dirs)
    level = logging.INFO if any(path.is_dir() for path in settings.run_dirs) else logging.WARNING
    logger.log(level, "reading rank records from %s", paths)
    collectors = registry.rank_collectors(settings, gpus)
    watcher = RankWatcher(run_directory, collectors)
    with ExitStack() as cleanup, watcher:
        for findings in (collector for collector in collectors if isinstance(collector, Findings)):
            cleanup.callback(findings.close)
        if scan := watcher.scan():
            logger.info("found ranks: %s", _list_ranks(scan.ranks) or "none")
        yield watcher


def _list_ranks(ranks: Sequence[Rank]) -> str:
    """Return the live ranks of the first runs, and the numbers of other runs and of ended ranks."""
    runs: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if rank.snapshot.alive:
            run, number, owner = rank.key
            runs.setdefault((run, owner), []).append(int(number))
    names = [f"{compact(sorted(numbers))} of run {run}" for (run, _), numbers in [*runs.items()][:MAX_RUNS_LOGGED]]
    more, ended = len(runs) - len(names), len(ranks) - sum(map(len, runs.values()))
    counts = [f"more runs: {more}"] * bool(more) + [f"ended ranks: {ended}"] * bool(ended)
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
    """Install the simulated driver instead of NVIDIA's, if enabled."""
    if settings.simulate is None:
        yield
        return
    from rankscope_exporter.simulation.machine import simulated

    try:
        machine = simulated(settings.simulate, run_directory)
    except DocumentError as error:
        raise StartError(f"--simulate: {error}") from error
    with machine:
        yield
