"""Every panel's query with the variables filled in: what a test needs to ask a real Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rankscope_dashboards.node import NODE
from rankscope_dashboards.run import RUN

DASHBOARDS = {"run": RUN, "node": NODE}


class PanelQuery(NamedTuple):
    """One query of one panel. `needs_fault`: it may be empty while nothing is or was wrong."""

    dashboard: str
    panel: str
    expr: str
    needs_fault: bool


def panel_queries(*, run: str, instance: str, job: str = "rankscope", interval: str = "1m") -> Iterator[PanelQuery]:
    """Every query of both dashboards, for all ranks of `run` and for the exporter `instance`.

    `interval` stands for Grafana's rate interval (at least four scrape intervals) and for the time range. No moment
    has data for all of them, as some are about live ranks and one about ended ones: ask over the whole life of a run
    that has ended, with `query_range`.
    """
    values = {
        "$__rate_interval": interval,
        "$__range": interval,
        "$instance": instance,
        "$rank": ".*",
        "$run": run,
        "$job": job,
    }
    for name, dashboard in DASHBOARDS.items():
        for panel in (panel for row in dashboard.rows for panel in row.panels):
            for query in panel.queries:
                yield PanelQuery(name, panel.title, _filled(query.expr, values), query.needs_fault)


def _filled(expr: str, values: dict[str, str]) -> str:
    for variable, value in values.items():
        expr = expr.replace(variable, value)
    return expr
