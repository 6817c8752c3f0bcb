"""The table of GPUs on the status page."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.record.quantities import duration
from rankscope_exporter.report.gpus import BAD_STATES, GpuReport
from rankscope_exporter.web.table import Cell, Column, Row, table

COLUMNS = (
    Column("GPU"),
    Column("state"),
    Column("busy", is_number=True),
    Column("°C", is_number=True),
    Column("throttled"),
    Column("memory GiB", is_number=True, is_wide=True),
    Column("power W", is_number=True, is_wide=True),
    Column("processes", is_number=True, is_wide=True),
    Column("last busy", is_wide=True),
    Column("allocated to", is_wide=True),
    Column("name", is_wide=True),
)


def gpu_table(gpus: Sequence[GpuReport]) -> str:
    """Return the table as HTML."""
    return table(COLUMNS, [_gpu(one) for one in gpus], "No GPU found.")


def _gpu(one: GpuReport) -> Row:
    return Row(
        (
            Cell(one.index),
            _state(one),
            Cell("" if one.busy_ratio is None else f"{one.busy_ratio:.0%}"),
            Cell(_whole(one.temperature), "bad" * one.is_hot),
            _throttled(one),
            Cell(one.memory),
            Cell(_whole(one.power)),
            Cell("" if one.processes is None else str(one.processes)),
            Cell(_last_busy(one)),
            Cell(one.holder),
            Cell(one.name),
        ),
        "bad" * bool(one.problem),
    )


def _state(one: GpuReport) -> Cell:
    if not one.is_up:
        return Cell("lost", "bad")
    kind = "bad" if one.state in BAD_STATES else "good" * (one.state == "working")
    return Cell(one.state.replace("_", " ") or "up", kind)


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
