"""The panels' queries with values for the variables, for tests against a real Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from rankscope_dashboards.cost import COST
from rankscope_dashboards.dashboard import NO_RUN
from rankscope_dashboards.fleet import FLEET
from rankscope_dashboards.node import NODE
from rankscope_dashboards.run import RUN

DASHBOARDS = {"fleet": FLEET, "cost": COST, "run": RUN, "node": NODE}
"""By the name of its file. Grafana's home page is the first."""


# Metrics that need a real NVIDIA GPU, with the reason: the simulated driver replaces NVML, not CUDA. The end-to-end
# test expects no data for these metrics.
NEEDS_CUDA = {
    "rankscope_rank_device_seconds_total": "CUDA events measure it",
    "rankscope_rank_device_dry_seconds_total": "CUDA events measure it",
    "rankscope_rank_cuda_memory_peak_allocated_bytes": "CUDA's caching allocator keeps it",
}


class PanelQuery(NamedTuple):
    """A query of a panel.

    With `needs_fault` it may be empty in a healthy run; with `needs_cuda` it is empty without a GPU; a `rare` one is
    empty for a run of few ranks without a tracker.
    """

    dashboard: str
    panel: str
    expr: str
    needs_fault: bool
    needs_cuda: bool
    rare: bool


def panel_queries(
    *,
    run: str = "",
    owner: str = "",
    instance: str = "",
    interval: str = "1m",
    time_range: str = "",
    compare: str = NO_RUN,
    price: str = "",
) -> Iterator[PanelQuery]:
    """Yield every query of all dashboards: for all ranks of `run`, the run `compare`, and the exporter `instance`.

    `interval` is Grafana's rate interval (at least four scrape intervals), and the time range if no other is given.
    Some queries are about live ranks and one is about ended ranks, so use `query_range` over the whole life of a run
    that has ended, and give its length as the time range.
    """
    values = {
        "$__rate_interval": interval,
        "$__range": time_range or interval,
        "$instance": instance,
        "$rank": ".*",
        "$run": run,
        "$owner": owner,
        "$compare": compare,
        "$price": price,
    }
    for name, dashboard in DASHBOARDS.items():
        for panel in (panel for row in dashboard.rows for panel in row.panels):
            for query in panel.queries:
                needs_cuda = set(re.findall(r"rankscope_\w+", query.expr)) <= NEEDS_CUDA.keys()
                expr = _substitute(query.expr, values)
                yield PanelQuery(name, panel.title, expr, query.needs_fault, needs_cuda, query.rare)


def _substitute(expr: str, values: dict[str, str]) -> str:
    for variable, value in values.items():
        expr = expr.replace(variable, value)
    return expr
