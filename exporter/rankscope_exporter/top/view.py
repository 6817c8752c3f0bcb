"""The screen of `rankscope top`: problems, runs with their ranks, GPUs or nodes, and charts where there is room."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.text import Text

from rankscope.cli.printable import printable
from rankscope.record.quantities import count
from rankscope_exporter.report import describe
from rankscope_exporter.report.findings import FindingReport
from rankscope_exporter.report.gpus import GpuProblem, GpuReport
from rankscope_exporter.report.runs import CAPTURED_KINDS, NodeReport, RunReport
from rankscope_exporter.top.bars import legend
from rankscope_exporter.top.layout import Line, Lines, Section, first_that_fit, share_rows, side_by_side
from rankscope_exporter.top.servers import NodeState
from rankscope_exporter.top.tables import STYLES, Column, gpu_section, node_section, run_section
from rankscope_exporter.top.trends import RunKey, Trends, key_of

WIDE, GAP = 156, 2
"""Columns of the terminal from which on GPUs are next to the ranks, and the space between the two."""
ROOM_FOR_ROWS = 8
"""Lines that are kept for the ranks of a run if there are too many runs to show."""
CHART_LINES = 7, 24
"""The fewest and the most lines of the charts, with their headings."""
MOST_OF_SCREEN = 0.4
"""The part of the screen that problems may take."""
NODES_NAMED = 3
MEASURES, IS_LATE = "waits, lag: of the step", "<: late"
Entry = Sequence[RenderableType]


class Shown(NamedTuple):
    """The content of the screen at one moment. `error` is the reason if the ranks cannot be read."""

    node: NodeReport
    gpus: Sequence[GpuReport] = ()
    error: str = ""
    source: str = ""
    """The URL of the only server that is asked; empty for this machine."""
    nodes: Sequence[NodeState] = ()
    """The servers, if several are asked."""
    left_out: int = 0
    """The number of exporters that are not asked, because they are too many."""


@dataclass(frozen=True)
class Screen:
    """The terminal, and what the user has chosen."""

    width: int
    has_color: bool
    height: int | None = None
    """None shows everything."""
    has_keys: bool = False
    chosen: RunKey | None = None
    """The run whose ranks are shown first."""
    watched_since: float | None = None
    """The unix time since which this program reads the ranks itself; None if an exporter does."""


class View:
    """The whole screen."""

    def __init__(self, shown: Shown, screen: Screen, trends: Trends | None = None) -> None:
        self._shown, self._screen, self._trends = shown, screen, trends or Trends()

    def __rich_console__(self, console: Console, _options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the screen, as many as fit."""
        lines = self._lines(Lines(console, self._screen.width))
        for i, line in enumerate(lines[: self._screen.height]):
            yield from [Segment.line()] * (i > 0) + line
        if self._screen.height is None:
            yield Segment.line()

    def _lines(self, lines: Lines) -> list[Line]:
        shown, screen = self._shown, self._screen
        entries = [*_problems(shown, screen.watched_since)]
        bars = [rank.phases for run in shown.node.runs for rank in run.ranks if rank.is_alive]
        foot = lines.of(_legend(bars, shown.node.runs, screen)) if any(bars) else []
        head = lines.of(_head(shown))
        if screen.height is None:
            top = [*head, *chain.from_iterable(lines.of(part) for entry in entries for part in entry)]
            return [*top, *self._everything(lines), *foot]
        if screen.has_keys:
            foot += lines.of(_keys(len(shown.node.runs)))
        problems = first_that_fit(lines, entries, max(int(MOST_OF_SCREEN * screen.height), 2), _more_problems)
        left = max(screen.height - len(head) - len(problems) - len(foot), 1)
        body = self._body(lines, left)
        return [*head, *problems, *body, *([[]] * max(left - len(body), 0)), *foot]

    def _everything(self, lines: Lines) -> list[Line]:
        sections = self._sections(lines.width, lines.width)
        return [*chain.from_iterable(lines.section(one, one.rows) for one in sections)]

    def _sections(self, run_width: int, other_width: int) -> list[Section]:
        shown, screen = self._shown, self._screen
        column = Column(run_width, screen.has_color)
        several = len(shown.node.runs) > 1
        found = [
            run_section(run, column, is_chosen=several and key_of(run) == screen.chosen) for run in shown.node.runs
        ]
        exporters = [node for node in shown.nodes if not node.is_analyzer]
        if exporters:
            found.append(node_section(exporters, shown.node.runs))
        elif shown.gpus:
            found.append(gpu_section(shown.gpus, Column(other_width, screen.has_color)))
        return found

    def _body(self, lines: Lines, height: int) -> list[Line]:
        """Return the runs and GPUs that fit, next to each other on a wide terminal, and charts below them."""
        width, runs = self._screen.width, self._shown.node.runs
        left_width = (width - GAP) // 2 if width >= WIDE else width
        sections = self._sections(left_width, width - GAP - left_width if width >= WIDE else width)
        others = sections[len(runs) :]
        if width >= WIDE and runs and others:
            left = self._column(lines.narrower(left_width), sections[: len(runs)], height)
            right = self._column(lines.narrower(width - GAP - left_width), others, height)
            body = side_by_side(left, right, left_width, GAP)
        else:
            body = self._column(lines, [*others, *sections[: len(runs)]], height, len(others))
        return [*body, *self._charts(lines, height - len(body))]

    def _column(self, lines: Lines, sections: Sequence[Section], height: int, last: int = 0) -> list[Line]:
        """Return the sections that fit. The first `last` ones are the most important, but are shown at the end."""
        runs = self._shown.node.runs
        chosen = next((i for i, run in enumerate(runs) if key_of(run) == self._screen.chosen), None)
        first = None if chosen is None or len(sections) - last < len(runs) else chosen + last
        most = max(height - ROOM_FOR_ROWS, last + 1)
        if first is not None and first >= most > 0 and len(sections) > most:  # show it first
            sections, first = [*sections[:last], sections[first], *sections[last:first], *sections[first + 1 :]], last
        fitting = sections[:most] if len(sections) > most + 1 else sections
        hidden = len(sections) - len(fitting)
        rows = share_rows(lines, fitting, height - bool(hidden), first)
        blocks = [lines.section(section, n) for section, n in zip(fitting, rows, strict=True)]
        more = lines.of(Text(f"... and {count(hidden, 'more run')}", style="dim")) if hidden else []
        return [*chain.from_iterable([*blocks[last:], more, *blocks[:last]])]

    def _charts(self, lines: Lines, height: int) -> list[Line]:
        """Return the charts of the chosen run, or the worst, next to each other if the terminal is wide."""
        runs, screen = self._shown.node.runs, self._screen
        run = next((run for run in runs if key_of(run) == screen.chosen), runs[0] if runs else None)
        if run is None or height < CHART_LINES[0] + 1:
            return []
        size = min(height - 1, CHART_LINES[1]) - 1
        is_wide = screen.width >= WIDE
        width = (screen.width - GAP) // 2 if is_wide else screen.width
        charts = self._trends.charts(run, width, size, has_color=screen.has_color)
        parts = [lines.narrower(width).of(chart) for chart in charts]
        if not parts:
            return []
        return [[], *(side_by_side(parts[0], parts[1], width, GAP) if is_wide and len(parts) > 1 else parts[0])]


def _head(shown: Shown) -> Text:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(shown.node.at))
    gpus = [gpu for node in shown.nodes for gpu in node.gpus] or shown.gpus
    exporters = [node for node in shown.nodes if not node.is_analyzer]
    parts = [f"{sum(not node.error for node in exporters)} of {len(exporters)} nodes"] if exporters else []
    parts += [f"{sum(gpu.is_up for gpu in gpus)} of {len(gpus)} GPUs"] if gpus else []
    is_here = not (shown.source or shown.nodes)
    answering = f"{', '.join(parts)} answer" if parts else "no GPU answers" if is_here else ""
    where = shown.source or socket.gethostname() if is_here or shown.source else ""
    return Text(printable("  ".join(filter(None, ["rankscope top", where, when, answering]))), style="dim")


def _legend(bars: Sequence[Mapping[str, float]], runs: Sequence[RunReport], screen: Screen) -> Text:
    is_late = any(describe.is_late(run, rank) for run in runs for rank in run.ranks)
    return legend(bars, screen.width, MEASURES, *[IS_LATE] * is_late, has_color=screen.has_color)


def _keys(runs: int) -> Text:
    return Text("q quit" + "   n, p next and previous run" * (runs > 1), style="dim")


def _problems(shown: Shown, watched_since: float | None) -> Iterator[Entry]:
    """Yield what is wrong, the worst first, each as a sentence and what follows it."""
    runs = shown.node.runs
    findings = sorted(
        (one for run in runs for one in run.findings), key=lambda one: (one.severity != "critical", -one.ratio)
    )
    captured = {id(one): describe.captured(run) for run in runs for one in run.findings if one.kind in CAPTURED_KINDS}
    gpus, lost = [*_problems_of_gpus(shown)], [*_defects(shown, is_up=False)]
    defects = [*_defects(shown, is_up=True)]
    if shown.error:
        yield (Text(printable(f"No data about the ranks: {shown.error}."), style=STYLES["bad"]),)
    silent = [*_silent(shown)]
    critical = [one for one in findings if one.severity == "critical"]
    yield from (_finding(one, watched_since, captured.get(id(one), "")) for one in critical)
    yield from silent
    yield from (_gpu_problem(one) for one in gpus if one.severity == "critical")
    yield from lost
    yield from (_finding(one, watched_since) for one in findings[len(critical) :])
    yield from (_gpu_problem(one) for one in gpus if one.severity != "critical")
    yield from defects
    for run in describe.undiagnosed(runs):
        known = " ".join(describe.known_here(run))
        more = (Padding(Text(printable(known)), (0, 0, 0, 2), expand=False),) if known else ()
        yield (Text(printable(describe.undiagnosed_sentence(run)), style="bold"), *more)
    if not (shown.error or findings or gpus or lost or defects):
        yield from ((text,) for text in _no_problem(shown, is_partly_unknown=bool(silent)))
    for run in runs:
        yield from ((Text(printable(note), style="dim"),) for note in describe.notes(run))


def _silent(shown: Shown) -> Iterator[Entry]:
    """Yield the nodes that do not answer."""
    for is_only_unreachable in (False, True):
        silent = [node for node in shown.nodes if node.error and node.is_only_unreachable == is_only_unreachable]
        names = ", ".join(node.name for node in silent[:NODES_NAMED])
        if not silent:
            continue
        if is_only_unreachable:
            text = f"{count(len(silent), 'node')} cannot be reached from here, but by the analyzer: {names}"
        elif len(silent) == 1:
            text = f"No answer from {names}: {silent[0].error}"
        else:
            text = f"No answer from {len(silent)} nodes: {names}"
        more = f" and {len(silent) - NODES_NAMED} more" if len(silent) > NODES_NAMED else ""
        yield (Text(printable(f"{text}{more}."), style=STYLES["warn" if is_only_unreachable else "bad"]),)
    if shown.left_out:
        yield (Text(f"{shown.left_out} more nodes of the analyzer are not asked.", style=STYLES["warn"]),)


def _problems_of_gpus(shown: Shown) -> Iterator[GpuProblem]:
    """Yield the problems of GPUs that alert, as the exporters of the nodes say."""
    problems = [one for node in shown.nodes for one in node.gpu_problems] or shown.node.gpu_problems
    yield from (one for one in problems if not one.remaining_seconds)


def _defects(shown: Shown, *, is_up: bool) -> Iterator[Entry]:
    """Yield the defects of GPUs that answer, or do not, which no alert and no finding says."""
    findings = [one for run in shown.node.runs for one in run.findings]
    places = [(f" of {node.name}", node.gpus, node.gpu_problems) for node in shown.nodes]
    for where, gpus, problems in places or [("", shown.gpus, shown.node.gpu_problems)]:
        for gpu in describe.other_defects(gpus, problems, findings):
            if gpu.is_up == is_up:
                yield (Text(printable(f"GPU {gpu.index}{where} {gpu.problem}."), style=STYLES["bad"]),)


def _finding(one: FindingReport, watched_since: float | None, captured: str = "") -> Entry:
    return _problem(one, describe.age(one, watched_since), captured)


def _gpu_problem(one: GpuProblem) -> Entry:
    return _problem(one, describe.gpu_age(one))


def _problem(one: FindingReport | GpuProblem, age: str, captured: str = "") -> Entry:
    text = Text(one.severity.upper(), style=STYLES["bad" if one.severity == "critical" else "warn"])
    text.append(f"{' ' * bool(age)}{age}: {printable(one.sentence)}", style="bold")
    more = (part for part in (one.advice, captured) if part)
    return text, *(Padding(Text(printable(part)), (0, 0, 0, 2), expand=False) for part in more)


def _more_problems(left: int) -> Text:
    return Text(f"... and {left} more: rankscope top --once shows all", style="bold", no_wrap=True)


def _no_problem(shown: Shown, *, is_partly_unknown: bool) -> Iterator[Text]:
    runs: Sequence[RunReport] = shown.node.runs
    yet = " yet" if any(describe.is_growing(one) for run in runs for one in run.pending) else ""
    if not runs:
        if not is_partly_unknown:
            yield Text("No run is known there." if shown.source or shown.nodes else "No rank records on this machine.")
    elif not describe.undiagnosed(runs) and not is_partly_unknown:
        yield Text(f"No problem found{yet}.", style=STYLES["warn" if yet else "good"])
    elif any(run.is_judged and run.living for run in runs):
        yield Text(f"Otherwise, no problem found{yet}.")
