"""The tables of `rankscope top`: ranks of a run, GPUs, and nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice

from rich.table import Table
from rich.text import Text

from rankscope.cli.printable import printable
from rankscope.record.group_name import compact
from rankscope.record.quantities import count, duration
from rankscope_exporter.diagnosis.findings import LISTED
from rankscope_exporter.report import describe
from rankscope_exporter.report.gpus import BAD_STATES, GpuReport
from rankscope_exporter.report.ranks import RankReport
from rankscope_exporter.report.runs import RunReport, places
from rankscope_exporter.top.bars import bar
from rankscope_exporter.top.layout import Section
from rankscope_exporter.top.servers import NodeState

STYLES = {"bad": "bold red", "warn": "yellow", "good": "green", "": ""}
BAR_WIDTH, NARROW_BAR = 24, 10
PHASE_WIDTH = 22
"""The width of the column for the current phase and its time, so that the table does not change its width."""
DIGITS = 20
NARROW = 100
"""Columns below which steps, pids and power are left out."""


@dataclass(frozen=True)
class Column:
    """The part of the screen that a table has."""

    width: int
    has_color: bool

    @property
    def is_narrow(self) -> bool:
        """Return whether only the most important columns fit."""
        return self.width < NARROW


def run_section(run: RunReport, column: Column, *, is_chosen: bool = False) -> Section:
    """Return a run and its ranks, the marked ones first if not all fit."""
    head = Text("> " * is_chosen + printable(describe.title(run)), style="bold")
    head.append(f": {printable(', '.join(describe.summary(run)))}", style="not bold dim")
    found = count(len(run.findings), "problem") if run.findings else "no problem" if run.is_judged else "not diagnosed"
    short = Text(printable(describe.title(run)), style="bold", no_wrap=True)
    short.append(f": {', '.join([found, *islice(describe.summary(run), 2)])}", style="not bold dim")
    ranks = sorted(run.ranks, key=lambda rank: (not describe.mark(run, rank), not rank.waits_least, rank.rank))
    return Section(
        head, short, len(ranks), lambda rows: _rank_table(run, ranks[:rows], column), partial(_more_ranks, ranks)
    )


def _more_ranks(ranks: Sequence[RankReport], rows: int) -> Text:
    left = sorted(rank.rank for rank in ranks[rows:])
    numbers = f": {compact(left)}" if len(left) <= LISTED else ""
    return _dim(f"... and {count(len(left), 'more rank')}{numbers}")


def _rank_table(run: RunReport, ranks: Sequence[RankReport], column: Column) -> Table:
    table = _table(
        ("rank", True), ("GPU", True), ("now", False), ("time by phase", False), ("waits", True), ("lag", True)
    )
    table.columns[2].min_width = PHASE_WIDTH
    if len(run.nodes) > 1:
        table.add_column("node", no_wrap=True)
    if not column.is_narrow:
        for name in ("steps", "pid"):
            table.add_column(name, justify="right", no_wrap=True)
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        table.add_row(*_rank(run, rank, column), style=STYLES[describe.mark(run, rank)] if column.has_color else "")
    return table


def _rank(run: RunReport, rank: RankReport, column: Column) -> Iterator[Text]:
    yield Text(str(rank.rank))
    yield _text(rank.gpu)
    yield _text(describe.now(rank), STYLES[describe.now_mark(run, rank)])
    width = NARROW_BAR if column.is_narrow and len(run.nodes) > 1 else BAR_WIDTH
    yield bar(rank.phases if rank.is_alive else {}, width, has_color=column.has_color)
    yield Text(describe.wait(rank))
    yield Text(f"{describe.lag(run, rank)}{' <' * describe.is_late(run, rank)}")
    if len(run.nodes) > 1:
        yield _text(rank.node)
    if not column.is_narrow:
        yield Text(describe.steps(rank))
        yield Text("" if rank.pid is None else str(rank.pid))


def gpu_section(gpus: Sequence[GpuReport], column: Column) -> Section:
    """Return the GPUs, those with a problem first if not all fit."""
    ordered = sorted(gpus, key=lambda gpu: not gpu.problem)
    short = _dim(f"{count(len(gpus), 'GPU')}: {_states(gpus)}")
    return Section(
        head=None,
        short=short,
        rows=len(gpus),
        table=lambda rows: _gpu_table(sorted(ordered[:rows], key=gpus.index), column),
        more=lambda rows: _dim(f"... and {count(len(gpus) - rows, 'more GPU')}: {_states(ordered[rows:])}"),
    )


def _states(gpus: Sequence[GpuReport]) -> str:
    """Return how many GPUs are in which state."""
    return ", ".join(f"{number} {state}" for state, number in Counter(map(_state, gpus)).most_common())


def _state(gpu: GpuReport) -> str:
    return gpu.state or "answers" if gpu.is_up else "lost"


def _gpu_table(gpus: Sequence[GpuReport], column: Column) -> Table:
    table = _table(
        ("GPU", True), ("state", False), ("busy", True), ("temp", True), ("memory GiB", True), ("throttled", False)
    )
    if not column.is_narrow:
        table.add_column("power", justify="right", no_wrap=True)
        table.add_column("held by", no_wrap=True)
    for gpu in gpus:
        table.add_row(*_gpu(gpu, column))
    return table


def _gpu(gpu: GpuReport, column: Column) -> Iterator[Text]:
    state_mark = "bad" if not gpu.is_up or gpu.state in BAD_STATES else "good" if gpu.state == "working" else ""
    yield _text(gpu.index)
    yield _text(_state(gpu), STYLES[state_mark])
    yield Text("" if gpu.busy_ratio is None else f"{gpu.busy_ratio:.0%}")
    yield Text("" if gpu.temperature is None else f"{gpu.temperature:.0f} C", style=STYLES["bad" if gpu.is_hot else ""])
    yield Text(gpu.memory)
    yield _text(gpu.throttling, STYLES[gpu.throttling_mark])
    if not column.is_narrow:
        yield Text("" if gpu.power is None else f"{gpu.power:.0f} W")
        yield _text(gpu.holder)


@dataclass(frozen=True)
class _NodeRow:
    """A node, its problems, and whether all of its runs are diagnosed."""

    node: NodeState
    problems: int
    is_diagnosed: bool


def node_section(nodes: Sequence[NodeState], runs: Sequence[RunReport]) -> Section:
    """Return the nodes, the worst first: those that do not answer, then those with a problem.

    `runs` are those of all nodes, since what slows down a run on several nodes may be on one of them.
    """
    placed = [(run, places(run)) for run in runs]
    ordered = sorted(
        (_node_row(node, placed) for node in nodes),
        key=lambda row: (not row.node.error, -row.problems, row.is_diagnosed, _numbered(row.node.name)),
    )
    return Section(
        head=None,
        short=_dim(f"{count(len(nodes), 'node')}: {_answers(ordered)}"),
        rows=len(nodes),
        table=lambda rows: _node_table(ordered[:rows]),
        more=lambda rows: _dim(f"... and {count(len(nodes) - rows, 'more node')}: {_answers(ordered[rows:])}"),
    )


def _numbered(name: str) -> Sequence[str]:
    """Return a key that sorts node2 before node10."""
    return [part.zfill(DIGITS) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _node_row(node: NodeState, runs: Sequence[tuple[RunReport, Set[tuple[int, str]]]]) -> _NodeRow:
    here = {place for run in node.runs for place in places(run)}
    names = {rank.node for run in node.runs for rank in run.ranks}
    own = [run for run, its in runs if here & its]
    found = [one for run in own for one in run.findings if not one.node or one.node in names]
    defects = [gpu for gpu in node.gpus if gpu.problem]
    return _NodeRow(node, len(found) + len(defects), not describe.undiagnosed(own))


def _answers(rows: Sequence[_NodeRow]) -> str:
    """Return how many nodes are in which state."""
    states = Counter(
        "without an answer" if row.node.error else "with a problem" if row.problems else "without a problem"
        for row in rows
    )
    return ", ".join(f"{number} {state}" for state, number in states.most_common())


def _node_table(rows: Sequence[_NodeRow]) -> Table:
    table = _table(("node", False), ("state", False), ("runs", True), ("GPUs", True), ("busy", True), ("hottest", True))
    for row in rows:
        table.add_row(*_node(row))
    return table


def _node(row: _NodeRow) -> Iterator[Text]:
    node, is_silent = row.node, bool(row.node.error)
    yield _text(node.name)
    yield _node_state(row)
    yield Text("" if is_silent else str(len(node.runs)))
    up = sum(gpu.is_up for gpu in node.gpus)
    gpus = "" if not node.gpus else str(up) if up == len(node.gpus) else f"{up} of {len(node.gpus)}"
    yield Text(gpus, style=STYLES["bad" if up < len(node.gpus) else ""])
    yield Text(_over(node.gpus, lambda gpu: gpu.busy_ratio, lambda busy: f"{sum(busy) / len(busy):.0%}"))
    yield Text(_over(node.gpus, lambda gpu: gpu.temperature, lambda degrees: f"{max(degrees):.0f} C"))


def _node_state(row: _NodeRow) -> Text:
    """Return whether a node answers, and has problems. Only a node that is known to be healthy is green."""
    if row.node.error and row.node.is_only_unreachable:
        return Text("not reached from here", style=STYLES["warn"])
    if row.node.error:
        return Text(f"no answer for {duration(row.node.silent_seconds)}", style=STYLES["bad"])
    if row.problems:
        return Text(count(row.problems, "problem"), style=STYLES["bad"])
    return Text("ok", style=STYLES["good"]) if row.is_diagnosed else Text("not all diagnosed", style=STYLES["warn"])


def _over(
    gpus: Sequence[GpuReport], value: Callable[[GpuReport], float | None], text: Callable[[Sequence[float]], str]
) -> str:
    known = [found for gpu in gpus if (found := value(gpu)) is not None]
    return text(known) if known else ""


def _table(*columns: tuple[str, bool]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name, is_number in columns:
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    return table


def _text(text: str, style: str = "") -> Text:
    """Return a text from another machine or user, without control characters."""
    return Text(printable(text), style=style)


def _dim(text: str) -> Text:
    return Text(printable(text), style="dim", no_wrap=True)
