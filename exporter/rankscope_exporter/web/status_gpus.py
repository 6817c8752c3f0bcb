"""The table of GPUs on the status page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from rankscope.record.quantities import duration, percent
from rankscope_exporter.report.gpus import BAD_STATES, GpuProblem, GpuReport
from rankscope_exporter.report.rates import Point, RecentRates
from rankscope_exporter.web import charts
from rankscope_exporter.web.table import Cell, Column, Row, table

COLUMNS = (
    Column("GPU"),
    Column("state"),
    Column("busy", is_number=True),
    Column("last 10 min", is_wide=True),
    Column("°C", is_number=True),
    Column("throttled"),
    Column("memory GiB", is_number=True, is_wide=True),
    Column("power W", is_number=True, is_wide=True),
    Column("last busy", is_wide=True),
    Column("allocated to", is_wide=True),
)


def gpu_section(gpus: Sequence[GpuReport], problems: Sequence[GpuProblem], rates: RecentRates) -> str:
    """Return the heading with the GPUs' models, and the table as HTML."""
    alerts = [one for one in problems if not one.remaining_seconds]
    models = ", ".join(f"{number} {name}" for name, number in Counter(one.name for one in gpus if one.name).items())
    rows = table(COLUMNS, [_gpu(one, alerts, rates.busy(one.uuid)) for one in gpus], "GPUs", "No GPU found.")
    return f'<section id="gpus"><h2>GPUs <small>{escape(models)}</small></h2>{rows}</section>'


def _gpu(one: GpuReport, alerts: Sequence[GpuProblem], busy: Sequence[Point]) -> Row:
    severities = {problem.severity for problem in alerts if problem.uuid == one.uuid}
    is_bad = "critical" in severities or bool(one.problem and not severities)
    return Row(
        (
            Cell(one.index),
            _state(one, severities),
            Cell("" if one.busy_ratio is None else f"{one.busy_ratio:.0%}"),
            Cell(html=_busy(busy)),
            Cell(_whole(one.temperature), "bad" * one.is_hot),
            _throttled(one),
            Cell(one.memory),
            Cell(_whole(one.power)),
            Cell(_last_busy(one)),
            Cell(one.holder),
        ),
        "bad" if is_bad else "warn" * bool(severities),
    )


def _state(one: GpuReport, severities: set[str]) -> Cell:
    if not one.is_up:
        return Cell("lost", "bad")
    if one.is_paused and one.idle_seconds is not None:
        return Cell(f"no work for {duration(one.idle_seconds)}")
    mark = "bad" if one.state in BAD_STATES else "warn" if severities else "good" * (one.state == "working")
    return Cell(one.state.replace("_", " ") or "up", mark)


def _busy(points: Sequence[Point]) -> str:
    ratios = [point.rate for point in points]
    if not ratios:
        return ""
    return charts.line(points, 1.0, f"busy {percent(min(ratios))} to {percent(max(ratios))} in the last 10 min")


def _throttled(one: GpuReport) -> Cell:
    return Cell(one.throttling, one.throttling_mark)


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _last_busy(one: GpuReport) -> str:
    """Return when the GPU was last busy. If it never was, `idle_seconds` counts from the first reading."""
    if one.idle_seconds is None:
        return ""
    if not one.has_worked:
        return f"not in the last {duration(one.idle_seconds)}"
    return "now" if one.idle_seconds < 1.0 else f"{duration(one.idle_seconds)} ago"
