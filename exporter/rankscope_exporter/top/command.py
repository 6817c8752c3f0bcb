"""The command `rankscope top`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.live import Live

from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError
from rankscope.cli.printable import printable
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.node import Node
from rankscope_exporter.ranks.watcher import OutdatedError
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.report.gpus import GpuReport
from rankscope_exporter.report.remote import RemoteError, fetch_report
from rankscope_exporter.report.runs import NodeReport, RunReport
from rankscope_exporter.top.node import gpus_of, watch_node
from rankscope_exporter.top.view import Screen, view

INTERVAL = 1.0
COLLECT_SECONDS = 10.0
COLLECT_LIMIT = 30.0
"""Seconds after which `--once` prints in any case: runs with long steps take minutes to be judged."""
ENOUGH_STEPS = 12
STALLED_AFTER = 5.0
"""Seconds without a step after which `--once` does not wait for more steps."""
OTHER_LINES = 12
"""Lines of the screen for other things than ranks and GPUs."""
MIN_RANKS = 4


class Shown(NamedTuple):
    """The content of the screen at one moment. `error` is the reason if the ranks cannot be read."""

    node: NodeReport
    gpus: Sequence[GpuReport]
    error: str = ""


def show(run_dirs: Sequence[Path], *, once: bool, is_json: bool) -> int:
    """Show the node until Ctrl-C; with `once` or `is_json`, or if the output is not a terminal, print it once."""
    silence_logs()
    console = Console(highlight=False)
    with suppress(KeyboardInterrupt), watch_node(run_dirs) as node:
        if once or is_json or not console.is_terminal:
            wait_until_judged(node.reporter.report)
            _print(_of_node(node), console, is_json=is_json)
        else:
            _follow(lambda: _of_node(node), console)
    return 0


def show_remote(connect: Callable[[], Prometheus], *, once: bool, is_json: bool) -> int:
    """Show what an exporter or the analyzer says of its runs, like `show`. Return 2 if it cannot be read at first."""
    console = Console(highlight=False)
    try:
        server = connect()
        first = Shown(fetch_report(server), ())
    except (PrometheusError, RemoteError) as error:
        print(f"rankscope top: {printable(str(error))}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    if once or is_json or not console.is_terminal:
        _print(first, console, is_json=is_json, source=server.url)
        return 0
    with suppress(KeyboardInterrupt):
        _follow(lambda: _of_server(server), console, server.url)
    return 0


def wait_until_judged(
    runs: Callable[[], NodeReport],
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for COLLECT_SECONDS, and up to COLLECT_LIMIT for runs that have too few steps to be judged, or events."""
    began = monotonic()
    while (passed := monotonic() - began) < COLLECT_LIMIT:
        if passed >= COLLECT_SECONDS and _are_judged(runs):
            return
        sleep(INTERVAL / 2)


def _are_judged(runs: Callable[[], NodeReport]) -> bool:
    try:
        return all(_has_span(run) and not _may_be_found(run) for run in runs().runs if run.living and run.is_judged)
    except OutdatedError:
        return False


def _has_span(run: RunReport) -> bool:
    """Return whether the shortest span of a loss is complete, or will not be because the run makes no steps."""
    if min((rank.stalled_seconds or 0.0 for rank in run.ranks if rank.is_alive), default=0.0) > STALLED_AFTER:
        return True
    seconds = run.window_seconds or 0.0
    return seconds >= Thresholds().tiers[0].seconds and seconds * (run.steps_per_second or 0.0) >= ENOUGH_STEPS


def _may_be_found(run: RunReport) -> bool:
    """Return whether a rank is late that may be so by chance, until more events show it."""
    return any(one.lacks == "time" and one.remaining_seconds is None for one in run.pending)


def _print(shown: Shown, console: Console, *, is_json: bool, source: str = "") -> None:
    if is_json:
        sys.stdout.write(as_json(shown.node) + "\n")
    else:
        screen = Screen(console.width, _has_color(console))
        console.print(view(shown.node, shown.gpus, screen, shown.error, source))


def _follow(read: Callable[[], Shown], console: Console, source: str = "") -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            shown = read()
            ranks = (console.height - OTHER_LINES - len(shown.gpus)) // max(len(shown.node.runs), 1)
            screen = Screen(console.width, _has_color(console), max(ranks, MIN_RANKS))
            live.update(view(shown.node, shown.gpus, screen, shown.error, source), refresh=True)
            time.sleep(INTERVAL)


def _of_node(node: Node) -> Shown:
    """Return the runs and an empty error, or no runs and the error if they cannot be read."""
    gpus = gpus_of(node)
    try:
        return Shown(node.reporter.report(), gpus)
    except OutdatedError as error:
        return Shown(NodeReport(time.time(), ()), gpus, str(error))


def _of_server(server: Prometheus) -> Shown:
    try:
        return Shown(fetch_report(server), ())
    except RemoteError as error:
        return Shown(NodeReport(time.time(), ()), (), str(error))


def _has_color(console: Console) -> bool:
    """Return whether the terminal shows colors and blocks."""
    can_show = console.color_system is not None and console.encoding.startswith("utf")
    return console.is_terminal and not console.no_color and can_show


def silence_logs() -> None:
    """Keep log lines off the screen, which shows the same information."""
    logger = logging.getLogger("rankscope_exporter")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
