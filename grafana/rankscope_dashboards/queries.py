"""Every panel's query with the variables filled in: what a test needs to ask a real Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rankscope_dashboards.dashboard import NO_RUN
from rankscope_dashboards.node import NODE
from rankscope_dashboards.run import RUN

DASHBOARDS = {"run": RUN, "node": NODE}


# What no machine without an NVIDIA GPU has: the simulated driver stands in for NVML and not for CUDA. By metric, with
# the reason; the end-to-end test asks for no data of these, and complains about one that does have some.
NEEDS_CUDA = {
    "rankscope_rank_device_seconds_total": "CUDA events measure it",
    "rankscope_rank_device_dry_seconds_total": "likewise",
    "rankscope_rank_device_waits_total": "only a CUDA device is waited for",
    "rankscope_rank_host_to_device_copy_bytes_total": "only a copy to a CUDA device counts",
    **dict.fromkeys(
        (
            "rankscope_rank_cuda_memory_allocated_bytes",
            "rankscope_rank_cuda_memory_reserved_bytes",
            "rankscope_rank_cuda_memory_peak_allocated_bytes",
            "rankscope_rank_cuda_allocation_retries_total",
            "rankscope_rank_cuda_out_of_memory_total",
        ),
        "CUDA's caching allocator keeps it",
    ),
}


class PanelQuery(NamedTuple):
    """One query of one panel.

    `needs_fault`: it may be empty while nothing is or was wrong. `needs_cuda`: it is empty without a GPU.
    """

    dashboard: str
    panel: str
    expr: str
    needs_fault: bool
    needs_cuda: bool


def panel_queries(
    *, run: str, owner: str, instance: str, interval: str = "1m", compare: str = NO_RUN
) -> Iterator[PanelQuery]:
    """Every query of both dashboards: for all ranks of `owner`'s `run`, beside `compare`, for the exporter `instance`.

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
        "$owner": owner,
        "$compare": compare,
    }
    for name, dashboard in DASHBOARDS.items():
        for panel in (panel for row in dashboard.rows for panel in row.panels):
            for query in panel.queries:
                needs_cuda = any(metric in query.expr for metric in NEEDS_CUDA)
                yield PanelQuery(name, panel.title, _filled(query.expr, values), query.needs_fault, needs_cuda)


def _filled(expr: str, values: dict[str, str]) -> str:
    for variable, value in values.items():
        expr = expr.replace(variable, value)
    return expr
