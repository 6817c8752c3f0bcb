"""The command `rankscope top`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from rankscope.cli.explaining.fetching import fetch
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError, connector
from rankscope.cli.printable import printable
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.node import Node
from rankscope_exporter.ranks.watcher import OutdatedError
from rankscope_exporter.report.as_json import as_json
from rankscope_exporter.report.remote import Fetch, one_at_a_time
from rankscope_exporter.report.runs import NodeReport, RunReport
from rankscope_exporter.top.keys import NEXT, PREVIOUS, QUIT, terminal_keys
from rankscope_exporter.top.node import gpus_of, watch_node
from rankscope_exporter.top.servers import Servers, ServersReport, merged
from rankscope_exporter.top.trends import RunKey, Trends, key_of
from rankscope_exporter.top.view import Screen, Shown, View

INTERVAL = 1.0
COLLECT_SECONDS = 10.0
COLLECT_LIMIT = 30.0
"""Seconds after which `--once` prints in any case: runs with long steps take minutes to be judged."""
ENOUGH_STEPS = 12
STALLED_AFTER = 5.0
"""Seconds without a step after which `--once` does not wait for more steps."""
LOOK_INTERVAL = 0.2
"""Seconds between two looks at the size of the terminal."""
FIRST_ANSWERS = 12.0
"""Seconds within which each server has answered or failed, twice as the exporters of an analyzer follow."""


def show(run_dirs: Sequence[Path], *, once: bool, is_json: bool) -> int:
    """Show the node until q or Ctrl-C; with `once` or `is_json`, or if the output is no terminal, print it once."""
    silence_logs()
    console = Console(highlight=False)
    began = time.time()
    with suppress(KeyboardInterrupt), watch_node(run_dirs) as node:
        if once or is_json or not _is_interactive(console):
            wait_until_judged(node.reporter.report)
            _print(_of_node(node), console, is_json=is_json, watched_since=began)
        else:
            _follow(lambda: _of_node(node), console, watched_since=began)
    return 0


def show_remote(
    urls: Sequence[str], headers: Sequence[str] = (), *, once: bool, is_json: bool, fetch: Fetch = fetch
) -> int:
    """Show what exporters and analyzers say of their nodes and runs, like `show`. Return 2 if none answers at first.

    The headers, and passwords in the URLs, are for these servers, not for the exporters that an analyzer names.
    """
    console = Console(highlight=False)
    try:
        named = [connector(headers, one_at_a_time(fetch))(url, None) for url in urls]
    except PrometheusError as error:
        return _fail([str(error)])
    servers = Servers(named, lambda url: Prometheus(url, fetch=one_at_a_time(fetch)))
    with suppress(KeyboardInterrupt), servers.asking():
        if errors := servers.wait(FIRST_ANSWERS):
            return _fail(errors)
        if once or is_json or not _is_interactive(console):
            servers.wait(FIRST_ANSWERS)
            _print(_of_servers(servers), console, is_json=is_json)
        else:
            _follow(lambda: _of_servers(servers), console)
    return 0


def _fail(errors: Iterable[str]) -> int:
    for error in errors:
        print(f"rankscope top: {printable(error)}", file=sys.stderr)  # noqa: T201 - a command
    return 2


def _is_interactive(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


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


def _print(shown: Shown, console: Console, *, is_json: bool, watched_since: float | None = None) -> None:
    if is_json:
        sys.stdout.write(as_json(_as_report(shown)) + "\n")
    else:
        console.print(View(shown, Screen(console.width, _has_color(console), watched_since=watched_since)))


def _as_report(shown: Shown) -> NodeReport | ServersReport:
    """Return what `--json` prints: of several servers also which do not answer, and why."""
    failures = {node.name: node.error for node in shown.nodes if node.error}
    return ServersReport(shown.node.at, failures, shown.node.runs) if shown.nodes else shown.node


def _follow(read: Callable[[], Shown], console: Console, watched_since: float | None = None) -> None:
    """Show what `read` returns each second, until the user quits."""
    trends, chosen = Trends(), None
    with terminal_keys() as next_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            due, shown = time.monotonic() + INTERVAL, read()
            trends.add(shown.node)
            size, key = None, ""
            while time.monotonic() < due:
                if key or size != console.size:
                    size = console.size
                    chosen = choose(shown.node.runs, chosen, key)
                    has_keys = sys.stdin.isatty()
                    screen = Screen(size.width, _has_color(console), size.height, has_keys, chosen, watched_since)
                    live.update(View(shown, screen, trends), refresh=True)
                key = next_key(max(min(LOOK_INTERVAL, due - time.monotonic()), 0.0))
                if key == QUIT:
                    return


def choose(runs: Sequence[RunReport], chosen: RunKey | None, key: str) -> RunKey | None:
    """Return the run that is chosen after a key; None is the worst, without a choice."""
    known = [*map(key_of, runs)]
    if not known or key not in (NEXT, PREVIOUS):
        return chosen if chosen in known else None
    if chosen not in known:
        return known[1 % len(known)] if key == NEXT else known[-1]
    return known[(known.index(chosen) + (1 if key == NEXT else -1)) % len(known)]


def _of_node(node: Node) -> Shown:
    """Return the runs and an empty error, or no runs and the error if they cannot be read."""
    gpus = gpus_of(node)
    try:
        return Shown(node.reporter.report(), gpus)
    except OutdatedError as error:
        return Shown(NodeReport(time.time(), ()), gpus, str(error))


def _of_servers(servers: Servers) -> Shown:
    """Return what all servers say; of a single exporter as if it were this machine."""
    nodes = servers.nodes()
    if len(nodes) == 1 and not nodes[0].is_analyzer:
        (node,) = nodes
        return Shown(NodeReport(time.time(), node.runs, node.gpu_problems), node.gpus, node.error, servers.urls[0])
    return Shown(merged(nodes, time.time()), nodes=nodes, left_out=servers.left_out)


def _has_color(console: Console) -> bool:
    """Return whether the terminal shows colors and blocks."""
    can_show = console.color_system is not None and console.encoding.startswith("utf")
    return console.is_terminal and not console.no_color and can_show


def silence_logs() -> None:
    """Keep log lines off the screen, which shows the same information."""
    logger = logging.getLogger("rankscope_exporter")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
