"""The runs on the status page: a summary of each run's lost time, and a table of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rankscope.record.phases import NAMES
from rankscope.record.quantities import count, duration, number
from rankscope_exporter.report import describe
from rankscope_exporter.report.ranks import RankReport
from rankscope_exporter.report.rates import Point
from rankscope_exporter.report.runs import NodeReport, RunReport
from rankscope_exporter.web import charts
from rankscope_exporter.web.table import Cell, Column, Row, table

COLUMNS = (
    Column("rank"),
    Column("GPU"),
    Column("now"),
    Column("time by phase", is_wide=True),
    Column("waits", is_number=True),
    Column("lag", is_number=True),
    Column("clock", is_wide=True),
    Column("steps", is_number=True, is_wide=True),
    Column("last checkpoint", is_number=True, is_wide=True),
    Column("pid", is_number=True, is_wide=True),
)
SHOWN = 64
"""The most ranks of a run in its table."""
NODE = Column("node")
"""A column of runs that span nodes."""


def run_section(run: RunReport, steps: Sequence[Point] = ()) -> str:
    """Return a run's heading, the chart of its steps per second, and the table of its ranks as HTML."""
    kind = "" if run.living else ' class="ended"'
    has_nodes, name = len(run.nodes) > 1, describe.name(run)
    columns = (COLUMNS[0], NODE, *COLUMNS[1:]) if has_nodes else COLUMNS
    shown = _shown(run)
    ranks = table(columns, [_rank(run, rank, has_node=has_nodes) for rank in shown], f"Ranks of run {name}")
    if hidden := len(run.ranks) - len(shown):
        ranks += f'<p class="dim">{count(hidden, "more rank")}: see /api/v1/runs.</p>'
    unknown = "waits and lags are unknown" if run.living and describe.stands_still(run) else ""
    about = " · ".join(filter(None, (describe.owner(run), *describe.summary(run), unknown)))
    head = f"<h2>{escape(name)} <small>{escape(about)}</small></h2>{_speed(steps) if run.living else ''}"
    return f'<section{kind} id="run-{escape(name)}-{escape(run.owner)}">{head}{ranks}</section>'


def _shown(run: RunReport) -> Sequence[RankReport]:
    """Return the ranks that the table shows: all, or those that are late, stuck or failed and the first ones."""
    worst = sorted(
        run.ranks, key=lambda rank: (not describe.mark(run, rank), not describe.now_mark(run, rank), rank.rank)
    )
    return sorted(worst[:SHOWN], key=lambda rank: rank.rank)


def _speed(steps: Sequence[Point]) -> str:
    rates = [point.rate for point in steps]
    words = f"now {number(rates[-1])}, highest {number(max(rates))}" if rates else ""
    drawn = charts.line(steps, max(rates, default=0.0), f"steps per second in the last 10 min: {words}")
    return f'<p class="rate">Steps per second, last 10 min {drawn} {words}</p>' if drawn else ""


def legend(node: NodeReport) -> str:
    """Return the legend of the phases that are shown."""
    shown = {phase for run in node.runs for rank in run.ranks for phase in rank.phases}
    known = [phase for phase in NAMES if phase in shown] + ["own"] * bool(shown - {*NAMES})
    names = {"own": "custom"}
    square = '<svg viewBox="0 0 1 1" aria-hidden="true"><rect class="p-{}" width="1" height="1"/></svg>{}'
    colors = "".join(square.format(phase, names.get(phase, phase)) for phase in known)
    return f'<p class="legend wide">{colors}</p>' if colors else ""


def _rank(run: RunReport, rank: RankReport, *, has_node: bool) -> Row:
    saved = rank.checkpoint_seconds
    cells = (
        Cell(str(rank.rank)),
        *([Cell(rank.node)] if has_node else ()),
        Cell(rank.gpu),
        Cell(describe.now(rank), describe.now_mark(run, rank)),
        Cell(html=charts.bar(rank.phases) if rank.is_alive else ""),
        Cell("" if describe.stands_still(run) else describe.wait(rank)),
        _lag(run, rank),
        Cell(rank.clock or ""),
        Cell(describe.steps(rank)),
        Cell("" if saved is None else f"{duration(saved)} ago"),
        Cell("" if rank.pid is None else str(rank.pid)),
    )
    return Row(cells, describe.mark(run, rank))


def _lag(run: RunReport, rank: RankReport) -> Cell:
    is_late = describe.is_late(run, rank)
    return Cell(f"{describe.lag(run, rank)}{', late' * is_late}", "bad" * is_late)
