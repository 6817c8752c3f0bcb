"""The exporter's main program: serves the pages of this node, and stops all parts in reverse order."""

from __future__ import annotations

import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from rankscope import __version__
from rankscope.record.group_name import compact
from rankscope_exporter import registry
from rankscope_exporter.config import Config
from rankscope_exporter.dcgm.collector import DcgmCollector
from rankscope_exporter.documents import DocumentError
from rankscope_exporter.exposition.scrape import Scrape
from rankscope_exporter.node import StartError, build_node
from rankscope_exporter.node_facts.recorder import NodeFacts
from rankscope_exporter.ranks.rank import Rank
from rankscope_exporter.report.gpu_problems import GpuWatch
from rankscope_exporter.report.rates import INTERVAL
from rankscope_exporter.report.values import Values
from rankscope_exporter.web import limits
from rankscope_exporter.web.app import create_app
from rankscope_exporter.web.connections import Connections
from rankscope_exporter.web.listeners import address_name, listening
from rankscope_exporter.web.pages import PacedPages
from rankscope_exporter.web.protocol import protocol
from rankscope_exporter.web.stacks import warn_of_open_stacks
from rankscope_exporter.worker import Worker

# Optional modules are imported where they are used: with YAML and bcrypt they take 2 MiB.
if TYPE_CHECKING:
    import ssl

    from rankscope_exporter.capture.service import CaptureService
    from rankscope_exporter.web.config_file import WebConfigFile
    from rankscope_exporter.web.gate import Gate

MAX_RUNS_LOGGED = 10  # in one log line
SWITCH_INTERVAL = 0.00005
"""Seconds after which a thread must release the GIL if another thread waits for it. The event loop acquires the GIL at
each step of each connection. With Python's default of 5 ms, each step may take that long while ranks are read or a
status page is rendered. The median scrape under attack took 24 ms with 0.5 ms, and 16 ms with this value."""
M_MMAP_THRESHOLD, DEFAULT_THRESHOLD = -3, 128 * 1024
"""An option of glibc's mallopt, and the initial value in bytes of what it sets."""
M_ARENA_MAX = -8
"""The same for the number of its heaps. With one of each thread, what a thread frees is of no use to the others."""
TRIM_INTERVAL = 2.0  # seconds between two returns of freed memory
SHUTDOWN_GRACE = 2  # seconds for requests in flight when the daemon stops

logger = logging.getLogger("rankscope_exporter")


def run(settings: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError."""
    if settings.analyze:
        _run_analyzer(settings)
        return
    _glibc("mallopt", M_ARENA_MAX, 1)  # before the first thread
    web_config = _web_config(settings)
    trimming = Worker("memory", TRIM_INTERVAL, _return_small_blocks, "cannot return memory")
    with _listening(settings) as listeners, trimming:
        _log_run_directories(settings)
        if settings.enable_stacks:
            hosts = [one.getsockname()[0] for one in listeners]
            warn_of_open_stacks(hosts, web_config.current() if web_config else None)
        facts = NodeFacts(settings.node)
        captures = _captures(settings)
        with build_node(settings, [facts.record, *(one.on_look for one in captures)]) as node:
            if scan := node.ranks.scan():
                logger.info("found ranks: %s", _list_ranks(scan.ranks) or "none")
            collectors = registry.collectors(settings.collectors, node.gpus, node.sampler, node.ranks.collectors)
            collectors += [DcgmCollector(node.averages, node.sampler)] if node.averages else []
            for one in captures:
                one.gpus, one.on_capture = node.sampler, node.diagnosis.add_capture
                node.reporter.captures, one.hanging = one.reports, node.reporter.analyzer.hanging
                collectors.append(one)
            scrape = Scrape(collectors, node.sampler.take_snapshot)
            node.reporter.check_gpus = GpuWatch(lambda: Values(scrape.collect()), settings.node).check
            recent = Worker("recent", INTERVAL, node.reporter.watch, "cannot check the GPUs")
            app = create_app(
                scrape,
                node.sampler,
                node.reporter,
                facts,
                node=settings.node,
                has_lifecycle=settings.enable_lifecycle,
                stacks_of=node.ranks.scan if settings.enable_stacks else None,
            )
            with ExitStack() as workers:
                for worker in (recent, *(one.worker for one in captures)):
                    workers.enter_context(worker)
                _serve_app(app, web_config, listeners)


def _captures(settings: Config) -> list[CaptureService]:
    """Return the captures of this node; none without a directory for them."""
    if settings.capture_dir is None:
        return []
    from rankscope_exporter.capture.service import CaptureService

    return [CaptureService(settings, settings.node)]


def _run_analyzer(settings: Config) -> None:
    """Serve the diagnosis of the runs that span the nodes of other exporters, until SIGTERM or SIGINT."""
    from rankscope_exporter.analyzer.running import AnalyzerError, running

    _glibc("mallopt", M_ARENA_MAX, 1)  # before the first thread
    web_config = _web_config(settings)
    trimming = Worker("memory", TRIM_INTERVAL, _return_small_blocks, "cannot return memory")
    address = f"{settings.host or socket.gethostname()}:{settings.port}"
    try:
        with _listening(settings) as listeners, trimming, running(settings, settings, address) as app:
            _serve_app(app, web_config, listeners)
    except AnalyzerError as error:
        raise StartError(str(error)) from error


def _serve_app(app: ASGIApp, web_config: WebConfigFile | None, listeners: list[socket.socket]) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL)
    _return_large_blocks()
    gc.freeze()  # imported objects stay: a full collection takes 0.1 ms instead of 38
    scheme = "https" if web_config and web_config.current().context else "http"
    _serve(server_configuration(app, web_config), listeners, scheme)


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


def _log_run_directories(settings: Config) -> None:
    paths = ", ".join(f"{path}{'' if path.is_dir() else ' (does not exist yet)'}" for path in settings.run_dirs)
    level = logging.INFO if any(path.is_dir() for path in settings.run_dirs) else logging.WARNING
    logger.log(level, "reading rank records from %s", paths)


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
