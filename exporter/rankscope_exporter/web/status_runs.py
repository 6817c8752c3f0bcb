"""The runs on the status page: a summary of each run's lost time, and a table of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from rankscope.record.phases import NAMES
from rankscope.record.quantities import duration, percent
from rankscope_exporter.report import describe
from rankscope_exporter.report.ranks import RankReport
from rankscope_exporter.report.runs import NodeReport, RunReport
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
NODE = Column("node")
"""A column of runs that span nodes."""


def run_section(run: RunReport) -> str:
    """Return a run's heading and the table of its ranks as HTML."""
    kind = "" if run.living else ' class="ended"'
    has_nodes = len(run.nodes) > 1
    columns = (COLUMNS[0], NODE, *COLUMNS[1:]) if has_nodes else COLUMNS
    ranks = table(columns, [_rank(run, rank, has_node=has_nodes) for rank in run.ranks])
    about = " · ".join(filter(None, (describe.owner(run), *describe.summary(run))))
    return f"<section{kind}><h2>{escape(describe.name(run))} <small>{escape(about)}</small></h2>{ranks}</section>"


def legend(node: NodeReport) -> str:
    """Return the legend of the phases that are shown."""
    shown = {phase for run in node.runs for rank in run.ranks for phase in rank.phases}
    known = [phase for phase in NAMES if phase in shown] + ["own"] * bool(shown - {*NAMES})
    names = {"own": "custom"}
    colors = "".join(f'<i class="p-{phase}"></i>{names.get(phase, phase)}' for phase in known)
    return f'<p class="legend wide">{colors}</p>' if colors else ""


def _rank(run: RunReport, rank: RankReport, *, has_node: bool) -> Row:
    saved = rank.checkpoint_seconds
    cells = (
        Cell(str(rank.rank)),
        *([Cell(rank.node)] if has_node else ()),
        Cell(rank.gpu),
        Cell(describe.now(rank), describe.now_mark(run, rank)),
        Cell(html=_bar(rank.phases) if rank.is_alive else ""),
        Cell(describe.wait(rank)),
        _lag(rank),
        Cell(rank.clock or ""),
        Cell(describe.steps(rank)),
        Cell("" if saved is None else f"{duration(saved)} ago"),
        Cell("" if rank.pid is None else str(rank.pid)),
    )
    return Row(cells, describe.mark(run, rank))


def _lag(rank: RankReport) -> Cell:
    is_marked = rank.is_alive and rank.waits_least
    return Cell(f"{describe.lag(rank)}{', waits least' * is_marked}", "bad" * is_marked)


def _bar(phases: Mapping[str, float]) -> str:
    """Return a bar of a rank's time by phase, in the order of the record; custom phases come last."""
    ordered = sorted(phases, key=lambda phase: NAMES.index(phase) if phase in NAMES else len(NAMES))
    total = sum(phases.values()) or 1.0
    parts = "".join(
        f'<i class="p-{phase if phase in NAMES else "own"}" style="width:{100 * phases[phase] / total:.1f}%" '
        f'title="{escape(phase)} {percent(phases[phase])}"></i>'
        for phase in ordered
    )
    return f'<div class="bar">{parts}</div>' if parts else ""
