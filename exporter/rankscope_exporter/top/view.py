"""The screen of `rankscope top`: findings, runs with their ranks, GPUs."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankscope.cli.printable import printable
from rankscope.record.quantities import duration
from rankscope_exporter.report import describe
from rankscope_exporter.report.findings import FindingReport
from rankscope_exporter.report.gpus import BAD_STATES, GpuReport
from rankscope_exporter.report.ranks import RankReport
from rankscope_exporter.report.runs import NodeReport, RunReport
from rankscope_exporter.top.bars import bar, legend

STYLES = {"bad": "bold red", "warn": "yellow", "good": "green", "": ""}
BAR_WIDTH, NARROW_BAR = 24, 10
PHASE_WIDTH = 22
"""The width of the column for the current phase and its time, so that the table does not change its width."""
NARROW = 100
"""Columns of the terminal below which steps, pids and power are left out."""


@dataclass(frozen=True)
class Screen:
    """The limits of the terminal. `ranks` is the number of ranks shown per run, None for all."""

    width: int
    has_color: bool
    ranks: int | None = None

    @property
    def is_narrow(self) -> bool:
        """Return whether only the most important columns fit."""
        return self.width < NARROW


def view(
    node: NodeReport, gpus: Sequence[GpuReport], screen: Screen, error: str = "", source: str = ""
) -> RenderableType:
    """Return the whole screen. `error` is the reason if the ranks cannot be read.

    `source` is the URL of the exporter or analyzer that has sent the report; empty for this machine's.
    """
    parts: list[RenderableType] = [_head(node, gpus, source), *_problems(node, gpus, error, source)]
    parts += [part for run in node.runs for part in _run(run, screen)]
    bars = [rank.phases for run in node.runs for rank in run.ranks if rank.is_alive]
    if any(bars):
        parts.append(legend(bars, has_color=screen.has_color))
    if gpus:
        parts += [Text(), _gpus(gpus, screen)]
    return Group(*parts)


def _head(node: NodeReport, gpus: Sequence[GpuReport], source: str) -> Text:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(node.at))
    answering = f"{sum(gpu.is_up for gpu in gpus)} of {len(gpus)} GPUs answer" if gpus else "no GPU answers"
    about = [source, when] if source else [socket.gethostname(), when, answering]
    return Text(printable("  ".join(["rankscope top", *about])), style="dim")


def _problems(node: NodeReport, gpus: Sequence[GpuReport], error: str, source: str) -> Iterator[RenderableType]:
    findings = [one for run in node.runs for one in run.findings]
    defective = [gpu for gpu in gpus if gpu.problem]
    if error:
        yield Text(f"No data about the ranks: {error}.", style=STYLES["bad"])
    for one in findings:
        yield from _finding(one)
    for gpu in defective:
        yield Text(f"GPU {gpu.index} {gpu.problem}.", style=STYLES["bad"])
    for run in describe.undiagnosed(node.runs):
        yield Text(printable(describe.undiagnosed_sentence(run)), style="bold")
        if known := " ".join(describe.known_here(run)):
            yield Padding(Text(printable(known)), (0, 0, 0, 2), expand=False)
    if not (error or findings or defective):
        yield from _no_problem(node, source)
    for run in node.runs:
        for note in describe.notes(run):
            yield Text(printable(note), style="dim")


def _finding(one: FindingReport) -> Iterator[RenderableType]:
    text = Text(f"{one.severity.upper()} ", style=STYLES["bad" if one.severity == "critical" else "warn"])
    text.append(f"for {duration(one.age_seconds)}: {printable(one.sentence)}", style="bold")
    yield text
    yield Padding(Text(one.advice), (0, 0, 0, 2), expand=False)


def _no_problem(node: NodeReport, source: str) -> Iterator[Text]:
    yet = " yet" if any(describe.is_growing(one) for run in node.runs for one in run.pending) else ""
    if not node.runs:
        yield Text("No run is known there." if source else "No rank records on this machine.")
    elif not describe.undiagnosed(node.runs):
        yield Text(f"No problem found{yet}.", style=STYLES["warn" if yet else "good"])
    elif any(run.is_judged and run.living for run in node.runs):
        yield Text(f"Otherwise, no problem found{yet}.")


def _run(run: RunReport, screen: Screen) -> Iterator[RenderableType]:
    yield Text()
    head = Text(printable(describe.title(run)), style="bold")
    head.append(f": {', '.join(describe.summary(run))}", style="not bold dim")
    yield head
    ranks = _select_ranks(run, screen.ranks)
    table = _table(
        ("rank", True), ("GPU", True), ("now", False), ("time by phase", False), ("waits", True), ("lag", True)
    )
    table.columns[2].min_width = PHASE_WIDTH
    if len(run.nodes) > 1:
        table.add_column("node", no_wrap=True)
    if not screen.is_narrow:
        for name in ("steps", "pid"):
            table.add_column(name, justify="right", no_wrap=True)
    for rank in ranks:
        table.add_row(*_rank(run, rank, screen), style=STYLES[describe.mark(run, rank)] if screen.has_color else "")
    yield table
    if hidden := len(run.ranks) - len(ranks):
        yield Text(f"and {hidden} more ranks", style="dim")


def _select_ranks(run: RunReport, limit: int | None) -> Sequence[RankReport]:
    """Return the ranks that fit, marked ranks first, ordered by number."""
    if limit is None or len(run.ranks) <= limit:
        return run.ranks
    first = sorted(run.ranks, key=lambda rank: (not describe.mark(run, rank), not rank.waits_least, rank.rank))
    return sorted(first[:limit], key=lambda rank: rank.rank)


def _table(*columns: tuple[str, bool]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name, is_number in columns:
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    return table


def _rank(run: RunReport, rank: RankReport, screen: Screen) -> Iterator[Text]:
    yield Text(str(rank.rank))
    yield Text(rank.gpu)
    yield Text(printable(describe.now(rank)), style=STYLES[describe.now_mark(run, rank)])
    width = NARROW_BAR if screen.is_narrow and len(run.nodes) > 1 else BAR_WIDTH
    yield bar(rank.phases if rank.is_alive else {}, width, has_color=screen.has_color)
    yield Text(describe.wait(rank))
    yield Text(f"{describe.lag(rank)}{' <' * (rank.waits_least and rank.is_alive)}")
    if len(run.nodes) > 1:
        yield Text(printable(rank.node))
    if not screen.is_narrow:
        yield Text(describe.steps(rank))
        yield Text("" if rank.pid is None else str(rank.pid))


def _gpus(gpus: Sequence[GpuReport], screen: Screen) -> Table:
    table = _table(
        ("GPU", True), ("state", False), ("busy", True), ("temp", True), ("memory GiB", True), ("throttled", False)
    )
    if not screen.is_narrow:
        table.add_column("power", justify="right", no_wrap=True)
        table.add_column("held by", no_wrap=True)
    for gpu in gpus:
        table.add_row(*_gpu(gpu, screen))
    return table


def _gpu(gpu: GpuReport, screen: Screen) -> Iterator[Text]:
    is_lost = not gpu.is_up
    state_mark = "bad" if is_lost or gpu.state in BAD_STATES else "good" if gpu.state == "working" else ""
    yield Text(gpu.index)
    yield Text("lost" if is_lost else gpu.state or "answers", style=STYLES[state_mark])
    yield Text("" if gpu.busy_ratio is None else f"{gpu.busy_ratio:.0%}")
    yield Text("" if gpu.temperature is None else f"{gpu.temperature:.0f} C", style=STYLES["bad" if gpu.is_hot else ""])
    yield Text(gpu.memory)
    yield Text(gpu.throttling, style=STYLES[gpu.throttling_mark])
    if not screen.is_narrow:
        yield Text("" if gpu.power is None else f"{gpu.power:.0f} W")
        yield Text(printable(gpu.holder))
